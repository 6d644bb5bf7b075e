"""Chat models for tests: a small one with a template, and what transformers makes of messages."""

import json

import torch
from conftest import CHECKPOINTS, run_rows

from loading.load import load_model, save_model
from loading.tokenizer import load_encoding

BOS = "<|begin_of_text|>"
EOS = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
ADDED = [BOS, START, END, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ADDED += ["<tool_call>", "[INST]"]  # which are not special
CONTROL = [EOS, *ADDED]  # ids 4095 to 4103
AS_OBJECT = {"__type": "AddedToken", "content": END, "lstrip": False}
SPECIAL = {"bos_token": BOS, "eos_token": AS_OBJECT, "pad_token": None, "add_bos_token": True}

# In the form of Qwen2.5's: a system message of its own, a branch for tools.
CHATML = r"""{%- if tools %}
    {{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou write stories.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") or not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# In the form of Llama 3's: it begins with BOS, trims, and names the day.
HEADERS = r"""{{- bos_token }}
{%- if not day is defined %}
    {%- set day = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if documents is not none %}
    {{- raise_exception("no documents") }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\nOn ' + day + ':\n' }}
{%- endif %}
"""
# White space as jinja2 leaves it, loops that are left, other tokens and filters.
LINES = r"""{{ bos_token }}
{% for message in messages %}
    {% if loop.index > 4 %}{% break %}{% endif %}
    {% if message.role == 'user' %}
  [INST] {{ message.content }} [/INST]
    {% else %}
{{ {'b': message.role, 'a': 'é<'} | tojson }} {{ message.content }}
{{ [1, 'é'] | tojson(indent=2) }}{{ eos_token }}{{ pad_token }}{{ unk_token }}
    {% endif %}
{% endfor %}
"""


def save_base(tiny, directory) -> None:
    """Write a random model of 4,104 tokens, which <|im_end|> ends, and a tokenizer; no template."""
    from tokenizers import AddedToken, Tokenizer

    model = tiny(dtype=torch.float32, vocab_size=4104, block_size=128, eos_token_id=4098)
    save_model(model, directory)
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "stories" / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ADDED[:-2]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED[-2:]])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_template(directory, template, as_file=False, **config) -> None:
    """Give a model a template. as_file: in chat_template.jinja."""
    if as_file:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    else:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | config))


def conversation(*contents, system=None):
    """Messages of a user and an assistant in turns, after that of a system if there is one."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for i, text in enumerate(contents):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
    return messages


def theirs(tokenizer, messages, **options):
    """What transformers makes of it."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )


def control_ids(ids):
    return [token for token in ids if token >= 4095]


def replies(directory, prompts, **params):
    """The texts that follow prompts, with the EOS that ends them left out."""
    model = load_model(directory)
    encoding = load_encoding(directory, 4104)
    rows = run_rows(model, prompts, **params)
    return [encoding.decode([token for token in row if token != 4098]) for row in rows]


def shown(texts: list[str]) -> str:
    """Several texts as scripts print them."""
    return ("\n" + "-" * 40 + "\n").join(texts) + "\n"

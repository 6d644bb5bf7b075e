"""Chat models for tests: a small one with a template, and what transformers makes of messages."""

import json

import torch
from conftest import CHECKPOINTS, run_rows

from loading.load import load_model, save_model
from text.tokenizer import load_encoding

BOS, EOS = "<|begin_of_text|>", "<|endoftext|>"
START, END = "<|im_start|>", "<|im_end|>"
ADDED = [BOS, START, END, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ADDED += ["<tool_call>", "[INST]"]  # which are not special
CONTROL = [EOS, *ADDED]  # ids 4095 to 4103
AS_OBJECT = {"__type": "AddedToken", "content": END, "lstrip": False}
SPECIAL = {"bos_token": BOS, "eos_token": AS_OBJECT, "pad_token": None, "add_bos_token": True}

# In the form of Qwen2.5's: a system message of its own, a branch for tools.
CHATML = r"""{%- if tools %}{{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou write stories.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") or not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# In the form of Llama 3's: it begins with BOS, trims, and names the day.
HEADERS = r"""{{- bos_token }}
{%- if not day is defined %}{%- set day = strftime_now("%d %b %Y") %}{%- endif %}
{%- if documents is not none %}{{- raise_exception("no documents") }}{%- endif %}
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

# In the form of Qwen2.5's, with tools as NousResearch's Hermes has them.
HERMES = r"""{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}
{%- else %}{{- 'You write stories.' }}{%- endif %}
{%- if tools %}{{- '\n\nTools:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- elif not loop.first or message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}"
    "{% endif %}" + HERMES
)
# In the form of Llama 3.2's: one call a reply, which is bare JSON; a result is of ipython.
BARE = r"""{{- bos_token }}
{%- if tools is not none %}{{- '<|start_header_id|>system<|end_header_id|>\n\nTools:\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|im_end|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# In the form of Mistral's: a list of calls, each with an id of nine letters and digits.
LISTED = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}{{- '<tool_call>[' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ']<|im_end|>' if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""
WITH_TOOLS = {"hermes": HERMES, "bare": BARE, "listed": LISTED}


def save_base(tiny, directory) -> None:
    from tokenizers import AddedToken, Tokenizer

    model = tiny(dtype=torch.float32, vocab_size=4104, block_size=128, eos_token_id=4098)
    save_model(model, directory)
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "stories" / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ADDED[:-2]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED[-2:]])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_template(directory, template, as_file=False, **config) -> None:
    if as_file:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    else:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | config))


def conversation(*contents, system=None):
    said = [] if system is None else [("system", system)]
    said += [(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
    return [{"role": role, "content": text} for role, text in said]


def theirs(tokenizer, messages, **options):
    options |= {"add_generation_prompt": True, "return_dict": False}
    return tokenizer.apply_chat_template(messages, **options)


def control_ids(ids):
    return [token for token in ids if token >= 4095]


def replies(directory, prompts, **params):
    model = load_model(directory)
    encoding = load_encoding(directory, 4104)
    rows = run_rows(model, prompts, **params)
    return [encoding.decode([token for token in row if token != 4098]) for row in rows]


def tool(name: str, properties: dict | None = None, **more) -> dict:
    named = properties or {}
    parameters = {"type": "object", "properties": named, "required": list(named)}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def tool_grammar(directory, tools, choice="auto", parallel=True) -> str:
    from constraints.vocabulary import get_vocabulary
    from text.chat import Chat
    from text.tools import build_tool_grammar, detect_tool_format

    encoding = load_encoding(directory, 4104)
    tool_format = detect_tool_format(Chat(directory), encoding, (4098,))
    vocabulary = get_vocabulary(encoding, 4104, (4098,))
    return build_tool_grammar(tool_format, tools, vocabulary, choice, parallel)


def call(name: str, arguments, id: str = "abcdefghi") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def used(text: str, arguments: dict, result: str) -> list[dict]:
    messages = conversation(text)
    messages.append({"role": "assistant", "content": "", "tool_calls": [call("look", arguments)]})
    return messages + [{"role": "tool", "tool_call_id": "abcdefghi", "content": result}]

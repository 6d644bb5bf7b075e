"""Chat models that reason, for tests: their templates, and engines that write a fixed reply."""

import json
import re

from serving import writing

from engine.engine import Engine
from infer import generate
from text.tokenizer import load_encoding

LAST = "«<|im_end|>»"  # in `spelled`
THINK, END = 4102, 4103  # markers that are one token, in `write_thinker`

# The end of Qwen3's template.
QWEN3_PROMPT = r"""{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# In the form of Qwen3's: reasoning since the last question is written, older is left out.
QWEN3 = r"""{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {%- set content = '<think>\n' + reasoning + '\n</think>\n\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n[CALL]\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\n[/CALL]' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
"""
QWEN3 += QWEN3_PROMPT
# In the form of DeepSeek-R1's: the generation prompt opens the block.
R1 = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[USER]' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '[REPLY]' + message.content.split('</think>')[-1] + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[REPLY]<think>\n' }}{%- endif %}"""
QWQ = QWEN3.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
BRACKETS = R1.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
COUNTED = [  # template, what comes before the reasoning, the reasoning, what comes after
    (QWEN3, "\n «<think>»", "\nHe asks. ", f"«</think>»\n\nYes.{LAST}"),
    (QWEN3, "«<think>»", "a </think>", f"«</think>»«<think>»b«</think>»{LAST}"),
    (QWEN3, "«<think>»", "He asks", ""),
    (QWEN3, "Yes", "", f" «<think>»a«</think>»{LAST}"),
    (R1, "", "\n\nHe", f"«</think>» a{LAST}"),
    (R1, "", f"He asks{LAST}", ""),
    (BRACKETS, "", "a [/THI b[", f"[/THINK]b{LAST}"),  # markers that are text
    (BRACKETS, "", "a ", "[/THIN"),
]
CUT = [  # end marker, reasoning in tokens of one byte, how many of them are no part of the marker
    ("[/THINK]", b"a\xe2", 2),
    ("[/THINK]", b"[/T\xe2", 4),
    ("[/THINK]", b"a[/T", 1),
    ("◁/think▷", b"a\xe2", 1),
    ("◁/think▷", b"\xe2\x97\xe2", 2),
    ("◁/think▷", "◁/t€".encode(), 8),
    ("</think>", b"</th", 4),  # a token, and text where a stop string has it
]


def write_thinker(write_chat, template=QWEN3, special=False):
    """Return a model's directory in which <think> and </think> are tokens, as in Qwen3.

    special: whether they are, as <|start_header_id|> is.
    """
    names = ["<|start_header_id|>", "<|end_header_id|>"] if special else ["<tool_call>", "[INST]"]
    directory = write_chat(template)
    file = directory / "tokenizer.json"
    text = file.read_text()
    for name, marker in zip(names, ("<think>", "</think>")):
        text = text.replace(json.dumps(name), json.dumps(marker))
    file.write_text(text)
    return directory


def thinker_engine(tiny_llama, directory, **options):
    shape = {"vocab_size": 4104, "block_size": 1280, "bos_token_id": 4096, "eos_token_id": 4098}
    return Engine(tiny_llama(**shape), encoding=load_encoding(directory, 4104), **options)


def spelled(encoding, text: str, one_by_one: bool = False) -> list[int]:
    """Return tokens of a text, in which «NAME» is an added token. one_by_one: cut every word."""
    ids = []
    for index, piece in enumerate(re.split("«(.*?)»", text)):
        if index % 2:
            ids.append(encoding.added_token_ids[piece])
            continue
        for part in piece if one_by_one else [piece]:
            ids += encoding.encode_ordinary(part, at_start=False)
    return ids


def playing(tiny_llama, directory, ids: list[int]):
    """Return a function that makes an engine which writes these ids."""
    return lambda: writing(thinker_engine(tiny_llama, directory), ids)


def said(events: list[dict]) -> dict[int, dict]:
    """Return what the chunks of each choice add up to, with the number of its log-probabilities."""
    choices = {}
    for event in events:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"logprobs": 0})
            for name, value in choice["delta"].items():
                if isinstance(value, str):
                    whole[name] = whole.get(name, "") + value
            whole["logprobs"] += len((choice["logprobs"] or {"content": ()})["content"])
            whole["finish_reason"] = choice["finish_reason"]
    return choices


def rows_of(model, encoding, prompts, params, **options) -> list[list[int]]:
    """Return the tokens that `generate` writes for each prompt."""
    steps = list(generate(model, prompts, params, encoding=encoding, **options))
    rows = range(len(prompts))
    return [[step[row] for step in steps if step[row] is not None] for row in rows]

"""How a template writes calls is found by its own text. Oracle: transformers."""

import json

import pytest
from chats import CHATML, HERMES, LISTED, WITH_TOOLS, call, conversation, theirs, tool
from conftest import refused

from text.chat import Chat
from text.tokenizer import load_encoding


def test_a_format_that_is_not_known_is_one_line(write_chat):
    import text.tools

    assert hasattr(text.tools, "detect_tool_format")
    strange = HERMES.replace('{"name": "', "call ").replace('", "arguments": ', " ")
    deaf = HERMES.replace("<tool_response>\\n' + message.content }}", "<tool_response>\\n' }}")
    one_word = HERMES.replace('", "arguments": \'', "_'")  # where does a name end?
    indented = HERMES.replace("arguments | tojson", "arguments | tojson(indent=2)")
    assert len({HERMES, strange, deaf, one_word, indented}) == 5
    for template in (strange, CHATML, deaf, one_word, indented):
        directory = write_chat(template)
        encoding = load_encoding(directory, 4104)
        message = refused(text.tools.detect_tool_format, Chat(directory), encoding, (4098,))
        assert "tokenizer_config.json: " in message and "unsupported format" in message


def test_separators_are_those_of_the_template(write_chat):
    """Without blanks, too, as some templates write JSON."""
    from text.tools import detect_tool_format

    dense = HERMES.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
    found = []
    for template in (HERMES, dense):
        directory = write_chat(template)
        encoding = load_encoding(directory, 4104)
        found.append(detect_tool_format(Chat(directory), encoding, (4098,)))
    assert found[0].separators == (", ", ": ")
    assert found[1] == found[0]._replace(separators=(",", ":"))


@pytest.mark.parametrize("template", WITH_TOOLS.values(), ids=WITH_TOOLS)
def test_the_format_is_what_transformers_writes(chat_pair, template):
    from text.tools import detect_tool_format

    ours, tokenizer = chat_pair(template)
    encoding = load_encoding(ours.file.parent, 4104)
    tool_format = detect_tool_format(ours, encoding, (4098,))
    asked = conversation("Tom")
    before = theirs(tokenizer, asked, tokenize=False)
    for number in (1, 2, 3) if tool_format.between else (1,):
        said = [{"a": 'x"}', "b": [number, {}]}, {}, {"\u00e9": None}][:number]
        calls = [call(f"f-{number}", arguments, "id0123456") for arguments in said]
        messages = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        known = tokenizer.apply_chat_template(messages, tokenize=False)
        texts = [json.dumps(each, ensure_ascii=False) for each in said]
        written = [f"f-{number}{tool_format.middle}{text}" for text in texts]
        text = tool_format.begin + (tool_format.between or "").join(written) + tool_format.end
        assert before + text.replace("\0" * 9, "id0123456") + "<|im_end|>" == known.rstrip("\n")


NEEDING = HERMES.replace("{%- if tools %}", "{%- if true %}")  # as NousResearch's Hermes 3
SWITCHED = HERMES.replace(  # as Qwen3
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}{{- '' if thinking else '<think>\\n\\n</think>\\n\\n' }}",
)
OPENED = HERMES.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")  # as QwQ


@pytest.mark.parametrize("tools", [None, [tool("look")]])
@pytest.mark.parametrize("template", [NEEDING, SWITCHED, OPENED, LISTED])
def test_the_format_is_the_same(write_chat, template, tools):
    """Whatever a new reply begins with, and whether or not there are tools."""
    from text.tools import detect_tool_format

    if template == NEEDING and not tools:
        return
    known = LISTED if template == LISTED else HERMES
    encoding = load_encoding(write_chat(template), 4104)
    tool_formats = [
        detect_tool_format(Chat(write_chat(each)).with_tools(tools), encoding, ends)
        for each, ends in ((template, (4098,)), (known, (4098,)), (known, (4097, 4098)))
    ]
    assert tool_formats[0] == tool_formats[1] == tool_formats[2]  # the first EOS counts


def test_a_format_has_no_result_and_no_numbers(write_chat):
    """Results in the turn of the reply (Apertus); ids that are counted (Command R7B)."""
    from text.tools import detect_tool_format

    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}"
    inside = HERMES.replace(
        end,
        "{%- if not message.tool_calls %}{{- '<|im_end|>' }}{%- endif %}"
        "\n    {%- elif message.role == 'tool' %}",
    ).replace("'<|im_start|>user\\n<tool_response>", "'<tool_response>")
    assert inside.count("im_end") == HERMES.count("im_end")
    directory = write_chat(inside)
    encoding = load_encoding(directory, 4104)
    assert "chat template" in refused(detect_tool_format, Chat(directory), encoding, (4098,))
    start = """<tool_call>\\n{"name": "'"""
    numbered = """<tool_call>\\n{"id": ' + loop.index | string + ', "name": "'"""
    counted = HERMES.replace(start, numbered)
    assert counted != HERMES
    tool_format = detect_tool_format(Chat(write_chat(counted)), encoding, (4098,))
    assert tool_format.between is None and tool_format.begin == '<tool_call>\n{"id": 1, "name": "'

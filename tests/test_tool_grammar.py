"""A reply calls tools only as its template writes calls. Oracle: transformers."""

import json
import re

import pytest
from chats import CHATML, HERMES, LISTED, WITH_TOOLS, call, conversation, theirs, tool, tool_grammar
from conftest import is_one_line, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from text.chat import Chat
from text.tokenizer import load_encoding
from text.tools import ToolCallParser, detect_tool_format

TRIGGER = 4102  # <tool_call>
PLACE = {"place": {"enum": ["sea", "wood"]}, "far": {"type": "boolean"}}
LOOK = tool("look", PLACE, description="What is there?")
COUNT = tool("count", {"things": {"type": "integer", "minimum": 3, "maximum": 40}})
TOOLS = [LOOK, COUNT]


def format_of(chat, ends=(4098,)):
    return detect_tool_format(chat, load_encoding(chat.file.parent, 4104), ends)


def matcher_of(directory, choice="auto"):
    vocabulary = get_vocabulary(load_encoding(directory, 4104), 4104, (4098,))
    return Grammar("tool_grammar", tool_grammar(directory, TOOLS, choice), vocabulary).matcher()


@pytest.mark.parametrize("template", WITH_TOOLS.values(), ids=WITH_TOOLS)
def test_the_format_is_what_transformers_writes(chat_pair, template):
    ours, tokenizer = chat_pair(template)
    tool_format = format_of(ours)
    asked = conversation("Tom")
    before = theirs(tokenizer, asked, tokenize=False)
    for number in (1, 2, 3) if tool_format.between else (1,):
        said = [{"a": 'x"}', "b": [number, {}]}, {}, {"\u00e9": None}][:number]
        calls = [call(f"f-{number}", arguments, "id0123456") for arguments in said]
        messages = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        known = tokenizer.apply_chat_template(messages, tokenize=False)
        own = [(f"f-{number}", arguments) for arguments in said]
        text = write(tool_format, "", own, "id0123456")
        assert before + text + "<|im_end|>" == known.rstrip("\n")


NEEDING = HERMES.replace("{%- if tools %}", "{%- if true %}")  # as NousResearch's Hermes 3
SWITCHED = HERMES.replace(  # as Qwen3
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}{{- '' if thinking else '<think>\\n\\n</think>\\n\\n' }}",
)
OPENED = HERMES.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")  # as QwQ


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [NEEDING, SWITCHED, OPENED, LISTED])
def test_the_format_is_the_same(write_chat, template, tools):
    known = LISTED if template == LISTED else HERMES
    tool_formats = [
        format_of(Chat(write_chat(each)).with_tools(tools), ends)
        for each, ends in ((template, (4098,)), (known, (4098,)), (known, (4097, 4098)))
        if tools or template != NEEDING
    ]
    assert len(set(tool_formats)) <= 1  # the first EOS counts


def test_a_format_has_no_result_and_no_numbers(write_chat):
    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}"
    inside = HERMES.replace(
        end,
        "{%- if not message.tool_calls %}{{- '<|im_end|>' }}{%- endif %}"
        "\n    {%- elif message.role == 'tool' %}",
    ).replace("'<|im_start|>user\\n<tool_response>", "'<tool_response>")
    assert "chat template" in refused(format_of, Chat(write_chat(inside)))
    start = """<tool_call>\\n{"name": "'"""
    numbered = """<tool_call>\\n{"id": ' + loop.index | string + ', "name": "'"""
    tool_format = format_of(Chat(write_chat(HERMES.replace(start, numbered))))
    assert tool_format.between is None and tool_format.begin == '<tool_call>\n{"id": 1, "name": "'


@pytest.mark.parametrize("template", [HERMES, LISTED], ids=["hermes", "listed"])
def test_a_token_is_no_text(write_chat, template):
    directory = write_chat(template)
    encoding = load_encoding(directory, 4104)
    matcher = matcher_of(directory)
    added = [*range(4095, 4098), *range(4099, 4104)]
    assert matcher.token_mask([])[added].all() and matcher.token_mask([4096, 4096])[added].all()
    letters = encoding.encode_ordinary("x <tool_call")
    after = matcher.token_mask(letters)
    assert not after[encoding.encode_single_token(">")] and after[TRIGGER]
    assert matcher.token_mask([*letters, TRIGGER]).sum() == 1
    begun = '{"name": "look", "arguments": {"place": "'
    begun = encoding.encode_ordinary("\n" + begun if template == HERMES else "[" + begun)
    assert not matcher.token_mask([*letters, TRIGGER, *begun])[added].any()
    assert matcher_of(directory, "required").token_mask([]).nonzero().tolist() == [[TRIGGER]]


def test_items_are_separated_as_in_the_template(write_chat):
    dense = HERMES.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
    directory = write_chat(dense)
    matcher = matcher_of(directory, "required")
    for blank in ("", " "):
        arguments = f'{{"place":{blank}"sea","far":{blank}true}}'
        text = f'\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        tokens = [TRIGGER, *load_encoding(directory, 4104).encode_ordinary(text)]
        taken = [matcher.token_mask(tokens[:size])[tokens[size]] for size in range(len(tokens))]
        assert all(taken) == (blank == "")


def arguments_of(tmp_path, model, tools=TOOLS) -> tuple:
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    words = ("--chat", "--prompt", "x", "--tools", tmp_path / "tools.json")
    return ("--model", model, *words)


def test_the_scripts_hold_replies_to_calls(cli, engine_cli, write_chat, tmp_path):
    arguments = arguments_of(tmp_path, write_chat(HERMES))
    arguments += ("--max-new-tokens", 110, "--logit-bias", f"{TRIGGER}=100")
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert re.fullmatch(r'<tool_call>\n\{"name": "\w+", "arguments": .*\n</tool_call>\n', out)
    assert engine_cli(*arguments, "--temperature", 0)[:2] == (code, out)


STRANGE = HERMES.replace('{"name": "', "call ").replace('", "arguments": ', " ")

DEAF = HERMES.replace("<tool_response>\\n' + message.content }}", "<tool_response>\\n' }}")
ONE_WORD = HERMES.replace('", "arguments": \'', "_'")  # where does a name end?


def test_what_cannot_be_held_is_one_line(cli, write_chat, tmp_path):
    for strange in (STRANGE, CHATML, DEAF, ONE_WORD):
        found = cli(*arguments_of(tmp_path, write_chat(strange)))
        assert is_one_line(found, "tokenizer_config.json: ", "chat template")
    arguments = arguments_of(tmp_path, write_chat(HERMES))
    assert is_one_line(cli(*arguments, "--regex", "a"), "regex", "tool_grammar")
    assert is_one_line(cli(*arguments, "--num-beams", 2), "--num-beams", "--tools")


def test_parameters_that_are_not_done(write_chat):
    for schema, words in (
        ({"type": "string"}, "f.parameters.type is 'string'"),
        ({"not": {}}, "'f.parameters.not'"),
        ({"properties": 1}, "f.parameters.properties 1"),
        ({"x-guidance": {}}, "'f.parameters.x-guidance'"),
    ):
        tools = [LOOK, {"type": "function", "function": {"name": "f", "parameters": schema}}]
        assert words in refused(tool_grammar, write_chat(HERMES), tools)


def test_a_tool_that_cannot_be_compiled_is_named(cli, write_chat, tmp_path):
    for field, words in (
        ({"type": "nummer"}, "Invalid type: nummer"),
        ({"$ref": "#/$defs/b"}, "Pointer '/$defs/b' does not exist"),
        ({"pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
    ):
        tools = [LOOK, tool("find-it", parameters={"properties": {"a": field}}), COUNT]
        code, out, err = cli(*arguments_of(tmp_path, write_chat(HERMES), tools))
        note, error = err.splitlines(keepends=True)
        assert (code, out, note[:39]) == (2, "", "note: the prompt exceeds the context wi")
        assert error.endswith(f"error: tools: find-it: failed to compile JSON schema: {words}\n")


def test_all_tools_together_are_bounded(write_chat):
    many = {f"p{number}": {"type": "integer"} for number in range(10)}
    tools = [tool(f"f{number}", many) for number in range(120)]
    assert "1,000 schemas" in refused(tool_grammar, write_chat(HERMES), tools)
    tools = [tool("f", {"a": {"description": "x" * 2**18}})]
    assert "262," in refused(tool_grammar, write_chat(HERMES), tools)


words = st.text(st.sampled_from('ab"\\{}[]<>_/ \n\u00e9:,toolcall'), max_size=8)
arguments = st.dictionaries(words, st.lists(words | st.integers(), max_size=2) | words, max_size=3)
made_calls = st.lists(st.tuples(st.sampled_from(["a", "look_up-2"]), arguments), max_size=3)


def write(tool_format, text: str, made: list, id: str = "abcdefghi") -> str:
    if not made:
        return text
    said = [name + tool_format.middle + json.dumps(own, ensure_ascii=False) for name, own in made]
    reply = text + tool_format.begin + (tool_format.between or "").join(said) + tool_format.end
    return reply.replace("\0" * 9, id)


def parse(tool_format, pieces: list[str]) -> tuple:
    parser = ToolCallParser(tool_format)
    content = ""
    made = []
    for piece in pieces:
        new, parts = parser.add(piece)
        content += new
        for part in parts:
            if part.name is not None:
                assert part.index == len(made)
                made.append([part.name, ""])
            made[part.index][1] += part.arguments
    return content + parser.end(), made, parser.is_complete


@pytest.fixture(scope="module")
def tool_formats(write_chat):
    return [format_of(Chat(write_chat(template))) for template in WITH_TOOLS.values()]


@settings(max_examples=100)
@given(text=words, made=made_calls, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_reply_is_read_however_it_is_cut(tool_formats, text, made, cuts):
    for tool_format in tool_formats:
        own = made if tool_format.between else made[:1]
        reply = write(tool_format, text, own)
        places = sorted({min(cut, len(reply)) for cut in cuts} | {0, len(reply)})
        pieces = [reply[start:end] for start, end in zip(places, places[1:])]
        content, found, is_complete = parse(tool_format, pieces)
        assert content == text and is_complete == bool(own)
        assert [(name, json.loads(said)) for name, said in found] == own
        # One that ends early is told as far as it goes.
        begun = reply[: places[len(places) // 2]]
        content, found, is_complete = parse(tool_format, list(begun))
        assert content == text[: len(content)] or tool_format.trigger not in begun
        assert is_complete == (begun == reply and bool(own))
        for (name, said), known in zip(found, own):
            assert name == known[0]
            assert json.dumps(known[1], ensure_ascii=False).startswith(said)

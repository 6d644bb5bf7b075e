"""Calls are read out of a reply, however it is cut. Oracle: what was written."""

import json

import pytest
from chats import WITH_TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st

words = st.text(st.sampled_from('ab"\\{}[]<>_/ \n\u00e9:,toolcall'), max_size=8)
arguments = st.dictionaries(words, st.lists(words | st.integers(), max_size=2) | words, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["a", "look_up-2"]), arguments), max_size=3)


def write(tool_format, text: str, made: list) -> str:
    """A reply as `ToolFormat` says; an id is written as nine letters."""
    if not made:
        return text
    tool_format = tool_format._replace(between=tool_format.between or "")
    said = [name + tool_format.middle + json.dumps(own, ensure_ascii=False) for name, own in made]
    return (text + tool_format.begin + tool_format.between.join(said) + tool_format.end).replace(
        "\0", "x"
    )


def read(tool_format, pieces: list[str]) -> tuple:
    """The text, the calls, and whether the reply is whole."""
    from text.tools import ToolCallParser

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
    from text.chat import Chat
    from text.tokenizer import load_encoding
    from text.tools import detect_tool_format

    found = []
    for template in WITH_TOOLS.values():
        directory = write_chat(template)
        found.append(detect_tool_format(Chat(directory), load_encoding(directory, 4104), (4098,)))
    return found


@settings(max_examples=150)
@given(text=words, made=calls, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_reply_is_read_however_it_is_cut(tool_formats, text, made, cuts):
    for tool_format in tool_formats:
        own = made if tool_format.between else made[:1]
        reply = write(tool_format, text, own)
        places = sorted({min(cut, len(reply)) for cut in cuts} | {0, len(reply)})
        pieces = [reply[start:end] for start, end in zip(places, places[1:])]
        content, found, is_complete = read(tool_format, pieces)
        assert content == text and is_complete == bool(own)
        assert [(name, json.loads(said)) for name, said in found] == own
        assert read(tool_format, list(reply)) == (content, found, is_complete)


@settings(max_examples=50)
@given(text=words, made=calls.filter(bool), end=st.integers(0, 200))
def test_a_reply_that_ends_early_is_told_as_far_as_it_goes(tool_formats, text, made, end):
    for tool_format in tool_formats:
        reply = write(tool_format, text, made if tool_format.between else made[:1])[:end]
        content, found, is_complete = read(tool_format, list(reply))
        assert content == text[: len(content)] or tool_format.trigger not in reply
        whole = write(tool_format, text, made if tool_format.between else made[:1])
        assert is_complete == (reply == whole)
        for (name, said), known in zip(found, made):
            assert name == known[0]
            assert json.dumps(known[1], ensure_ascii=False).startswith(said)

"""A text ends before a stop string, however tokens cut it, and shows no more than is certain."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stops import beginning, characters, cut, encoding_of

from text.detokenizer import StopStringDetokenizer

CUTS = st.lists(st.integers(0, 24), max_size=24)
FEW = st.text("ab", min_size=1, max_size=4)
MANY = st.text("aé🙂\ufffd\n", min_size=1, max_size=3)
BYTES = st.lists(
    st.sampled_from([b"a", "é".encode(), "🙂".encode(), b"\xff", b"\xc3", b"\xf0\x9f", b"\n"])
).map(b"".join)


def streamed(pieces, stops, skip=()) -> tuple[list[str], bool]:
    """What it releases after each token and at the end, and whether it has stopped."""
    stream = StopStringDetokenizer(encoding_of(pieces), skip, tuple(stops))
    released = [stream.add(token) for token in range(len(pieces))]
    stopped = stream.stopped
    return [*released, stream.end()], stopped


def split(data: bytes, cuts) -> list[bytes]:
    """Tokens of a text, some of them empty, that may cut its characters."""
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def test_text_that_is_held_is_shown_once_however_often_it_ends():
    """A caller may end a stream twice, such as after Ctrl-C."""
    stream = StopStringDetokenizer(encoding_of([b"cab"]), (), ("abc",))
    assert [stream.add(0), stream.end(), stream.end()] == ["c", "ab", ""]


@given(
    data=st.one_of(st.text("abc", max_size=24).map(str.encode), BYTES),
    stops=st.lists(st.one_of(FEW, MANY), max_size=4),
    cuts=CUTS,
)
@example(data=b"cabc", stops=["abc", "b"], cuts=[1, 2, 3])
@example(data=b"caaa", stops=["aa", "aaa"], cuts=[1, 4])
@example(data=b"aab", stops=["ab"], cuts=[1, 2])
@settings(max_examples=200)
def test_any_split_into_tokens_gives_the_cut_of_the_whole_text(data, stops, cuts):
    """After each token all is shown but what may begin a stop string; bad bytes are U+FFFD."""
    pieces = split(data, cuts)
    released, stopped = streamed(pieces, stops)
    for count in range(1, len(pieces) + 1):
        text, found = cut(characters(b"".join(pieces[:count])), stops)
        held = "" if found else beginning(text, stops)
        assert "".join(released[:count]) + held == text
    assert stopped == found
    assert "".join(released) == cut(data.decode("utf-8", "replace"), stops)[0]


READABLE = [
    (["a", "b", "c"], [], ["a", "b", "c", ""]),
    # It begins in one token and ends in the next.
    (["ab", "cd", "e"], ["bc"], ["a", "", "", ""]),
    # What was held comes when it is none,
    (["ab", "bd", "e"], ["bc"], ["a", "bbd", "e", ""]),
    # but only as far as it can still grow into one.
    (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""]),
    # The one that is complete first, not the one that begins first.
    (["xabcx"], ["abc", "b"], ["xa", ""]),
    (["xaaax"], ["aaa", "aa"], ["x", ""]),
    # The longest of two that end with the same character.
    (["xabx"], ["b", "ab"], ["x", ""]),
    (["abcab"], ["cd", "ab"], ["", ""]),
    # What begins one may begin another one later on.
    (["ab", "a"], ["abc", "bac"], ["", "a", "ba"]),
    # The end of the text: it was none.
    (["x", "ab"], ["abc"], ["x", "", "ab"]),
    (["a\n", "\nb"], ["\n\n"], ["a", "", ""]),
    (["x", "ST", "OP"], ["stop", "Stop"], ["x", "ST", "OP", ""]),
    # A string, not a pattern.
    (["a.b"], ["a*b", "a[.]b", "."], ["a", ""]),
]


@pytest.mark.parametrize("tokens, stops, released", READABLE)
def test_texts_that_one_can_read(tokens, stops, released):
    assert streamed([token.encode() for token in tokens], stops)[0] == released


def test_a_stop_string_of_characters_that_tokens_cut():
    letters = [bytes([byte]) for byte in "a🙂é!".encode()]
    assert streamed(letters, ["🙂é"])[0] == ["a"] + [""] * 8
    # Three bytes in common.
    assert streamed(letters, ["🙃"])[0] == ["a", "", "", "", "🙂", "", "é", "!", ""]
    assert streamed(["é".encode() + b"\xc3", b"\xa9"], ["éé"]) == (["", "", ""], True)
    assert streamed(["é".encode() + b"\xc3"], ["éé"]) == (["", "é\ufffd"], False)
    assert streamed([b"a", b"b\xc3"], ["abc", "\ufffdd"])[0] == ["", "", "ab\ufffd"]
    assert streamed([b"a\xff", b"b"], ["\ufffdb"]) == (["a", "", ""], True)
    assert streamed([b"one. two. \xc3", b"\xa9"], [". t"]) == (["one", "", ""], True)
    assert streamed([b"a\xc3"], ["a"]) == (["", ""], True)  # half a character, too


def test_skipped_tokens_and_ids_without_text():
    pieces = [b"a", b"<end>", b"b", None, b"c"]
    assert streamed(pieces, ["ab"], skip=(1,)) == ([""] * 6, True)  # there is nothing between them
    assert streamed(pieces, ["end"])[0] == ["a", "<", "", "", "", ""]
    assert streamed(pieces, ["b\ufffdc"])[0] == ["a", "<end>", "", "", "", ""]

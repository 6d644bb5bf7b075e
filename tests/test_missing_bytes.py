"""What a vocabulary lacks is dropped, and the user is told."""

import io
import json
import sys

import pytest
from chats import CHATML, conversation
from conftest import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import refusal, serving, small_engine
from test_llama_3_tokenizer import load_from
from test_tokenizer import library

import infer_speculative
from loading.byte_level import unicode_to_bytes

MISSING = bytes([4, 0x1D, 0xF1])
TEXT = "a\x04 cat \x1d\U00040000"
NOTE = "note: the vocabulary lacks these bytes of the input, which are dropped: {}\n"


def without(raw: dict, missing: bytes = MISSING) -> dict:
    byte = unicode_to_bytes()
    vocabulary = {
        f"nothing{id}" if byte.get(token) in [*missing] else token: id
        for token, id in raw["model"]["vocab"].items()
    }
    return raw | {"model": raw["model"] | {"vocab": vocabulary}}


@pytest.fixture(scope="module")
def raw() -> dict:
    return without(json.loads((CHECKPOINTS / "stories" / "tokenizer.json").read_text("utf-8")))


@pytest.fixture(scope="module")
def encoding(raw, tmp_path_factory):
    return load_from(tmp_path_factory.mktemp("lacking"), raw)


@pytest.fixture
def directory(write_chat):
    """A random model with a template, whose vocabulary lacks bytes."""
    made = write_chat(CHATML)
    file = made / "tokenizer.json"
    file.write_text(json.dumps(without(json.loads(file.read_text("utf-8")))), "utf-8")
    return made


def test_the_bytes_that_are_dropped_are_named(encoding, raw, tmp_path):
    def lacking(missing, **more):
        return load_from(tmp_path, without(raw, missing) | more).dropped_bytes

    assert encoding.dropped_bytes(TEXT) == "04 1d f1"
    assert encoding.dropped_bytes("a\x1d\x1d") == "1d"
    assert encoding.dropped_bytes("a cat\n\x05 é🙂") == encoding.dropped_bytes("") == ""
    # A surrogate counts as what it becomes.
    assert encoding.dropped_bytes("\ud800") == "" and lacking(b"\xbf")("\ud800") == "bf"
    # Bytes of added tokens are not lost.
    end = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end |= {"id": 4096, "content": "<｜end｜>", "special": True}
    dropped = lacking(b"\xef", added_tokens=[*raw["added_tokens"], end])
    assert (dropped("a<｜end｜>"), dropped("a<｜end｜>", plain=True)) == ("", "ef")
    assert dropped("a", "<｜") == "ef"
    # Bytes count in the normal form: U+0340 is CD 80, and in its normal form CC 80.
    assert lacking(b"\xcd")("\u0340") == "cd"
    assert lacking(b"\xcd", normalizer={"type": "NFC"})("\u0340") == ""
    dropped = lacking(b"\xcc", normalizer={"type": "NFC"})
    assert (dropped("a\u0301"), dropped("a", "\u0301")) == ("", "cc")


PIECES = st.sampled_from([*"\x04\x1dé🙂 a\n", "\U00040000", " the", "th", "e", "<|endoftext|>"])


@settings(max_examples=100)
@given(text=st.lists(PIECES | st.characters(exclude_categories=["Cs"])).map("".join))
def test_a_text_comes_back_without_them(raw, encoding, text):
    whole = text.encode()
    left = bytes(byte for byte in whole if byte not in MISSING)
    ids = encoding.encode(text, allowed_special="all")
    assert ids == library(raw).encode(text).ids
    assert encoding.decode(ids) == left.decode("utf-8", "replace")
    assert bool(encoding.dropped_bytes(text)) == (left != whole)


def test_a_note_says_what_is_lost(cli, engine_cli, run_main, directory, monkeypatch):
    def speculate(_, model, *args):
        lookup = ("--target", directory, "--draft", "lookup")
        return run_main(infer_speculative.main, *lookup, *args)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\x1d\n")))
    for run, words, shown in (
        (cli, ("--prompt", TEXT, "--prompt", "a"), "04 1d f1"),
        (cli, ("--chat", "--system", "\x04", "--prompt", "a\x1d"), "04 1d"),
        (cli, ("--chat",), "1d"),
        (speculate, ("--prompt", "a\x04"), "04"),
        (engine_cli, ("--prompt", "a\x04"), "04"),
    ):
        code, _, err = run("--model", directory, *words, "--max-new-tokens", 2)
        assert (code, err.count(NOTE.format(shown))) == (0, 1), err


def test_a_server_refuses_what_it_would_drop(encoding, tiny_llama):

    def make():
        engine = small_engine(tiny_llama)
        engine.encoding = encoding
        return engine

    words = "{}: the vocabulary of the model lacks these bytes: 04 f1"
    with serving(make) as client:
        for prompt in (TEXT.replace("\x1d", ""), ["a", "\x04\U00040000"]):
            body = {"prompt": prompt, "max_tokens": 1}
            assert client.post("/v1/completions", body) == (400, refusal(words.format("prompt")))
        messages = conversation("a\x04\U00040000", "b", "\U00040000")
        found = client.post("/v1/chat/completions", {"messages": messages})
        assert found == (400, refusal(words.format("messages")))
        assert client.post("/v1/completions", {"prompt": "a cat", "max_tokens": 1})[0] == 200

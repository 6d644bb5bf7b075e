"""Lesson 104: what a vocabulary lacks is dropped, and the user is told."""

import json

import pytest
from chats import CHATML, save_base, write_template
from conftest import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import refusal, serving, small_engine
from test_conversation import talk  # noqa: F401
from test_llama_3_tokenizer import load_from
from test_tokenizer import library

from loading.byte_level import unicode_to_bytes
from text.tokenizer import load_encoding

MISSING = bytes([4, 0x1D, 0xF1])
TEXT = "a\x04 cat \x1d\U00040000"
NOTE = "note: the vocabulary lacks these bytes of the input, which are dropped: {}\n"


def without(raw: dict, missing: bytes = MISSING) -> dict:
    """A tokenizer.json with other tokens in the places of these bytes."""
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


@pytest.fixture(scope="session")
def directory(tiny, tmp_path_factory):
    """A random model with a template, whose vocabulary lacks bytes."""
    made = tmp_path_factory.mktemp("missing")
    save_base(tiny, made)
    write_template(made, CHATML)
    file = made / "tokenizer.json"
    file.write_text(json.dumps(without(json.loads(file.read_text("utf-8")))), "utf-8")
    return made


def test_the_bytes_that_are_dropped_are_named(encoding):
    assert encoding.dropped_bytes(TEXT) == "04 1d f1"
    assert encoding.dropped_bytes("a\x1d\x1d") == "1d"
    assert encoding.dropped_bytes("a cat\n\x05 é🙂") == encoding.dropped_bytes("") == ""
    assert load_encoding(CHECKPOINTS / "stories", 4096).dropped_bytes(TEXT) == ""


def test_bytes_of_added_tokens_are_not_lost(raw, tmp_path):
    other = without(raw, b"\xef")
    end = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end |= {"id": 4096, "content": "<｜end｜>", "special": True}
    ours = load_from(tmp_path, other | {"added_tokens": [*raw["added_tokens"], end]})
    assert (
        ours.dropped_bytes("a<｜end｜>") == ""
        and ours.dropped_bytes("a<｜end｜>", plain=True) == "ef"
    )
    assert ours.dropped_bytes("a", "<｜") == "ef"


def test_a_surrogate_counts_as_what_it_becomes(encoding, raw, tmp_path):
    assert encoding.dropped_bytes("\ud800") == ""
    assert load_from(tmp_path, without(raw, b"\xbf")).dropped_bytes("\ud800") == "bf"


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


def test_bytes_count_in_the_normal_form(raw, tmp_path):
    """U+0340 is CD 80, in its normal form CC 80."""
    other = without(raw, b"\xcd")
    assert load_from(tmp_path, other).dropped_bytes("\u0340") == "cd"
    ours = load_from(tmp_path, other | {"normalizer": {"type": "NFC"}})
    assert ours.dropped_bytes("\u0340") == ""
    lacking = load_from(tmp_path, without(raw, b"\xcc") | {"normalizer": {"type": "NFC"}})
    assert lacking.dropped_bytes("a\u0301") == "" and lacking.dropped_bytes("a", "\u0301") == "cc"


@pytest.mark.parametrize("prompts, shown", [([TEXT, "a"], "04 1d f1"), (["\x1d"], "1d")])
def test_a_note_says_what_a_prompt_loses(cli, directory, prompts, shown):
    args = [word for prompt in prompts for word in ("--prompt", prompt)]
    code, out, err = cli("--model", directory, "--max-new-tokens", 2, *args)
    assert code == 0
    assert err.count(NOTE.format(shown)) == 1
    assert prompts[0] in out


def test_a_note_says_what_messages_lose(cli, talk, directory):  # noqa: F811
    args = ("--model", directory, "--chat", "--max-new-tokens", 2)
    code, _, err = cli(*args, "--system", "\x04", "--prompt", "a\x1d")
    assert (code, err.count(NOTE.format("04 1d"))) == (0, 1)
    code, _, err = talk("a\nb\x1d\n", "--max-new-tokens", 2)
    assert (code, err.count(NOTE.format("1d"))) == (0, 1)


def test_a_note_of_speculation_and_of_the_engine(run_main, engine_cli, directory):
    import infer_speculative

    args = ("--max-new-tokens", 2, "--prompt", "a\x04")
    for result in (
        run_main(infer_speculative.main, "--target", directory, "--draft", "lookup", *args),
        engine_cli("--model", directory, *args),
    ):
        assert (result[0], result[2].count(NOTE.format("04"))) == (0, 1)


def test_a_server_refuses_what_it_would_drop(encoding, tiny_llama):
    """A client sees no note."""

    def make():
        engine = small_engine(tiny_llama)
        engine.encoding = encoding
        return engine

    words = "{}: the vocabulary of the model lacks these bytes: 04 f1"
    with serving(make) as client:
        for prompt in (TEXT.replace("\x1d", ""), ["a", "\x04\U00040000"]):
            body = {"prompt": prompt, "max_tokens": 1}
            assert client.post("/v1/completions", body) == (400, refusal(words.format("prompt")))
        messages = [{"role": "user", "content": "a\x04"}, {"role": "assistant", "content": "b"}]
        messages.append({"role": "user", "content": "\U00040000"})
        messages[0]["content"] += "\U00040000"
        status, found = client.post("/v1/chat/completions", {"messages": messages})
        assert (status, found) == (400, refusal(words.format("messages")))
        assert client.post("/v1/completions", {"prompt": "a cat", "max_tokens": 1})[0] == 200

"""Lesson 103: any byte-level BPE, as the tokenizers library reads it."""

import json
import random

import pytest
from conftest import CHECKPOINTS
from test_llama_3_tokenizer import O200K, TEXTS, load_from
from test_tokenizer import check_refused, library, with_values

from benchmarks.export_gguf import write_gguf
from errors import UserError
from loading.byte_level import unicode_to_bytes

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL = "<tool_call>"
BLANKS = ["   ", "\n\n", "     "]  # added tokens that control nothing
# SmolLM2's vocabulary lacks these.
MISSING = bytes.fromhex("04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff")
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ONLY = LEVEL | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern, behavior="Isolated", invert=False) -> dict:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def steps(*parts) -> dict:
    return {"type": "Sequence", "pretokenizers": [*parts]}


FORMS = {
    "smollm2": steps(DIGITS, LEVEL),
    "o200k": steps(split({"Regex": O200K}), BYTES_ONLY),
    "roberta": LEVEL | {"add_prefix_space": True},
    "blanks": steps(split({"String": " "}, "MergedWithNext"), BYTES_ONLY),
    "whole": BYTES_ONLY,
}


def random_texts(count: int) -> list[str]:
    ranges = [(0x20, 0x7F), (0x30, 0x3A), (0, 0x20), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530)]
    ranges += [(0x5D0, 0x660), (0x660, 0x66A), (0x900, 0xE80), (0x1100, 0x1200), (0x1E00, 0x2070)]
    ranges += [(0x20A0, 0x2C00), (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4)]
    ranges += [(0xFE00, 0x10000), (0x1D400, 0x1D800), (0x1F300, 0x1FAFF), (0x40000, 0xF0000)]
    words = [" the", "def f(x):\n    ", "\r\n", "  ", "\t", "'ll", "'S", "123", "👩‍👩‍👧", "e\u0301"]
    words += [TOOL, *SPECIAL, "<|im", "\u3000", "0x1F", "==", "Grüße", "안녕", "क्षि", "שָׁ"]
    draw = random.Random(0)
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(0, 12)):
            a, b = draw.choice(ranges)
            run = "".join(chr(draw.randrange(a, b)) for _ in range(draw.randint(1, 4)))
            pieces.append(draw.choice([run, draw.choice(words)]))
        texts.append("".join(pieces))
    return texts


RANDOM = random_texts(800)


def made(pre_tokenizer: dict) -> dict:
    """A small tokenizer.json of this form, without some bytes; added tokens first, as SmolLM2's."""
    from tokenizers import AddedToken, Tokenizer, models, trainers

    frame = {"version": "1.0", "pre_tokenizer": pre_tokenizer, "decoder": LEVEL}
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    tokenizer = library(empty | frame)
    alphabet = [name for name, byte in unicode_to_bytes().items() if byte not in MISSING]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(
        [text for text in TEXTS if not {*MISSING} & {*text.encode()}], trainer
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (TOOL, *BLANKS)])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def smol() -> dict:
    return made(FORMS["smollm2"])


def test_each_id_has_the_bytes_that_the_library_shows(smol, tmp_path):
    ours = load_from(tmp_path, smol)
    theirs = library(smol)
    assert ours.n_vocab == theirs.get_vocab_size()
    for token in range(ours.n_vocab):
        data = ours.decode_single_token_bytes(token)
        assert data.decode("utf-8", "replace") == theirs.decode([token], skip_special_tokens=False)
    for token in (ours.n_vocab, 2**32 - 1):
        with pytest.raises(KeyError):
            ours.decode_single_token_bytes(token)


@pytest.mark.parametrize("kind", ["a merge", "a character", "whole"])
def test_an_added_token_that_is_a_word_of_the_vocabulary(smol, tmp_path, kind):
    """A special one is refused, as each message with it would hold it. Another one is text."""
    name, other = with_a_word(smol, kind, special=True)
    words = f"added token {name!r}: plain text must not become it"
    check_refused(words, load_from, tmp_path, other)
    name, other = with_a_word(smol, kind, special=False)
    ours = load_from(tmp_path, other)
    theirs = library(other)
    assert name not in ours.special_tokens_set
    for text in [f"{name}{name}x", f"a {name}", *TEXTS]:
        if not any(token in text for token in ours.special_tokens_set):
            assert ours.encode_ordinary(text) == theirs.encode(text).ids
            if not ours.dropped_bytes(text):
                assert ours.decode(ours.encode_ordinary(text)) == text


def with_a_word(smol, kind, special) -> tuple[str, dict]:
    vocabulary = smol["model"]["vocab"]
    pairs = (token for token in vocabulary if len(token) == 2 and token.isascii())
    made = next(pair for pair in pairs if pair.isalpha())
    name = "e" if kind == "a character" else made
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": vocabulary[name], "content": name, "special": special} | flags
    other = json.loads(json.dumps(smol | {"added_tokens": [token, *smol["added_tokens"]]}))
    if kind == "whole":
        other["model"] |= {"ignore_merges": True, "merges": []}
        other["added_tokens"] = [token]
    return name, other


def test_a_text_on_which_a_pattern_gives_up_is_one_line(smol, tmp_path):
    slow = steps(split({"Regex": "(a*)*b|(a|aa)+$"}), BYTES_ONLY)
    ours = load_from(tmp_path, smol | {"pre_tokenizer": slow})
    for encode in (ours.encode, ours.encode_ordinary):
        with pytest.raises(UserError, match="^the tokenizer's pattern cannot split this text"):
            encode("a" * 60 + "c")


def test_bytes_are_written_once_and_an_added_token_has_a_text(smol, tmp_path):
    words = "normalizer has a step ByteLevel; only pre_tokenizer may have one"
    check_refused(words, load_from, tmp_path, smol | {"normalizer": {"type": "ByteLevel"}})
    other = with_values(smol, {"model.vocab": {"": 999} | smol["model"]["vocab"]})
    other["added_tokens"] = [smol["added_tokens"][0] | {"id": 999, "content": ""}]
    check_refused("added token '' is empty", load_from, tmp_path, other)


def test_what_would_cut_or_pad_a_text_or_stand_for_missing_bytes_does_nothing(smol, tmp_path):
    cut = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": SPECIAL[0]}
    other = with_values(smol, {"model.unk_token": SPECIAL[0]})
    ours = load_from(tmp_path, other | {"truncation": cut, "padding": pad})
    for text in TEXTS:
        assert ours.encode(text, allowed_special="all") == library(smol).encode(text).ids
    missing = MISSING[:6].decode("latin-1")
    assert library(other).encode(missing).ids
    assert ours.encode_ordinary(missing) == ours.encode(missing) == []
    assert ours.encode("a\ud800") == ours.encode("a\ufffd")  # a character that is none


@pytest.mark.parametrize("kind", ["split", "normal form"])
def test_an_exported_file_has_names_for_what_it_does_or_is_refused(smol, tiny, tmp_path, kind):
    stories = json.loads((CHECKPOINTS / "stories" / "tokenizer.json").read_text())
    words = {
        "split": "GGUF has no name for this pre_tokenizer",
        "normal form": "normalizer is {'type': 'Lowercase'}; supported is",
    }
    raw = {"split": smol, "normal form": stories | {"normalizer": {"type": "Lowercase"}}}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(raw[kind]))
    model = tiny(vocab_size=4096)
    check_refused(words[kind], write_gguf, model, tmp_path / "m.gguf", "float32", file)

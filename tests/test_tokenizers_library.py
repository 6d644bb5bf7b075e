"""Any list of merges, as the tokenizers library encodes it; added tokens."""

import json
import random

import pytest
from test_llama_3_tokenizer import TEXTS, load_from
from test_tokenizer import check_refused, library, with_values

from loading.byte_level import unicode_to_bytes

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained_tokenizer(pre_tokenizer: dict, *added: str) -> dict:
    """A small tokenizer.json of this form, without some bytes; special tokens first, as SmolLM2's.

    added: tokens that are not special.
    """
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
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return json.loads(tokenizer.to_str())


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOOL = "<tool_call>"
# SmolLM2's vocabulary lacks these.
MISSING = bytes.fromhex("04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff")


def random_texts(count: int) -> list[str]:
    """Letters of many scripts, digits, blanks, emoji, combining marks, control characters, code."""
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


@pytest.fixture(scope="module")
def small() -> dict:
    return trained_tokenizer(LEVEL, TOOL)


def test_each_id_has_the_bytes_that_the_library_shows(small, tmp_path):
    ours = load_from(tmp_path, small)
    theirs = library(small)
    assert ours.n_vocab == theirs.get_vocab_size()
    for token in range(ours.n_vocab):
        data = ours.decode_single_token_bytes(token)
        assert data.decode("utf-8", "replace") == theirs.decode([token], skip_special_tokens=False)
    for token in (ours.n_vocab, 2**32 - 1):
        with pytest.raises(KeyError):
            ours.decode_single_token_bytes(token)


def test_texts_come_back(small, tmp_path):
    ours = load_from(tmp_path, small)
    for text in [*TEXTS, *RANDOM]:
        whole = bytes(byte for byte in text.encode() if byte not in MISSING)
        found = ours.decode(ours.encode(text, allowed_special="all"))
        assert found == whole.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["a merge", "a character", "whole"])
def test_so_is_one_that_a_merge_or_a_character_makes(small, tmp_path, kind):
    """A word is control then, and each message with it would hold the token."""
    name, other = with_a_word(small, kind, special=True)
    check_refused(
        f"added token {name!r}: plain text must not become it", load_from, tmp_path, other
    )


def test_an_added_token_has_a_text(small, tmp_path):
    other = json.loads(json.dumps(small))
    other["model"]["vocab"] = {"": len(small["model"]["vocab"]) + 50} | other["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": other["model"]["vocab"][""], "content": "", "special": True} | flags
    check_refused("added token '' ", load_from, tmp_path, other | {"added_tokens": [token]})


def test_what_would_cut_a_text_or_pad_it_does_nothing(small, tmp_path):
    cut = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": SPECIAL[0]}
    ours = load_from(tmp_path, small | {"truncation": cut, "padding": pad})
    for text in TEXTS:
        assert ours.encode(text, allowed_special="all") == library(small).encode(text).ids


def test_what_stands_for_missing_bytes_is_never_a_control_token(small, tmp_path):
    other = with_values(small, {"model.unk_token": SPECIAL[0]})
    text = MISSING[:6].decode("latin-1")
    assert library(other).encode(text).ids  # the library's is
    ours = load_from(tmp_path, other)
    assert ours.encode_ordinary(text) == ours.encode(text) == []


def test_a_character_that_is_none_becomes_the_replacement_character(small, tmp_path):
    ours = load_from(tmp_path, small)
    assert ours.encode("a\ud800") == ours.encode("a\ufffd")


def with_a_word(smol, kind, special) -> tuple[str, dict]:
    """An added token that is a word of the vocabulary, and the tokenizer.json with it."""
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

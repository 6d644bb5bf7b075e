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


@pytest.fixture(scope="module", params=FORMS)
def form(request) -> dict:
    return made(FORMS[request.param])


@pytest.fixture(scope="module")
def smol() -> dict:
    return made(FORMS["smollm2"])


def test_ids_equal_those_of_tokenizers(form, tmp_path):
    ours = load_from(tmp_path, form)
    theirs = library(form)
    for text in [*TEXTS, *RANDOM]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids


def test_plain_text_has_no_control_token(form, tmp_path):
    """The library without these added tokens; runs of blanks are tokens in both."""
    ours = load_from(tmp_path, form)
    blanks = [token for token in form["added_tokens"] if token["content"].isspace()]
    theirs = library(form | {"added_tokens": blanks})
    number = {token["content"]: token["id"] for token in blanks}
    control = {ours.encode_single_token(token) for token in [*SPECIAL, TOOL]}
    assert ours.special_tokens_set == {*SPECIAL, TOOL}
    for text in [*TEXTS, *RANDOM]:
        ids = ours.encode_ordinary(text)
        expected = theirs.encode(text).ids
        shown = [theirs.id_to_token(token) for token in expected]
        assert ids == [number.get(text, token) for text, token in zip(shown, expected)]
        assert not control & set(ids)


def test_each_id_has_the_bytes_that_the_library_shows(form, tmp_path):
    ours = load_from(tmp_path, form)
    theirs = library(form)
    assert ours.n_vocab == theirs.get_vocab_size()
    for token in range(ours.n_vocab):
        data = ours.decode_single_token_bytes(token)
        assert data.decode("utf-8", "replace") == theirs.decode([token], skip_special_tokens=False)
    for token in (ours.n_vocab, 2**32 - 1):
        with pytest.raises(KeyError):
            ours.decode_single_token_bytes(token)


@pytest.mark.parametrize("vocabulary", [True, False])
def test_a_control_token_that_plain_text_becomes_is_refused(smol, tmp_path, vocabulary):
    other = json.loads(json.dumps(smol))
    other["model"]["ignore_merges"] = True
    other["pre_tokenizer"] = BYTES_ONLY
    if vocabulary:
        words = f"added token {SPECIAL[0]!r}: plain text must not become it"
        check_refused(words, load_from, tmp_path, other)
    else:  # the others, which are not in it, are no trouble
        other["added_tokens"] = other["added_tokens"][len(SPECIAL) :]
        assert load_from(tmp_path, other).encode_ordinary(TOOL)


@pytest.mark.parametrize("kind", ["a merge", "a character", "whole"])
def test_so_is_one_that_a_merge_or_a_character_makes(smol, tmp_path, kind):
    """A word is control then, and each message with it would hold the token."""
    name, other = with_a_word(smol, kind, special=True)
    check_refused(
        f"added token {name!r}: plain text must not become it", load_from, tmp_path, other
    )


@pytest.mark.parametrize("kind", ["a merge", "a character", "whole"])
def test_a_word_that_is_not_special_is_text(smol, tmp_path, kind):
    """transformers finds it in any text, inside of words too; it has no punctuation."""
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


def test_a_text_on_which_a_pattern_gives_up_is_one_line(smol, tmp_path):
    slow = steps(split({"Regex": "(a*)*b|(a|aa)+$"}), BYTES_ONLY)
    ours = load_from(tmp_path, smol | {"pre_tokenizer": slow})
    for encode in (ours.encode, ours.encode_ordinary):
        with pytest.raises(UserError, match="^the tokenizer's pattern cannot split this text"):
            encode("a" * 60 + "c")


def test_bytes_are_written_once(smol, tmp_path):
    words = "normalizer has a step ByteLevel; only pre_tokenizer may have one"
    check_refused(words, load_from, tmp_path, smol | {"normalizer": {"type": "ByteLevel"}})


def test_an_added_token_has_a_text(smol, tmp_path):
    other = json.loads(json.dumps(smol))
    other["model"]["vocab"] = {"": len(smol["model"]["vocab"]) + 50} | other["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": other["model"]["vocab"][""], "content": "", "special": True} | flags
    check_refused("added token '' ", load_from, tmp_path, other | {"added_tokens": [token]})


def test_what_would_cut_a_text_or_pad_it_does_nothing(smol, tmp_path):
    cut = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": SPECIAL[0]}
    ours = load_from(tmp_path, smol | {"truncation": cut, "padding": pad})
    for text in TEXTS:
        assert ours.encode(text, allowed_special="all") == library(smol).encode(text).ids


def test_what_stands_for_missing_bytes_is_never_a_control_token(smol, tmp_path):
    other = with_values(smol, {"model.unk_token": SPECIAL[0]})
    text = MISSING[:6].decode("latin-1")
    assert library(other).encode(text).ids  # the library's is
    ours = load_from(tmp_path, other)
    assert ours.encode_ordinary(text) == ours.encode(text) == []


def test_a_character_that_is_none_becomes_the_replacement_character(smol, tmp_path):
    ours = load_from(tmp_path, smol)
    assert ours.encode("a\ud800") == ours.encode("a\ufffd")


def test_an_exported_file_names_its_split_or_there_is_none(smol, tiny, tmp_path):
    load_from(tmp_path, smol)
    words = "GGUF has no name for this pre_tokenizer"
    file = tmp_path / "tokenizer.json"
    check_refused(words, write_gguf, tiny(vocab_size=800), tmp_path / "model.gguf", "float32", file)


def test_an_exported_file_has_no_other_normal_form(tiny, tmp_path):
    raw = json.loads((CHECKPOINTS / "stories" / "tokenizer.json").read_text())
    load_from(tmp_path, raw | {"normalizer": {"type": "Lowercase"}})
    target = tmp_path / "model.gguf"
    arguments = (tiny(vocab_size=4096), target, "float32", tmp_path / "tokenizer.json")
    check_refused("normalizer is {'type': 'Lowercase'}; supported is", write_gguf, *arguments)

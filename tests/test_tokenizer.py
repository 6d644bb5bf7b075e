"""Our tiktoken encodings against the tokenizers library, and every way in which loading one can fail."""

import json
import shutil

import pytest
from conftest import CHECKPOINTS
from hypothesis import given
from hypothesis import strategies as st

from tokenizer import byte_of_character, load_encoding

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two spaces,\n\na blank line,\ttabs and trailing space ",
    "don't I'll we've 1234 3.14 ... !?\"quoted\"",
    "Grüße, 你好, 🙂 and \x00 \x7f \xa0",
    "<|endoftext|>One day<|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def pair():
    """Our encoding of the embedded vocabulary, and the same file in the library it comes from."""
    from tokenizers import Tokenizer

    return load_encoding(CHECKPOINTS / "stories", 4096), Tokenizer.from_file(
        str(CHECKPOINTS / "stories/tokenizer.json")
    )


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_tokenizers(pair, text):
    ours, theirs = pair
    ids = ours.encode(text, allowed_special="all")
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == text


@given(text=st.text(max_size=60))
def test_ids_equal_those_of_tokenizers_on_any_text(pair, text):
    ours, theirs = pair
    assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
    assert ours.decode(ours.encode(text, allowed_special="all")) == text


def test_both_checkpoints_share_one_vocabulary_with_eos_last():
    ours, draft = load_encoding(CHECKPOINTS / "stories", 4096), load_encoding(CHECKPOINTS / "stories-draft", 4096)
    assert ours.n_vocab == 4096 and ours.encode("<|endoftext|>", allowed_special="all") == [4095]
    assert ours._mergeable_ranks == draft._mergeable_ranks


def test_every_byte_has_its_character():
    assert sorted(byte_of_character().values()) == list(range(256))
    assert byte_of_character()["Ġ"] == ord(" ") and byte_of_character()["Ċ"] == ord("\n")


def test_random_models_read_bytes_and_print_numbers():
    encoding = load_encoding("random:gpt2", 50257)
    assert encoding.encode("Hi") == [72, 105]
    assert encoding.decode([300, 50000, 50256]) == " 300 50000<|endoftext|>"


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the tokenizer has 4096 tokens, the model's vocab_size is 4000"):
        load_encoding(CHECKPOINTS / "stories", 4000)


def test_a_directory_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json in this directory"):
        load_encoding(tmp_path, 4096)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda raw: raw["model"].update(type="Unigram"), "only a byte-level BPE"),
        (lambda raw: raw["pre_tokenizer"].update(type="Whitespace"), "only a byte-level BPE"),
        (lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True), "only a byte-level BPE"),
        (lambda raw: raw["model"]["vocab"].update({"a b": 4096}), "stands for no byte"),
        (lambda raw: raw.pop("model"), "not a Hugging Face tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, change, words):
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    change(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(ValueError, match=words) as error:
        load_encoding(tmp_path, 5000)
    assert "\n" not in str(error.value)

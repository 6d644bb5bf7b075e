"""Encodings against the tokenizers library, all ways in which loading one can fail, streams."""

import copy
import json
from functools import reduce
from operator import getitem

import pytest
from conftest import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from loading.byte_level import unicode_to_bytes
from text.tokenizer import EOT, Encoding, load_encoding

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two spaces,\n\na blank line,\ttabs and trailing space ",
    "don't I'll we've they're it's I'm he'd 1234 3.14 ... !?\"quoted\"",
    "Grüße, 你好, 🙂 and \x00 \x7f \xa0",
    "<|endoftext|>One day<|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def pair():
    """Our encoding of the embedded vocabulary, and the same file in the library it comes from."""
    from tokenizers import Tokenizer

    file = CHECKPOINTS / "stories" / "tokenizer.json"
    return load_encoding(CHECKPOINTS / "stories", 4096), Tokenizer.from_file(str(file))


@settings(max_examples=50)
@given(text=st.text(max_size=60))
def test_ids_equal_those_of_tokenizers_on_any_text(pair, text):
    ours, theirs = pair
    for each in (text, *TEXTS):
        ids = ours.encode(each, allowed_special="all")
        assert ids == theirs.encode(each).ids and ours.decode(ids) == each


def test_special_text_is_one_token_or_refused(pair):
    assert pair[0].encode("a<|endoftext|>b", allowed_special="all")[1] == 4095
    with pytest.raises(ValueError, match="disallowed special token"):  # not taken as plain text
        pair[0].encode("a<|endoftext|>b")
    assert 4095 not in pair[0].encode_ordinary("a<|endoftext|>b")


def test_random_models_read_bytes_and_print_numbers():
    encoding = load_encoding("random:gpt2", 50257)
    assert encoding.encode("Hi") == [72, 105]
    assert encoding.decode([300, 50000, 50256]) == " 300 50000<|endoftext|>"


def test_the_vocabulary_of_a_model_may_be_padded_but_not_cut():
    assert load_encoding(CHECKPOINTS / "stories", 4224).n_vocab == 4096
    words = "the tokenizer has 4096 tokens, more than the model's vocab_size .4095"
    with pytest.raises(UserError, match=words):
        load_encoding(CHECKPOINTS / "stories", 4095)


def tokenizer_json(merges: list, special: tuple[str, ...] = (EOT,)) -> dict:
    tokens = [*unicode_to_bytes(), *(a + b for a, b in merges), *special]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": vocabulary[token], "content": token, "special": True} | flags
            for token in special
        ],
        "normalizer": None,
        "pre_tokenizer": level | {"add_prefix_space": False},
        "post_processor": None,
        "decoder": level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for token, i in vocabulary.items() if token not in special},
            "merges": [list(merge) for merge in merges],
        },
    }


MERGES = [("h", "e"), ("Ġ", "t"), ("l", "l"), ("he", "ll"), ("Ġt", "he"), ("hell", "o")]
SMALL = tokenizer_json(MERGES)
THE_END = SMALL["added_tokens"][0]
VOCABULARY = SMALL["model"]["vocab"]
AFTER = {EOT: 0} | {token: i + 1 for token, i in VOCABULARY.items()}


@pytest.fixture
def load(tmp_path):
    def load(raw) -> Encoding:
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
        return load_encoding(tmp_path, 5000)

    return load


def library(raw: dict):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(raw))


def same_ids(encoding, raw, texts) -> None:
    theirs = library(raw)
    for text in texts:
        assert encoding.encode(text, allowed_special="all") == theirs.encode(text).ids


def check_refused(words: str, load, *args) -> None:
    with pytest.raises(UserError) as error:
        load(*args)
    message = str(error.value)
    assert words in message
    assert "tokenizer.json" in message
    assert "\n" not in message
    assert len(message) < 400


def with_values(raw: dict, changes: dict) -> dict:
    """A copy with other values. changes: path, such as "pre_tokenizer.type" -> value."""
    raw = copy.deepcopy(raw)
    for path, value in changes.items():
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        reduce(getitem, keys, raw)[last] = value
    return raw


def with_changes(**changes) -> dict:
    """SMALL with other values; `model__type` is that of `type` in `model`."""
    return with_values(SMALL, {key.replace("__", "."): changes[key] for key in changes})


def added(**changes) -> dict:
    return with_changes(added_tokens=[THE_END | changes])


def first_normalized(*tokens) -> dict:
    raw = tokenizer_json(MERGES, tokens)
    raw["added_tokens"][0]["normalized"] = True
    return raw


TEXT_A = {"Sequence": {"id": "A", "type_id": 0}}
TEXT_B = {"Sequence": {"id": "B", "type_id": 0}}
ADDS_EOT = {"SpecialToken": {"id": EOT, "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [TEXT_A],
    "pair": [TEXT_A, TEXT_B],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "raw",
    [
        SMALL,
        with_changes(model__merges=[f"{a} {b}" for a, b in MERGES]),  # files before 2024
        # The special token in both places.
        with_changes(model__vocab=VOCABULARY | {EOT: 262}),
        with_changes(
            post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
        ),
        with_changes(post_processor=TEMPLATE),  # as transformers writes it
        added(normalized=True),
        first_normalized("b<c", "<a>b"),
        with_changes(model__ignore_merges=True),
        tokenizer_json(MERGES, (EOT, "<pad>", "the")),
        tokenizer_json(MERGES, ("<a>", "<a>b")),  # one begins with another
        first_normalized("<<a>>", "<a>"),
        # Ids and merges in any order, or missing.
        with_changes(model__vocab=VOCABULARY | {"hello": 263}),
        with_changes(model__merges=[MERGES[1], MERGES[0], *MERGES[2:]]),
        with_changes(model__merges=[]),
        with_changes(added_tokens=[]),
        # Another normal form, a blank before each text, and no split.
        with_changes(normalizer={"type": "Lowercase"}),
        with_changes(pre_tokenizer__add_prefix_space=True),
        with_changes(pre_tokenizer__use_regex=False),
        # Special tokens first: the ids of bytes and merges begin after theirs.
        with_values(SMALL, {"added_tokens.0.id": 0, "model.vocab": AFTER}),
    ],
)
def test_forms_that_real_files_have_give_the_ids_of_tokenizers(load, raw):
    same_ids(load(raw), raw, [*TEXTS, *NESTED, "hello the hell<pad>", " the the helo aaa"])


NESTED = ["<a>b<c b<c", "<a>b<a>", "<a>b<<a>>b< <<a>>"]


def renumbered(number) -> dict:
    return with_changes(model__vocab=VOCABULARY | {"hello": number})


FLAGS = ("lstrip", "rstrip", "single_word")
FOREIGN = "not a Hugging Face tokenizer: "
BYTES = "pre_tokenizer must have a step ByteLevel"
AROUND = "post_processor may only put added tokens before a text"
OUT = "out of vocabulary"
IN_LIBRARY = "added token '<|endoftext|>' has the id {}, but 262 in the"


@pytest.mark.parametrize(
    "raw, words",
    [
        (with_changes(model=None), "model.type is None; supported is 'BPE'"),
        (with_changes(model__type="Unigram"), "model.type is 'Unigram'"),
        (with_changes(model__dropout=0.1), "model.dropout is 0.1"),
        (with_changes(model__end_of_word_suffix="</w>"), "model.end_of_word_suffix is '</w>'"),
        (with_changes(model__continuing_subword_prefix="##"), "subword_prefix is '##'"),
        (with_changes(decoder__type="WordPiece"), "decoder.type is 'WordPiece'"),
        *[(added(**{flag: True}), f"{flag} is True; supported is False") for flag in FLAGS],
        (with_changes(pre_tokenizer=None), BYTES),
        (with_changes(pre_tokenizer={"type": "Whitespace"}), BYTES),
        (with_changes(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), FOREIGN),
        (with_changes(post_processor={"type": "BertProcessing"}), AROUND),
        *[
            (with_changes(post_processor=TEMPLATE | {"single": single}), AROUND)
            for single in ([ADDS_EOT, TEXT_A], [TEXT_A, ADDS_EOT])
        ],
        # added tokens
        (added(content=""), "added token '' has the id 262, but None in the"),
        (added(content=7), FOREIGN),
        (with_changes(added_tokens=[THE_END, THE_END | {"id": 263}]), IN_LIBRARY.format(263)),
        (with_changes(added_tokens=7), FOREIGN),
        # ids
        *[(renumbered(id), FOREIGN) for id in (None, -1, True)],
        *[(added(id=id), FOREIGN) for id in (None, -1, [262])],
        *[(added(id=id), IN_LIBRARY.format(id)) for id in (261, 263)],
        # the vocabulary and its merges
        (with_changes(model__vocab=None), FOREIGN),
        (with_changes(model__merges=None), FOREIGN),
        (with_changes(model__merges=[["h", 1]]), FOREIGN),
        (with_changes(model__merges=[*MERGES, ("h", "i")]), OUT),
    ],
)
def test_what_would_give_other_ids_is_refused_by_name(load, raw, words):
    check_refused(words, load, raw)


def test_what_is_no_tokenizer_is_named(load, tmp_path):
    with pytest.raises(UserError, match="no tokenizer.json in this directory"):
        load_encoding(tmp_path, 4096)
    with pytest.raises(UserError, match="tokenizer.json: not a JSON object"):
        load([])
    assert load(with_changes(added_tokens=None)).n_vocab == 262
    words = "the tokenizer has 1000000001 tokens, more than the model's vocab_size .5000"
    with pytest.raises(UserError, match=words):
        load(renumbered(10**9))

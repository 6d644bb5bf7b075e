"""All forms of tokenizer.json and their added tokens, against the tokenizers library."""

import functools
import json
import random

import pytest
from test_any_bpe import BYTES_ONLY, RANDOM, split, steps
from test_any_bpe import FORMS as BYTE_LEVEL
from test_any_bpe import made as made_byte_level
from test_llama_3_tokenizer import TEXTS, load_from, trained
from test_sentencepiece import FORMS, made
from test_tokenizer import check_refused, library

import errors
from errors import UserError
from loading.byte_level import PATTERNS
from text.tokenizer import load_encoding

BLANK = "▁"
RUNS = [sign * count for sign in ("\n", "\t", BLANK) for count in (2, 3, 5)]
TAGS = ["<h1>", "</h1>", "<table>", "<s>", "</s>", "<bbox>"]
RESERVED = ["<unused0>", "<mask>", "[multimodal]", "<tool_call>", "|||EMAIL|||", "### Response:"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
WORDS = ["Grüße", "你好", "🙂", "hello "]


def with_added(raw: dict, special: list[str], others: list[str], outside: int = 0) -> dict:
    """A tokenizer.json with these added tokens in its vocabulary, but for the last `outside`."""
    raw = json.loads(json.dumps(raw))
    vocabulary = raw["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = [*special, *others]
    raw["added_tokens"] = []
    for number, name in enumerate(names):
        token = vocabulary.get(name, len(vocabulary) + max(0, number - len(names) + outside))
        if number < len(names) - outside:
            vocabulary[name] = token
        raw["added_tokens"].append(
            {"id": token, "content": name, "special": name in special} | flags
        )
    return raw


@functools.cache
def gemma() -> dict:
    """As Gemma 3's: runs of blanks, tags and reserved names are added tokens, and not special."""
    raw = made(FORMS["gemma"])
    for sign, count in ((BLANK, 5), ("\n", 5), ("\t", 5)):
        raw["model"]["vocab"].setdefault(sign, len(raw["model"]["vocab"]))
        for size in range(2, count + 1):
            run = sign * size
            raw["model"]["vocab"].setdefault(run, len(raw["model"]["vocab"]))
            raw["model"]["merges"] = [[sign * (size - 1), sign], *raw["model"]["merges"]]
    return with_added(raw, ["<unk>", "<bos>", *TURNS], RUNS + TAGS + RESERVED + WORDS)


@functools.cache
def tekken() -> dict:
    """As the converter of transformers writes it: merges are ignored, control tokens come first."""
    raw = json.loads(trained(PATTERNS["Tekken"]).to_str())
    raw["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    raw["model"] |= {"ignore_merges": True}
    return with_added(raw, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<SPECIAL_14>"], [])


def texts_with(names: list[str]) -> list[str]:
    draw = random.Random(0)
    pieces = [*names, " ", "  ", "\n", "\n\n\n\n\n\n\n", "a", "é", "<", "the"]
    drawn = ["".join(draw.choices(pieces, k=draw.randint(1, 9))) for _ in range(200)]
    return [*TEXTS, *RANDOM[:300], *drawn]


MADE = {
    **{name: functools.partial(made_byte_level, step) for name, step in BYTE_LEVEL.items()},
    **{name: functools.partial(made, parts) for name, parts in FORMS.items()},
    "gemma 3": gemma,
    "tekken": tekken,
}


@pytest.mark.parametrize("form", MADE)
def test_ids_equal_those_of_tokenizers(tmp_path, form):
    """Plain text has those of the library without the control tokens, and none of theirs."""
    raw = MADE[form]()
    ours = load_from(tmp_path, raw)
    theirs = library(raw)
    added = [each for each in raw["added_tokens"] if each["content"] not in ours.special_tokens_set]
    plain = library(raw | {"added_tokens": added})
    number = {each["content"]: each["id"] for each in added}
    control = {ours.encode_single_token(name) for name in ours.special_tokens_set}
    assert control
    for text in texts_with([each["content"] for each in raw["added_tokens"]]):
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
        ids = ours.encode_ordinary(text)
        expected = plain.encode(text, add_special_tokens=False).ids
        assert ids == [number.get(plain.id_to_token(token), token) for token in expected]
        assert not control & {*ids}


def test_plain_text_becomes_what_controls_nothing(tmp_path):
    ours = load_from(tmp_path, gemma())
    assert ours.special_tokens_set == {"<unk>", "<bos>", *TURNS, *RESERVED}
    assert ours.special_token_ids.keys() == {"<unk>", "<bos>", *TURNS}
    for name in RUNS + TAGS + WORDS:
        assert ours.encode_ordinary(name) == [ours.added_token_ids[name]]


def test_a_run_of_blanks_is_written_as_blanks(tmp_path):
    """The token of `▁▁` is that of two blanks, whether a text has these or those."""
    ours = load_from(tmp_path, gemma())
    for text in ("a  b", "a▁▁b"):
        ids = ours.encode_ordinary(text)
        assert ours.added_token_ids["▁▁"] in ids and ours.decode(ids) == "a  b"


@pytest.mark.parametrize("around", ["", " "])
def test_a_control_token_that_a_split_leaves_whole_is_refused(tmp_path, around):
    pattern = split({"Regex": rf"{around}\S+|\s+"})
    raw = tekken() | {"pre_tokenizer": steps(pattern, BYTES_ONLY)}
    check_refused("added token '<unk>': plain text must not become it", load_from, tmp_path, raw)


def test_an_added_token_without_a_row_is_plain_text(tmp_path, capsys):
    """Gemma 3's file has one token more than the model has rows: `<image_soft_token>`."""
    image = "<image_soft_token>"
    raw = with_added(gemma(), [image], [], outside=1)
    raw["added_tokens"] = [*gemma()["added_tokens"], *raw["added_tokens"]]
    size = raw["added_tokens"][-1]["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    errors.warn_once.cache_clear()
    ours = load_encoding(tmp_path, size)
    line = f"ids beyond the model's vocab_size ({size}) are read as plain text: {image}\n"
    assert capsys.readouterr().err.endswith(line)
    assert ours.n_vocab == size and image not in ours.special_tokens_set
    assert ours.decode(ours.encode_ordinary(image)) == image
    for text in texts_with([*ours.added_token_ids]):
        ids = library(gemma()).encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids
    whole = load_encoding(tmp_path, size + 1)
    assert whole.added_token_ids[image] == size and not capsys.readouterr().err


def test_tokens_that_cannot_be_dropped_need_their_row(tmp_path):
    start = "<begin>"
    raw = with_added(gemma(), [start], [], outside=1)
    raw["added_tokens"] = [*gemma()["added_tokens"], *raw["added_tokens"]]
    size = raw["added_tokens"][-1]["id"]
    single = [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    known = {start: {"id": start, "ids": [size], "tokens": [start]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": known}
    own = len(gemma()["model"]["vocab"])
    for form, rows in ((raw | {"post_processor": template}, size), (gemma(), own - 1)):
        (tmp_path / "tokenizer.json").write_text(json.dumps(form))
        message = f"{rows + 1} tokens, more than the model's vocab_size .{rows}"
        with pytest.raises(UserError, match=message):
            load_encoding(tmp_path, rows)

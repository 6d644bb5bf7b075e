"""Any byte-level BPE, as the tokenizers library reads it."""

import json

import pytest
from chats import CHATML, conversation, write_template
from conftest import CHECKPOINTS
from test_llama_3_tokenizer import O200K, TEXTS, check_prompt, load_from
from test_tokenizer import check_refused, library
from test_tokenizers_library import RANDOM, TOOL, trained_tokenizer, with_a_word

from benchmarks.export_gguf import write_gguf
from errors import UserError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BLANKS = ["   ", "\n\n", "     "]  # added tokens that control nothing
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ONLY = LEVEL | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern, behavior="Isolated", invert=False) -> dict:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def steps(*parts) -> dict:
    return {"type": "Sequence", "pretokenizers": [*parts]}


FORMS = {
    "smollm2": steps(DIGITS, LEVEL),
    "deepseek": steps(
        split({"Regex": r"\p{N}{1,3}"}), split({"Regex": "[一-龥぀-ゟ゠-ヿ]+"}), DIGITS, LEVEL
    ),
    "o200k": steps(split({"Regex": O200K}), BYTES_ONLY),
    "falcon": steps({"type": "Punctuation", "behavior": "Contiguous"}, LEVEL, DIGITS),
    "bloom": steps(split({"Regex": " ?[^(\\s|[.,!?…。，、।۔،])]+"}), BYTES_ONLY),
    "roberta": LEVEL | {"add_prefix_space": True},
    "blanks": steps(split({"String": " "}, "MergedWithNext"), BYTES_ONLY),
    "whole": BYTES_ONLY,
}


def made(pre_tokenizer: dict) -> dict:
    """A small tokenizer.json of this form; some of its added tokens are runs of blanks."""
    return trained_tokenizer(pre_tokenizer, TOOL, *BLANKS)


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


def test_ids_equal_those_of_transformers(smol, tmp_path):
    from transformers import AutoTokenizer

    ours = load_from(tmp_path, smol)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, *RANDOM]:
        assert ours.encode(text, allowed_special="all") == theirs(text)["input_ids"]


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


def test_a_model_reads_its_prompt(smol, tiny, tmp_path, cli):
    check_prompt(smol, "2024 <|im_start|>user\nWe'll see<tool_call>", tiny, tmp_path, cli)


@pytest.mark.parametrize("text", ["a    b 12", f"{SPECIAL[2]}\n{TOOL}", "x\n   y"])
def test_messages_are_plain_text(smol, tmp_path, text):
    from transformers import AutoTokenizer

    from text.chat import Chat

    ours = load_from(tmp_path, smol)
    write_template(tmp_path, CHATML, tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "config.json").write_text("{}")
    template = Chat(tmp_path)
    ids = template.encode(conversation(text), ours)
    assert ours.decode(ids) == template.render(conversation(text))
    control = {ours.encode_single_token(token) for token in [*SPECIAL, TOOL]}
    names = [ours.decode([token]) for token in ids if token in control]
    assert names == [*SPECIAL[1:] * 2, SPECIAL[1]]
    if "<" not in text:  # transformers would take them for control tokens
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs.apply_chat_template(conversation(text), add_generation_prompt=True)
        assert ids == expected["input_ids"]


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


def test_a_text_on_which_a_pattern_gives_up_is_one_line(smol, tmp_path):
    slow = steps(split({"Regex": "(a*)*b|(a|aa)+$"}), BYTES_ONLY)
    ours = load_from(tmp_path, smol | {"pre_tokenizer": slow})
    for encode in (ours.encode, ours.encode_ordinary):
        with pytest.raises(UserError, match="^the tokenizer's pattern cannot split this text"):
            encode("a" * 60 + "c")


def test_bytes_are_written_once(smol, tmp_path):
    words = "normalizer has a step ByteLevel; only pre_tokenizer may have one"
    check_refused(words, load_from, tmp_path, smol | {"normalizer": {"type": "ByteLevel"}})


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

"""Llama 3's vocabulary, whose tokenizer.json has another form."""

import copy
import json

import pytest
import torch
from conftest import run_rows
from test_tokenizer import TEMPLATE, check_refused, library, same_ids, with_values

from loading.byte_level import unicode_to_bytes
from loading.load import save_model
from text.tokenizer import load_encoding

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
# White space, and what only some programs take for it.
SPACES = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2009\u200b\u2028\u2029"
    "\u202f\u205f\u2060\u3000\ufeff"
)
TEXTS = [
    "",
    "Once upon a time, there was a little girl. She'd seen the sea; the sea hadn't seen her!",
    "def add(a, b=3):\n    return a + b  # sum\n\n\nclass A:\n\tx_1 = {'k': [0x1F, 1e-5]}\r\n\r\n",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 v2.10 a1b22c333d4444 2³ ½ Ⅷ ㊿ 一二三四",
    "٠١٢٣٤٥ १२३४५ １２３４ 𝟏𝟐𝟑𝟒 1٠२３ ১২৩৪" + "1234567890" * 9,
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☃︎ 🙂🙂🙂",
    "你好，世界。我有 3 只猫。こんにちは、世界！안녕하세요 ｶﾅ",
    "Grüße, naïve Ångström, e\u0301 o\u0308\u0323 \u0301x \u0323\u0301",
    "क्षि ไทย ภาษา שָׁלוֹם العَرَبِيَّة",
    "".join(f"a{space}b {space}{space}c{space}1{space}.{space}\n" for space in SPACES),
    "a\r\nb\n\n\nc\r\rd \n e\t\n\n  f   \n   ",
    "I'm I'M it's IT'S we'll WE'LL they've he'd HE'D don't DON'T you're YOU'rE 'tis",
    "'s'S''s'llama 'rebel 1's _'s",
    "'ſ x'ſ X'ſtop '\u212a o'K ŉ 'ß 'ﬆ ’s don’t",
    "\ufffd\ufffe\uffff\U0010ffff\x00\x7f\x80\x9f â€™ ï»¿ <|begin_of_text <|eot_id| |>",
    f"a {EOS} b<|eot_id|><|eot_id|>\n\n{EOS}  1<|reserved_special_token_10|>234",
    "<|reserved_special_token_1|>2",
    "zyxwv qzyxwv wvut wvutwvut awvut",
    " " * 700 + "x" + "\t" * 9 + "\n",
]
for unit in ("a", " ", "\n", "\r\n", "=", "1", "é", "\u3000", "'", "ab", "🙂", "\u0301"):
    TEXTS.append(unit * 700)


def trained(pattern: str):
    """A small tokenizer of the tokenizers library that splits by this, trained on most TEXTS."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if "wvut" not in text], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def raw() -> dict:
    """A small tokenizer.json as Llama 3's, which transformers' converter wrote.

    It has tokens that merges alone do not explain.
    """
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    names = [BOS, EOS, *(f"<|reserved_special_token_{i}|>" for i in range(11)), "<|eot_id|>"]
    converter = TikTokenConverter(extra_special_tokens=names)
    tokens = [*json.loads(trained(converter.pattern).to_str())["model"]["vocab"]]
    # No two tokens make the first one; the parts of the second come after it.
    tokens += ["zyxwv", "wvut", "wv", "ut"]
    to_byte = unicode_to_bytes()
    ranks = {bytes(map(to_byte.get, token)): i for i, token in enumerate(tokens)}
    converter.load_tiktoken_bpe = lambda path: ranks
    tokenizer = converter.converted()
    template = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS}:1 $B:1", [(BOS, len(ranks))]
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    raw = json.loads(tokenizer.to_str())
    assert raw["model"]["ignore_merges"]
    # What GPT-2's form lacks: tokens of several merges, and of none.
    made = [a + b for a, b in raw["model"]["merges"]]
    assert made.count("zyxwv") == 0
    assert made.count("ĠĠĠĠ") == 3
    return raw


@pytest.fixture(scope="module")
def pair(raw, tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return load_from(directory, raw), library(raw)


def load_from(directory, raw: dict):
    (directory / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    return load_encoding(directory, 5000)


def test_a_model_reads_its_prompt_after_the_prefix(raw, tiny, tmp_path, cli):
    prompt = "In 2024, they'LL see 1234567 of us"
    theirs = library(raw)
    size = theirs.get_vocab_size()
    model = tiny(dtype=torch.float32, vocab_size=size, block_size=64, eos_token_id=0)
    save_model(model, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    (new,) = run_rows(model, [theirs.encode(prompt).ids], max_new_tokens=5, ignore_eos=True)
    options = ("--max-new-tokens", 5, "--ignore-eos", "--prompt", prompt)
    code, out, _ = cli("--model", tmp_path, *options)
    assert (code, out) == (0, prompt + theirs.decode(new, skip_special_tokens=False) + "\n")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_tokenizers(pair, text):
    ours, theirs = pair
    ids = ours.encode(text, allowed_special="all")
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == BOS + text


def test_the_prefix_comes_once(pair):
    ours, theirs = pair
    (bos,) = theirs.encode("").ids
    assert ours.encode("") == [bos]
    assert ours.encode(BOS, allowed_special="all") == [bos]
    # As from a chat template; the library would put a second one before it.
    text = f"{BOS}a{BOS}{BOS}b"
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, allowed_special="all") == expected
    assert ours.encode(f" {BOS}", allowed_special="all")[0] == bos
    assert ours.encode(f" {BOS}", allowed_special="all").count(bos) == 2


def test_plain_text_is_plain(pair):
    ours, theirs = pair
    assert ours.encode_ordinary("a b") == theirs.encode("a b", add_special_tokens=False).ids
    assert {BOS, EOS} <= ours.special_tokens_set
    assert ours.n_vocab == theirs.get_vocab_size()
    assert not {*ours.encode_ordinary(BOS + EOS)} & {*range(ours.n_vocab - 14, ours.n_vocab)}
    with pytest.raises(ValueError, match="disallowed special token"):
        ours.encode(BOS)


PIECE = "pre_tokenizer.pretokenizers"
SINGLE = "post_processor.processors.1.single"
KNOWN = "post_processor.processors.1.special_tokens"
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def put(*names: str) -> list:
    return [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]


def test_a_prefix_of_two_tokens_is_there_or_not(raw, tmp_path):
    template = raw["post_processor"]["processors"][1]
    second = {"id": "<|eot_id|>", "ids": [raw["added_tokens"][-1]["id"]], "tokens": ["<|eot_id|>"]}
    known = template["special_tokens"] | {"<|eot_id|>": second}
    changes = {SINGLE: [*put(BOS, "<|eot_id|>"), TEXT], KNOWN: known}
    other = with_values(raw, changes)
    ours = load_from(tmp_path, other)
    same_ids(ours, other, [*TEXTS, f"{BOS}a", f"<|eot_id|>{BOS}a"])
    whole = f"{BOS}<|eot_id|>a"
    assert ours.encode(whole, allowed_special="all") == library(other).encode("a").ids


def test_a_template_may_stand_alone(raw, tmp_path):
    """As in the first files of Llama 3; with merges as text, as files before 2024 had them."""
    other = with_values(raw, {"post_processor": raw["post_processor"]["processors"][1]})
    other["model"]["merges"] = [" ".join(merge) for merge in other["model"]["merges"]]
    same_ids(load_from(tmp_path, other), other, ["12345 wvut"])


FOREIGN = "not a Hugging Face tokenizer: "
BYTES = "pre_tokenizer must have a step ByteLevel"
AROUND = "post_processor may only put added tokens before a text"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({f"{PIECE}.0.pattern": None}, FOREIGN),
        ({f"{PIECE}.0.behavior": "Removed"}, BYTES),
        ({PIECE: [DIGITS]}, BYTES),
        ({PIECE: [LEVEL, LEVEL]}, BYTES),
        # what is put around a text
        ({SINGLE: [TEXT, *put(EOS)]}, AROUND),
        ({SINGLE: [*put(BOS), TEXT, *put(BOS)]}, AROUND),
        ({SINGLE: put(BOS)}, AROUND),
        ({SINGLE: f"{BOS} $A"}, AROUND),
        ({SINGLE: [*put(EOS), TEXT]}, AROUND),  # its ids are not in the template
        ({SINGLE: [*put(BOS), {"Sequence": {"id": "B", "type_id": 0}}]}, AROUND),
        ({f"{KNOWN}.{BOS}.ids": [5]}, AROUND),
        ({f"{KNOWN}.{BOS}.ids": [704, 705]}, AROUND),
        ({"post_processor.processors.0": TEMPLATE}, AROUND),
    ],
)
def test_what_would_give_other_ids_is_refused_by_name(raw, tmp_path, changes, words):
    check_refused(words, load_from, tmp_path, with_values(raw, changes))


@pytest.mark.parametrize("token", ["a b", "日本"])
def test_a_token_that_stands_for_no_bytes_is_its_text(raw, tmp_path, token):
    """No text becomes it, so nobody but a model that never learned it writes it."""
    other = copy.deepcopy(raw)
    last = len(other["model"]["vocab"])
    other["model"]["vocab"][token] = last
    other["added_tokens"] = []
    other["post_processor"] = None
    assert load_from(tmp_path, other).decode([last]) == token

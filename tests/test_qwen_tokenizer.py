"""The tokenizer of Qwen2.5: a normal form, and added tokens that are not special."""

import json
from types import SimpleNamespace

import pytest
from test_llama_3_tokenizer import TEXTS, load_from
from test_tokenizer import library

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<|fim_pad|>", "[KEY]"]
NORMALIZED = [  # texts that are not in normal form, and some that only seem so
    "e\u0301 \u00e9 e\u0323\u0301 e\u0301\u0323 A\u030a \u212b \u212a \u2126",
    "\u1e9b\u0323 q\u0307\u0323",
    "\u1100\u1161\u11a8 \uac00\u11a8 한글 \u0915\u093c \u0958 \u0f73 \u0344 \u1fef",
    "\u037e \u2000 \u2329 \uf900",
    "\u0301 alone, x\u0301y, 1\u0301 .\u0338 =\u0338 \n\u0301 \u0300\u0301\u0316",
    "<|im_start|>user\nCafe\u0301<|im_end|>\u0301e<tool_call>\u0338e\u0301</tool_call\u0338>",
    "</tool_call\u0338><tool_call>",
    "[\u212aEY][KEY][KEY]\u0301[KEY\u0338]e\u0301[KEY]",
    "e" + "\u0301" * 40 + "\u0323" * 40,
]


@pytest.fixture(scope="module")
def raw() -> dict:
    """A small tokenizer.json as Qwen2.5's, with the converter's normalizer and pre-tokenizer."""
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import Qwen2Converter

    tokenizer = Qwen2Converter(SimpleNamespace(encoder={}, bpe_ranks={})).converted()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, *NORMALIZED], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in NOT_SPECIAL])
    raw = json.loads(tokenizer.to_str())
    # As the real files say "none".
    raw["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return raw


@pytest.fixture(scope="module")
def pair(raw, tmp_path_factory):
    return load_from(tmp_path_factory.mktemp("qwen"), raw), library(raw)


@pytest.mark.parametrize("text", [*TEXTS, *NORMALIZED])
def test_ids_equal_those_of_tokenizers(pair, text):
    ours, theirs = pair
    assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids


def test_added_tokens_that_are_not_special_are_tokens_too(pair):
    ours, theirs = pair
    number = theirs.token_to_id("<tool_call>")
    assert ours.encode("a<tool_call>b", allowed_special="all")[1] == number
    assert ours.special_tokens_set == {*SPECIAL, *NOT_SPECIAL}
    with pytest.raises(ValueError, match="disallowed special token"):
        ours.encode("a<tool_call>b")


@pytest.mark.parametrize("text", ["<|im_start|>e\u0301<tool_call>", "[\u212aEY]e\u0301"])
def test_plain_text_is_in_normal_form_and_plain(pair, raw, text):
    """No added token is found, not even one that the normal form makes."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(json.dumps(raw | {"added_tokens": []}))
    assert pair[0].encode_ordinary(text) == plain.encode(text).ids
    assert pair[0].encode_ordinary("") == pair[0].encode("") == []

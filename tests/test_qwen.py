"""Lesson 33: Qwen2.5, a Llama with three biases, several ends of text, its own tokenizer."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import difference, edit_json, load, run_rows
from draws import seeded
from test_llama import check_greedy_text, check_logits
from test_llama_3_tokenizer import TEXTS, load_from
from test_tokenizer import library

from errors import UserError
from loading.load import save_model

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
    """Our encoding of that file, and the library's."""
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


@pytest.fixture(scope="session")
def tiny_qwen(tiny_llama):
    """As `tiny_llama`, with biases that are not zero."""

    def build(seed=0, **shape):
        model = tiny_llama(seed, qkv_bias=True, **shape)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.data.normal_(std=0.4, generator=generator)
        return model

    return build


@pytest.mark.parametrize("seed", range(10))
def test_logits_equal_transformers_in_float64(peer, seed):
    check_logits(peer, "Qwen2", seed)


def test_greedy_text_equals_transformers(peer):
    check_greedy_text(peer, "Qwen2", tie_word_embeddings=True)


def test_save_and_load_give_the_same_model(tiny_qwen, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = tiny_qwen(dtype=torch.float32)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    assert difference(ours, theirs) < 1e-4
    assert load(tmp_path).config == ours.config


@pytest.mark.parametrize(
    "values, words", [({"eos_token_id": None}, "eos_token_id None: must be an id below 61")]
)
def test_a_config_that_this_model_cannot_be_is_refused(tiny_qwen, tmp_path, values, words):
    save_model(tiny_qwen(), tmp_path)
    edit_json(tmp_path / "config.json", values)
    with pytest.raises(UserError, match=words):
        load(tmp_path)


@pytest.fixture(scope="module")
def whole(tiny_qwen) -> list[int]:
    """The text of that model, whatever would end it."""
    options = {"max_new_tokens": 300, "temperature": 5.0, "ignore_eos": True}
    return run_rows(tiny_qwen(), [[1]], generator=seeded(0), **options)[0]


@pytest.mark.parametrize(
    "in_config, in_generation, expected",
    [
        (60, None, (60,)),
        ([60, 3], None, (60, 3)),
        (60, 5, (60, 5)),
        (60, [5, 60], (60, 5)),
        ([60, 3], [3, 7], (60, 3, 7)),
        (60, {}, (60,)),
        (None, 5, (5,)),
        (None, [5, 60], (5, 60)),
        (60, {"eos_token_id": None}, (60,)),
    ],
)
def test_every_end_of_text_of_both_files_ends_a_text(
    tiny_qwen, whole, tmp_path, in_config, in_generation, expected
):
    save_model(tiny_qwen(), tmp_path)
    edit_json(tmp_path / "config.json", {"eos_token_id": in_config})
    if in_generation is not None:
        ids = in_generation if isinstance(in_generation, dict) else {"eos_token_id": in_generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(ids | {"temperature": 0.7}))
    model = load(tmp_path)
    assert model.config.eos_token_ids == expected
    (text,) = run_rows(model, [[1]], max_new_tokens=300, temperature=5.0, generator=seeded(0))
    first = next(index for index, token in enumerate(whole) if token in expected)
    assert text == whole[: first + 1]


@pytest.mark.parametrize("in_config", [60, None])
def test_an_end_of_text_that_is_none_is_named(tiny_qwen, tmp_path, in_config):
    save_model(tiny_qwen(), tmp_path)
    edit_json(tmp_path / "config.json", {"eos_token_id": in_config})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [60, 61]}')
    words = r"generation_config.json: eos_token_id \[60, 61\]: must be an id below 61"
    with pytest.raises(UserError, match=words):
        load(tmp_path)


def test_an_empty_prompt_begins_with_the_first_end_of_config_json(tiny_qwen, tmp_path):
    """Qwen2.5 names no BOS; generation_config.json adds ends after that of config.json."""
    save_model(tiny_qwen(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["bos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [60, 7]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load(tmp_path).config.eos_token_ids == (60, 7, 5)
    assert load(tmp_path).config.bos_token_id == 60

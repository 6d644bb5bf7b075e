"""Files as public models have them: Mixtral's names, a head of its own, ends of text, scales."""

import json
import random

import pytest
import torch
from conftest import difference, edit_json, exact_norm, load, random_peer, refused
from gguf_files import edited
from safetensors.torch import load_file, save_file
from test_gguf import same

import errors
from benchmarks.export_gguf import write_gguf
from llama import ExpertsConfig
from loading.config import read_special_tokens
from loading.load import load_config, load_model, resolve_source, save_model


@pytest.fixture
def notes(capsys):
    """A function that returns what was noted since it was last called."""
    errors.warn_once.cache_clear()
    return lambda: capsys.readouterr().err


# Mixtral


@pytest.mark.parametrize("seed", range(4))
def test_logits_of_a_mixtral_equal_transformers(tmp_path, monkeypatch, seed):
    from transformers.models.mixtral import modeling_mixtral

    monkeypatch.setattr(modeling_mixtral.MixtralRMSNorm, "forward", exact_norm)
    choose = random.Random(seed).choice
    count = choose([1, 2, 5, 8])
    theirs, directory = random_peer(
        "Mixtral",
        tmp_path,
        saved_as=choose([torch.float64, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_local_experts=count,
        num_experts_per_tok=choose([1, min(2, count)]),
        sliding_window=choose([None, 5]),
        num_hidden_layers=choose([1, 3]),
        tie_word_embeddings=choose([False, True]),
        experts_implementation="eager",
    )
    names = {name for file in directory.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in names
    assert difference(load(directory), theirs) < 1e-9


def test_what_a_mixtrals_config_lacks_is_as_in_transformers(tmp_path):
    import transformers

    said = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2}
    said |= {"num_attention_heads": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(said))
    ours = load_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (ours.n_kv_head, ours.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    experts = ours.experts
    assert experts.num_experts == theirs.num_local_experts
    assert experts.num_experts_per_tok == theirs.num_experts_per_tok
    assert (experts.n_inner, experts.norm_topk_prob) == (24, True)
    assert ours.sliding_windows == () and theirs.sliding_window is None
    edit_json(tmp_path / "config.json", {"num_experts_per_tok": 9})
    assert "per_tok 9: must be at most num_local_experts" in refused(load_config, tmp_path)


def test_a_mixtral_in_a_gguf_file_is_a_llama_with_experts(tiny_llama, tmp_path):
    experts = ExpertsConfig(num_experts=5, num_experts_per_tok=2, n_inner=24, norm_topk_prob=True)
    model = tiny_llama(dtype=torch.float32, experts=experts)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "float32")
    assert same(load_model(file), model)
    values = {"llama.expert_feed_forward_length": None}  # as llama.cpp's converter writes it
    assert same(load_model(edited(file, tmp_path / "other.gguf", values=values)), model)
    assert "a Mixtral" in refused(save_model, model, tmp_path)


# A head of its own, though the config ties it to the embedding


def add_head(directory, head) -> None:
    stored = load_file(directory / "model.safetensors")
    save_file(stored | {"lm_head.weight": head}, directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_another_head_in_the_file_counts_as_in_transformers(peer, notes, kind):
    _, directory = peer(kind, tie_word_embeddings=True, head_dim=6)
    add_head(directory, torch.randn(61, 16, dtype=torch.float64))
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    notes()
    ours = load(directory)
    assert not ours.config.tie_word_embeddings
    assert difference(ours, theirs) < 1e-9
    words = (
        "lm_head.weight differs from the embedding, though tie_word_embeddings is true; it is used"
    )
    assert notes() == f"note: {directory}: {words}, as in transformers\n"


def test_still_the_same_head_is_tied(tiny_llama, tmp_path, notes):
    model = tiny_llama(tie_word_embeddings=True)
    save_model(model, tmp_path)
    add_head(tmp_path, model.embed_tokens.weight.detach().clone())
    assert load(tmp_path).config.tie_word_embeddings and notes() == ""


def test_a_gpt_2_has_no_other_head(tiny, tmp_path):
    save_model(tiny(), tmp_path)
    add_head(tmp_path, torch.ones(61, 16, dtype=torch.float64))
    message = refused(load_model, tmp_path)
    assert "lm_head.weight differs from the embedding; a GPT has one matrix" in message


# Ends of a text that only the tokenizer's files name


def write(directory, **files) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


ADDED = {"7": {"content": "<end>", "special": True}}
TOKENIZER = {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"</s>": 9}}}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": ADDED}}, (60, 7)),
        ({"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": TOKENIZER}, (60, 7)),
        (
            {"tokenizer_config": {"eos_token": {"content": "<end>"}}, "tokenizer": TOKENIZER},
            (60, 7),
        ),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": TOKENIZER}, (60, 9)),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer": TOKENIZER}, (60, 9)),
        (
            {
                "special_tokens_map": {"eos_token": "</s>"},
                "tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": ADDED},
                "tokenizer": TOKENIZER,
            },
            (60, 7),
        ),
        (
            {
                "generation_config": {"eos_token_id": [3, 7]},
                "tokenizer_config": {"eos_token": "<end>"},
                "tokenizer": TOKENIZER,
            },
            (60, 3, 7),
        ),
        ({"tokenizer_config": {"eos_token": "<none>"}, "tokenizer": TOKENIZER}, (60,)),
        ({"tokenizer_config": {"eos_token": "<end>"}}, (60,)),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": TOKENIZER}, (60,)),
        (
            {
                "tokenizer_config": {"eos_token": "<end>"},
                "tokenizer": {"added_tokens": [{"id": 61, "content": "<end>"}]},
            },
            (60,),
        ),
    ],
)
def test_the_tokenizers_end_ends_a_text(tiny_llama, tmp_path, files, expected):
    save_model(tiny_llama(), tmp_path)
    write(tmp_path, **files)
    assert load(tmp_path).config.eos_token_ids == expected


def test_an_end_that_only_the_tokenizer_names(tiny_llama, tmp_path):
    """2, which a Llama's config means where it names none, is another token then."""
    save_model(tiny_llama(), tmp_path)
    edit_json(tmp_path / "config.json", {"eos_token_id": None})
    assert load(tmp_path).config.eos_token_ids == (2,)
    write(tmp_path, tokenizer_config={"eos_token": "<end>"}, tokenizer=TOKENIZER)
    assert load(tmp_path).config.eos_token_ids == (7,)


def test_special_tokens_of_both_files(tmp_path):
    write(
        tmp_path,
        special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": 3},
        tokenizer_config={"eos_token": "<end>", "cls_token": "<c>", "unk_token": None},
    )
    expected = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<c>"}
    assert read_special_tokens(resolve_source(tmp_path)) == expected
    edit_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {}})
    expected = {"eos_token": "<end>", "cls_token": "<c>"}
    assert read_special_tokens(resolve_source(tmp_path)) == expected


# Quantized weights


@pytest.mark.parametrize(
    "said, method",
    [
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "'fp8'",
        ),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "'bits"),
        ({"quantization_config": {"load_in_8bit": True}}, "None"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
        ({"quantization_config": "fp8"}, "'fp8'"),
    ],
)
def test_quantized_weights_are_refused_by_name(tiny, tmp_path, said, method):
    save_model(tiny(), tmp_path)
    edit_json(tmp_path / "config.json", said)
    message = refused(load_config, tmp_path)
    (key,) = said
    words = f"{key}: quant_method {method}"
    assert message.startswith(f"{tmp_path / 'config.json'}: {words}")


# What GGUF files of some models do not say


@pytest.mark.parametrize("kind", ["qwen2", "Mistral 7B", "mistral basename"])
def test_a_note_says_what_is_assumed(tiny_llama, tmp_path, notes, kind):
    file = tmp_path / "model.gguf"
    write_gguf(tiny_llama(dtype=torch.float32, qkv_bias=kind == "qwen2"), file, "float32")
    name = "basename" if "basename" in kind else "name"
    given = {f"general.{name}": kind}
    other = tmp_path / "other.gguf"
    architecture = "llama"
    if kind == "qwen2":
        given = {}
        architecture = "qwen2"
    tensors = {"rope_freqs.weight": None} if kind == "qwen2" else None
    edited(file, other, architecture, values=given, tensors=tensors)
    load_config(other)
    load_config(other)
    keys = f"{architecture}.attention.sliding_window and {architecture}.rope.scaling.type"
    assumed = "no sliding window and no RoPE scaling"
    assert notes() == f"note: {other}: no {keys}: assuming {assumed}\n"
    load_config(file)  # a Llama
    said = {
        f"{architecture}.attention.sliding_window": 0,
        f"{architecture}.rope.scaling.type": "none",
    }
    load_config(edited(other, tmp_path / "says.gguf", architecture, values=said))
    assert notes() == ""

"""The configuration that a GGUF file holds."""

import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, refused
from gguf_files import edited

from benchmarks.export_gguf import write_gguf
from loading.gguf import read_gguf


@pytest.fixture
def made(tiny, tiny_llama, tmp_path):
    """A function that writes a random model of an architecture: its configuration, its file."""

    def make(kind, **shape):
        file = tmp_path / f"{kind}.gguf"
        if kind == "gpt2":
            model = tiny(dtype=torch.float32, **shape)
        else:
            options = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}[kind]
            model = tiny_llama(dtype=torch.float32, **options | shape)
        write_gguf(model, file, "float32")
        if kind == "qwen2":  # the export writes it as a Llama
            file = edited(file, tmp_path / "own.gguf", "qwen2")
        return model.config, file

    return make


def config_of(file):
    from loading.gguf_model import read_gguf_config

    return read_gguf_config(read_gguf(file))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3"])
def test_what_was_written_comes_back(made, kind):
    shapes = [{}, {"n_layer": 12, "eos_token_ids": (4, 9, 7)}]
    if kind != "gpt2":
        shapes += [{"tie_word_embeddings": True, "rope_theta": 500.0, "norm_eps": 1e-5}]
    for shape in shapes:
        config, file = made(kind, **shape)
        assert config_of(file) == config, shape


@pytest.mark.parametrize("tokenizer", [None, CHECKPOINTS / "stories" / "tokenizer.json"])
def test_the_export_writes_each_eos_id(tiny_llama, tmp_path, capsys, tokenizer):
    from loading.list_gguf import main

    model = tiny_llama(dtype=torch.float32, vocab_size=4096, eos_token_ids=(4095, 7, 9))
    write_gguf(model, tmp_path / "f.gguf", "float32", tokenizer)
    main([str(tmp_path / "f.gguf")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ids = {row[0].removeprefix("tokenizer.ggml."): row[1] for row in rows}
    assert ids["bos_token_id"] == str(model.config.bos_token_id)
    ends = [ids.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    assert ends == ["4095", "7", "9"]


def test_the_embedding_has_the_size_of_the_vocabulary(made, tmp_path):
    _, file = made("qwen3", eos_token_ids=(4,))
    short = {"token_embd.weight": np.zeros((60, 16))}
    assert config_of(edited(file, tmp_path / "short.gguf", tensors=short)).vocab_size == 60
    none = edited(file, tmp_path / "none.gguf", tensors={"token_embd.weight": None})
    assert "tensor token_embd.weight is missing" in refused(config_of, none)


# Files that are wrong.
WRONG = {  # what is different -> what is said
    "context_length": (None, "qwen3.context_length None: must be an integer from 1 to"),
    "block_count": (10**6, "qwen3.block_count 1000000: must be an integer from 1 to 1000"),
    "embedding_length": ("16", "qwen3.embedding_length '16': must be an integer"),
    "feed_forward_length": ([24, 24], "qwen3.feed_forward_length array"),
    "attention.head_count": (0, "qwen3.attention.head_count 0: must be an integer"),
    "attention.head_count_kv": (3, "head_count 4: must be a multiple of "),
    "attention.key_length": (7, "key_length 7: must be even"),
    "attention.value_length": (8, "qwen3.attention.value_length is 8; supported is 6"),
    "attention.layer_norm_rms_epsilon": (None, "epsilon None: must be above 0"),
    "rope.freq_base": (-1.0, "qwen3.rope.freq_base -1.0: must be above 0"),
    "rope.dimension_count": (4, "qwen3.rope.dimension_count is 4; supported is 6"),
    "rope.scaling.type": ("yarn", "qwen3.rope.scaling.type is 'yarn'; supported is 'none'"),
    "rope.scaling.factor": (4.0, "qwen3.rope.scaling.factor is 4.0; supported is 1"),
    "rope.scale_linear": (4.0, "qwen3.rope.scale_linear is 4.0; supported is 1"),
    "expert_count": (8, "qwen3.expert_count is 8; supported is 0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_config_that_this_model_cannot_be(made, tmp_path, key):
    value, words = WRONG[key]
    config, file = made("qwen3")
    assert config_of(file) == config
    file = edited(file, tmp_path / "f.gguf", values={f"qwen3.{key}": value})
    message = refused(config_of, file)
    assert message.startswith(f"{file}: ") and words in message


def test_other_keys_that_are_wrong(made, tmp_path):
    config, file = made("qwen3")
    assert config_of(file) == config
    ends = "tokenizer.ggml.eos_token_id"
    for values, words in (
        ({"split.count": 3}, "split.count 3: must be 0, 1, or N for files named"),
        ({ends: 61}, f"{ends} [61]: must be an id below 61"),
        ({ends: None}, f"{ends} []: must be an id below 61"),
        ({"tokenizer.ggml.bos_token_id": 99}, "bos_token_id 99: must be an id below 61"),
    ):
        message = refused(config_of, edited(file, tmp_path / "f.gguf", values=values))
        assert words in message
    values = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eot_token_id": 3}
    config = config_of(edited(file, tmp_path / "f.gguf", values=values))
    assert (config.bos_token_id, config.eos_token_ids) == (60, (60, 3))
    words = "general.architecture is 'bert'; supported are gpt2, "
    assert words in refused(config_of, edited(file, tmp_path / "f.gguf", "bert"))


@pytest.mark.parametrize("key, value", [("feed_forward_length", 63), ("head_count_kv", 1)])
def test_no_gpt_2(made, tmp_path, key, value):
    config, file = made("gpt2")
    assert config_of(file) == config
    key = f"gpt2.{'attention.' if 'head' in key else ''}{key}"
    message = refused(config_of, edited(file, tmp_path / "f.gguf", values={key: value}))
    assert "must be (2, 8.0, 64) in a GPT-2" in message

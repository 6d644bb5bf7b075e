"""Phi-3 in GGUF files, whose projections are fused as in Hugging Face's."""

import gguf
import numpy as np
import pytest
import torch
from conftest import random_tokens, refused, run
from gguf_files import edited
from ranks import ROUNDING, compared
from test_gguf import same

from benchmarks.export_gguf import write_gguf
from loading import gguf_model
from loading.load import load_config, load_model
from native import use_native


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a random Phi-3: the model, its file."""

    def make(**shape):
        own = {"rotary_dim": 4, "n_embd": 24, "rope_theta": 1000.0, "block_size": 40}
        model = tiny_llama(dtype=torch.float32, **own | shape)
        write_gguf(model, tmp_path / "model.gguf", "float32")
        return model, tmp_path / "model.gguf"

    return make


@pytest.mark.parametrize(
    "shape",
    [{}, {"tie_word_embeddings": True, "n_layer": 11}, {"n_kv_head": 4, "rotary_dim": 2}],
    ids=str,
)
def test_what_was_written_comes_back_bit_for_bit(made, monkeypatch, shape):
    model, file = made(**shape)
    assert same(load_model(file), model)
    for rows in (1, 5, 13):
        monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 24 * rows)
        assert same(load_model(file), model)


def test_a_file_is_what_llama_cpp_reads(made):
    model, path = made()
    file = gguf.GGUFReader(path)
    assert file.get_field("general.architecture").contents() == "phi3"
    assert file.get_field("phi3.rope.dimension_count").contents() == 4
    stored = {tensor.name: tensor.data for tensor in file.tensors if ".1." in tensor.name}
    block = model.layers[1]
    attention = block.self_attn
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    gate_up = [block.mlp.gate_proj.weight, block.mlp.up_proj.weight]
    for name, parts in (("attn_qkv", qkv), ("ffn_up", gate_up)):
        expected = torch.cat(parts).detach().numpy()
        assert np.array_equal(stored.pop(f"blk.1.{name}.weight"), expected)
    names = {name.split(".")[2] for name in stored}
    assert names == {"attn_norm", "attn_output", "ffn_norm", "ffn_down"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_in_int8_in_c_and_on_ranks(made, compiled, tmp_path, kind, dtype):
    shape = {"n_embd": 128, "n_inner": 64, "head_dim": 32, "rotary_dim": 24}
    model, file = made(**shape)
    write_gguf(model, file, kind)
    found = load_model(file, dtype)
    if (kind, dtype) == ("int8", torch.uint8):  # blocks stay as they are
        key = found.layers[1].self_attn.k_proj.blocks().dequantize()
        assert torch.equal(key, load_model(file).layers[1].self_attn.k_proj.weight)
    prompts = [random_tokens(9), random_tokens(3)]
    expected = run(found, prompts, max_new_tokens=12)
    use_native(found)
    assert run(found, prompts, max_new_tokens=12) == expected
    if dtype != torch.uint8:
        difference, *_ = compared(2, file, torch.tensor([random_tokens(23)]), dtype=dtype)
        assert difference <= ROUNDING[dtype]


@pytest.mark.parametrize(
    "values, windows",
    [
        ({"attention.sliding_window": 0}, ()),
        ({"attention.sliding_window": 7}, (7, 7)),  # llama.cpp ignores it
        ({"rope.scaling.original_context_length": 40}, ()),
    ],
)
def test_keys_of_other_files(made, tmp_path, values, windows):
    model, file = made()
    values = {f"phi3.{key}": value for key, value in values.items()}
    config = load_config(edited(file, tmp_path / "other.gguf", values=values))
    assert (config.sliding_windows, config.rotary_dim) == (windows, 4)


def test_separate_queries_keys_and_values_are_read_too(made, tmp_path):
    """As in llama.cpp."""
    model, file = made()
    tensors = {"blk.0.attn_qkv.weight": None}
    for letter in "qkv":
        weight = getattr(model.layers[0].self_attn, f"{letter}_proj").weight
        tensors[f"blk.0.attn_{letter}.weight"] = weight.detach()
    assert same(load_model(edited(file, tmp_path / "other.gguf", tensors=tensors)), model)


@pytest.mark.parametrize(
    "values, tensors, words",
    [
        ({"phi3.rope.dimension_count": 3}, {}, "phi3.rope.dimension_count 3: must be even"),
        ({"phi3.rope.dimension_count": 8}, {}, "dimension_count 8: must be an integer from 1 to 6"),
        ({"phi3.attention.sliding_window": 10**8}, {}, "sliding_window 100000000: must be an"),
        ({}, {"rope_factors_long.weight": [1, 1]}, "tensor rope_factors_short.weight is missing"),
        ({}, {"blk.0.ffn_gate.weight": [1.0]}, "blk.0.ffn_gate.weight is also a part of blk.0.ff"),
        (
            {},
            {"blk.1.attn_qkv.weight": np.ones((50, 24))},
            "attn_qkv.weight has shape (50, 24); the metadata says (48, 24)",
        ),
        (
            {},
            {"blk.1.ffn_up.weight": np.ones((24, 24))},
            "ffn_up.weight has shape (24, 24); the metadata says (48, 24)",
        ),
        ({}, {"blk.1.attn_qkv.weight": None}, "tensor blk.1.attn_q.weight is missing"),
    ],
)
def test_a_file_of_another_model_is_refused(made, tmp_path, values, tensors, words):
    file = edited(made()[1], tmp_path / "other.gguf", values=values, tensors=tensors)
    assert words in refused(load_model, file)


@pytest.mark.parametrize(
    "shape",
    [{"qk_norm": True}, {"qkv_bias": True}, {"nope_layers": (3,), "n_layer": 4}, {"n_embd": 16}],
    ids=str,
)
def test_what_llama_cpp_does_not_read_is_not_exported(made, tmp_path, shape):
    assert "llama.cpp's " in refused(lambda: made(**shape))
    assert not list(tmp_path.iterdir())

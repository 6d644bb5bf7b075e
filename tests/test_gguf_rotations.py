"""A Llama's file: queries and keys in pairs, and rotations that are slowed down by a table."""

import numpy as np
import pytest
import torch
from conftest import random_tokens, refused, run
from gguf_files import edited, loaded
from ranks import ROUNDING, compared
from test_gguf import same

from benchmarks.export_gguf import permute, write_gguf
from llama import RopeScaling, RotaryEmbedding
from loading import gguf_model
from loading.gguf_model import reverse_permute_weights
from loading.load import load_model, save_model
from native import use_native

SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
FACTORS = "rope_freqs.weight"


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a random Llama: the model, its file."""

    def make(**shape):
        model = tiny_llama(dtype=torch.float32, **shape)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.data.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        write_gguf(model, tmp_path / "llama.gguf", "float32")
        return model, tmp_path / "llama.gguf"

    return make


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"qkv_bias": True}], ids=str)
def test_what_was_written_comes_back_bit_for_bit(made, shape):
    model, file = made(**shape, n_layer=3, n_head=6, n_kv_head=2, head_dim=8)
    found = loaded(file)
    assert same(found, model)
    text = run(model, [random_tokens(9)], max_new_tokens=30)
    assert run(found, [random_tokens(9)], max_new_tokens=30) == text


def test_halves_apart_undoes_pairs_together():
    for shape in ((4 * 6, 16), (4 * 6,)):
        rows = torch.randn(shape)
        pairs = permute(rows, 4)
        assert torch.equal(reverse_permute_weights(pairs, 6), rows)
    order = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert reverse_permute_weights(torch.arange(12), 6).tolist() == order


def test_a_block_of_rows_is_of_whole_heads(made, monkeypatch):
    model, file = made(qkv_bias=True)
    loaded(file)
    for rows in (1, 7, 13):
        monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 16 * rows)
        assert same(loaded(file), model)


def check_backends(file, dtype: torch.dtype, length: int) -> None:
    """C writes torch's texts, and two ranks have the logits of one for so many tokens."""
    found = loaded(file, dtype)
    texts = [random_tokens(9), random_tokens(3)]
    in_torch = run(found, texts, max_new_tokens=9)
    use_native(found)
    assert run(found, texts, max_new_tokens=9) == in_torch
    tokens = torch.tensor([random_tokens(length)])
    assert compared(2, file, tokens, dtype=dtype)[0] <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_in_c_and_on_ranks(made, compiled, dtype):
    model, file = made(n_embd=32, n_inner=64, rope_scaling=SCALING)
    check_backends(file, dtype, 15)


def test_slowed_rotations_are_a_table_of_factors(made, tmp_path):
    options = {"rope_scaling": SCALING, "head_dim": 16, "rope_theta": 1000.0, "block_size": 90}
    model, file = made(**options)
    found = loaded(file)
    factors = found.config.rope_freq_factors
    assert len(factors) == 8 and (factors[0], factors[-1]) == (1.0, 8.0)
    assert hash(found.config) and found.config.rope_scaling is None
    tokens = torch.tensor([random_tokens(90)])
    with torch.inference_mode():
        assert (found(tokens) - model(tokens)).abs().max() < 1e-4
        plain = loaded(edited(file, tmp_path / "plain.gguf", tensors={FACTORS: None}))
        assert plain.config.rope_freq_factors is None
        assert (plain(tokens) - model(tokens)).abs().max() > 1e-2
    write_gguf(found, tmp_path / "again.gguf", "float32")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


def test_factors_divide_each_frequency(made, tmp_path):
    _, file = made()
    loaded(file)
    file = edited(file, tmp_path / "f.gguf", tensors={FACTORS: [1, 2, 0.5]})
    config = load_model(file).config
    assert config.rope_freq_factors == (1.0, 2.0, 0.5)
    plain = 10000.0 ** -(torch.arange(3) / 3)
    found = RotaryEmbedding(config, torch.float32, "cpu").inv_freq
    assert torch.allclose(found, plain / torch.tensor([1, 2, 0.5]), rtol=1e-6)


def test_a_table_is_not_saved(made, tmp_path):
    _, file = made(rope_scaling=SCALING)
    found = loaded(file)
    words = "config.json has no key for the rope_freqs"
    assert words in refused(save_model, found, tmp_path / "directory")
    assert not (tmp_path / "directory").exists()


@pytest.mark.parametrize(
    "factors, words",
    [
        ([1, 1], f"tensor {FACTORS} has shape (2,); the metadata says (3,)"),
        ([1, 0, 1], f"tensor {FACTORS}: all numbers must be above 0"),
        ([1, np.nan, 1], "all numbers must be above 0"),
        ([1, np.inf, 1], "all numbers must be above 0"),
    ],
)
def test_tables_that_are_wrong(made, tmp_path, factors, words):
    _, file = made()
    loaded(file)
    file = edited(file, tmp_path / "f.gguf", tensors={FACTORS: factors})
    assert words in refused(load_model, file)


def test_still_only_a_llama_has_a_table(tiny_llama, tmp_path):
    write_gguf(tiny_llama(dtype=torch.float32, qk_norm=True), tmp_path / "q.gguf", "float32")
    file = edited(tmp_path / "q.gguf", tmp_path / "f.gguf", tensors={FACTORS: [1, 1, 1]})
    assert f"unexpected tensor {FACTORS}" in refused(load_model, file)

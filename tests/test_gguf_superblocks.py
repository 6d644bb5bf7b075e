"""Superblocks of 256 numbers, beside what the package `gguf` makes of them."""

import gguf
import numpy as np
import pytest
import torch
from conftest import module_with, random_tokens
from gguf_files import edited, loaded
from ranks import ROUNDING, compared
from test_gguf_blocks import check_numbers

from benchmarks.export_gguf import write_gguf
from loading.load import load_model

SUPERBLOCKS = ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K"]


def random_blocks(name, rows: int, width: int, seed: int) -> np.ndarray:
    """Rows of random superblocks whose scales are small: their numbers are those of a model."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * width // 256, size), dtype=np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
    for place in places[name]:
        scales = generator.uniform(1e-4, 1e-3, (len(data), 1)).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a Llama of random superblocks: its file, and its numbers' file."""

    def make(name):
        shape = {"n_embd": 256, "n_inner": 512, "head_dim": 64, "tie_word_embeddings": True}
        model = tiny_llama(dtype=torch.float32, **shape)
        write_gguf(model, tmp_path / "f32.gguf", "float32")
        blocks = {}
        numbers = {}
        for tensor in gguf.GGUFReader(tmp_path / "f32.gguf").tensors:
            if len(tensor.shape) == 2:
                width, rows = tensor.shape.tolist()
                data = random_blocks(name, rows, width, len(blocks))
                blocks[tensor.name] = data, name
                numbers[tensor.name] = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
        file = edited(tmp_path / "f32.gguf", tmp_path / "blocks.gguf", blocks=blocks)
        return file, edited(tmp_path / "f32.gguf", tmp_path / "plain.gguf", tensors=numbers)

    return make


@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_random_bytes_are_the_numbers_of_gguf(name):
    blocks = module_with("loading.gguf_blocks", "dequantize")
    assert name in blocks.UNPACKERS
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (3000, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, kind).ravel()
    ours = blocks.dequantize(name, torch.from_numpy(data).flatten()).numpy()
    assert not np.isfinite(theirs).all() and ours.dtype == np.float32
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view("u4")[numbers], theirs.view("u4")[numbers])


def test_a_superblock_by_hand():
    """Of the second block's scale, 33, and the last one's minimum, 18, bits lie apart."""
    blocks = module_with("loading.gguf_blocks", "dequantize")
    assert "Q4_K" in blocks.UNPACKERS
    half, two = [0x00, 0x38], [0x00, 0x40]
    first = [0, 33, 0, 0]  # scales of the first four blocks
    minima = [0, 0, 0, 0b01_000000]  # the high bits of the last minimum
    nibbles = [0, 0, 0, 0x20]
    q = [0x50, *[0] * 127]  # number 32, the first of the second block, is 5
    data = torch.tensor([*half, *two, *first, *minima, *nibbles, *q], dtype=torch.uint8)
    found = blocks.dequantize("Q4_K", data)
    assert (found[32], found[33], found[0]) == (0.5 * 33 * 5, 0, 0)
    assert (found[224:] == -2.0 * 18).all() and not found[160:224].any()


@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_a_model_of_superblocks_is_its_numbers(made, compiled, name):
    blocks, plain = made(name)
    check_numbers(blocks, plain, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_ranks_read_their_superblocks(made, compiled, dtype):
    blocks, _ = made("Q6_K")
    loaded(blocks)
    assert compared(2, blocks, torch.tensor([random_tokens(15)]), dtype=dtype)[0] <= ROUNDING[dtype]


def test_parts_of_a_tensor(made, monkeypatch):
    from loading import gguf_model

    blocks, plain = made("Q5_K")
    loaded(blocks)
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 256 * 7)
    pairs = zip(load_model(blocks).parameters(), load_model(plain).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

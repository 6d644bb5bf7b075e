"""Lesson 132: weights of 8 bits in blocks, in C."""

import copy

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import check_own_runs
from gguf_files import loaded
from natives import (
    in_pieces,
    native,
    on_each_target,
    quantized_in_blocks,
    random_numbers,
    random_rows,
    random_texts,
    threads,
)
from ranks import compared
from test_file_blocks import files  # noqa: F401
from test_gguf_blocks import made  # noqa: F401
from test_gguf_superblocks import made as made_super  # noqa: F401

from loading.load import load_model
from quantisation import blocks

SIZES = [(1, 1), (7, 3), (33, 31), (64, 32), (133, 100), (96, 576)]
TYPES = ["Q8_0", "Q5_1", "Q5_K"]


def block_layer(name: str, out: int, size: int, extreme: int | None = None, bias: bool = True):
    """A layer in blocks of random numbers, or all of the extreme one."""
    block_format = blocks.BLOCK_FORMATS[name]
    layer = torch.nn.Linear(size, out, bias=bias)
    layer = blocks.BlockLinear(layer, block_format)
    generator = torch.Generator().manual_seed(out * size)
    count = -(-size // 32)
    low, high = (
        (-128, 128)
        if block_format.bits == 8
        else (-block_format.zero_point, 16 - block_format.zero_point)
    )
    shape = out, 32 * count
    values = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    values = values if extreme is None else torch.full_like(values, extreme)
    scale, minimum = torch.randn(2, out, count, generator=generator).to(block_format.dtype)
    weight = blocks.QuantizedBlocks(values, scale, minimum if block_format.has_minimum else None)
    blocks.load_block_rows(dict(layer.named_buffers()), "weight", slice(None), weight)
    assert torch.equal(layer.blocks().values, values)
    return layer


def in_c(layer):
    """The same layer in C."""
    from native import build
    from native.linear import NativeLinear

    return NativeLinear(copy.deepcopy(layer), build.load())


@torch.inference_mode()
def check_outputs(name: str) -> None:
    """C has torch's bits, for any sizes and numbers of rows, and so has an embedding."""
    from native.linear import NativeEmbedding

    for out, size in SIZES:
        layer = block_layer(name, out, size)
        ours = in_c(layer)
        for rows in (1, 2, 3, 6, 19):
            x = random_rows(rows, size, seed=rows)
            assert torch.equal(ours(x), layer(x)), (out, size, rows)
        found = NativeEmbedding(ours)(torch.arange(out))
        assert torch.equal(found, layer.blocks().dequantize()[:, :size]), (out, size)


@torch.inference_mode()
def check_extremes(name: str, *extremes: int) -> None:
    """Sums of the largest numbers do not overflow: pairs of products are added in 16 bits."""
    for extreme in extremes:
        layer = block_layer(name, 40, 96, extreme)
        for sign in (1, -1):
            x = torch.full((3, 96), 127.0) * sign
            x[1, ::2] *= -1
            assert torch.equal(in_c(layer)(x), layer(x)), (extreme, sign)


@torch.inference_mode()
def check_passes(model) -> None:
    """A pass has the same bits on each processor and any number of threads, and in pieces."""
    texts = random_texts(model, 3)
    found = on_each_target(model, texts, 16)
    with threads(3):
        assert torch.equal(on_each_target(model, texts, 5), found)
        alone = [in_pieces(native(copy.deepcopy(model)), text[None], 1) for text in texts]
    assert torch.equal(torch.cat(alone), found)
    expected = model(texts)
    assert (found - expected).abs().median() < 0.06 * expected.abs().median()


def check_engine(model) -> None:
    """Texts of an engine in C are their own runs'."""
    check_own_runs(native(model), range(3, 8), 9, max_num_seqs=3)


@pytest.mark.parametrize("name", TYPES)
def test_outputs_have_torchs_bits(name, target):
    check_outputs(name)


@pytest.mark.parametrize("name", TYPES)
def test_sums_do_not_overflow(name, target):
    check_extremes(name, -128, 127)


def test_nan_and_infinity_stay_in_their_row(target):
    layer = block_layer("Q8_0", 40, 96)
    x = random_numbers(4, 96)
    expected = in_c(layer)(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 40] = value
        found = in_c(layer)(x)
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]]) and found[2].isnan().all()


@pytest.mark.parametrize("family", ["tiny", "tiny_llama", "tiny_gemma", "tiny_experts"])
def test_passes_of_each_family(request, family, compiled):
    check_passes(quantized_in_blocks(request.getfixturevalue(family)(dtype=torch.float32)))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K"])
def test_passes_of_a_file(files, name, compiled):  # noqa: F811
    check_passes(loaded(files(name)[0], torch.uint8))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1"])
def test_texts_of_the_engine_are_their_own(files, name, compiled):  # noqa: F811
    check_engine(loaded(files(name)[0], torch.uint8))


def test_ranks_have_the_bits_of_one_process(files, compiled):  # noqa: F811
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, files("Q5_1")[0], tokens, dtype=torch.uint8)[0] == 0


def test_weights_are_packed_where_they_lie(compiled):
    layer = block_layer("Q8_0", 192, 64)
    address = layer.weight.data_ptr()
    from native import build
    from native.linear import NativeLinear

    ours = NativeLinear(layer, build.load())
    assert ours.weight.data_ptr() == address
    assert ours.scale.nbytes + ours.weight.nbytes == 192 * (64 + 2 * 2)


def test_the_command_line_computes_blocks_in_c(cli):
    options = ("--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "blocks")
    code, out, err = cli(*options, "--backend", "native")
    story = "Once upon a time, there was a little girl named Lily. She loved to\n"
    assert (code, out) == (0, story) and "note" not in err


def test_a_layer_is_checked_before_it_is_packed(compiled):
    model = load_model(CHECKPOINTS / "stories", torch.uint8)
    layer = model.layer("up", 0)
    layer.scale = layer.scale[:, :3].contiguous()
    before = model.layer("down", 0).weight.clone()
    with pytest.raises(ValueError, match="native code reads contiguous torch"):
        native(model)
    assert torch.equal(model.layer("down", 0).weight, before)

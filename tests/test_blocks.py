"""Weights in blocks that share a scale: from GGUF files, rounded, in torch, in C and on ranks."""

import copy

import gguf
import numpy as np
import pytest
import torch
from conftest import random_tokens
from engines import check_own_runs
from gguf_files import edited
from natives import (
    in_pieces,
    native,
    on_each_target,
    random_numbers,
    random_rows,
    random_texts,
    threads,
)
from ranks import compared, save_uneven
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.export_gguf import write_gguf
from loading import gguf_model
from loading.gguf_blocks import dequantize
from loading.load import load_model, resolve_source
from native import build
from native.linear import NativeEmbedding, NativeLinear
from quantisation import blocks

SIZES = {  # bytes of a weight
    "Q8_0": 34 / 32,
    "Q4_0": 18 / 32,
    "Q4_1": 20 / 32,
    "Q5_0": 34 / 32,
    "Q5_1": 36 / 32,
    "Q4_K": 24 / 32,
    "Q5_K": 40 / 32,
}
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
WIDE = {"n_embd": 256, "n_inner": 512, "head_dim": 64}
TYPES = gguf.GGMLQuantizationType


def random_blocks(name, rows: int, width: int, seed: int) -> np.ndarray:
    """Rows of random superblocks whose scales are small: their numbers are those of a model."""
    _, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * width // 256, size), dtype=np.uint8)
    for place in SCALES[name]:
        scales = generator.uniform(1e-4, 1e-3, (len(data), 1)).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a random Llama with rows of whole blocks in float32: its file."""

    def make(**shape):
        shape = {"n_embd": 64, "n_inner": 96, "head_dim": 16, "tie_word_embeddings": True} | shape
        write_gguf(tiny_llama(dtype=torch.float32, **shape), tmp_path / "f32.gguf", "float32")
        return tmp_path / "f32.gguf"

    return make


@pytest.fixture
def files(made, tmp_path):
    """A function that writes a random Llama of this type: its file, and that of its numbers."""

    def make(name):
        if name not in SCALES:
            file = edited(made(), tmp_path / "blocks.gguf", kind=name)
            return file, edited(file, tmp_path / "plain.gguf")
        plain = made(**WIDE)
        stored = {}
        for tensor in gguf.GGUFReader(plain).tensors:
            if len(tensor.shape) == 2:
                width, rows = tensor.shape.tolist()
                stored[tensor.name] = random_blocks(name, rows, width, len(stored)), name
        numbers = {key: gguf.dequantize(data, TYPES[name]) for key, (data, _) in stored.items()}
        file = edited(plain, tmp_path / "blocks.gguf", blocks=stored)
        return file, edited(plain, tmp_path / "plain.gguf", tensors=numbers)

    return make


# Numbers of a file


@pytest.mark.parametrize("name", [*SIZES, "Q6_K", "Q2_K", "Q3_K"])
def test_random_bytes_are_the_numbers_of_gguf(name):
    _, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
    data = np.random.default_rng(0).integers(0, 256, (3000, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, TYPES[name]).ravel()
    ours = dequantize(name, torch.from_numpy(data).flatten()).numpy()
    assert not np.isfinite(theirs).all() and ours.dtype == np.float32
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view("u4")[numbers], theirs.view("u4")[numbers])


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q4_K", "Q6_K"])
def test_floats_and_int8_of_blocks_are_those_of_their_numbers(files, monkeypatch, name):
    file, plain = files(name)
    types = {tensor.type for tensor in resolve_source(file).gguf.tensors.values()}
    assert types == {"F32", name}
    expected = [load_model(plain, dtype).state_dict() for dtype in (torch.float32, torch.int8)]
    whole = load_model(file, torch.uint8).state_dict()
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 64 * 7)  # rows of a tensor in parts
    found = [load_model(file, dtype).state_dict() for dtype in (torch.float32, torch.int8)]
    found.append(load_model(file, torch.uint8).state_dict())
    parts = gguf_model.read_gguf_tensors(resolve_source(file).gguf, load_model(file))
    sizes = [part.nbytes for key, _, part in parts if "mlp" in key]  # others have whole heads
    assert max(sizes) <= 4 * (64 * 7 + 512)
    for ours, theirs in zip(found, [*expected, whole], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def layers_of(model) -> dict:
    """The layers in blocks, by the names of their weights; a tied head once."""
    kinds = blocks.BlockLinear
    names = dict(model.named_modules())
    return {f"{n}.weight": m for n, m in names.items() if isinstance(m, kinds) and n != "lm_head"}


def check_kept(file, plain) -> dict:
    """A model has the numbers of its file, which are also floats in another. Returns layers."""
    model = load_model(file, torch.uint8)
    layers = layers_of(model)
    for key, weight in load_model(plain).named_parameters():
        found = layers[key].blocks().dequantize() if key in layers else model.get_parameter(key)
        assert torch.equal(found, weight), key
    return layers


@pytest.mark.parametrize("name", SIZES)
def test_blocks_stay_as_they_stand_in_the_file(files, name):
    file, plain = files(name)
    for layer in check_kept(file, plain).values():
        size = sum(tensor.nbytes for tensor in layer.buffers())
        assert size == layer.blocks().dequantize().numel() * SIZES[name]
    model = load_model(file, torch.uint8)
    head = model.layer("head")
    assert head.block_format == model.embed_tokens.block_format
    assert all(torch.equal(*pair) for pair in zip(head.buffers(), model.embed_tokens.buffers()))
    tokens = torch.tensor([[3, 60]])
    assert torch.equal(model.embed_tokens(tokens), load_model(plain).embed_tokens(tokens))


@pytest.mark.parametrize("name", ["Q6_K", "Q2_K", "Q3_K", "F16"])
def test_other_types_are_rounded_to_8_bits(files, name):
    file, plain = files(name)
    layers = layers_of(load_model(file, torch.uint8))
    weights = dict(load_model(plain).named_parameters())
    assert layers and name not in blocks.BLOCK_FORMATS
    for key, layer in layers.items():
        rounded = blocks.quantize_blocks(weights[key].detach())
        assert layer.block_format == blocks.BlockFormat()
        assert torch.equal(layer.weight, rounded.values)
        assert torch.equal(layer.scale, rounded.scale)


def test_stacked_experts_and_positions_of_a_gpt_2(tiny, tiny_experts, tmp_path):
    shape = {"n_embd": 64, "n_inner": 32, "head_dim": 16, "tie_word_embeddings": True}
    shape |= {"sizes": {"n_inner": 32}}
    for model, part in (
        (tiny_experts(dtype=torch.float32, **shape), ".experts."),
        (tiny(dtype=torch.float32, n_embd=64), "c_attn"),
    ):
        write_gguf(model, tmp_path / "f32.gguf", "float32")
        file = edited(tmp_path / "f32.gguf", tmp_path / "q.gguf", kind="Q4_1")
        layers = check_kept(file, edited(file, tmp_path / "plain.gguf"))
        assert any(part in key for key in layers) and "wpe.weight" not in layers


def test_a_head_of_its_own_has_its_own_form(made, tmp_path):
    file = made(tie_word_embeddings=False)
    (head,) = (each for each in gguf.GGUFReader(file).tensors if each.name == "output.weight")
    given = {"output.weight": (gguf.quantize(head.data, TYPES["Q8_0"]), "Q8_0")}
    file = edited(file, tmp_path / "blocks.gguf", kind="Q4_1", blocks=given)
    model = load_model(file, torch.uint8)
    formats = [model.lm_head.block_format, model.embed_tokens.block_format]
    assert formats == [blocks.BLOCK_FORMATS[name] for name in ("Q8_0", "Q4_1")]
    assert torch.equal(model.lm_head.blocks().dequantize(), load_model(file).lm_head.weight)


def test_empty_layers_compute_nothing():
    """Any operation but this on the device "meta" makes torch import 800 modules, 70 MB."""
    operations = set()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.add(operation.overloadpacket.__name__)
            return operation(*args, **(kwargs or {}))

    layer = torch.nn.Linear(64, 3, device="meta")
    with Noted():
        for block_format in blocks.BLOCK_FORMATS.values():
            blocks.BlockLinear(layer, block_format)
    assert operations == {"empty"}


# Rounding and products


def test_a_block_by_hand():
    x = torch.zeros(1, 40)
    x[0, :2] = torch.tensor([-63.5, 1.2])
    x[0, 32] = 127 * 2.0**-30  # a scale that no float16 is
    rounded = blocks.quantize_blocks(x)
    assert rounded.values.shape == (1, 64) and rounded.values.dtype == torch.int8
    assert rounded.scale.tolist() == [[0.5, 2.0**-24]] and rounded.scale.dtype == torch.float16
    assert rounded.values[0, :3].tolist() == [-127, 2, 0] and rounded.values[0, 32:].sum() == 2
    x[0, 32] = 127 * 1.4 * 2.0**-24  # a scale that loses much as a float16
    rounded = blocks.quantize_blocks(x)
    assert rounded.scale[0, 1] == 2.0**-24 and rounded.values[0, 32] == 127


def test_numbers_of_a_file_are_rounded_to_the_same_blocks():
    theirs = gguf.quantize(random_rows(50, 320).numpy(), TYPES["Q8_0"])
    ours = blocks.quantize_blocks(torch.from_numpy(gguf.dequantize(theirs, TYPES["Q8_0"])))
    rows = theirs.reshape(50, 10, 34)
    assert np.array_equal(ours.scale.numpy().view(np.uint8), rows[..., :2].reshape(50, 20))
    assert np.array_equal(ours.values.numpy().view(np.uint8), rows[..., 2:].reshape(50, 320))


def block_layer(name: str, out: int, size: int, extreme: int | None = None, bias: bool = True):
    """A layer in blocks of random numbers, or all of the extreme one."""
    block_format = blocks.BLOCK_FORMATS[name]
    layer = blocks.BlockLinear(torch.nn.Linear(size, out, bias=bias), block_format)
    generator = torch.Generator().manual_seed(out * size)
    count = -(-size // 32)
    zero = block_format.zero_point
    low, high = (-128, 128) if block_format.bits == 8 else (-zero, 16 - zero)
    shape = out, 32 * count
    values = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    values = values if extreme is None else torch.full_like(values, extreme)
    scale, minimum = torch.randn(2, out, count, generator=generator).to(block_format.dtype)
    weight = blocks.QuantizedBlocks(values, scale, minimum if block_format.has_minimum else None)
    blocks.load_block_rows(dict(layer.named_buffers()), "weight", slice(None), weight)
    assert torch.equal(layer.blocks().values, values)
    return layer


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("size", [1, 31, 33, 96])
def test_outputs_are_exact_sums_of_blocks_and_minima(name, size):
    layer = block_layer(name, 7, size)
    weight = layer.blocks()
    x = random_rows(5, size, seed=1)
    padded = torch.nn.functional.pad(x, (0, -size % 32))
    values, scale = blocks.quantize(padded.view(5, -1, 32))
    expected = torch.zeros(5, 7)
    for block in range(values.shape[1]):
        own = scale[:, block, None]
        sums = values[:, block].long() @ weight.values[:, 32 * block :][:, :32].long().t()
        expected += sums * (own * weight.scale[:, block].float())
        if weight.minimum is not None:
            total = own * values[:, block].long().sum(dim=1, keepdim=True)
            expected += total * weight.minimum[:, block].float()
    assert torch.equal(layer(x), expected + layer.bias)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_zeros_nan_and_infinity_stay_in_their_row():
    layer = blocks.BlockLinear(torch.nn.Linear(64, 3, bias=False))
    weight = torch.zeros(3, 64)
    weight[1, 40] = torch.nan
    weight[2, 3] = torch.inf
    blocks.load_block_rows(dict(layer.named_buffers()), "weight", slice(None), weight)
    found = layer(torch.ones(1, 64))[0]
    assert found[0] == 0 and not found[1:].isfinite().any()
    layer = block_layer("Q8_0", 1, 64)
    for value in (torch.nan, torch.inf):
        x = torch.ones(2, 64)
        x[1, 5] = value
        assert layer(x)[0].isfinite() and not layer(x)[1].isfinite()


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_ranks_join_inputs_in_whole_blocks(tiny_llama, tmp_path, parallel_mode):
    """So --join reduce is gather, and of layers with any widths each bit is that of one process."""
    name = save_uneven(tiny_llama, tmp_path, "tiny_llama")
    tokens = torch.tensor([random_tokens(12)])
    assert compared(3, name, tokens, parallel_mode, dtype=torch.uint8, native=False)[0] == 0


@pytest.mark.parametrize("name, in_c", [("Q4_0", False), ("Q5_1", True), ("Q4_1", True)])
def test_ranks_read_their_blocks(files, compiled, name, in_c):
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, files(name)[0], tokens, dtype=torch.uint8, native=in_c)[0] == 0


# In C


def in_c(layer):
    return NativeLinear(copy.deepcopy(layer), build.load())


EACH_FORMAT = pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_K", "Q4_0", "Q4_1", "Q4_K"])


@torch.inference_mode()
@EACH_FORMAT
def test_outputs_in_c_have_torchs_bits(name, target):
    for out, size in ((1, 1), (7, 3), (33, 31), (64, 32), (133, 100), (96, 576)):
        layer = block_layer(name, out, size)
        ours = in_c(layer)
        for rows in (1, 2, 3, 6, 8, 19):
            x = random_rows(rows, size, seed=rows)
            assert torch.equal(ours(x), layer(x)), (out, size, rows)
        found = NativeEmbedding(ours)(torch.arange(out))
        assert torch.equal(found, layer.blocks().dequantize()[:, :size]), (out, size)


@torch.inference_mode()
@pytest.mark.parametrize(
    "name, extremes",
    [
        *((name, (-128, 127)) for name in ("Q8_0", "Q5_1", "Q5_K")),
        ("Q4_0", (-8, 7)),
        ("Q4_1", (0, 15)),
    ],
)
def test_sums_do_not_overflow(name, extremes, target):
    """Sums of the largest numbers: pairs of products are added in 16 bits."""
    for extreme in extremes:
        layer = block_layer(name, 40, 96, extreme)
        for sign in (1, -1):
            x = torch.full((3, 96), 127.0) * sign
            x[1, ::2] *= -1
            assert torch.equal(in_c(layer)(x), layer(x)), (extreme, sign)


def test_nan_and_infinity_stay_in_their_row_in_c(target):
    layer = block_layer("Q8_0", 40, 96)
    x = random_numbers(4, 96)
    expected = in_c(layer)(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 40] = value
        found = in_c(layer)(x)
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]]) and found[2].isnan().all()


@torch.inference_mode()
@EACH_FORMAT
def test_passes_and_outputs_of_a_file_in_c(files, name, compiled):
    model = load_model(files(name)[0], torch.uint8)
    texts = random_texts(model, 3)
    found = on_each_target(model, texts, 16)
    with threads(3):
        assert torch.equal(on_each_target(model, texts, 5), found)
        alone = [in_pieces(native(copy.deepcopy(model)), text[None], 1) for text in texts]
    assert torch.equal(torch.cat(alone), found)
    expected = model(texts)
    assert (found - expected).abs().median() < 0.06 * expected.abs().median()
    check_own_runs(native(model), range(3, 8), 9, max_num_seqs=3)


def test_weights_are_packed_where_they_lie_and_two_nibbles_take_a_byte(compiled):
    layer = block_layer("Q8_0", 192, 64)
    address = layer.weight.data_ptr()
    ours = NativeLinear(layer, build.load())
    assert ours.weight.data_ptr() == address
    assert ours.scale.nbytes + ours.weight.nbytes == 192 * (64 + 2 * 2)
    assert in_c(block_layer("Q4_0", 192, 64)).weight.nbytes == 192 * 32


def test_a_scale_rounded_down_to_a_subnormal_float16_overflows_no_value():
    weight = torch.linspace(-1, 1, 32)[None] * 127 * 1.4 * 2**-24
    values = blocks.quantize_blocks(weight).values[0].tolist()
    assert (values[0], values[-1]) == (-127, 127) and values == sorted(values)

"""Lesson 131: blocks stay as they stand in a GGUF file."""

import gguf
import pytest
import torch
from conftest import random_tokens
from gguf_files import edited, loaded
from natives import random_rows
from ranks import compared
from test_gguf_blocks import made  # noqa: F401
from test_gguf_superblocks import made as made_super  # noqa: F401

from benchmarks.export_gguf import write_gguf
from loading.load import load_model
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
ROUNDED = ["Q6_K", "Q2_K", "Q3_K", "F16"]


@pytest.fixture
def files(made, made_super, tmp_path):  # noqa: F811
    """A function that writes a random Llama of this type: its file, and that of its numbers."""

    def make(name):
        if name.endswith("_K"):
            return made_super(name)
        file = edited(made()[1], tmp_path / "blocks.gguf", kind=name)
        return file, edited(file, tmp_path / "plain.gguf")

    return make


def layers_of(model) -> dict:
    """The layers in blocks, by the names of their weights; a tied head once."""
    kinds = blocks.BlockLinear
    names = dict(model.named_modules())
    return {f"{n}.weight": m for n, m in names.items() if isinstance(m, kinds) and n != "lm_head"}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_are_those_of_the_file(files, name):
    file, plain = files(name)
    model = loaded(file, torch.uint8)
    layers = layers_of(model)
    weights = dict(loaded(plain).named_parameters())
    for key, layer in layers.items():
        size = sum(tensor.nbytes for tensor in layer.buffers())
        assert size == weights[key].numel() * SIZES[name]
    assert name in blocks.BLOCK_FORMATS
    for key, weight in weights.items():
        found = layers[key].blocks().dequantize() if key in layers else model.get_parameter(key)
        assert torch.equal(found, weight), key
    head = model.layer("head")
    assert head.block_format == model.embed_tokens.block_format
    assert all(torch.equal(*pair) for pair in zip(head.buffers(), model.embed_tokens.buffers()))
    tokens = torch.tensor([[3, 60]])
    assert torch.equal(model.embed_tokens(tokens), loaded(plain).embed_tokens(tokens))


@pytest.mark.parametrize("name", ROUNDED)
def test_other_types_are_rounded_to_8_bits(files, name):
    file, plain = files(name)
    assert name not in blocks.BLOCK_FORMATS
    layers = layers_of(loaded(file, torch.uint8))
    weights = dict(loaded(plain).named_parameters())
    assert layers
    for key, layer in layers.items():
        rounded = blocks.quantize_blocks(weights[key].detach())
        assert layer.block_format == blocks.BlockFormat() and torch.equal(
            layer.weight, rounded.values
        )
        assert torch.equal(layer.scale, rounded.scale)


def test_nibbles_by_hand():
    values = torch.arange(64).remainder(16).to(torch.int8)[None]
    packed = blocks.pack_q4(values)
    assert packed.dtype == torch.uint8 and packed.shape == (1, 32)
    assert packed[0, :3].tolist() == [0x00, 0x11, 0x22]  # numbers 0 and 16, 1 and 17, ...
    assert torch.equal(blocks.unpack_q4(packed), values)
    values[0, 16:32] = 0
    assert blocks.pack_q4(values)[0, 3] == 0x03


@pytest.mark.parametrize("name", ["Q4_1", "Q4_0", "Q5_1"])
def test_outputs_are_sums_of_blocks_and_minima(files, name):
    file, _ = files(name)
    layer = loaded(file, torch.uint8).layer("down", 0)
    weight = layer.blocks()
    assert (weight.minimum is None) == (name == "Q4_0")
    x = random_rows(5, 96)
    values, scale = blocks.quantize(x.view(5, 3, 32))
    expected = torch.zeros(5, 64)
    for block in range(3):
        q = weight.values[:, 32 * block :][:, :32].long()
        own = scale[:, block, None]
        sums = values[:, block].long() @ q.t()
        expected += sums * (own * weight.scale[:, block].float())
        if weight.minimum is not None:
            total = own * values[:, block].long().sum(dim=1, keepdim=True)
            expected += total * weight.minimum[:, block].float()
    assert torch.equal(layer(x), expected)
    exact = x @ weight.dequantize().t()
    assert (layer(x) - exact).norm() < 0.01 * exact.norm()


def test_stacked_experts_and_their_router(tiny_experts, tmp_path):
    shape = {"n_embd": 64, "n_inner": 32, "head_dim": 16}
    model = tiny_experts(dtype=torch.float32, sizes={"n_inner": 32}, **shape)
    write_gguf(model, tmp_path / "f32.gguf", "float32")
    file = edited(tmp_path / "f32.gguf", tmp_path / "q.gguf", kind="Q4_0")
    plain = loaded(edited(file, tmp_path / "plain.gguf"))
    layers = layers_of(loaded(file, torch.uint8))
    experts = [key for key in layers if ".experts." in key]
    assert experts
    for key, layer in layers.items():
        assert torch.equal(layer.blocks().dequantize(), plain.get_parameter(key))


def test_a_head_of_its_own_has_its_own_form(made, tmp_path):  # noqa: F811
    file = made(tie_word_embeddings=False)[1]
    (head,) = (each for each in gguf.GGUFReader(file).tensors if each.name == "output.weight")
    data = gguf.quantize(head.data, gguf.GGMLQuantizationType.Q8_0)
    given = {"output.weight": (data, "Q8_0")}
    file = edited(file, tmp_path / "blocks.gguf", kind="Q4_1", blocks=given)
    model = loaded(file, torch.uint8)
    formats = blocks.BLOCK_FORMATS
    assert (model.lm_head.block_format, model.embed_tokens.block_format) == (
        formats["Q8_0"],
        formats["Q4_1"],
    )
    weight = loaded(file).lm_head.weight
    assert torch.equal(model.lm_head.blocks().dequantize(), weight)


def test_positions_of_a_gpt_2_become_floats(tiny, tmp_path):
    """They are a matrix of the file, and no layer in blocks."""
    write_gguf(tiny(dtype=torch.float32, n_embd=64), tmp_path / "f32.gguf", "float32")
    file = edited(tmp_path / "f32.gguf", tmp_path / "blocks.gguf", kind="Q4_1")
    model = loaded(file, torch.uint8)
    layers = layers_of(model)
    assert any("c_attn" in key for key in layers) and "wpe.weight" not in layers
    for key, weight in loaded(file).named_parameters():
        found = layers[key].blocks().dequantize() if key in layers else model.get_parameter(key)
        assert torch.equal(found, weight), key


def test_empty_layers_compute_nothing():
    """Any operation but this on the device "meta" makes torch import 800 modules, 70 MB."""
    from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1"])
def test_ranks_read_their_blocks(files, name):
    file, _ = files(name)
    assert name in blocks.BLOCK_FORMATS
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, file, tokens, dtype=torch.uint8, native=False)[0] == 0


def test_rows_of_a_tensor_in_parts(files, monkeypatch):
    from loading import gguf_model

    file, _ = files("Q4_1")
    assert blocks.BLOCK_FORMATS
    expected = load_model(file, torch.uint8).state_dict()
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 64 * 7)
    found = load_model(file, torch.uint8).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_all_types_of_4_and_5_bits_and_8_0_are_kept():
    assert list(blocks.BLOCK_FORMATS) == list(SIZES)
    kinds = gguf.GGMLQuantizationType
    sizes = {name: gguf.GGML_QUANT_SIZES[kinds[name]] for name in SIZES}
    assert all(numbers % 32 == 0 for numbers, _ in sizes.values())

"""Layers of 4-bit blocks, with and without minima, hold and compute what GGUF's types do."""

import copy

import gguf
import pytest
import torch
from conftest import module_with, run_rows
from natives import random_rows

from loading.gguf_blocks import unpack_blocks
from quantisation import blocks

TYPES = {  # GGUF type -> arguments of its BlockFormat, bytes of a weight
    "Q8_0": ((8, False), 34 / 32),
    "Q4_0": ((4, False), 18 / 32),
    "Q4_1": ((4, True), 20 / 32),
    "Q5_0": ((8, False), 34 / 32),
    "Q5_1": ((8, True), 36 / 32),
    "Q4_K": ((4, True, torch.float32), 24 / 32),
    "Q5_K": ((8, True, torch.float32), 40 / 32),
}


def blocks_of(name: str, data: torch.Tensor, rows: int):
    """Return the blocks of a weight. data: its bytes in a GGUF file."""
    parts = blocks.QuantizedBlocks(*unpack_blocks(name, data.flatten()))
    return parts.map(lambda part: part.reshape(rows, -1))


def layer_of(name: str, rows: int = 6, size: int = 512) -> tuple:
    """Return a layer of random blocks of a GGUF type, and the weight that gguf reads from them."""
    block_format = module_with("quantisation.blocks", "BlockFormat").BlockFormat(*TYPES[name][0])
    kind = gguf.GGMLQuantizationType[name]
    values, width = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(0)
    shape = (rows * size // values, width)
    data = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    # A type's float16 numbers come first, at most two of them.
    data[:, :4] = torch.randn(len(data), 2, generator=generator).half().view(torch.uint8)
    weight = torch.from_numpy(gguf.dequantize(data.numpy(), kind)).view(rows, size)
    layer = blocks.BlockLinear(torch.nn.Linear(size, rows, bias=False), block_format)
    tensors = dict(layer.named_buffers())
    blocks.load_block_rows(tensors, "weight", slice(None), blocks_of(name, data, rows))
    return layer, weight


@pytest.mark.parametrize("name", TYPES)
def test_a_layer_has_the_numbers_that_gguf_reads(name):
    layer, weight = layer_of(name)
    assert torch.equal(layer.blocks().dequantize(), weight)
    assert torch.equal(layer.blocks(slice(1, 3)).dequantize(), weight[1:3])
    assert sum(each.nbytes for each in layer.buffers()) == weight.numel() * TYPES[name][1]
    floats = {"weight": torch.empty(6, 100)}  # a tensor that is not in blocks
    blocks.load_block_rows(floats, "weight", slice(None), layer.blocks(), slice(50, 150))
    assert torch.equal(floats["weight"], weight[:, 50:150])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_generates_what_its_numbers_do(tiny_llama, name, tied):
    """Oracle: linear layers of the dequantised weights, with their inputs rounded in blocks."""
    block_format = module_with("quantisation.blocks", "BlockFormat").BlockFormat(*TYPES[name][0])
    shape = {"n_embd": 64, "n_inner": 96, "head_dim": 16, "tie_word_embeddings": tied}
    model = tiny_llama(dtype=torch.float32, **shape)
    plain = copy.deepcopy(model)
    kind = gguf.GGMLQuantizationType[name]
    read = {}
    for key, weight in plain.named_parameters():
        if weight.dim() == 2:
            data = gguf.quantize(weight.detach().numpy(), kind)
            weight.data = torch.from_numpy(gguf.dequantize(data, kind))
            read[key] = blocks_of(name, torch.from_numpy(data), len(weight))
    formats = dict.fromkeys(read, block_format)
    tensors = blocks.replace_with_block_linear(model, formats).state_dict()
    for key, parts in read.items():
        blocks.load_block_rows(tensors, key, slice(None), parts)
    layers = [each for each in model.modules() if isinstance(each, blocks.BlockLinear)]
    assert len(layers) > 2 and {each.block_format for each in layers} == {block_format}
    assert (model.layer("head").weight is model.layer("embedding").weight) == tied

    def round_inputs(layer, args):
        values, scale = blocks.quantize(blocks.pad_to_blocks(args[0]))
        return (values * scale[..., None]).flatten(-2)

    for layer in plain.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(round_inputs)
    prompts = [[5, 6, 7], [1]]
    params = {"max_new_tokens": 12, "ignore_eos": True}
    assert run_rows(model, prompts, **params) == run_rows(plain, prompts, **params)


def test_nibbles_by_hand():
    values = torch.arange(64).remainder(16).to(torch.int8)[None]
    packed = blocks.pack_q4(values)
    assert packed.dtype == torch.uint8 and packed.shape == (1, 32)
    assert packed[0, :3].tolist() == [0x00, 0x11, 0x22]  # numbers 0 and 16, 1 and 17, ...
    assert torch.equal(blocks.unpack_q4(packed), values)
    values[0, 16:32] = 0
    assert blocks.pack_q4(values)[0, 3] == 0x03


@pytest.mark.parametrize("name", ["Q4_1", "Q4_0", "Q5_1", "Q4_K"])
def test_outputs_are_sums_of_blocks_and_minima(name):
    layer, _ = layer_of(name)
    weight = layer.blocks()
    assert (weight.minimum is None) == (name == "Q4_0")
    x = random_rows(5, 512)
    values, scale = blocks.quantize(x.view(5, 16, 32))
    expected = torch.zeros(5, 6)
    for block in range(16):
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
        for arguments, _ in TYPES.values():
            blocks.BlockLinear(layer, blocks.BlockFormat(*arguments))
    assert operations == {"empty"}

"""Weights in blocks: whole numbers of 8 bits, and a scale for each 32 of a row, as in GGUF's Q8_0.

Inputs of products are rounded in blocks as well, so an outlier takes the steps of 31 neighbours and
no more. The form and its rounding: quantize_row_q8_0_ref in github.com/ggml-org/ggml. There the
scales of inputs are float16, here float32.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from int8 import quantize

SIZE = 32  # numbers of a block
TINY = 2.0**-24  # the smallest float16 above 0


class Blocks(NamedTuple):
    """Rows of numbers in blocks: values, int8 (rows, n), times scale, (rows, n / 32)."""

    values: torch.Tensor
    scale: torch.Tensor


def padded(x: torch.Tensor) -> torch.Tensor:
    """Rows, (..., n), as (..., blocks, 32): zeros fill the last block."""
    return F.pad(x, (0, -x.shape[-1] % SIZE)).unflatten(-1, (-1, SIZE))


def to_blocks(weight: torch.Tensor) -> Blocks:
    """Round the rows of a weight, (rows, n). A block with a NaN or infinity has such a scale."""
    parts = padded(weight.float())
    scale = (parts.abs().amax(dim=-1) / 127).half().clamp(min=TINY)
    # A scale below 2**-14 may lose a third as a float16, which would give 189.
    values = (parts / scale[..., None]).round().clamp(-127, 127)
    return Blocks(values.to(torch.int8).flatten(-2), scale)


def to_floats(blocks: Blocks) -> torch.Tensor:
    """The float32 numbers of rows of blocks, zeros at their ends among them."""
    return (blocks.values.unflatten(-1, (-1, SIZE)) * blocks.scale.float()[..., None]).flatten(-2)


def block_linear(x: torch.Tensor, weight: Blocks, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ to_floats(weight).T + bias, with x rounded in blocks too.

    x: (..., in_features). The sum in a block is exact; blocks are added in their order, so that an
    output does not depend on other rows.
    """
    values, x_scale = quantize(padded(x))  # (..., blocks, 32), (..., blocks)
    w = weight.values.unflatten(-1, (-1, SIZE))  # (out_features, blocks, 32)
    scale = weight.scale.float()
    y = x.new_zeros(*x.shape[:-1], len(scale))
    for block in range(scale.shape[1]):
        sums = values[..., block, :].float() @ w[:, block].float().t()  # exact, far below 2**24
        y += sums * (x_scale[..., block, None] * scale[:, block])
    return y if bias is None else y + bias


class BlockLinear(nn.Module):
    """A linear layer with a weight in blocks, int8 (out_features, in_features), and its scale.

    Zeros fill up in_features to whole blocks. Both tensors are empty at first.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding):
        super().__init__()
        rows, self.in_features = layer.weight.shape
        count = -(-self.in_features // SIZE)
        device = layer.weight.device
        weight = torch.empty(rows, count * SIZE, dtype=torch.int8, device=device)
        scale = torch.empty(rows, count, dtype=torch.float16, device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = getattr(layer, "bias", None)

    def forward(self, x):
        return block_linear(x, Blocks(self.weight, self.scale), self.bias)


class BlockEmbedding(BlockLinear):
    """A token embedding with rows in blocks, and a linear layer's tensors: the head shares them."""

    def forward(self, tokens):
        rows = to_floats(Blocks(self.weight[tokens], self.scale[tokens]))
        return rows[..., : self.in_features]


def with_block_layers(model: nn.Module) -> nn.Module:
    """Put empty layers in blocks in the places of the linear layers and the token embedding."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, BlockLinear(layer))
    model.set_submodule(model.path("embedding"), BlockEmbedding(model.layer("embedding")))
    return model.tie_weights()


def store_blocks(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    weight: torch.Tensor,
    columns: slice = slice(None),
) -> None:
    """Write rows of numbers into a model's tensor, rounded if it is in blocks.

    columns: those that the tensor has of each row; rows in blocks are whole.
    """
    scale = name.removesuffix("weight") + "scale"
    if scale not in tensors:
        tensors[name][rows] = weight[..., columns]
        return
    # Few rows at a time: rounding takes room for them all.
    parts = (tensor.split(256) for tensor in (tensors[name][rows], tensors[scale][rows], weight))
    for values, scales, numbers in zip(*parts):
        values[:], scales[:] = to_blocks(numbers)

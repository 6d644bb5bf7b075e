"""Block quantisation as in GGUF files: 32 values of a row share a scale, and a minimum in some.

The inputs of linear layers are quantised in blocks as well, so an outlier costs the precision of
only 31 neighbours. The formats: ggml-common.h in github.com/ggml-org/ggml. There the scales of
inputs are float16, here float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from quantisation.int8 import quantize

BLOCK_SIZE = 32  # values per block
MIN_SCALE = 2.0**-24  # the smallest float16 above 0


class BlockFormat(NamedTuple):
    """The storage format of a block-quantised weight."""

    bits: int = 8  # per value, 8 or 4
    has_minimum: bool = False
    dtype: torch.dtype = torch.float16  # of scales and minima

    @property
    def zero_point(self) -> int:
        """Return the offset that makes values unsigned before they become nibbles."""
        return 8 if self.bits == 4 and not self.has_minimum else 0


Q8_0 = BlockFormat()
BLOCK_FORMATS = {  # by the GGUF type, for types that load without requantisation
    "Q8_0": Q8_0,
    "Q4_0": BlockFormat(bits=4),
    "Q4_1": BlockFormat(bits=4, has_minimum=True),
    "Q5_0": Q8_0,
    "Q5_1": BlockFormat(has_minimum=True),
    "Q4_K": BlockFormat(bits=4, has_minimum=True, dtype=torch.float32),
    "Q5_K": BlockFormat(has_minimum=True, dtype=torch.float32),
}


@dataclass(frozen=True)
class QuantizedBlocks:
    """Rows of block-quantised values that stand for values * scale + minimum.

    values: int8 (rows, n). scale, minimum: (rows, n / 32), one for each block. A minimum of None is
    0.
    """

    values: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    def map(self, function: Callable) -> "QuantizedBlocks":
        """Apply a function to every tensor and return the result."""
        tensors = self.values, self.scale, self.minimum
        return QuantizedBlocks(*(each if each is None else function(each) for each in tensors))

    def __getitem__(self, rows) -> "QuantizedBlocks":
        return self.map(lambda tensor: tensor[rows])

    def dequantize(self) -> torch.Tensor:
        """Return the values as float32 (rows, n)."""
        numbers = self.values.unflatten(-1, (-1, BLOCK_SIZE)) * self.scale.float()[..., None]
        if self.minimum is not None:
            numbers = numbers + self.minimum.float()[..., None]
        return numbers.flatten(-2)


def pad_to_blocks(x: torch.Tensor) -> torch.Tensor:
    """Split rows, (..., n), into (..., blocks, 32). Zeros pad the last block."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE))


def quantize_blocks(weight: torch.Tensor) -> QuantizedBlocks:
    """Quantise a weight, (rows, n), to Q8_0. A NaN or infinity gives a non-finite scale."""
    parts = pad_to_blocks(weight.float())
    scale = (parts.abs().amax(dim=-1) / 127).half().clamp(min=MIN_SCALE)
    # A subnormal float16 scale, below 2**-14, may be a third too small, which would give 189.
    values = (parts / scale[..., None]).round().clamp(-127, 127)
    return QuantizedBlocks(values.to(torch.int8).flatten(-2), scale)


def pack_q4(values: torch.Tensor) -> torch.Tensor:
    """Pack values from 0 to 15, (rows, n), two per byte, uint8 (rows, n / 2).

    Byte j of a block holds values j and j + 16.
    """
    low, high = values.unflatten(-1, (-1, 2, BLOCK_SIZE // 2)).to(torch.uint8).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_q4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the values that `pack_q4` packed, int8 (rows, n)."""
    parts = packed.unflatten(-1, (-1, BLOCK_SIZE // 2))
    return torch.stack([parts & 15, parts >> 4], dim=-2).flatten(-3).view(torch.int8)


def block_linear(
    x: torch.Tensor, weight: QuantizedBlocks, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x @ weight.dequantize().T + bias, with x quantised in blocks too.

    x: (..., in_features). The sum within a block is exact. Blocks are added in order, so that an
    output does not depend on other rows of x. A block's minimum contributes the minimum times the
    sum of the block's inputs.
    """
    values, x_scale = quantize(pad_to_blocks(x))  # (..., blocks, 32), (..., blocks)
    x_sum = x_scale * values.sum(dim=-1)
    w = weight.values.unflatten(-1, (-1, BLOCK_SIZE))  # (out_features, blocks, 32)
    scale = weight.scale.float()
    y = x.new_zeros(*x.shape[:-1], len(scale))
    for block in range(scale.shape[1]):
        sums = values[..., block, :].float() @ w[:, block].float().t()  # exact, far below 2**24
        y += sums * (x_scale[..., block, None] * scale[:, block])
        if weight.minimum is not None:
            y += x_sum[..., block, None] * weight.minimum[:, block].float()
    return y if bias is None else y + bias


class BlockLinear(nn.Module):
    """A linear layer with a block-quantised weight, int8 (out_features, in_features) or nibbles.

    Rows are zero-padded to whole blocks. All tensors are uninitialised.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, block_format: BlockFormat = Q8_0):
        super().__init__()
        rows, self.in_features = layer.weight.shape
        self.block_format = block_format
        count = -(-self.in_features // BLOCK_SIZE)

        def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
            # torch.empty alone: the first real operation on the meta device imports 800 modules.
            return torch.empty(rows, width, dtype=dtype, device=layer.weight.device)

        weight_dtype = torch.int8 if block_format.bits == 8 else torch.uint8  # unsigned nibbles
        self.register_buffer(
            "weight", empty(count * BLOCK_SIZE * block_format.bits // 8, weight_dtype)
        )
        self.register_buffer("scale", empty(count, block_format.dtype))
        self.register_buffer(
            "minimum", empty(count, block_format.dtype) if block_format.has_minimum else None
        )
        self.bias = getattr(layer, "bias", None)

    def blocks(self, rows=slice(None)) -> QuantizedBlocks:
        """Return rows of the weight, all of them by default."""
        values = self.weight[rows]
        if self.block_format.bits == 4:
            values = unpack_q4(values) - self.block_format.zero_point
        minimum = None if self.minimum is None else self.minimum[rows]
        return QuantizedBlocks(values, self.scale[rows], minimum)

    def forward(self, x):
        return block_linear(x, self.blocks(), self.bias)


class BlockEmbedding(BlockLinear):
    """A token embedding with block-quantised rows.

    It has the tensors of a linear layer, so that the head can share them.
    """

    def forward(self, tokens):
        return self.blocks(tokens).dequantize()[..., : self.in_features]


def replace_with_block_linear(model: nn.Module, formats: dict[str, BlockFormat]) -> nn.Module:
    """Replace the linear layers and the token embedding with uninitialised block layers.

    formats: by the name of the weight, Q8_0 for weights not in it.
    """
    embedding = model.path("embedding")
    if model.config.tie_word_embeddings:
        formats = formats | {
            f"{model.path('head')}.weight": formats.get(f"{embedding}.weight", Q8_0)
        }
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, BlockLinear(layer, formats.get(f"{path}.weight", Q8_0)))
    block_format = formats.get(f"{embedding}.weight", Q8_0)
    model.set_submodule(embedding, BlockEmbedding(model.layer("embedding"), block_format))
    return model.tie_weights()


def load_block_rows(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    weight: torch.Tensor | QuantizedBlocks,
    columns: slice = slice(None),
) -> None:
    """Write rows of a weight into a model's tensor, quantised or dequantised as the tensor needs.

    columns: the columns of each row that a float tensor holds. Block-quantised tensors hold
    complete rows.
    """
    layer = name.removesuffix("weight")
    if f"{layer}scale" not in tensors:
        numbers = weight.dequantize() if isinstance(weight, QuantizedBlocks) else weight
        tensors[name][rows] = numbers[..., columns]
        return
    target = tensors[name][rows]
    # In chunks of rows, because quantisation needs temporary memory for all rows it is given.
    for first in range(0, len(target), 256):
        part = slice(first, first + 256)
        piece = weight[part]
        piece = piece if isinstance(piece, QuantizedBlocks) else quantize_blocks(piece)
        values = piece.values
        if target.dtype == torch.uint8:
            block_format = BlockFormat(bits=4, has_minimum=piece.minimum is not None)
            values = pack_q4(values + block_format.zero_point)
        target[part] = values
        tensors[f"{layer}scale"][rows][part] = piece.scale
        if piece.minimum is not None:
            tensors[f"{layer}minimum"][rows][part] = piece.minimum

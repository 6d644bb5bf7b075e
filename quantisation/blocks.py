"""Block quantisation as in GGUF's Q8_0: int8 values, of which 32 of a row share a scale.

The inputs of linear layers are quantised in blocks as well, so an outlier costs the precision of
only 31 neighbours. The format and its rounding: quantize_row_q8_0_ref in
github.com/ggml-org/ggml. There the scales of inputs are float16, here float32.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from quantisation.int8 import quantize

BLOCK_SIZE = 32  # values per block
MIN_SCALE = 2.0**-24  # the smallest float16 above 0


@dataclass(frozen=True)
class QuantizedBlocks:
    """Rows of block-quantised values that stand for values * scale.

    values: int8 (rows, n). scale: (rows, n / 32), one for each block.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the values as float32 (rows, n)."""
        numbers = self.values.unflatten(-1, (-1, BLOCK_SIZE)) * self.scale.float()[..., None]
        return numbers.flatten(-2)


def pad_to_blocks(x: torch.Tensor) -> torch.Tensor:
    """Split rows, (..., n), into (..., blocks, 32). Zeros pad the last block."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE))


def quantize_blocks(weight: torch.Tensor) -> QuantizedBlocks:
    """Quantise a weight, (rows, n), in blocks. A NaN or infinity gives a non-finite scale."""
    parts = pad_to_blocks(weight.float())
    scale = (parts.abs().amax(dim=-1) / 127).half().clamp(min=MIN_SCALE)
    # A subnormal float16 scale, below 2**-14, may be a third too small, which would give 189.
    values = (parts / scale[..., None]).round().clamp(-127, 127)
    return QuantizedBlocks(values.to(torch.int8).flatten(-2), scale)


def block_linear(
    x: torch.Tensor, weight: QuantizedBlocks, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x @ weight.dequantize().T + bias, with x quantised in blocks too.

    x: (..., in_features). The sum within a block is exact. Blocks are added in order, so that an
    output does not depend on other rows of x.
    """
    values, x_scale = quantize(pad_to_blocks(x))  # (..., blocks, 32), (..., blocks)
    w = weight.values.unflatten(-1, (-1, BLOCK_SIZE))  # (out_features, blocks, 32)
    scale = weight.scale.float()
    y = x.new_zeros(*x.shape[:-1], len(scale))
    for block in range(scale.shape[1]):
        sums = values[..., block, :].float() @ w[:, block].float().t()  # exact, far below 2**24
        y += sums * (x_scale[..., block, None] * scale[:, block])
    return y if bias is None else y + bias


class BlockLinear(nn.Module):
    """A linear layer with a block-quantised weight, int8 (out_features, in_features).

    Rows are zero-padded to whole blocks. Both tensors are uninitialised.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding):
        super().__init__()
        rows, self.in_features = layer.weight.shape
        count = -(-self.in_features // BLOCK_SIZE)

        def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
            # torch.empty alone: the first real operation on the meta device imports 800 modules.
            return torch.empty(rows, width, dtype=dtype, device=layer.weight.device)

        self.register_buffer("weight", empty(count * BLOCK_SIZE, torch.int8))
        self.register_buffer("scale", empty(count, torch.float16))
        self.bias = getattr(layer, "bias", None)

    def forward(self, x):
        return block_linear(x, QuantizedBlocks(self.weight, self.scale), self.bias)


class BlockEmbedding(BlockLinear):
    """A token embedding with block-quantised rows.

    It has the tensors of a linear layer, so that the head can share them.
    """

    def forward(self, tokens):
        rows = QuantizedBlocks(self.weight[tokens], self.scale[tokens]).dequantize()
        return rows[..., : self.in_features]


def replace_with_block_linear(model: nn.Module) -> nn.Module:
    """Replace the linear layers and the token embedding with uninitialised block layers."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, BlockLinear(layer))
    model.set_submodule(model.path("embedding"), BlockEmbedding(model.layer("embedding")))
    return model.tie_weights()


def load_block_rows(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    weight: torch.Tensor,
    columns: slice = slice(None),
) -> None:
    """Write rows of a weight into a model's tensor, quantised if the tensor is.

    columns: the columns of each row that a float tensor holds. Block-quantised tensors hold
    complete rows.
    """
    layer = name.removesuffix("weight")
    if f"{layer}scale" not in tensors:
        tensors[name][rows] = weight[..., columns]
        return
    target = tensors[name][rows]
    # In chunks of rows, because quantisation needs temporary memory for all rows it is given.
    for first in range(0, len(target), 256):
        part = slice(first, first + 256)
        piece = quantize_blocks(weight[part])
        target[part] = piece.values
        tensors[f"{layer}scale"][rows][part] = piece.scale

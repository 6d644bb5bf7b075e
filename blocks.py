"""Weights in blocks, as GGUF files have them: 32 numbers of a row share a scale, or also a minimum.

Inputs of products are rounded in blocks as well, so an outlier takes the steps of 31 neighbours and
no more. The forms: ggml-common.h in github.com/ggml-org/ggml. There the scales of inputs are
float16, here float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from int8 import quantize

SIZE = 32  # numbers of a block
TINY = 2.0**-24  # the smallest float16 above 0


class Form(NamedTuple):
    """How a weight is kept in blocks: bits of a number, 8 or 4, and what blocks have beside it."""

    bits: int = 8
    has_minimum: bool = False
    dtype: torch.dtype = torch.float16  # of scales and minima

    @property
    def zero(self) -> int:
        """What is added to numbers before they become nibbles, which have no sign."""
        return 8 if self.bits == 4 and not self.has_minimum else 0


Q8_0 = Form()
FORMS = {  # of the types in files that are kept as they are
    "Q8_0": Q8_0,
    "Q4_0": Form(bits=4),
    "Q4_1": Form(bits=4, has_minimum=True),
    "Q5_0": Q8_0,
    "Q5_1": Form(has_minimum=True),
    "Q4_K": Form(bits=4, has_minimum=True, dtype=torch.float32),
    "Q5_K": Form(has_minimum=True, dtype=torch.float32),
}


@dataclass(frozen=True)
class Blocks:
    """Rows of numbers in blocks: values * scale + minimum, with these two for each 32 values.

    values: int8 (rows, n). scale, minimum: (rows, n / 32); no minimum is 0.
    """

    values: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    def map(self, function: Callable) -> "Blocks":
        """With all tensors changed alike."""
        tensors = self.values, self.scale, self.minimum
        return Blocks(*(each if each is None else function(each) for each in tensors))

    def __getitem__(self, rows) -> "Blocks":
        return self.map(lambda tensor: tensor[rows])

    def floats(self) -> torch.Tensor:
        """The numbers, float32 (rows, n)."""
        numbers = self.values.unflatten(-1, (-1, SIZE)) * self.scale.float()[..., None]
        if self.minimum is not None:
            numbers = numbers + self.minimum.float()[..., None]
        return numbers.flatten(-2)


def padded(x: torch.Tensor) -> torch.Tensor:
    """Rows, (..., n), as (..., blocks, 32): zeros fill the last block."""
    return F.pad(x, (0, -x.shape[-1] % SIZE)).unflatten(-1, (-1, SIZE))


def to_blocks(weight: torch.Tensor) -> Blocks:
    """Round the rows of a weight, (rows, n), to Q8_0. A NaN or infinity makes such a scale."""
    parts = padded(weight.float())
    scale = (parts.abs().amax(dim=-1) / 127).half().clamp(min=TINY)
    # A scale below 2**-14 may lose a third as a float16, which would give 189.
    values = (parts / scale[..., None]).round().clamp(-127, 127)
    return Blocks(values.to(torch.int8).flatten(-2), scale)


def to_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Two numbers from 0 to 15 a byte, uint8 (rows, n / 2): byte j of a block has j and j + 16."""
    low, high = values.unflatten(-1, (-1, 2, SIZE // 2)).to(torch.uint8).unbind(-2)
    return (low | high << 4).flatten(-2)


def from_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """The numbers that `to_nibbles` packed, int8 (rows, n)."""
    parts = nibbles.unflatten(-1, (-1, SIZE // 2))
    return torch.stack([parts & 15, parts >> 4], dim=-2).flatten(-3).view(torch.int8)


def block_linear(x: torch.Tensor, weight: Blocks, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.floats().T + bias, with x rounded in blocks too.

    x: (..., in_features). The sum in a block is exact; blocks are added in their order, so that an
    output does not depend on other rows. All inputs of a block times its minimum are their sum
    times it.
    """
    values, x_scale = quantize(padded(x))  # (..., blocks, 32), (..., blocks)
    x_sum = x_scale * values.sum(dim=-1)
    w = weight.values.unflatten(-1, (-1, SIZE))  # (out_features, blocks, 32)
    scale = weight.scale.float()
    y = x.new_zeros(*x.shape[:-1], len(scale))
    for block in range(scale.shape[1]):
        sums = values[..., block, :].float() @ w[:, block].float().t()  # exact, far below 2**24
        y += sums * (x_scale[..., block, None] * scale[:, block])
        if weight.minimum is not None:
            y += x_sum[..., block, None] * weight.minimum[:, block].float()
    return y if bias is None else y + bias


class BlockLinear(nn.Module):
    """A linear layer with a weight in blocks: int8 (out_features, in_features), or nibbles.

    Zeros fill up in_features to whole blocks. All tensors are empty at first.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, form: Form = Q8_0):
        super().__init__()
        rows, self.in_features = layer.weight.shape
        self.form = form
        count = -(-self.in_features // SIZE)

        def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
            # Nothing else: torch's first operation on no device ("meta") imports 800 modules.
            return torch.empty(rows, width, dtype=dtype, device=layer.weight.device)

        kind = torch.int8 if form.bits == 8 else torch.uint8  # nibbles have no sign
        self.register_buffer("weight", empty(count * SIZE * form.bits // 8, kind))
        self.register_buffer("scale", empty(count, form.dtype))
        self.register_buffer("minimum", empty(count, form.dtype) if form.has_minimum else None)
        self.bias = getattr(layer, "bias", None)

    def blocks(self, rows=slice(None)) -> Blocks:
        """Rows of the weight, all of them by default."""
        values = self.weight[rows]
        if self.form.bits == 4:
            values = from_nibbles(values) - self.form.zero
        minimum = None if self.minimum is None else self.minimum[rows]
        return Blocks(values, self.scale[rows], minimum)

    def forward(self, x):
        return block_linear(x, self.blocks(), self.bias)


class BlockEmbedding(BlockLinear):
    """A token embedding with rows in blocks, and a linear layer's tensors: the head shares them."""

    def forward(self, tokens):
        return self.blocks(tokens).floats()[..., : self.in_features]


def with_block_layers(model: nn.Module, forms: dict[str, Form]) -> nn.Module:
    """Put empty layers in blocks in the places of the linear layers and the token embedding.

    forms: by the name of a weight; of all others Q8_0.
    """
    embedding = model.path("embedding")
    if model.config.tie_word_embeddings:
        forms = forms | {f"{model.path('head')}.weight": forms.get(f"{embedding}.weight", Q8_0)}
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, BlockLinear(layer, forms.get(f"{path}.weight", Q8_0)))
    form = forms.get(f"{embedding}.weight", Q8_0)
    model.set_submodule(embedding, BlockEmbedding(model.layer("embedding"), form))
    return model.tie_weights()


def store_blocks(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    weight: torch.Tensor | Blocks,
    columns: slice = slice(None),
) -> None:
    """Write rows of numbers into a model's tensor, rounded if it is in blocks and they are not.

    columns: those that the tensor has of each row; rows in blocks are whole.
    """
    layer = name.removesuffix("weight")
    if f"{layer}scale" not in tensors:
        numbers = weight.floats() if isinstance(weight, Blocks) else weight
        tensors[name][rows] = numbers[..., columns]
        return
    own = tensors[name][rows]
    # Few rows at a time: rounding takes room for them all.
    for first in range(0, len(own), 256):
        part = slice(first, first + 256)
        piece = weight[part]
        piece = piece if isinstance(piece, Blocks) else to_blocks(piece)
        values = piece.values
        if own.dtype == torch.uint8:
            form = Form(bits=4, has_minimum=piece.minimum is not None)
            values = to_nibbles(values + form.zero)
        own[part] = values
        tensors[f"{layer}scale"][rows][part] = piece.scale
        if piece.minimum is not None:
            tensors[f"{layer}minimum"][rows][part] = piece.minimum

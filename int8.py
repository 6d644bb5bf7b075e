"""Weights as int8, a quarter of float32's bytes: symmetric, a scale for each row, exact sums.

After Dettmers et al. 2022 (2208.07339), vector-wise quantisation. What it keeps in half precision,
outliers, is spread here over all numbers of a row before it is rounded: inputs and weights are
rotated by the same orthogonal matrix, as in QuaRot (Ashkboos et al. 2024, 2404.00456).

Activations are rounded to int8 as well. A last-bit difference in one of them can become a whole
step, so a text may change where any bit of its pass depends on its neighbours. torch's attention
has such bits: there a text may differ from its own run, in batches of `generate`, in the engine and
on several processes. Where C computes the whole pass, no bit depends on neighbours.
"""

import torch
import torch.nn as nn

from errors import UserError

EXACT_TERMS = 1024  # products, 127 * 127 at most, whose sum float32 holds: it is below 2**24


def rotate_channels(x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, (..., n), by a symmetric matrix R: R R is 2**k times the identity.

    n is 2**k times an odd number. For each prime factor p of n, the smallest first, groups of p
    numbers are mixed. Two, a and b, become a + b and a - b: k times, that is a Hadamard matrix.
    More are reflected: twice their mean is subtracted from each. Sums have one order, in C too.
    """
    n = x.shape[-1]
    rows = x.shape[:-1].numel()
    y = x.reshape(rows, n).t()  # because torch adds rows faster than columns
    for p in prime_factors(n):
        parts = [y[first::p] for first in range(p)]
        if p == 2:
            a, b = parts
            parts = a + b, a - b
        else:
            twice_mean = sum(parts) * (2 / p)
            parts = [part - twice_mean for part in parts]
        # Results of a kind come side by side. After all factors each number is at its place again.
        y = torch.cat(parts)
    # Contiguous: torch sums the numbers of a row in another order where rows are not.
    return y.t().reshape(x.shape).contiguous()


def prime_factors(n: int) -> list[int]:
    """The primes whose product is n, the smallest first."""
    factors = []
    p = 2
    while n > 1:
        if n % p:
            p += 1
        else:
            factors.append(p)
            n //= p
    return factors


def unrotate_channels(weight: torch.Tensor) -> torch.Tensor:
    """Rotate rows back: rotate_channels(x) @ unrotate_channels(weight).T is x @ weight.T."""
    n = weight.shape[-1]
    return rotate_channels(weight) / (n & -n)  # by 2**k, which is exact


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to whole numbers of steps: x is close to values * scale[..., None].

    x: (..., n), floating-point. Returns values, int8 (..., n), from -127 to 127, and scale, (...),
    in the dtype of x. A row with a NaN or infinity has a scale that is not finite either.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest / 127).clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros is fine
    return (x / scale).round().to(torch.int8), scale.squeeze(-1)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (weight * scale[:, None]).T + bias, with x rounded to int8 too, and exact int32 sums.

    x: (..., in_features), each row rounded by itself. weight: int8 (out_features, in_features).
    scale, bias: (out_features,).
    """
    values, x_scale = quantize(x)
    return dequantize_sums(int8_matmul(values, weight), x_scale, scale, bias)


def dequantize_sums(
    sums: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What whole sums, (..., out_features), stand for, by the scales of both, plus the bias."""
    y = sums.to(x_scale.dtype) * (x_scale[..., None] * scale)
    return y if bias is None else y + bias


def int8_matmul(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """values @ weight.T of whole numbers, as exact int32 sums."""
    # torch has no int8 product that is right on every CPU; float32 is exact for short sums of small
    # whole numbers.
    parts = zip(values.split(EXACT_TERMS, dim=-1), weight.split(EXACT_TERMS, dim=-1))
    return sum((a.float() @ b.float().t()).to(torch.int32) for a, b in parts)


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight (out_features, in_features) and its scale (out_features,).

    The weight's rows are rotated, and so is each input. Both tensors are empty at first. Raises
    UserError for rows whose sums may not fit int32.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding):
        super().__init__()
        shape = layer.weight.shape
        device = layer.weight.device
        if shape[1] > 2**17:
            reason = "above 2**17 a sum of products may not fit int32"
            raise UserError(f"int8 rows of {shape[1]} weights: {reason}")
        weight = torch.empty(shape, dtype=torch.int8, device=device)
        scale = torch.empty(shape[0], dtype=layer.weight.dtype, device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = getattr(layer, "bias", None)

    def forward(self, x):
        return int8_linear(rotate_channels(x), self.weight, self.scale, self.bias)


class Int8Embedding(Int8Linear):
    """A token embedding with int8 rows, which are rotated back when they are read.

    It has a linear layer's tensors: the head shares them.
    """

    def forward(self, tokens):
        return rotate_channels(self.weight[tokens] * self.scale[tokens][..., None])


def replace_with_int8_linear(model: nn.Module) -> nn.Module:
    """Put empty int8 layers in the places of the linear layers and the token embedding."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, Int8Linear(layer))
    model.set_submodule(model.path("embedding"), Int8Embedding(model.layer("embedding")))
    return model.tie_weights()


def to_int8(model: nn.Module) -> nn.Module:
    """Round a model's weights, in place: int8 layers take the place of its own. Returns it."""
    weights = dict(model.named_parameters())
    tensors = replace_with_int8_linear(model).state_dict()
    for name, weight in weights.items():
        load_weight_rows(tensors, name, slice(None), weight.detach())
    if model.adapters:
        model.adapters.attach(model)
    return model


def load_weight_rows(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    block: torch.Tensor,
    columns: slice = slice(None),
) -> None:
    """Write rows of numbers into a model's tensor: if it is int8, rotated, rounded, with scales.

    columns: those that the tensor has of each row; int8 rows are whole.
    """
    if tensors[name].dtype == torch.int8:
        values = tensors[name][rows]
        scale = tensors[name.removesuffix("weight") + "scale"][rows]
        # Few rows at a time: rounding takes room for them all.
        pieces = (tensor.split(256) for tensor in (values, scale, block))
        for piece, piece_scale, floats in zip(*pieces):
            piece[:], piece_scale[:] = quantize(unrotate_channels(floats.to(scale)))
    else:
        tensors[name][rows] = block[..., columns]

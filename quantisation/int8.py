"""Symmetric int8 quantisation of weights, one scale per row, with exact integer sums.

Vector-wise quantisation as in Dettmers et al. 2022 (2208.07339), at a quarter of float32's bytes.
LLM.int8() keeps outliers in half precision. Here a rotation spreads them over all channels of a row
before quantisation: inputs and weights are rotated by the same orthogonal matrix, as in QuaRot
(Ashkboos et al. 2024, 2404.00456).

Activations are quantised to int8 as well, so a last-bit difference in one can become a whole
quantisation step. torch's attention is not batch-invariant, so in torch the output may depend on
the batch in `generate` and in the engine, or on the number of processes. If C computes the whole
pass, the output is batch-invariant.
"""

import torch
import torch.nn as nn

from errors import UserError

EXACT_TERMS = 1024  # products of at most 127 * 127 that sum to less than 2**24, exact in float32


def rotate_channels(x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, (..., n), by a symmetric matrix R: R R is 2**k times the identity.

    n is 2**k times an odd number. Each prime factor p of n, in increasing order, gives a stage that
    mixes groups of p channels. For p = 2, a and b become a + b and a - b. These k stages are a
    Hadamard transform. For odd p each group is reflected: twice its mean is subtracted from each
    channel. The sums have a fixed order, the same in C.
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
        # Each stage groups its results by part. After the last stage the channels are in order.
        y = torch.cat(parts)
    # Contiguous, because torch sums a strided row in a different order.
    return y.t().reshape(x.shape).contiguous()


def prime_factors(n: int) -> list[int]:
    """Return the prime factors of n in increasing order, with repetition."""
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
    """Apply the inverse rotation: rotate_channels(x) @ unrotate_channels(weight).T = x @ weight.T.

    weight: (..., n).
    """
    n = weight.shape[-1]
    return rotate_channels(weight) / (n & -n)  # by 2**k, which is exact


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to int8, so that x is close to values * scale[..., None].

    x: (..., n), floating-point. Returns values, int8 (..., n), from -127 to 127, and scale, (...),
    in the dtype of x. A row with a NaN or infinity gets a non-finite scale.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest / 127).clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros would give 0 / 0
    return (x / scale).round().to(torch.int8), scale.squeeze(-1)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x @ (weight * scale[:, None]).T + bias, with int8 x and exact int32 sums.

    x: (..., in_features), quantised per row. weight: int8 (out_features, in_features). scale, bias:
    (out_features,).
    """
    values, x_scale = quantize(x)
    return dequantize_sums(int8_matmul(values, weight), x_scale, scale, bias)


def dequantize_sums(
    sums: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply int32 sums, (..., out_features), by both scales and add the bias."""
    y = sums.to(x_scale.dtype) * (x_scale[..., None] * scale)
    return y if bias is None else y + bias


def int8_matmul(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute values @ weight.T of int8 tensors as exact int32 sums."""
    # torch has no int8 matmul that is exact on every CPU. float32 is exact for short sums of small
    # integers.
    parts = zip(values.split(EXACT_TERMS, dim=-1), weight.split(EXACT_TERMS, dim=-1))
    return sum((a.float() @ b.float().t()).to(torch.int32) for a, b in parts)


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight (out_features, in_features) and its scale (out_features,).

    The rows of the weight are rotated, and so is each input. Both tensors are uninitialised. Raises
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
    """A token embedding with int8 rows, whose rotation is undone at each lookup.

    It has the tensors of a linear layer, so that the head can share them.
    """

    def forward(self, tokens):
        return rotate_channels(self.weight[tokens] * self.scale[tokens][..., None])


def replace_with_int8_linear(model: nn.Module) -> nn.Module:
    """Replace the linear layers and the token embedding with uninitialised int8 layers."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, Int8Linear(layer))
    model.set_submodule(model.path("embedding"), Int8Embedding(model.layer("embedding")))
    return model.tie_weights()


def load_weight_rows(
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: slice,
    block: torch.Tensor,
    columns: slice = slice(None),
) -> None:
    """Write rows of a weight into a model's tensor. If it is int8, rotate and quantise them.

    columns: the columns of each row that the tensor holds. An int8 tensor holds complete rows,
    because the rotation and the scale need all columns.
    """
    if tensors[name].dtype == torch.int8:
        values = tensors[name][rows]
        scale = tensors[name.removesuffix("weight") + "scale"][rows]
        # In chunks of rows, because quantisation needs temporary memory for all rows it is given.
        pieces = (tensor.split(256) for tensor in (values, scale, block))
        for piece, piece_scale, floats in zip(*pieces):
            piece[:], piece_scale[:] = quantize(unrotate_channels(floats.to(scale)))
    else:
        tensors[name][rows] = block[..., columns]

"""Symmetric int8 quantisation, one scale per row, with exact integer sums.

Vector-wise quantisation as in Dettmers et al. 2022 (2208.07339). LLM.int8() also keeps outliers in
half precision, which is left out here.
"""

import torch

EXACT_TERMS = 1024  # products of at most 127 * 127 that sum to less than 2**24, exact in float32


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

"""Products of whole numbers: symmetric int8, a scale for each row, exact sums.

After Dettmers et al. 2022 (2208.07339), vector-wise quantisation, without its outliers in half
precision.
"""

import torch

EXACT = 1024  # products, 127 * 127 at most, whose sum float32 holds: it is below 2**24


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
    return to_floats(int8_product(values, weight), x_scale, scale, bias)


def to_floats(
    sums: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What whole sums, (..., out_features), stand for, by the scales of both, plus the bias."""
    y = sums.to(x_scale.dtype) * (x_scale[..., None] * scale)
    return y if bias is None else y + bias


def int8_product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """values @ weight.T of whole numbers, as exact int32 sums."""
    # torch has no int8 product that is right on every CPU; float32 is exact for short sums of small
    # whole numbers.
    parts = zip(values.split(EXACT, dim=-1), weight.split(EXACT, dim=-1))
    return sum((a.float() @ b.float().t()).to(torch.int32) for a, b in parts)

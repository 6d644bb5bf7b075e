"""Products with int8 and float32 weights in C."""

import ctypes

import torch

from native import build


class LinearStruct(ctypes.Structure):
    """The struct Linear of gpt.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "width")),
    ]


def linear_struct(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: int,
    size: int,
) -> LinearStruct:
    """A layer as C reads it: int8 (out, size) with a scale, float32 without. Raises ValueError."""
    kind = torch.float32 if scale is None else torch.int8
    return LinearStruct(
        address(weight, kind, out, size),
        address(scale, torch.float32, out),
        address(bias, torch.float32, out),
        out_features=out,
        in_features=size,
        width=out,
    )


def address(tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Where C finds the numbers of a tensor, NULL for None.

    Raises ValueError if they are not as C reads them.
    """
    if tensor is None:
        return None
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_neg()  # torch has yet to negate what is there
    ):
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        found += f", strides {tensor.stride()}" + ", negative" * tensor.is_neg()
        wanted = f"contiguous {dtype} {shape} on the CPU"
        raise ValueError(f"native code reads {wanted}; this is {found}")
    return tensor.data_ptr()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`, for float32; the sums are in an order of its own.

    x: (..., in_features), contiguous or not. weight: (out_features, in_features).
    Raises ValueError for tensors of other shapes and dtypes, BuildError without compiled code.
    """
    return product(x, weight, None, bias)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The numbers of int8.py's `int8_linear`, bit for bit; x is float32. Raises as `linear`."""
    return product(x, weight, scale, bias)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What the two above return."""
    out, size = weight.shape
    layer = linear_struct(weight, scale, bias, out, size)
    rows = x.numel() // max(1, x.shape[-1])
    x2d = x.reshape(rows, x.shape[-1]).contiguous()
    y = torch.empty(rows, out)
    values = torch.empty(rows, size, dtype=torch.int16)  # x, rounded
    x_scale = torch.empty(rows)
    build.load().linear(
        ctypes.byref(layer),
        ctypes.c_int64(rows),
        ctypes.c_void_p(address(x2d, torch.float32, rows, size)),
        *(ctypes.c_void_p(each.data_ptr()) for each in (values, x_scale, y)),
        ctypes.c_int(torch.get_num_threads()),
    )
    return y.view(*x.shape[:-1], out)

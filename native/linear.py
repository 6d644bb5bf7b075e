"""The products of int8.py in C."""

import ctypes

import torch

from native import build


class Linear(ctypes.Structure):
    """The struct of that name in gpt.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "scale", "bias")] + [
        (name, ctypes.c_int64) for name in ("out_features", "in_features", "width")
    ]


def address(tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Where C finds the numbers of a tensor, NULL for None. Raises ValueError if they are not as C reads them."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu" or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
        raise ValueError(f"native code reads contiguous {dtype} {shape} on the CPU; this is {found}")
    return tensor.data_ptr()


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The numbers of int8.py's `int8_linear`, bit for bit. x: float32 (..., in_features), contiguous or not.

    Raises ValueError for tensors of other shapes and dtypes, BuildError without compiled code.
    """
    (out, size), rows = weight.shape, x.numel() // max(1, x.shape[-1])
    x2d = x.reshape(rows, x.shape[-1]).contiguous()
    y, values, x_scale = torch.empty(rows, out), torch.empty(rows, size, dtype=torch.int16), torch.empty(rows)
    floats = torch.float32
    pointers = address(weight, torch.int8, out, size), address(scale, floats, out), address(bias, floats, out)
    layer = Linear(*pointers, out, size, out)
    buffers = address(x2d, floats, rows, size), values.data_ptr(), x_scale.data_ptr(), y.data_ptr()
    build.load().int8_linear(
        ctypes.byref(layer),
        ctypes.c_int64(rows),
        *map(ctypes.c_void_p, buffers),
        ctypes.c_int(torch.get_num_threads()),
    )
    return y.view(*x.shape[:-1], out)


# For torch.compile and torch.export. Layers call the function itself, because an operator's first call takes a second.
operator = torch.library.custom_op("native::int8_linear", int8_linear, mutates_args=(), device_types="cpu")


@operator.register_fake
def _(x, weight, scale, bias=None):
    return x.new_empty(*x.shape[:-1], len(weight))

"""Norm and GELU in C, each alone."""

import ctypes

import pytest
import torch
from natives import call, random_numbers

pytestmark = pytest.mark.usefixtures("compiled")


def layer_norm(library, x, weight, bias) -> torch.Tensor:
    y = torch.empty_like(x)
    norm = (ctypes.c_void_p * 2)(weight.data_ptr(), bias.data_ptr())
    library.layer_norm.restype = None
    library.layer_norm(
        norm,
        ctypes.c_float(1e-5),
        *map(ctypes.c_int64, x.shape),
        *(ctypes.c_void_p(each.data_ptr()) for each in (x, y)),
    )
    return y


@pytest.mark.parametrize("size", [1, 3, 16, 51, 768])
def test_layer_norm(library, size):
    """In the same bits on every processor."""
    from native import build

    assert hasattr(library, "layer_norm")
    x = random_numbers(3, size) * torch.tensor([[1.0], [100.0], [1e-3]]) + 5
    weight = random_numbers(size, seed=1)
    bias = random_numbers(size, seed=2)
    y = layer_norm(library, x, weight, bias)
    double = (weight.double(), bias.double(), 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (size,), *double).float()
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(y[:1], expected[:1], rtol=2e-5, atol=2e-5)
    assert torch.equal(y, layer_norm(build.load(), x, weight, bias))


def test_gelu(library):
    """Where the exponential leaves the range of float32, too."""
    from native import build

    assert hasattr(library, "gelu")
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, torch.nan, 1e38])])
    y, same = torch.empty(2, len(x))
    call(library.gelu, len(x), x, y)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=2e-7, equal_nan=True)
    call(build.load().gelu, len(x), x, same)
    assert torch.equal(y.view(torch.int32), same.view(torch.int32))

"""The parts of a native pass, each alone."""

import ctypes

import pytest
import torch

from native.structs import NormStruct

pytestmark = pytest.mark.usefixtures("compiled")


def call(function, *arguments) -> None:
    """Call a function of C with the addresses of tensors, int for int64_t, and float."""
    kinds = {int: ctypes.c_int64, float: ctypes.c_float}
    function.restype = None
    function(
        *(
            ctypes.c_void_p(each.data_ptr())
            if isinstance(each, torch.Tensor)
            else kinds[type(each)](each)
            for each in arguments
        )
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 3, 16, 51, 768])
def test_layer_norm(library, size):
    x = random(3, size) * torch.tensor([[1.0], [100.0], [1e-3]]) + 5
    y = torch.empty_like(x)
    weight = random(size, seed=1)
    bias = random(size, seed=2)
    norm = NormStruct(weight.data_ptr(), bias.data_ptr())
    library.layer_norm.restype = None
    library.layer_norm(
        ctypes.byref(norm),
        ctypes.c_float(1e-5),
        *map(ctypes.c_int64, x.shape),
        *(ctypes.c_void_p(each.data_ptr()) for each in (x, y)),
    )
    double = (weight.double(), bias.double(), 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (size,), *double).float()
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(y[:1], expected[:1], rtol=2e-5, atol=2e-5)


def test_gelu(library):
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, torch.nan, 1e38])])
    y = torch.empty_like(x)
    call(library.gelu, len(x), x, y)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=2e-7, equal_nan=True)

"""The parts of a native pass, each alone."""

import ctypes

import pytest
import torch
from conftest import TARGETS

from native import build
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


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("size", [1, 4, 20, 64])
def test_the_attention_of_one_query(library, length, size):
    q = 3 * random(1, size)
    k = random(length, size, seed=1)
    v = random(length, size, seed=2)
    scores = torch.empty(length)
    page = torch.zeros(1, dtype=torch.int64)
    y = torch.empty(size)
    call(library.attend, page, length, 0, length, size, q, k, v, scores, y)
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(q.double(), k.double(), v.double())[0].float()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_scores_far_from_each_other(library):
    """The exponentials of the softmax leave the range of float32 there."""
    k = torch.tensor([[-300.0], [0.0], [290.0], [300.0]])
    v = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    y = torch.empty(1)
    page = torch.zeros(1, dtype=torch.int64)
    call(library.attend, page, 4, 0, 4, 1, torch.ones(1), k, v, torch.empty(4), y)
    assert y.item() == pytest.approx(4 - 1 / (1 + torch.tensor(10.0).exp().item()), rel=1e-6)


def test_these_parts_have_the_same_bits_on_every_processor():
    """Sums are added in one order, and nothing is fused, whatever the width of a vector."""
    q = random(1, 52)
    k = random(37, 52, seed=1)
    v = random(37, 52, seed=2)
    results = []
    for target in TARGETS:
        library = build.load(target)
        y = torch.empty(52)
        wide = torch.empty(52)
        page = torch.zeros(1, dtype=torch.int64)
        call(library.attend, page, 37, 0, 37, 52, q, k, v, torch.empty(37), y)
        call(library.gelu, 52, y, wide)
        results.append(torch.stack([y, wide]))
    assert all(torch.equal(each, results[0]) for each in results)

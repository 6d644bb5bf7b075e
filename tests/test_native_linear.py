"""Lesson 27: float32 products in C, those of torch but for rounding."""

import math

import pytest
import torch
from test_native_int8 import TARGETS, native_linear, random_rows

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(params=TARGETS, ids=str)
def target(request, monkeypatch):
    """All code in this test is compiled for that processor."""
    from native import build

    library = build.load(request.param)
    monkeypatch.setattr(build, "load", lambda *_: library)


def layer(out: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, size, generator=generator)
    return weight, torch.randn(out, generator=generator)


def assert_close(x, weight, bias=None) -> None:
    """As near to the exact numbers as float32 can be: an error of each product, at most."""
    y = native_linear(weight.clone(), None, bias)(x)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    sizes = x.double().abs() @ weight.double().abs().t()
    sizes += 0 if bias is None else bias.abs()
    assert y.dtype == torch.float32 and y.shape == expected.shape
    error = (y - expected).abs()
    assert (error <= sizes * 2**-24 * (3 + x.shape[-1] ** 0.5)).all()


@pytest.mark.parametrize(
    "out, size", [(1024, 256), (256, 1024), (61, 16), (7, 3), (1, 1), (3, 1000), (5, 4096)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
def test_close_to_torch(target, out, size, rows):
    weight, bias = layer(out, size)
    assert_close(random_rows(rows, size), weight, bias if rows % 2 else None)


def test_whole_numbers_are_exact(target):
    """Sums below 2**24 are exact in any order, so a number left out or taken twice shows."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 15, 16, 17, 63, 64, 65, 200):
        weight = torch.randint(-9, 10, (69, size), generator=generator).float()
        bias = torch.arange(69.0)
        linear = native_linear(weight.clone(), None, bias)
        for rows in range(1, 18):
            x = torch.randint(-9, 10, (rows, size), generator=generator).float()
            assert torch.equal(linear(x), x @ weight.t() + bias)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_at_any_number_of_threads(threads):
    before = torch.get_num_threads()
    x = random_rows(9, 40)
    weight, bias = layer(101, 40)
    linear = native_linear(weight, None, bias)
    expected = linear(x)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(target, bad):
    x = torch.ones(2, 70)
    x[1, 3] = bad
    weight, bias = layer(40, 70)
    y = native_linear(weight, None, bias)(x)
    assert y[0].isfinite().all() and not y[1].isfinite().any()


def test_shapes_and_strides():
    weight, bias = layer(10, 6)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    linear = native_linear(weight.clone(), None, bias)
    assert linear(x).shape == (6, 2, 10)
    assert linear(x[:0]).shape == (0, 2, 10)
    nothing = native_linear(weight[:, :0].clone(), None, bias)(x[..., :0])
    assert torch.equal(nothing, bias.expand(6, 2, 10))
    assert_close(x, weight, bias)
    assert_close(random_rows(3, 12)[:, ::2], weight)


@pytest.mark.parametrize("which", ["x", "x dtype", "weight dtype", "bias", "bias dtype"])
def test_nothing_outside_its_arrays_is_read(which):
    x = random_rows(2, 6)
    weight, bias = layer(10, 6)
    wrong = {
        "x": (x[:, :5], weight, bias),
        "x dtype": (x.double(), weight, bias),
        "weight dtype": (x, weight.to(torch.int8), bias),
        "bias": (x, weight, bias[:9]),
        "bias dtype": (x, weight, bias.half()),
    }
    x, weight, bias = wrong[which]
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native_linear(weight, None, bias)(x)

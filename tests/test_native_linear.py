"""Products in C: int8 ones bit for bit those of torch, float32 ones but for rounding."""

import math

import pytest
import torch
from natives import assert_equal, native_linear, random_layer, random_rows, threads

pytestmark = pytest.mark.usefixtures("compiled")
INT8 = pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])


def assert_close(x, weight, scale=None, bias=None) -> None:
    """As near to the exact numbers as float32 can be: an error of each product, at most."""
    y = native_linear(weight.clone(), scale, bias)(x)
    bias = torch.zeros(len(weight)) if bias is None else bias
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    sizes = x.double().abs() @ weight.double().abs().t() + bias.abs()
    assert y.dtype == torch.float32 and y.shape == expected.shape
    error = (y - expected).abs()
    assert (error <= sizes * 2**-24 * (3 + x.shape[-1] ** 0.5)).all()


def test_whole_numbers_are_exact(target):
    """Sums below 2**24 are exact in any order, so a number left out or taken twice shows."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 15, 16, 17, 63, 64, 65, 1000):
        weight = torch.randint(-9, 10, (69, size), generator=generator).float()
        bias = torch.arange(69.0)
        linear = native_linear(weight.clone(), None, bias)
        for rows in range(1, 18):
            x = torch.randint(-9, 10, (rows, size), generator=generator).float()
            assert torch.equal(linear(x), x @ weight.t() + bias)


@INT8
def test_the_same_bits_at_any_number_of_threads(int8):
    x = random_rows(9, 40)
    linear = native_linear(*random_layer(101, 40, int8=int8))
    expected = linear(x)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(linear(x), expected)


def test_halves_and_tiny_numbers_round_as_in_torch(target):
    weight, scale, bias = random_layer(8, 6)
    halves = [127.0, 0.5, 1.5, 2.5, -0.5, -126.5]
    tiny = [1e-45, -1e-40, 1e-38, 0.0, 0.0, 0.0]
    larger = [1e-37, -3e-38, 2e-38, 0.0, 1e-36, -1.4e-36]  # whose steps would be below FLT_MIN
    x = torch.tensor([halves, [0.0] * 6, tiny, larger])
    assert_equal(x, weight, scale, bias)
    large = scale * 1e38  # so that what is left of tiny numbers can be seen
    assert_equal(x, weight, large)
    assert native_linear(weight, large)(x)[2].any()


@INT8
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(target, bad, int8):
    x = torch.ones(2, 70)
    x[1, 3] = bad
    y = native_linear(*random_layer(40, 70, int8=int8))(x)
    assert y[0].isfinite().all() and not y[1].isfinite().any()
    assert y[1].isnan().all() or not int8  # as in torch


@INT8
def test_shapes_and_strides(int8):
    weight, scale, bias = random_layer(10, 6, int8=int8)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    linear = native_linear(weight.clone(), scale, bias)
    y = linear(x)
    assert y.shape == (6, 2, 10) and torch.equal(y[4, 1], linear(x[4, 1]))
    assert linear(x[:0]).shape == (0, 2, 10)
    nothing = native_linear(weight[:, :0].clone(), scale, bias)(x[..., :0])
    assert torch.equal(nothing, bias.expand(6, 2, 10))
    check = assert_equal if int8 else assert_close
    check(x, weight, scale, bias)
    check(random_rows(3, 12)[:, ::2], weight, scale)


WRONG = {
    "x": lambda x: x[:, :5],
    "x dtype": lambda x: x.double(),
    "weight dtype": lambda weight: weight.half(),
    "weight strides": lambda weight: weight.t().contiguous().t(),
    "scale": lambda scale: scale[:9],
    "bias": lambda bias: bias[:9],
    "bias dtype": lambda bias: bias.half(),
    "x negative": torch._neg_view,  # numbers that torch has yet to negate
    "weight negative": torch._neg_view,
    "scale negative": torch._neg_view,
    "bias negative": torch._neg_view,
}


CASES = [(which, int8) for which in WRONG for int8 in (True, False) if int8 or "scale" not in which]


@pytest.mark.parametrize("which, int8", CASES)
def test_nothing_outside_its_arrays_is_read(which, int8):
    name = which.split()[0]
    given = dict(zip(("weight", "scale", "bias"), random_layer(10, 6, int8=int8)))
    given["x"] = random_rows(2, 6)
    given[name] = WRONG[which](given[name])
    said = ", negative" if "negative" in which else ""
    with pytest.raises(ValueError, match="native code reads contiguous torch.*" + said):
        x = given.pop("x")
        native_linear(**given)(x)

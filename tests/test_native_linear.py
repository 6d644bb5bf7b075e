"""A layer in C: as near to the exact numbers as torch's, and nothing outside its tensors."""

import math

import pytest
import torch
from natives import native_linear, random_layer, random_rows

pytestmark = pytest.mark.usefixtures("compiled")


def assert_close(x, weight, scale=None, bias=None) -> None:
    """C is as near to the exact numbers as float32 can be: an error of each product, at most."""
    y = native_linear(weight.clone(), scale, bias)(x)
    bias = torch.zeros(len(weight)) if bias is None else bias
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    sizes = x.double().abs() @ weight.double().abs().t() + bias.abs()
    assert y.dtype == torch.float32 and y.shape == expected.shape
    error = (y - expected).abs()
    assert (error <= sizes * 2**-24 * (3 + x.shape[-1] ** 0.5)).all()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(target, bad):
    x = torch.ones(2, 70)
    x[1, 3] = bad
    y = native_linear(*random_layer(40, 70))(x)
    assert y[0].isfinite().all() and not y[1].isfinite().any()


def test_shapes_and_strides():
    weight, _, bias = random_layer(10, 6)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    linear = native_linear(weight.clone(), None, bias)
    y = linear(x)
    assert y.shape == (6, 2, 10) and torch.equal(y[4, 1], linear(x[4, 1]))
    assert linear(x[:0]).shape == (0, 2, 10)
    nothing = native_linear(weight[:, :0].clone(), None, bias)(x[..., :0])
    assert torch.equal(nothing, bias.expand(6, 2, 10))
    assert_close(x, weight, None, bias)
    assert_close(random_rows(3, 12)[:, ::2], weight)


def test_weights_are_packed_where_they_are():
    weight, _, bias = random_layer(100, 40)
    linear = native_linear(weight, None, bias)
    assert linear.weight.data_ptr() == weight.data_ptr()
    full = linear.weight.shape[0] * linear.weight.shape[2]
    assert full <= 100 < full + linear.tail_panel.shape[1]


WRONG = {
    "x": lambda x: x[:, :5],
    "x dtype": lambda x: x.double(),
    "x negative": torch._neg_view,  # numbers that torch has yet to negate
    "weight dtype": lambda weight: weight.double(),
    "weight strides": lambda weight: weight.t().contiguous().t(),
    "weight negative": torch._neg_view,
    "bias": lambda bias: bias[:9],
    "bias dtype": lambda bias: bias.half(),
    "bias negative": torch._neg_view,
}


@pytest.mark.parametrize("which", WRONG)
def test_nothing_outside_its_arrays_is_read(which):
    name = which.split()[0]
    given = dict(zip(("weight", "scale", "bias"), random_layer(10, 6)))
    given["x"] = random_rows(2, 6)
    given[name] = WRONG[which](given[name])
    said = ", negative" if "negative" in which else ""
    with pytest.raises(ValueError, match="native code reads contiguous torch.*" + said):
        x = given.pop("x")
        native_linear(**given)(x)

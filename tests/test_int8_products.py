"""Lesson 25: rows rounded to int8, and sums of their products that are exact."""

import math

import pytest
import torch
from conftest import module_with
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_a_row_is_rounded_to_the_nearest_step(row):
    int8 = module_with("quantisation.int8", "quantize")
    x = torch.tensor([row])
    values, scale = int8.quantize(x)
    assert values.dtype == torch.int8 and -127 <= values.min() <= values.max() <= 127  # not -128
    assert scale.shape == (1,) and scale.dtype == torch.float32
    error = (values.double() * scale.double() - x.double()).abs()
    assert (error <= scale.double() * (0.5 + 1e-5)).all()
    if x.abs().max() > 1e-30:
        assert values.abs().max() == 127


def test_rounding_at_the_edges():
    int8 = module_with("quantisation.int8", "quantize")
    row = [127.0, 0.5, 1.5, 2.5, -0.5, -126.6]
    values, scale = int8.quantize(torch.tensor([row, [0.0] * 6, [1e-45] * 6]))
    assert values[0].tolist() == [127, 0, 2, 2, 0, -127] and scale[0] == 1  # halves to even
    assert values[1:].tolist() == [[0] * 6] * 2 and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 4096, 6400])
@pytest.mark.parametrize("extreme", [True, False])
def test_sums_are_exact(size, extreme):
    int8 = module_with("quantisation.int8", "int8_linear", "quantize")
    generator = torch.Generator().manual_seed(size)
    weight = torch.randint(-127, 128, (5, size), generator=generator).to(torch.int8)
    x = torch.randn(2, 3, size, generator=generator)
    if extreme:
        weight, x = torch.full_like(weight, 127), torch.ones_like(x)
    scale, bias = torch.rand(2, 5, generator=generator)
    values, x_scale = int8.quantize(x)
    sums = values.long() @ weight.long().t()  # integers
    assert sums.abs().max() < 2**31 and (sums.abs().max() == 127 * 127 * size) == extreme
    expected = sums.float() * (x_scale[..., None] * scale)
    assert torch.equal(int8.int8_linear(x, weight, scale), expected)
    assert torch.equal(int8.int8_linear(x, weight, scale, bias), expected + bias)


@pytest.mark.parametrize("size", [1025, 2048, 6400])
def test_sums_that_float32_cannot_hold(size):
    int8 = module_with("quantisation.int8", "int8_linear")
    weight = torch.full((1, size), 127, dtype=torch.int8)
    x = weight.double()
    x[0, 0] = 126  # an odd sum, above 2**24 from 1041 terms on
    expected = 127 * 127 * size - 127
    assert int8.int8_linear(x, weight, torch.ones(1, dtype=torch.float64)).item() == expected


@pytest.mark.parametrize("extreme", [True, False])
def test_a_product_of_whole_numbers_is_int32(extreme):
    int8 = module_with("quantisation.int8", "int8_matmul", "EXACT_TERMS")
    generator = torch.Generator().manual_seed(0)
    for size in (1, int8.EXACT_TERMS, int8.EXACT_TERMS + 1, 3 * int8.EXACT_TERMS):
        values = torch.randint(-127, 128, (2, 3, size), generator=generator).to(torch.int8)
        weight = torch.randint(-127, 128, (5, size), generator=generator).to(torch.int8)
        if extreme:
            values, weight = torch.full_like(values, -127), torch.full_like(weight, 127)
        sums = int8.int8_matmul(values, weight)
        assert sums.dtype == torch.int32
        assert torch.equal(sums, (values.long() @ weight.long().t()).int())


def test_a_row_does_not_depend_on_its_neighbours():
    int8 = module_with("quantisation.int8", "int8_linear", "quantize")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, generator=generator) * torch.tensor([1e-3, 1, 1e3, 0, 5, 1])[:, None]
    values, scale = int8.quantize(torch.randn(7, 40, generator=generator))
    whole = int8.int8_linear(x, values, scale)
    for row, alone in zip(whole, x):
        assert torch.equal(row, int8.int8_linear(alone[None], values, scale)[0])


def test_sums_become_numbers_by_both_scales():
    int8 = module_with("quantisation.int8", "dequantize_sums")
    sums = torch.tensor([[6, -4]], dtype=torch.int32)
    x_scale = torch.tensor([0.5], dtype=torch.float64)
    scale = torch.tensor([2.0, 0.25], dtype=torch.float64)
    y = int8.dequantize_sums(sums, x_scale, scale, None)
    assert y.dtype == torch.float64 and y.tolist() == [[6, -0.5]]
    assert int8.dequantize_sums(sums, x_scale, scale, torch.ones(2)).tolist() == [[7, 0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    int8 = module_with("quantisation.int8", "int8_linear", "quantize")
    x = torch.ones(2, 8)
    x[1, 3] = bad
    y = int8.int8_linear(x, *int8.quantize(torch.ones(4, 8)))
    assert y[0].isfinite().all() and not y[1].isfinite().any()

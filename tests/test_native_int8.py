"""Lesson 25: int8 products in C, bit for bit those of torch, however compiled."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, run_rows

from loading.load import load_model

PLAIN = ()  # what to compile for, instead of this processor
AVX2 = ("-mavx2", "-mfma")
HAS_AVX2 = torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))
TARGETS = [None, PLAIN, *([AVX2] if HAS_AVX2 else [])]

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(params=TARGETS, ids=str)
def target(request, monkeypatch):
    """All code in this test is compiled for that processor."""
    from native import build

    library = build.load(request.param)
    monkeypatch.setattr(build, "load", lambda *_: library)
    return request.param


def layer(out: int, size: int, bias: bool = True, seed: int = 0):
    """The arguments of int8_linear after x, random."""
    from int8 import quantize

    generator = torch.Generator().manual_seed(seed)
    weight, scale = quantize(torch.randn(out, size, generator=generator))
    return weight, scale, torch.randn(out, generator=generator) if bias else None


def random_rows(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn(rows, 1, generator=generator)
    return torch.randn(rows, size, generator=generator) * sizes


def native_linear(weight, scale=None, bias=None):
    """A layer of these tensors in C."""
    from native import build
    from native.linear import NativeLinear

    return NativeLinear(SimpleNamespace(weight=weight, scale=scale, bias=bias), build.load())


def assert_equal(x, weight, scale, bias=None) -> None:
    """C computes the numbers of int8.py, bit for bit."""
    from int8 import int8_linear

    expected = int8_linear(x, weight, scale, bias)
    assert torch.equal(native_linear(weight.clone(), scale, bias)(x), expected)


def test_the_compiled_code_has_the_product():
    from native import build

    assert hasattr(build.load(), "linear")


@pytest.mark.parametrize(
    "out, size", [(1024, 256), (256, 1024), (61, 16), (7, 3), (1, 1), (3, 1000), (5, 4096)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17])
def test_equal_to_torch_bit_for_bit(target, out, size, rows):
    assert_equal(random_rows(rows, size), *layer(out, size, bias=rows % 2 == 1))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_at_any_number_of_threads(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_equal(random_rows(9, 40), *layer(100, 40))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_sums(target, sign):
    weight = torch.full((2, 6400), 127 * sign).to(torch.int8)
    assert_equal(torch.ones(3, 6400), weight, torch.ones(2))


def test_halves_and_tiny_numbers_round_as_in_torch(target):
    weight, scale, bias = layer(8, 6)
    halves = [127.0, 0.5, 1.5, 2.5, -0.5, -126.5]
    tiny = [1e-45, -1e-40, 1e-38, 0.0, 0.0, 0.0]
    larger = [1e-37, -3e-38, 2e-38, 0.0, 1e-36, -1.4e-36]  # whose steps would be below FLT_MIN
    x = torch.tensor([halves, [0.0] * 6, tiny, larger])
    assert_equal(x, weight, scale, bias)
    large = scale * 1e38  # so that what is left of tiny numbers can be seen
    assert_equal(x, weight, large)
    assert native_linear(weight, large)(x)[2].any()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_as_in_torch(target, bad):
    from int8 import int8_linear

    x = torch.ones(2, 70)
    x[1, 3] = bad
    weight, scale, bias = layer(40, 70)
    torch_y = int8_linear(x, weight, scale, bias)
    y = native_linear(weight, scale, bias)(x)
    assert y[0].isfinite().all() and y[1].isnan().all() and torch_y[1].isnan().all()


def test_shapes_and_strides():
    weight, scale, bias = layer(10, 6)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    linear = native_linear(weight.clone(), scale, bias)
    y = linear(x)
    assert y.shape == (6, 2, 10)
    assert torch.equal(y[4, 1], linear(x[4, 1]))
    assert linear(x[:0]).shape == (0, 2, 10)
    nothing = native_linear(weight[:, :0].clone(), scale, bias)(torch.ones(3, 0))
    assert torch.equal(nothing, bias.expand(3, 10))
    assert_equal(random_rows(3, 12)[:, ::2], weight, scale)


@pytest.mark.parametrize(
    "which",
    ["x", "x dtype", "weight", "scale", "bias", "bias dtype", "weight strides"],
)
def test_nothing_outside_its_arrays_is_read(which):
    x = random_rows(2, 6)
    weight, scale, bias = layer(10, 6)
    wrong = {
        "x": (x[:, :5], weight, scale, bias),
        "x dtype": (x.double(), weight, scale, bias),
        "weight": (x, weight.float(), scale, bias),
        "scale": (x, weight, scale[:9], bias),
        "bias": (x, weight, scale, bias[:9]),
        "bias dtype": (x, weight, scale, bias.half()),
        "weight strides": (x, torch.zeros(6, 10, dtype=torch.int8).t(), scale, bias),
    }
    x, *tensors = wrong[which]
    with pytest.raises(ValueError, match="native code reads contiguous torch"):
        native_linear(*tensors)(x)


@pytest.mark.parametrize("which", ["x", "weight", "scale", "bias"])
def test_numbers_that_torch_has_yet_to_negate_are_refused(which):
    arguments = dict(zip(("weight", "scale", "bias"), layer(10, 6)), x=random_rows(2, 6))
    negative = torch._neg_view(arguments[which])
    assert negative.is_contiguous() and torch.equal(negative, -arguments[which])
    with pytest.raises(ValueError, match="native code reads contiguous .*, negative"):
        arguments[which] = negative
        x = arguments.pop("x")
        native_linear(**arguments)(x)


def test_the_products_of_a_model_are_native(monkeypatch):
    from native import use_native
    from native.linear import NativeLinear

    model = load_model(CHECKPOINTS / "stories-draft", torch.int8)
    text = run_rows(model, [[5, 6, 7]], options={"use_cache": False}, max_new_tokens=20)
    use_native(model)
    seen = []
    forward = NativeLinear.forward

    def recorded(self, x):
        seen.append(1)
        return forward(self, x)

    monkeypatch.setattr(NativeLinear, "forward", recorded)
    assert run_rows(model, [[5, 6, 7]], options={"use_cache": False}, max_new_tokens=20) == text
    products = 4 * model.config.n_layer + 1  # in a pass: four in each layer, and the head
    assert len(text[0]) == 20 and len(seen) == 20 * products

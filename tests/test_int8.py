"""int8 weights: rotated and rounded rows, exact sums, in torch, in C and on ranks."""

import ctypes
import math

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, run_rows
from hypothesis import given
from hypothesis import strategies as st
from natives import (
    assert_equal,
    call,
    native_linear,
    quantised,
    random_layer,
    random_numbers,
    random_rows,
)
from ranks import compared, save_uneven

from errors import UserError
from loading.load import PRESETS, load_model, save_model
from quantisation import int8
from quantisation.int8 import int8_linear, quantize, rotate_channels, unrotate_channels

HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Also the code for AVX-512 without its int8 products.
ALL = [*TARGETS, *([("-O1", "-march=skylake-avx512")] if HAS_AVX512 else [])]
EVERY_KERNEL = pytest.mark.parametrize("library", ALL, ids=str, indirect=True)

# Rounding and sums


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_a_row_is_rounded_to_the_nearest_step(row):
    x = torch.tensor([row])
    values, scale = quantize(x)
    assert values.dtype == torch.int8 and -127 <= values.min() <= values.max() <= 127  # not -128
    assert scale.shape == (1,) and scale.dtype == torch.float32
    error = (values.double() * scale.double() - x.double()).abs()
    assert (error <= scale.double() * (0.5 + 1e-5)).all()
    if x.abs().max() > 1e-30:
        assert values.abs().max() == 127


def test_rounding_at_the_edges():
    row = [127.0, 0.5, 1.5, 2.5, -0.5, -126.6]
    values, scale = quantize(torch.tensor([row, [0.0] * 6, [1e-45] * 6]))
    assert values[0].tolist() == [127, 0, 2, 2, 0, -127] and scale[0] == 1  # halves to even
    assert values[1:].tolist() == [[0] * 6] * 2 and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("size", [1, 7, int8.EXACT_TERMS, int8.EXACT_TERMS + 1, 4096, 6400])
@pytest.mark.parametrize("extreme", [True, False])
def test_sums_are_exact(size, extreme):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randint(-127, 128, (5, size), generator=generator).to(torch.int8)
    x = torch.randn(2, 3, size, generator=generator)
    if extreme:
        weight, x = torch.full_like(weight, 127), torch.ones_like(x)
    scale, bias = torch.rand(2, 5, generator=generator)
    values, x_scale = quantize(x)
    sums = values.long() @ weight.long().t()  # integers
    assert sums.abs().max() < 2**31 and (sums.abs().max() == 127 * 127 * size) == extreme
    product = int8.int8_matmul(values, weight)
    assert product.dtype == torch.int32 and torch.equal(product, sums.int())
    expected = sums.float() * (x_scale[..., None] * scale)
    assert torch.equal(int8_linear(x, weight, scale), expected)
    assert torch.equal(int8_linear(x, weight, scale, bias), expected + bias)


@pytest.mark.parametrize("size", [1025, 2048, 6400])
def test_sums_that_float32_cannot_hold(size):
    weight = torch.full((1, size), 127, dtype=torch.int8)
    x = weight.double()
    x[0, 0] = 126  # an odd sum, above 2**24 from 1041 terms on
    expected = 127 * 127 * size - 127
    assert int8_linear(x, weight, torch.ones(1, dtype=torch.float64)).item() == expected


def test_sums_always_fit_int32():
    assert 127 * 127 * 2**17 < 2**31
    with torch.device("meta"):
        assert int8.Int8Linear(torch.nn.Linear(2**17, 1)).weight.shape == (1, 2**17)
        with pytest.raises(UserError, match="int8 rows of 131073 weights"):
            int8.Int8Linear(torch.nn.Linear(2**17 + 1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    x = torch.ones(2, 8)
    x[1, 3] = bad
    y = int8_linear(x, *quantize(torch.ones(4, 8)))
    assert y[0].isfinite().all() and not y[1].isfinite().any()


# Rotations


def matrix(size: int) -> torch.Tensor:
    """R as a Kronecker product: the Hadamard matrix, and a reflection for each odd prime factor."""
    found = torch.ones(1, 1).double()
    while size % 2 == 0:
        found = torch.kron(torch.tensor([[1, 1], [1, -1]]).double(), found)
        size //= 2
    for p in range(3, size + 1, 2):
        while size % p == 0:
            found = torch.kron(torch.eye(p).double() - 2 / p, found)
            size //= p
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 9, 16, 45, 48, 64, 70, 72, 2018])
def test_a_rotation_is_the_product_with_a_symmetric_matrix(size):
    x = random_numbers(2, 3, size).double()
    R = matrix(size)
    torch.testing.assert_close(rotate_channels(x), x @ R, rtol=0, atol=1e-9)
    torch.testing.assert_close(rotate_channels(unrotate_channels(x)), x, rtol=0, atol=1e-12)
    weight = random_numbers(5, size).double()
    products = rotate_channels(x) @ unrotate_channels(weight).t()
    torch.testing.assert_close(products, x @ weight.t(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [64, 70, 576, 1536])
def test_a_rotated_row_does_not_depend_on_its_neighbours(size):
    """Nor where it lies: it is contiguous, because torch adds up strided rows in another order."""
    x = random_numbers(7, size)
    rotated = rotate_channels(x)
    assert rotated.is_contiguous()
    assert torch.equal(rotated, torch.stack([rotate_channels(row) for row in x]))
    assert torch.equal(rotated, rotate_channels(x.t().contiguous().t()))


@pytest.mark.parametrize(
    "name, size, in_c",
    [("uneven", 3, False), ("stories-draft", 2, True), ("stories-llama", 4, False)],
)
def test_ranks_join_inputs_before_they_rotate_them(
    compiled, tiny_llama, tmp_path, name, size, in_c
):
    """So --join reduce is gather: before and after each of two products a layer, and at the ends.

    Each bit is that of one process.
    """
    if name == "uneven":
        path = save_uneven(tiny_llama, tmp_path, "tiny_llama")
    else:
        path = CHECKPOINTS / name
    options = {"dtype": torch.int8, "native": in_c}
    tokens = torch.tensor([random_tokens(12)])
    difference, (collectives, _), _ = compared(size, path, tokens, "reduce", **options)
    assert difference == 0 and collectives == 4 * load_model(path).config.n_layer + 2


# In C


@EVERY_KERNEL
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_products_of_every_kernel_have_torchs_bits(target, size):
    for out in (1, 15, 16, 17, 32, 33, 100):
        for rows in (1, 2, 4, 6, 7, 8, 13):
            assert_equal(random_rows(rows, size), *random_layer(out, size, int8=True))


@EVERY_KERNEL
def test_all_weights_that_a_byte_holds(target):
    weight = torch.arange(-128, 128).to(torch.int8).repeat(3, 1)
    x = torch.arange(-128, 128).float() * torch.tensor([[1.0], [-1.0]])
    assert_equal(unrotate_channels(x), weight, torch.ones(3))  # which is rotated to x


@EVERY_KERNEL
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_as_large_as_int32_holds(target, sign):
    """They pass 2**31 on the way, where numbers are made positive."""
    weight = torch.full((2, 2**17), 127 * sign).to(torch.int8)
    ones = unrotate_channels(torch.ones(7, 2**17))  # which are rotated to ones
    assert_equal(ones[:1], weight, torch.ones(2))
    assert_equal(-ones, weight, torch.ones(2))


def test_halves_and_tiny_numbers_round_as_in_torch(target):
    weight, scale, bias = random_layer(8, 8, int8=True)
    halves = [127.0, 0.5, 1.5, 2.5, -0.5, -126.5, 3.5, -4.5]
    tiny = [1e-45, -1e-40, 1e-38, 0.0, 0.0, 0.0, 0.0, 0.0]
    larger = [1e-37, -3e-38, 2e-38, 0.0, 1e-36, -1.4e-36, 0.0, 0.0]  # steps below FLT_MIN
    x = unrotate_channels(torch.tensor([halves, [0.0] * 8, tiny, larger]))  # rotated to these
    assert rotate_channels(x[0]).tolist() == halves
    assert_equal(x, weight, scale, bias)
    large = scale * 1e38  # so that what is left of tiny numbers can be seen
    assert_equal(x, weight, large)
    assert native_linear(weight, large)(x)[2].any()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_as_in_torch(target, bad):
    x = torch.ones(2, 70)
    x[1, 3] = bad
    y = native_linear(*random_layer(40, 70, int8=True))(x)
    assert y[0].isfinite().all() and y[1].isnan().all()


def exported(library, name: str) -> int | None:
    try:
        return ctypes.c_int.in_dll(library, name).value
    except ValueError:  # there is no such number
        return None


def test_each_kernel_has_groups_of_its_own(library):
    """VNNI takes four unsigned bytes, so 128 is added to each value."""
    name = (ctypes.c_char * 64).in_dll(library, "kernel").value.decode().split(",")[0]
    found = exported(library, "int8_group"), exported(library, "activation_zero_point")
    assert found == (2 if name == "plain C" else 4, 128 * name.endswith("VNNI"))


# Widths with every power of two around a pair of vectors, with and without an odd rest.
WIDTHS = [0, 1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 45, 48, 64, 70, 96, 160, 192, 576, 896, 1536, 2018]


@EVERY_KERNEL
def test_a_rotation_has_torchs_bits(library):
    """A row in its own place has them too, and one that begins anywhere; none beside is written."""
    for size in WIDTHS:
        x = random_rows(5, size + 1)[:, 1:]
        for row, expected in zip(x, rotate_channels(x)):
            room = torch.full((size + 2,), torch.nan)
            call(library.rotate_channels, size, row, room[1:])
            assert torch.equal(room[1:-1], expected) and room[[0, -1]].isnan().all()
            call(library.rotate_channels, size, row, row)
            assert torch.equal(row, expected)


# The forms of rounded weights: int8 and blocks

FORMS = pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["int8", "blocks"])


@FORMS
def test_a_file_is_rounded_while_it_is_read(dtype):
    read = load_model(CHECKPOINTS / "stories", dtype)
    whole = load_model(CHECKPOINTS / "stories")
    floats = sum(weight.nbytes for weight in whole.parameters())
    expected = quantised(whole, dtype).state_dict()
    tensors = read.state_dict()
    assert tensors.keys() == expected.keys() and read.dtype == torch.float32
    assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}  # a shared one once
    assert sum(sizes.values()) <= {torch.int8: 0.27, torch.uint8: 0.29}[dtype] * floats


@FORMS
def test_random_weights_are_rounded(tiny, monkeypatch, dtype):
    monkeypatch.setitem(PRESETS, "gpt2", tiny().config)
    rounded = load_model("random:gpt2", dtype)
    expected = quantised(load_model("random:gpt2"), dtype).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in rounded.state_dict().items())


@torch.inference_mode()
@FORMS
def test_probabilities_change_little(stories, dtype):
    """On a text of the model's own, in nats a token on average between the distributions."""
    tokens = run_rows(stories, [[4095]], max_new_tokens=64, ignore_eos=True)
    models = (stories, load_model(CHECKPOINTS / "stories", dtype))
    p, q = (model(torch.tensor(tokens))[0].log_softmax(dim=-1) for model in models)
    divergence = (p.exp() * (p - q)).sum(dim=-1).mean()
    assert 0 < divergence < {torch.int8: 0.01, torch.uint8: 0.003}[dtype]


@pytest.mark.parametrize(
    "dtype, words", [(torch.int8, "int8 weights"), (torch.uint8, "weights in blocks")]
)
def test_it_is_not_saved(tiny, tmp_path, dtype, words):
    with pytest.raises(ValueError, match=f"a model with {words} cannot be saved"):
        save_model(quantised(tiny(dtype=torch.float32), dtype), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["int8", "blocks"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_command_line_takes_them(cli, dtype, backend):
    options = ("--max-new-tokens", 12, "--dtype", dtype, "--backend", backend)
    code, out, err = cli("--prompt", "Once upon a time", *options)
    story = "Once upon a time, there was a little girl named Lily. She loved to\n"
    assert (code, out) == (0, story) and "note" not in err


def test_a_device_needs_no_products_of_int8(monkeypatch):
    """A GPU has none in torch: it computes them in float32."""
    from command_line.models import pick_dtype

    def ones(*args, **kwargs):
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(torch, "ones", ones)
    assert pick_dtype("int8", "cpu") == torch.int8

"""int8 weights in panels: bit for bit the numbers of int8.py."""

import math

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, run_rows
from natives import (
    assert_equal,
    native_linear,
    random_layer,
    random_rows,
    threads,
    to_int8,
    with_native_linear,
)
from test_native_linear import WRONG as WRONG_FLOATS

from loading.load import load_model
from quantisation.int8 import rotate_channels, unrotate_channels

pytestmark = pytest.mark.usefixtures("compiled")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Also the code for AVX-512 without its int8 products.
ALL = [*TARGETS, *([("-O1", "-march=skylake-avx512")] if HAS_AVX512 else [])]
EVERY_KERNEL = pytest.mark.parametrize("library", ALL, ids=str, indirect=True)


def test_int8_is_native_too(cli):
    """The text is torch's."""
    args = ("--model", CHECKPOINTS / "stories-draft", "--prompt", "Once upon a time")
    args += ("--max-new-tokens", 12, "--dtype", "int8", "--backend")
    code, out, err = cli(*args, "native")
    assert code == 0 and "note" not in err
    assert out == cli(*args, "torch")[1]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("out, size, panel_width", [(8, 8, 4), (10, 3, 4), (3, 5, 8)])
def test_groups_of_inputs_stay_together(group, out, size, panel_width):
    """Zeros fill up the last one."""
    from native.linear import pack

    weight = torch.arange(out * size).to(torch.int8).view(out, size) - 20
    before = torch.nn.functional.pad(weight.clone(), (0, -size % group))
    panels, tail_panel = (each.view(torch.int8) for each in pack(weight, panel_width, group))
    whole = out // panel_width
    groups = -(-size // group)
    panels = panels.view(whole, groups, panel_width, group).transpose(1, 2).flatten(0, 1)
    tail_panel = tail_panel.view(groups, panel_width, group).transpose(0, 1)
    assert torch.equal(panels.flatten(1), before[: whole * panel_width])
    assert torch.equal(tail_panel.flatten(1)[: out % panel_width], before[whole * panel_width :])
    assert not tail_panel[out % panel_width :].any()


@EVERY_KERNEL
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_int8_products_of_every_kernel(target, size):
    for out in (1, 15, 16, 17, 32, 33, 100):
        for rows in (1, 2, 4, 6, 7, 13):
            assert_equal(random_rows(rows, size), *random_layer(out, size, int8=True))


@EVERY_KERNEL
def test_all_weights_that_a_byte_holds(target):
    weight = torch.arange(-128, 128).to(torch.int8).repeat(3, 1)
    x = torch.arange(-128, 128).float() * torch.tensor([[1.0], [-1.0]])
    assert_equal(unrotate_channels(x), weight, torch.ones(3))  # which is rotated to x


@EVERY_KERNEL
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_as_large_as_int32_holds(target, sign):
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


def test_int8_layers_of_any_shape():
    weight, scale, bias = random_layer(10, 6, int8=True)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    assert_equal(x, weight, scale, bias)
    assert_equal(x[:0], weight, scale, bias)
    assert_equal(random_rows(3, 12)[:, ::2], weight, scale)
    nothing = native_linear(weight[:, :0].clone(), scale, bias)(x[..., :0])
    assert torch.equal(nothing, bias.expand(6, 2, 10))


def test_int8_weights_are_packed_where_they_are():
    weight, scale, bias = random_layer(100, 40, int8=True)
    linear = native_linear(weight, scale, bias)
    assert linear.weight.data_ptr() == weight.data_ptr()


def test_the_same_int8_bits_at_any_number_of_threads():
    x = random_rows(9, 40)
    linear = native_linear(*random_layer(101, 40, int8=True))
    expected = linear(x)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(linear(x), expected)


WRONG = WRONG_FLOATS | {"scale": lambda scale: scale[:9], "scale negative": torch._neg_view}


@pytest.mark.parametrize("which", WRONG)
def test_nothing_outside_int8_arrays_is_read(which):
    name = which.split()[0]
    given = dict(zip(("weight", "scale", "bias"), random_layer(10, 6, int8=True)))
    given["x"] = random_rows(2, 6)
    given[name] = WRONG[which](given[name])
    said = ", negative" if "negative" in which else ""
    with pytest.raises(ValueError, match="native code reads contiguous torch.*" + said):
        x = given.pop("x")
        native_linear(**given)(x)


def test_the_weights_of_an_int8_model_are_packed():
    """Its text is what it was."""
    model = load_model(CHECKPOINTS / "stories-draft", torch.int8)
    shapes = {name: layer.weight.shape for name, layer in model.named_modules() if "c_fc" in name}
    expected = run_rows(model, [[5, 6, 7]], options={"use_cache": False}, max_new_tokens=20)
    with_native_linear(model)
    for name, (out, size) in shapes.items():
        weight = model.get_submodule(name).weight  # (panels, groups, outputs)
        assert weight.dim() == 3 and weight.shape[0] * weight.shape[2] == out
        assert weight.numel() * weight.itemsize == out * size
    options = {"use_cache": False}
    assert run_rows(model, [[5, 6, 7]], options=options, max_new_tokens=20) == expected


def test_an_int8_weight_that_is_shared_is_packed_once(tiny, tiny_llama):
    for model in (
        tiny(dtype=torch.float32),
        tiny_llama(dtype=torch.float32, tie_word_embeddings=True),
    ):
        with_native_linear(to_int8(model))
        assert model.layer("embedding").linear is model.lm_head


@torch.inference_mode()
@EVERY_KERNEL
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_an_embedding_reads_its_int8_rows(tiny, target, shape):
    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0, **shape)
        tokens = torch.arange(vocab_size).view(1, -1)
        expected = to_int8(model).wte(tokens)
        assert torch.equal(with_native_linear(model).wte(tokens), expected)

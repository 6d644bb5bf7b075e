"""Lesson 24: int8 weights, with exact sums, in a quarter of the bytes."""

import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run_rows
from hypothesis import given
from hypothesis import strategies as st

from loading.load import PRESETS, load_model, save_model
from model import GPT


def int8_tiny(tiny, **shape) -> GPT:
    """A tiny model with int8 weights, and everything else in float64."""
    from int8 import to_int8

    return to_int8(tiny(**shape))


def test_the_command_line_takes_int8(cli):
    code, out, err = cli("--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "int8")
    story = "Once upon a time, there was a little girl named Lily. She loved to\n"
    assert (code, out) == (0, story)
    assert err.startswith("12 tokens, ")


def test_a_device_needs_no_products_of_int8(monkeypatch):
    """A GPU has none in torch: it computes them in float32."""
    from command_line import pick_dtype

    def ones(*args, **kwargs):
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(torch, "ones", ones)
    assert pick_dtype("int8", "cpu") == torch.int8


def test_still_benchmarks_take_floats_only(run_main):
    import benchmark_kv_cache

    code, _, err = run_main(benchmark_kv_cache.main, "--dtype", "int8")
    assert code == 2 and "--dtype: invalid choice: 'int8'" in err


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_a_row_is_rounded_to_the_nearest_step(row):
    from int8 import quantize

    x = torch.tensor([row])
    values, scale = quantize(x)
    assert values.dtype == torch.int8 and -127 <= values.min() <= values.max() <= 127  # not -128
    assert scale.shape == (1,) and scale.dtype == torch.float32
    error = (values.double() * scale.double() - x.double()).abs()
    assert (error <= scale.double() * (0.5 + 1e-5)).all()
    if x.abs().max() > 1e-30:
        assert values.abs().max() == 127


def test_rounding_at_the_edges():
    from int8 import quantize

    row = [127.0, 0.5, 1.5, 2.5, -0.5, -126.6]
    values, scale = quantize(torch.tensor([row, [0.0] * 6, [1e-45] * 6]))
    assert values[0].tolist() == [127, 0, 2, 2, 0, -127] and scale[0] == 1  # halves to even
    assert values[1:].tolist() == [[0] * 6] * 2 and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 4096, 6400])
@pytest.mark.parametrize("extreme", [True, False])
def test_sums_are_exact(size, extreme):
    from int8 import int8_linear, quantize

    generator = torch.Generator().manual_seed(size)
    weight = torch.randint(-127, 128, (5, size), generator=generator).to(torch.int8)
    x = torch.randn(2, 3, size, generator=generator)
    if extreme:
        weight, x = torch.full_like(weight, 127), torch.ones_like(x)
    scale, bias = torch.rand(2, 5, generator=generator)
    values, x_scale = quantize(x)
    sums = values.long() @ weight.long().t()  # integers
    assert sums.abs().max() < 2**31 and (sums.abs().max() == 127 * 127 * size) == extreme
    expected = sums.float() * (x_scale[..., None] * scale)
    assert torch.equal(int8_linear(x, weight, scale), expected)
    assert torch.equal(int8_linear(x, weight, scale, bias), expected + bias)


@pytest.mark.parametrize("size", [1025, 2048, 6400])
def test_sums_that_float32_cannot_hold(size):
    from int8 import int8_linear

    weight = torch.full((1, size), 127, dtype=torch.int8)
    x = weight.double()
    x[0, 0] = 126  # an odd sum, above 2**24 from 1041 terms on
    expected = 127 * 127 * size - 127
    assert int8_linear(x, weight, torch.ones(1, dtype=torch.float64)).item() == expected


def test_sums_always_fit_int32():
    from errors import UserError
    from int8 import Int8Linear

    assert 127 * 127 * 2**17 < 2**31
    with torch.device("meta"):
        assert Int8Linear(torch.nn.Linear(2**17, 1)).weight.shape == (1, 2**17)
        with pytest.raises(UserError, match="int8 rows of 131073 weights"):
            Int8Linear(torch.nn.Linear(2**17 + 1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    from int8 import int8_linear, quantize

    x = torch.ones(2, 8)
    x[1, 3] = bad
    y = int8_linear(x, *quantize(torch.ones(4, 8)))
    assert y[0].isfinite().all() and not y[1].isfinite().any()


def in_floats(x, weight, scale, bias):
    return torch.nn.functional.linear(x, weight * scale[:, None], bias)


def test_it_is_the_model_with_rounded_weights(tiny):
    """If activations are not rounded, logits are a float model's with the rounded weights."""
    import int8

    model = int8_tiny(tiny)
    rounded = tiny()
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if weight.dim() == 2 and name != "wpe.weight":
                values, scale = int8.quantize(weight)
                weight.copy_(values * scale[:, None])
    tokens = torch.tensor([random_tokens(16)])
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(int8, "int8_linear", in_floats)
        torch.testing.assert_close(model(tokens), rounded(tokens), rtol=0, atol=1e-12)


def test_a_file_is_rounded_while_it_is_read():
    from int8 import to_int8

    read = load_model(CHECKPOINTS / "stories", torch.int8)
    whole = load_model(CHECKPOINTS / "stories")
    floats = sum(weight.nbytes for weight in whole.parameters())
    expected = to_int8(whole).state_dict()
    tensors = read.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
    assert read.dtype == torch.float32
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int8, torch.float32}
    assert read.lm_head.weight is read.wte.weight and read.lm_head.scale is read.wte.scale
    assert sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values()) <= 0.27 * floats


def test_random_weights_are_rounded(tiny, monkeypatch):
    monkeypatch.setitem(PRESETS, "gpt2", tiny().config)
    whole = load_model("random:gpt2")
    rounded = load_model("random:gpt2", torch.int8)
    assert rounded.wte.weight.dtype == torch.int8 and rounded.dtype == torch.float32
    close = rounded.wte.weight * rounded.wte.scale[:, None]
    assert (close - whole.wte.weight).abs().max() <= rounded.wte.scale.max() / 2 * 1.001


@torch.inference_mode()
def test_probabilities_change_little(stories):
    """On a text of the model's own: 0.003 nats a token on average between the distributions."""
    text = run_rows(stories, [[4095]], max_new_tokens=64, ignore_eos=True)[0]
    models = (stories, load_model(CHECKPOINTS / "stories", torch.int8))
    p, q = (model(torch.tensor([text]))[0].log_softmax(dim=-1) for model in models)
    divergence = (p.exp() * (p - q)).sum(dim=-1)
    assert 0 < divergence.mean() < 0.01


def test_it_is_not_saved(tiny, tmp_path):
    with pytest.raises(ValueError, match="a model with int8 weights is not saved"):
        save_model(int8_tiny(tiny), tmp_path)
    assert not list(tmp_path.iterdir())

"""Lesson 26: int8 weights, in a quarter of the bytes."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run_rows

from loading.load import PRESETS, load_model, save_model
from model import GPT


def int8_tiny(tiny, **shape) -> GPT:
    """A tiny model with int8 weights, and everything else in float64."""
    from natives import to_int8

    return to_int8(tiny(**shape))


def test_the_command_line_takes_int8(cli):
    code, out, err = cli("--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "int8")
    story = "Once upon a time, there was a little girl named Lily. She loved to\n"
    assert (code, out) == (0, story)
    assert err.startswith("12 tokens, ")


def test_a_device_needs_no_products_of_int8(monkeypatch):
    """A GPU has none in torch: it computes them in float32."""
    from command_line.models import pick_dtype

    def ones(*args, **kwargs):
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(torch, "ones", ones)
    assert pick_dtype("int8", "cpu") == torch.int8


def test_still_benchmarks_take_floats_only(run_main):
    import benchmark_kv_cache

    code, _, err = run_main(benchmark_kv_cache.main, "--dtype", "int8")
    assert code == 2 and "--dtype: invalid choice: 'int8'" in err


def test_sums_always_fit_int32():
    from errors import UserError
    from quantisation.int8 import Int8Linear

    assert 127 * 127 * 2**17 < 2**31
    with torch.device("meta"):
        assert Int8Linear(torch.nn.Linear(2**17, 1)).weight.shape == (1, 2**17)
        with pytest.raises(UserError, match="int8 rows of 131073 weights"):
            Int8Linear(torch.nn.Linear(2**17 + 1, 1))


def in_floats(x, weight, scale, bias):
    return torch.nn.functional.linear(x, weight * scale[:, None], bias)


def test_it_is_the_model_with_rounded_weights(tiny):
    """If activations are not rounded, logits are a float model's with the rounded weights."""
    from quantisation import int8

    model = int8_tiny(tiny)
    rounded = tiny()
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if weight.dim() == 2 and name != "wpe.weight":
                values, scale = int8.quantize(int8.unrotate_channels(weight))
                weight.copy_(int8.rotate_channels(values * scale[:, None]))
    tokens = torch.tensor([random_tokens(16)])
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(int8, "int8_linear", in_floats)
        torch.testing.assert_close(model(tokens), rounded(tokens), rtol=0, atol=1e-12)


def test_a_file_is_rounded_while_it_is_read():
    from natives import to_int8

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
    from quantisation.int8 import unrotate_channels

    monkeypatch.setitem(PRESETS, "gpt2", tiny().config)
    whole = load_model("random:gpt2")
    rounded = load_model("random:gpt2", torch.int8)
    assert rounded.wte.weight.dtype == torch.int8 and rounded.dtype == torch.float32
    close = rounded.wte.weight * rounded.wte.scale[:, None]
    error = (close - unrotate_channels(whole.wte.weight)).abs().max()
    assert error <= rounded.wte.scale.max() / 2 * 1.001


@torch.inference_mode()
def test_probabilities_change_little(stories):
    """On a text of the model's own: 0.003 nats a token on average between the distributions."""
    text = run_rows(stories, [[4095]], max_new_tokens=64, ignore_eos=True)[0]
    models = (stories, load_model(CHECKPOINTS / "stories", torch.int8))
    p, q = (model(torch.tensor([text]))[0].log_softmax(dim=-1) for model in models)
    divergence = (p.exp() * (p - q)).sum(dim=-1)
    assert 0 < divergence.mean() < 0.01


def test_it_is_not_saved(tiny, tmp_path):
    with pytest.raises(ValueError, match="a model with int8 weights cannot be saved"):
        save_model(int8_tiny(tiny), tmp_path)
    assert not list(tmp_path.iterdir())

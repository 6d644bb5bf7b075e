"""Lesson 130: weights and inputs in blocks of 32 that share a scale."""

import gguf
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run_rows
from natives import quantized_in_blocks, random_numbers, random_rows
from ranks import LLAMA, compared, save_uneven

from cache import KVCache
from infer import next_logits
from loading.load import PRESETS, load_model, save_model
from quantisation import blocks
from quantisation.int8 import quantize

SIZES = [1, 31, 32, 33, 100, 576]


def layer_of(weight: torch.Tensor, bias=None):
    """A layer in blocks, with a weight that is rounded."""
    layer = torch.nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    layer.bias = None if bias is None else torch.nn.Parameter(bias)
    layer = blocks.BlockLinear(layer)
    blocks.load_block_rows(dict(layer.named_buffers()), "weight", slice(None), weight)
    return layer


def test_the_command_line_takes_blocks(cli):
    code, out, err = cli(
        "--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "blocks"
    )
    story = "Once upon a time, there was a little girl named Lily. She loved to\n"
    assert (code, out) == (0, story), err


def test_a_block_by_hand():
    x = torch.zeros(1, 40)
    x[0, :2] = torch.tensor([-63.5, 1.2])
    x[0, 32] = 127 * 2.0**-30  # a scale that no float16 is
    rounded = blocks.quantize_blocks(x)
    assert rounded.values.shape == (1, 64) and rounded.values.dtype == torch.int8
    assert rounded.scale.tolist() == [[0.5, 2.0**-24]] and rounded.scale.dtype == torch.float16
    assert rounded.values[0, :3].tolist() == [-127, 2, 0] and rounded.values[0, 32:].sum() == 2
    x[0, 32] = 127 * 1.4 * 2.0**-24  # a scale that loses much as a float16
    rounded = blocks.quantize_blocks(x)
    assert rounded.scale[0, 1] == 2.0**-24 and rounded.values[0, 32] == 127


def test_numbers_of_a_file_are_rounded_to_the_same_blocks():
    """What llama.cpp's rule made comes out again, bit for bit."""
    data = random_rows(50, 320).numpy()
    theirs = gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0)
    floats = torch.from_numpy(gguf.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0))
    ours = blocks.quantize_blocks(floats)
    rows = theirs.reshape(50, 10, 34)
    assert np.array_equal(ours.scale.numpy().view(np.uint8), rows[..., :2].reshape(50, 20))
    assert np.array_equal(ours.values.numpy().view(np.uint8), rows[..., 2:].reshape(50, 320))


@pytest.mark.parametrize("size", SIZES)
def test_outputs_are_exact_sums_of_blocks(size):
    bias = random_numbers(7)
    layer = layer_of(random_rows(7, size), bias)
    x = random_rows(5, size, seed=1)
    found = layer(x)
    expected = torch.zeros(5, 7)
    for start in range(0, size, 32):
        values, scale = quantize(x[:, start : start + 32])
        q = layer.weight[:, start : start + 32][:, : values.shape[1]]
        sums = values.long() @ q.long().t()
        expected += sums * (scale[:, None] * layer.scale[:, start // 32].float())
    assert torch.equal(found, expected + bias)
    assert torch.equal(found, torch.cat([layer(row[None]) for row in x]))


def test_an_outlier_costs_its_block_alone():
    x = random_numbers(1, 576)
    x[0, 7] = 300.0
    weight = random_numbers(40, 576, seed=1)
    exact = x @ weight.t()
    error = (layer_of(weight)(x) - exact).abs().mean()
    values, scale = quantize(x)  # with one scale for all
    rows = ((values * scale[:, None]) @ weight.t() - exact).abs().mean()
    assert 0 < 2.5 * error < rows


def test_zeros_nan_and_infinity():
    weight = torch.zeros(3, 64)
    weight[1, 40] = torch.nan
    weight[2, 3] = torch.inf
    found = layer_of(weight)(torch.ones(1, 64))[0]
    assert found[0] == 0 and not found[1:].isfinite().any()
    layer = layer_of(torch.ones(1, 64))
    for value in (torch.nan, torch.inf):
        x = torch.ones(2, 64)
        x[1, 5] = value
        assert layer(x)[0].isfinite() and not layer(x)[1].isfinite()


def test_a_file_is_rounded_while_it_is_read():
    read = load_model(CHECKPOINTS / "stories", torch.uint8)
    whole = load_model(CHECKPOINTS / "stories")
    for name, weight in whole.named_parameters():
        layer = read.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, blocks.BlockLinear) and name.endswith("weight"):
            rounded = blocks.quantize_blocks(weight.detach())
            assert torch.equal(layer.weight, rounded.values)
            assert torch.equal(layer.scale, rounded.scale)
        else:
            assert torch.equal(read.get_parameter(name), weight)
    assert read.dtype == torch.float32
    assert read.lm_head.weight is read.wte.weight and read.lm_head.scale is read.wte.scale
    tokens = torch.tensor([5, 4000])
    rows = read.wte(tokens) - whole.wte(tokens)
    assert 0 < rows.abs().max() < whole.wte(tokens).abs().max() / 127
    sizes = {t.data_ptr(): t.nbytes for t in read.state_dict().values()}
    floats = sum(weight.nbytes for weight in whole.parameters())
    assert sum(sizes.values()) < 0.29 * floats


def test_random_weights_are_rounded(tiny, monkeypatch):
    monkeypatch.setitem(PRESETS, "gpt2", tiny().config)
    rounded = load_model("random:gpt2", torch.uint8)
    expected = blocks.quantize_blocks(load_model("random:gpt2").wte.weight.detach())
    assert torch.equal(rounded.wte.weight, expected.values)


@torch.inference_mode()
def test_probabilities_change_little(stories):
    text = run_rows(stories, [[4095]], max_new_tokens=64, ignore_eos=True)[0]
    models = (stories, load_model(CHECKPOINTS / "stories", torch.uint8))
    p, q = (model(torch.tensor([text]))[0].log_softmax(dim=-1) for model in models)
    assert 0 < (p.exp() * (p - q)).sum(dim=-1).mean() < 0.003


@torch.inference_mode()
@pytest.mark.parametrize("family", ["tiny", "tiny_llama", "tiny_gemma", "tiny_experts"])
def test_each_family_computes_with_blocks(request, family):
    build = request.getfixturevalue(family)
    whole = build(dtype=torch.float32)
    rounded = quantized_in_blocks(build(dtype=torch.float32))
    text = [random_tokens(12)]
    linear = [each for each in rounded.modules() if isinstance(each, torch.nn.Linear)]
    assert not linear and not isinstance(rounded.layer("embedding"), torch.nn.Embedding)
    p, q = (next_logits(model, text, KVCache(model), keep=12) for model in (whole, rounded))
    assert 0 < (p - q).abs().median() < 0.06 * p.abs().median()


def test_ranks_join_inputs_in_whole_blocks(tiny_llama, tmp_path):
    """So --join reduce is gather, and of layers with any widths each bit is that of one process."""
    tokens = torch.tensor([random_tokens(12)])
    name = save_uneven(tiny_llama, tmp_path, "tiny_llama")
    for parallel_mode in ("gather", "reduce"):
        assert compared(3, name, tokens, parallel_mode, dtype=torch.uint8, native=False)[0] == 0
    tokens = torch.tensor([random_tokens(12, 4096)])
    assert compared(2, LLAMA, tokens, dtype=torch.uint8, native=False)[0] == 0


def test_it_is_not_saved(tmp_path):
    model = load_model(CHECKPOINTS / "stories", torch.uint8)
    with pytest.raises(ValueError, match="a model with weights in blocks cannot be saved"):
        save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())

"""Layers in C: panels of weights, exact products, dtypes, and nothing outside their tensors."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, record, run
from natives import native_linear, random_layer, random_rows, threads, to_int8, with_native_linear
from ranks import ROUNDING, compared

import sampling
from errors import UserError
from loading.load import load_model, save_model
from model import GPT
from native.linear import NativeEmbedding, pack

pytestmark = pytest.mark.usefixtures("compiled")
DRAFT = CHECKPOINTS / "stories-draft"
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.mark.parametrize("dtype, group", [(torch.float32, 1), *((torch.int8, n) for n in (2, 4))])
@pytest.mark.parametrize("out, size, panel_width", [(8, 3, 4), (10, 3, 4), (3, 5, 8), (16, 1, 16)])
def test_each_weight_is_in_the_panel_of_its_output(out, size, panel_width, dtype, group):
    """Where the weight was; what fills no panel is copied to one of its own.

    Groups of inputs stay together, and zeros fill up the last one.
    """
    weight = (torch.arange(out * size) - 20).to(dtype).view(out, size)
    before = torch.nn.functional.pad(weight.clone(), (0, -size % group))
    panels, tail_panel = (each.view(dtype) for each in pack(weight, panel_width, group))
    full, left = divmod(out, panel_width)
    groups = -(-size // group)
    if group == 1:
        assert panels.data_ptr() == weight.data_ptr() or not full
    panels = panels.view(full, groups, panel_width, group).transpose(1, 2).flatten(0, 1)
    tail_panel = tail_panel.view(groups, panel_width, group).transpose(0, 1)
    assert torch.equal(panels.flatten(1), before[: full * panel_width])
    assert torch.equal(tail_panel.flatten(1)[:left], before[full * panel_width :])
    assert not tail_panel[left:].any()


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


def test_a_long_sum_is_made_of_short_ones(target):
    """A sum of 3,072 positive products, one after the other, is off by some 5e-7."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(32, 3072, generator=generator)
    x = torch.rand(8, 3072, generator=generator)
    expected = x.double() @ weight.double().t()
    off = (native_linear(weight)(x) - expected).abs() / expected
    assert off.mean() < 2e-7


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_among_any_others_and_at_any_number_of_threads(target, int8):
    for out, size in ((7, 3), (64, 32), (33, 100), (130, 1000)):
        linear = native_linear(*random_layer(out, size, int8=int8))
        x = random_rows(19, size)
        alone = torch.cat([linear(row[None]) for row in x])
        for count in range(1, 20):
            assert torch.equal(linear(x[:count]), alone[:count])
            assert torch.equal(linear(x[-count:]), alone[-count:])
        with threads(3):
            assert torch.equal(linear(x), alone)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(target, bad):
    x = torch.ones(2, 70)
    x[1, 3] = bad
    y = native_linear(*random_layer(40, 70))(x)
    assert y[0].isfinite().all() and not y[1].isfinite().any()


@pytest.mark.parametrize("int8", [False, True])
def test_shapes_and_strides(int8):
    weight, scale, bias = random_layer(10, 6, int8=int8)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    linear = native_linear(weight.clone(), scale, bias)
    y = linear(x)
    assert y.shape == (6, 2, 10) and torch.equal(y[4, 1], linear(x[4, 1].clone()))
    assert linear(x[:0]).shape == (0, 2, 10)
    strided = random_rows(3, 12)[:, ::2]
    assert torch.equal(linear(strided), linear(strided.contiguous()))
    nothing = native_linear(weight[:, :0].clone(), scale, bias)(x[..., :0])
    assert torch.equal(nothing, bias.expand(6, 2, 10))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int8, torch.float16, torch.bfloat16], ids=str
)
def test_weights_are_packed_where_they_lie(dtype):
    weight, scale, _ = random_layer(100, 40, int8=dtype == torch.int8)
    weight = weight.to(dtype)
    linear = native_linear(weight, scale)
    assert linear.weight.data_ptr() == weight.data_ptr()
    full = linear.weight.shape[0] * linear.weight.shape[2]
    assert full <= 100 < full + linear.tail_panel.shape[1]
    assert linear.weight.nbytes == full * 40 * dtype.itemsize


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
    "scale": lambda scale: scale[:9],
    "scale negative": torch._neg_view,
}


@pytest.mark.parametrize(
    "which, int8",
    [
        *((which, True) for which in WRONG),
        *((which, False) for which in WRONG if "scale" not in which),
    ],
)
def test_nothing_outside_its_arrays_is_read(which, int8):
    name = which.split()[0]
    given = dict(zip(("weight", "scale", "bias"), random_layer(10, 6, int8=int8)))
    given["x"] = random_rows(2, 6)
    given[name] = WRONG[which](given[name])
    said = ", negative" if "negative" in which else ""
    with pytest.raises(ValueError, match="native code reads contiguous torch.*" + said):
        x = given.pop("x")
        native_linear(**given)(x)


# Weights of 16 bits


@HALVES
def test_each_number_of_16_bits_is_read_as_it_is(dtype, target):
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    found = NativeEmbedding(native_linear(numbers.clone()))(torch.arange(len(numbers)))
    expected = numbers.float()
    exact = found.view(torch.int32) == expected.view(torch.int32)
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan()) and (exact | found.isnan()).all()


@HALVES
def test_products_of_16_bits_have_the_bits_of_float32(dtype, target):
    for out, size in ((1, 1), (7, 3), (33, 31), (64, 32), (133, 100)):
        weight, _, bias = random_layer(out, size)
        weight, bias = weight.to(dtype), bias.to(dtype)
        exact = native_linear(weight.float(), None, bias.float())
        halves = native_linear(weight.clone(), None, bias)
        assert halves.bias.dtype == torch.float32
        for rows in (1, 2, 3, 6, 8, 19):
            x = random_rows(rows, size)
            assert torch.equal(halves(x), exact(x))


def test_ranks_have_the_logits_of_one_process():
    tokens = torch.tensor([[*range(15)]])
    assert compared(2, DRAFT, tokens, dtype=torch.bfloat16)[0] <= ROUNDING[torch.bfloat16]


def test_the_command_line_has_the_output_of_float32_with_rounded_weights(cli, tmp_path):
    save_model(load_model(DRAFT, torch.float16).float(), tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((DRAFT / "tokenizer.json").read_bytes())
    arguments = ("--prompt", "Once upon a time", "--max-new-tokens", 20, "--backend", "native")
    expected = cli("--model", tmp_path, *arguments)[:2]
    for more in ((), ("--no-cache",)):  # without a cache torch attends, in float32
        code, out, err = cli("--model", DRAFT, *arguments, "--dtype", "float16", *more)
        assert (code, out) == expected and code == 0 and "note" not in err


@HALVES
def test_sampling_sees_float32(tiny, monkeypatch, dtype):
    seen = record(monkeypatch, sampling, "sample", lambda logits, *_: logits.dtype)
    run(tiny(dtype=dtype), [[1]], max_new_tokens=3, repetition_penalty=1.1)
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
def test_the_command_line_takes_a_dtype(cli, monkeypatch, dtype):
    built = record(monkeypatch, GPT, "__init__", lambda model, config: model)
    options = ("--max-new-tokens", 8, *(("--dtype", dtype) if dtype else ()))
    code, out, _ = cli("--prompt", "Once upon a time", "--backend", "torch", *options)
    assert code == 0 and out.startswith("Once upon a time")
    expected = getattr(torch, dtype or "float32")
    assert {weight.dtype for weight in built[0].parameters()} == {expected}


def test_a_dtype_that_is_not_there_is_one_line(cli, tiny_checkpoint, monkeypatch):
    assert is_one_line(cli("--dtype", "int3"), "float32", "bfloat16")

    def ones(*args, **kwargs):
        raise TypeError("BFloat16 is not supported on this device")

    monkeypatch.setattr(torch, "ones", ones)
    result = cli("--model", tiny_checkpoint, "--dtype", "bfloat16")
    assert is_one_line(result, "--dtype bfloat16: not supported on cpu")


# Layers of a model


@torch.inference_mode()
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_an_embedding_reads_its_rows(tiny, target, int8, shape):
    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0, **shape)
        tokens = torch.arange(vocab_size).view(1, -1)
        model = to_int8(model) if int8 else model
        expected = model.wte(tokens)
        assert torch.equal(with_native_linear(model).wte(tokens), expected)
        for token in (-1, vocab_size):
            with pytest.raises(ValueError, match=f"must be from 0 to {vocab_size - 1}"):
                model.wte(torch.tensor([token]))


@pytest.mark.parametrize("int8", [False, True])
def test_a_shared_weight_is_packed_once(tiny, tiny_llama, int8):
    for build, tied in ((tiny, True), (tiny_llama, True), (tiny_llama, False)):
        model = build(
            dtype=torch.float32, **({} if build is tiny else {"tie_word_embeddings": tied})
        )
        with_native_linear(to_int8(model) if int8 else model)
        assert (model.layer("embedding").linear is model.lm_head) == tied


def test_native_is_for_the_cpu():
    from command_line.models import load_models

    with pytest.raises(UserError) as error:
        load_models(["m"], SimpleNamespace(dtype="int8", backend="native"), "cuda")
    assert str(error.value) == "--backend native requires --device cpu, not cuda"

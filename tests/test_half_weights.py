"""Lesson 129: weights stay float16 or bfloat16 in C, which computes float32 passes of them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import finish, make_engine, own_texts, request_params
from natives import in_pieces, native, native_linear, random_layer, random_rows, random_texts
from ranks import ROUNDING, compared

from cache import KVCache
from errors import UserError
from loading.load import load_model, save_model

DRAFT = CHECKPOINTS / "stories-draft"
HALVES = [torch.float16, torch.bfloat16]
NAMES = ["float16", "bfloat16"]
FAMILIES = ["tiny", "tiny_llama", "tiny_experts", "tiny_windows", "tiny_gemma"]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """By dtype, a directory with a model whose weights were rounded to it, in float32."""
    directories = {}
    for name, dtype in zip(NAMES, HALVES):
        directory = directories[name] = tmp_path_factory.mktemp(name)
        save_model(load_model(DRAFT, dtype).float(), directory)
        tokenizer = (DRAFT / "tokenizer.json").read_bytes()
        (directory / "tokenizer.json").write_bytes(tokenizer)
    return directories


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_float32_with_rounded_weights(cli, rounded, name):
    arguments = ("--prompt", "Once upon a time", "--max-new-tokens", 20)
    expected = cli("--model", rounded[name], *arguments, "--backend", "native")[:2]
    half = ("--model", DRAFT, *arguments, "--dtype", name)
    for backend in ("native", "auto"):
        code, out, err = cli(*half, "--backend", backend)
        assert (code, out) == expected and code == 0 and "note" not in err
    # Without a cache torch attends, in float32, between products in C.
    assert cli(*half, "--backend", "native", "--no-cache")[:2] == expected


def test_native_is_for_the_cpu():
    from command_line.models import load_models

    with pytest.raises(UserError) as error:
        load_models([DRAFT], SimpleNamespace(dtype="int8", backend="native"), "cuda")
    assert str(error.value) == "--backend native requires --device cpu, not cuda"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_each_number_of_16_bits_is_read_as_it_is(dtype, target):
    """Subnormal ones, both zeros, infinities and NaN too."""
    from native.linear import NativeEmbedding

    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    found = NativeEmbedding(native_linear(numbers.clone()))(torch.arange(len(numbers)))
    expected = numbers.float()
    exact = found.view(torch.int32) == expected.view(torch.int32)
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan()) and (exact | found.isnan()).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_have_the_bits_of_float32(dtype, target):
    for out, size in ((1, 1), (7, 3), (33, 31), (64, 32), (133, 100)):
        weight, _, bias = random_layer(out, size)
        weight = weight.to(dtype)
        bias = bias.to(dtype)
        exact = native_linear(weight.float(), None, bias.float())
        halves = native_linear(weight.clone(), None, bias)
        assert halves.bias.dtype == torch.float32
        for rows in (1, 2, 3, 6, 19):
            x = random_rows(rows, size)
            assert torch.equal(halves(x), exact(x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weights_are_packed_where_they_lie(dtype, compiled):
    weight = torch.randn(192, 50).to(dtype)
    linear = native_linear(weight)
    assert linear.weight.data_ptr() == weight.data_ptr()
    assert linear.weight.nbytes == 192 * 50 * 2 and linear.tail_panel.itemsize == 2


@torch.inference_mode()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_have_the_bits_of_float32(request, family, dtype, target):
    model = request.getfixturevalue(family)(dtype=torch.float32).to(dtype)
    exact = native(copy.deepcopy(model).float())
    native(model)
    length = model.config.block_size
    texts = random_texts(model, 2, length)
    assert KVCache(model, 1, length).storage.dtype == model.dtype == torch.float32
    for size in (1, 5, length):
        assert torch.equal(in_pieces(model, texts, size), in_pieces(exact, texts, size))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_are_nearer_to_float32s_than_torchs(dtype, compiled, stories):
    texts = random_texts(stories, 1, 64)
    expected = stories(texts)
    model = load_model(CHECKPOINTS / "stories", dtype)
    torchs = (model(texts).float() - expected).abs().mean()
    ours = (in_pieces(native(model), texts, 64) - expected).abs().mean()
    assert 0 < ours < 0.8 * torchs


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_experts"])
def test_texts_of_the_engine_are_their_own(request, family, compiled):
    model = native(request.getfixturevalue(family)(dtype=torch.bfloat16))
    prompts = [random_tokens(3 + row, seed=row) for row in range(5)]
    params = request_params(5, max_new_tokens=9)
    engine, requests = make_engine(
        model, prompts, params, max_num_seqs=3, page_size=4, max_num_batched_tokens=7
    )
    finish(engine)
    assert [request.output for request in requests] == own_texts(model, prompts, params)


def test_ranks_have_the_logits_of_one_process(compiled):
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, DRAFT, tokens, dtype=torch.bfloat16)[0] <= ROUNDING[torch.bfloat16]


def test_still_other_floats_are_refused(tiny, compiled):
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(tiny(dtype=torch.float64))

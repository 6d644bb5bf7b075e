"""Lesson 136: C writes and reads keys and values of 16 and 8 bits."""

import copy

import pytest
import torch
from conftest import random_tokens
from engines import SMALL_ENGINE, finish, make_engine, make_greedy, own_texts, request_params
from natives import (
    call,
    in_pieces,
    native,
    native_in_dtype,
    on_each_target,
    passed,
    random_numbers,
    random_texts,
    threads,
)

from cache import KVCache, stored_head_dim, to_cache_dtype

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
FAMILIES = pytest.mark.parametrize(
    "family", ["tiny", "tiny_llama", "tiny_experts", "tiny_windows", "tiny_gemma"]
)


def stored_in_c(library, rows: torch.Tensor, dtype) -> torch.Tensor:
    """Rows, (n, D), as C writes them into a cache."""
    stored = torch.full((len(rows), stored_head_dim(rows.shape[1], dtype)), 99, dtype=dtype)
    for row, to in zip(rows.clone(), stored):
        call(library.store_kv_row, {torch.float16: 1, torch.int8: 3}[dtype], len(row), row, to)
    return stored


def test_a_float16_is_the_nearest(library):
    """Every number between two of them, whose middle becomes the even one, and far ones."""
    assert hasattr(library, "store_kv_row")
    halves = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[:-1].double()
    steps = torch.tensor([0, 0.25, 0.5, 0.5 + 2**-12, 0.5 - 2**-12, 0.75], dtype=torch.float64)
    below = halves[:, None] + steps * halves.diff(append=torch.tensor([65536.0]))[:, None]
    far = [65519.99, 65520, 65536, 1e9, torch.inf, 1e-8, 2.0**-25, 2.0**-149, 2.0**-126]
    numbers = torch.cat([below.flatten().float(), torch.tensor(far)])
    numbers = torch.cat([numbers, -numbers])
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 1000)).view(-1, 1000)
    assert torch.equal(
        stored_in_c(library, rows, torch.float16).view(torch.int16), rows.half().view(torch.int16)
    )
    assert stored_in_c(library, torch.full((1, 7), torch.nan), torch.float16).isnan().all()


@pytest.mark.parametrize("dim", [1, 5, 6, 20, 32, 64, 100])
@DTYPES
def test_rows_have_torchs_bits(library, dim, dtype):
    assert hasattr(library, "store_kv_row")
    rows = (
        random_numbers(9, dim) * torch.tensor([0, 1e-45, 1e-30, 1e-3, 1, 30, 1e3, 1e4, 3])[:, None]
    )
    found = stored_in_c(library, rows, dtype)
    assert torch.equal(found.view(torch.uint8), to_cache_dtype(rows, dtype).view(torch.uint8))


@torch.inference_mode()
@FAMILIES
@DTYPES
def test_a_pass_stores_rounded_rows(request, compiled, attended, family, dtype):
    """In the first layer: those of a float32 cache as torch rounds them."""
    model = native(request.getfixturevalue(family)(dtype=torch.float32))
    texts = random_texts(model, 2)
    storages = []
    for each in (None, dtype):
        cache = KVCache(model, *texts.shape, each)
        model.runner.logits(model, cache, cache.spans(texts.tolist()), [1, 1])
        storages.append(cache.storage[0])
    exact, small = storages
    assert torch.equal(small, to_cache_dtype(exact, dtype)) and not attended


@torch.inference_mode()
@FAMILIES
@DTYPES
def test_chunks_threads_and_other_rows_change_no_bit(request, target, family, dtype):
    model = native(request.getfixturevalue(family)(dtype=torch.float32))
    texts = random_texts(model, 3, model.config.block_size)
    whole = in_pieces(model, texts, 40, dtype)
    for size in (1, 5, 13):
        assert torch.equal(in_pieces(model, texts, size, dtype), whole)
    assert torch.equal(in_pieces(model, texts[1:2], 5, dtype), whole[1:2])
    with threads(3):
        assert torch.equal(in_pieces(model, texts, 5, dtype), whole)


@torch.inference_mode()
@FAMILIES
@DTYPES
def test_logits_are_near_torchs(request, target, attended, family, dtype):
    """A last bit may become a step, so they are not equal. torch attends to nothing."""
    model = request.getfixturevalue(family)(dtype=torch.float32)
    texts = random_texts(model, 2)
    expected = in_pieces(copy.deepcopy(model), texts, 5, dtype)
    exact = in_pieces(model, texts, 5)
    attended.clear()
    found = in_pieces(native(model), texts, 5, dtype)
    assert not attended
    assert (found - expected).abs().mean() < 0.2 * (expected - exact).abs().mean()


def without_keys(model):
    """The model, whose new keys and values are 0, which no cache rounds."""
    for name, weight in model.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            weight.data.zero_()
        elif "c_attn" in name:
            weight.data[len(weight) // 3 :] = 0
    return model


@torch.inference_mode()
@pytest.mark.parametrize("family", ["tiny", "tiny_llama"])
@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 64}, {"head_dim": 20}, {"n_embd": 128}], ids=str
)
def test_float16_is_read_as_it_is(request, target, family, shape):
    """With numbers of all sizes in the cache: the bits are those of float32 with the same."""
    if (family == "tiny") == ("head_dim" in shape):
        shape = {}
    shape = {"block_size": 100, "dtype": torch.float32} | shape
    model = native(without_keys(request.getfixturevalue(family)(**shape)))
    bits = torch.randint(0x7C00, (50_000,), generator=torch.Generator().manual_seed(0))
    numbers = bits.to(torch.int16).view(torch.float16) * torch.tensor([-1, 1]).half().repeat(25_000)
    small = KVCache(model, 1, 70, torch.float16).storage
    small[:] = numbers.repeat(2)[: small.numel()].view(small.shape)
    for count in (1, 40):
        part = [0], 30, random_tokens(count)
        logits = [
            passed(model, storage, [part], [count]) for storage in (small.clone(), small.float())
        ]
        assert logits[0].isfinite().all() and torch.equal(*logits)


@torch.inference_mode()
@FAMILIES
@DTYPES
def test_int8_models_have_the_same_bits_on_each_processor(request, compiled, family, dtype):
    model = of_int8(request.getfixturevalue(family))
    texts = random_texts(model, 2)
    found = on_each_target(model, texts, 5, dtype)
    assert torch.equal(found, on_each_target(model, texts, 16, dtype))


def of_int8(build):
    """A model with int8 weights, in torch yet."""
    from natives import to_int8

    return to_int8(build(dtype=torch.float32))


@pytest.mark.parametrize("weights", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("family", ["tiny", "tiny_llama", "tiny_gemma"])
@DTYPES
def test_texts_of_the_engine_are_their_own(request, compiled, attended, family, weights, dtype):
    """With chunks, preemption, hops, windows and pages that hold NaN."""
    model = native_in_dtype(request.getfixturevalue(family)(dtype=torch.float32), weights)
    prompts = [random_tokens(length, seed=length) for length in (3, 14, 1, 9, 14)]
    params = request_params(len(prompts), max_new_tokens=18, temperature=0.8)
    options = {
        "max_num_seqs": 4,
        "page_size": 4,
        "num_pages": 12,
        "max_num_batched_tokens": 7,
        "cache_dtype": dtype,
    }
    engine, requests = make_engine(model, prompts, params, **options)
    for storage in engine.cache.storages:
        storage.view(torch.uint8).fill_(255)
    finish(engine)
    own = own_texts(model, prompts, params, None, dtype)
    assert [request.output for request in requests] == own
    assert not attended


@DTYPES
def test_layers_with_a_window_have_pages_of_their_own(tiny_gemma, compiled, attended, dtype):
    model = native(tiny_gemma(sliding_windows=(5, None, 8), block_size=200, dtype=torch.float32))
    engine, requests = make_greedy(model, [3, 70, 9, 30], 40, **SMALL_ENGINE, cache_dtype=dtype)
    assert len(engine.cache.storages) == 2
    finish(engine)
    prompts = [request.tokens[: request.prompt_length] for request in requests]
    own = own_texts(model, prompts, [request.params for request in requests], None, dtype)
    assert [request.output for request in requests] == own and not attended


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_the_command_line_computes_the_whole_pass_in_c(cli, attended, name):
    arguments = ("--prompt", "Once upon a time", "--max-new-tokens", 12)
    expected = cli(*arguments, "--backend", "torch", "--cache-dtype", name)[:2]
    attended.clear()
    assert cli(*arguments, "--backend", "native", "--cache-dtype", name)[:2] == expected
    assert not attended


def test_still_other_storages_are_refused(tiny_llama, compiled):
    """A width or a dtype that C does not know."""
    model = native(tiny_llama(dtype=torch.float32))
    for dtype, width in ((torch.int8, 10), (torch.float16, 5), (torch.bfloat16, 6)):
        storage = torch.zeros(2, 2, 1, 2, 16, width, dtype=dtype)
        with pytest.raises(ValueError, match="native code reads contiguous torch"):
            passed(model, storage, [([0], 0, [1])], [1])

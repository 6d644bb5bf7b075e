"""A pass in C of any tokens of any texts: the same bits whatever is computed beside them."""

import copy

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, record, run_rows
from engines import own_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import (
    WEIGHT_DTYPES,
    both,
    in_pieces,
    native,
    native_in_dtype,
    random_texts,
    threads,
    to_int8,
)
from test_native_llama import FORMS as LLAMAS
from test_native_step import FORMS as GPTS

from cache import KVCache
from infer import generate, pass_logits
from infer_speculative import generate_speculative
from loading.load import load_model
from sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
FORMS = [*(("tiny", form) for form in GPTS), *(("tiny_llama", form) for form in LLAMAS)]


@pytest.fixture
def passes(monkeypatch):
    """A list to which each native pass adds its new tokens."""
    from native import NativeRunner

    def tokens(runner, storage, spans, keep):
        return [span.tokens for span in spans]

    return record(monkeypatch, NativeRunner, "compute", tokens)


def test_a_prompt_and_many_rows_are_native(cli, torch_passes):
    """No pass with a cache is left for torch."""
    args = ("--prompt", "Once upon a time, there was a little girl named Lily. " * 5)
    args += ("--num-samples", 3, "--max-new-tokens", 12)
    expected = cli(*args, "--backend", "torch")[:2]
    torch_passes.clear()
    assert cli(*args)[:2] == expected and expected[0] == 0
    assert torch_passes == []


@torch.inference_mode()
@ALL_TARGETS
@WEIGHT_DTYPES
@pytest.mark.parametrize("odd", [False, True])
def test_the_same_bits_in_pieces_of_any_size(build, target, dtype, odd):
    """They are as near to float64's as torch's; in int8 they are equal on every processor."""
    shape = {"n_head": 3, "n_embd": 51} if odd else {}
    if odd and build(0).path("embedding") == "embed_tokens":
        shape = {"head_dim": 20, "n_embd": 51, "n_inner": 57}
    model = build(dtype=torch.float32, **shape)
    texts = random_texts(model, 2)
    exact = copy.deepcopy(model).double()(texts).float()
    if dtype == torch.int8:
        to_int8(model)
    expected = in_pieces(native(copy.deepcopy(model), target), texts, 8)
    if dtype == torch.float32:
        torch.testing.assert_close(expected, exact, rtol=3e-5, atol=3e-5)
    else:
        assert torch.equal(expected, in_pieces(native(copy.deepcopy(model)), texts, 8))
    native(model, target)
    for size in (1, 3, 7):
        assert torch.equal(in_pieces(model, texts, size), expected)


@torch.inference_mode()
@WEIGHT_DTYPES
@pytest.mark.parametrize("keys", [None, 2, 6])
def test_the_same_bits_of_many_tokens_at_any_number_of_threads(tiny, tiny_llama, dtype, keys):
    """Fewer tokens than threads each thread prepares for itself, more are shared out.

    With a key for each query, threads do not wait between the two; with fewer they do.
    """
    if keys is None:
        model = tiny(dtype=torch.float32, n_embd=64)
    else:
        heads = {"n_head": 6, "n_kv_head": keys}
        model = tiny_llama(dtype=torch.float32, n_embd=64, n_inner=96, **heads)
    model = native_in_dtype(model, dtype)
    for rows, length in ((1, 1), (1, 2), (2, 1), (3, 1), (1, 16), (5, 7)):
        texts = random_texts(model, rows, length)
        expected = in_pieces(model, texts, length)
        for count in (2, 5):
            with threads(count):
                for _ in range(2):
                    assert torch.equal(in_pieces(model, texts, length), expected)


@torch.inference_mode()
@ALL_TARGETS
@pytest.mark.parametrize("family, form", FORMS, ids=str)
def test_logits_of_any_form_in_any_pieces(request, target, family, form):
    """They are as near to those of float64 as torch's."""
    model = request.getfixturevalue(family)(dtype=torch.float32, **form)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(std=0.8 * model.config.n_embd**-0.5, generator=generator)
    texts = random_texts(model, 2)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (3, 8):
        torch.testing.assert_close(in_pieces(model, texts, size), expected, rtol=1e-5, atol=1e-5)


@given(st.data())
@settings(max_examples=15)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(build, data):
    """Each row's logits are those of its own text; nothing else in the cache changes."""
    eager, model = both(build)
    pasts = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=4))
    keep = data.draw(st.integers(1, 3))
    rows = data.draw(st.permutations(range(len(pasts))))[: data.draw(st.integers(1, len(pasts)))]
    lengths = [data.draw(st.integers(keep, 4)) for _ in rows]
    texts = [random_tokens(16, seed=row) for row in range(len(pasts))]
    caches = [KVCache(eager, len(pasts)) for _ in range(2)]
    for row, past in enumerate(pasts):
        if past:
            for cache in caches:
                pass_logits(eager, [texts[row][:past]], [row], cache, 1)
    new = [texts[row][pasts[row] : pasts[row] + length] for row, length in zip(rows, lengths)]
    expected, logits = (
        pass_logits(each, new, rows, cache, keep) for each, cache in zip((eager, model), caches)
    )
    torch.testing.assert_close(logits, expected, rtol=3e-5, atol=3e-5)
    assert caches[0].tokens == caches[1].tokens
    torch.testing.assert_close(caches[0].storage, caches[1].storage, rtol=1e-5, atol=1e-5)


MODES = {
    "hops": {"max_new_tokens": 50},
    "every step a hop": {"options": {"stride": 1}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "sampled": {"temperature": 1.0, "ignore_eos": False},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    "a prompt of two windows": {"prompts": [random_tokens(100), random_tokens(30, seed=1)]},
}


@pytest.mark.parametrize("mode", MODES)
def test_texts_of_ragged_rows(build, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]
    given = {"prompts": prompts, "max_new_tokens": 30, "ignore_eos": True} | MODES[mode]

    def texts(model):
        return run_rows(model, generator=torch.Generator().manual_seed(0), **given)

    eager, compiled = both(build)
    assert texts(compiled) == texts(eager)


def test_float32_texts_do_not_depend_on_their_batch():
    """Sampled texts too are equal bit for bit, not only up to rounding."""
    model = native(load_model(CHECKPOINTS / "stories-draft"))
    prompts = [random_tokens(length, 4096, seed=length) for length in (1, 40, 7, 90)]
    each = [SamplingParams(120, True, temperature=1.0, seed=seed) for seed in range(4)]
    together = [list(column) for column in zip(*generate(model, prompts, each))]
    assert together == own_texts(model, prompts, each)


@pytest.mark.parametrize("gamma, temperature", [(1, 0.0), (4, 1.0), (16, 0.0)])
def test_speculation(build, tiny_llama, gamma, temperature):
    params = SamplingParams(40, True, temperature=temperature, presence_penalty=0.3)

    def passes(use):
        target = use(build(dtype=torch.float32))
        draft = use(tiny_llama(dtype=torch.float32, n_layer=1))
        generator = torch.Generator().manual_seed(0)
        return list(generate_speculative(target, draft, [3], params, gamma, generator))

    assert passes(native) == passes(lambda model: model)


def test_which_passes_are_native(build, passes):
    """All passes with a cache, of any number of tokens, are in C."""
    from native import use_native

    model = build(dtype=torch.float32, block_size=32)
    seen = []
    hidden = model.hidden
    model.hidden = lambda tokens, *args: seen.append(tokens.shape[1]) or hidden(tokens, *args)
    use_native(model)
    run_rows(model, [random_tokens(16)] * 2, max_new_tokens=3, ignore_eos=True)
    assert [sum(map(len, new)) for new in passes] == [32, 2, 2] and not seen
    without = {"use_cache": False}
    run_rows(model, [random_tokens(3)], options=without, max_new_tokens=3, ignore_eos=True)
    assert len(passes) == 3 and seen == [3, 4, 5]

"""Lesson 13: with the cache a step computes new tokens only; its logits are those of all."""

import pytest
import torch
from conftest import CHECKPOINTS, in_cache, passed_widths, random_tokens, run
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from cache import KVCache
from infer import next_logits


@torch.inference_mode()
def in_pieces(model, tokens, sizes):
    """The logits of all positions, from passes of these sizes on one cache."""
    cache = KVCache(model)
    logits = []
    for piece in torch.tensor(tokens).split(sizes):
        logits.append(in_cache(model, cache, piece.tolist()))
    assert cache.tokens == [tokens]
    return torch.cat(logits, dim=1)


def test_a_decode_step_computes_one_position(tiny):
    model, widths = passed_widths(tiny())
    run(model, [[1, 2, 3, 4, 5]], max_new_tokens=10, ignore_eos=True)
    assert widths == [5] + [1] * 9


def test_without_the_cache_all_positions_are_computed(tiny):
    model, widths = passed_widths(tiny())
    run(model, [[1, 2, 3, 4, 5]], max_new_tokens=4, ignore_eos=True, options={"use_cache": False})
    assert widths == [5, 6, 7, 8]


@given(
    st.lists(st.integers(1, 16), min_size=1).filter(lambda sizes: sum(sizes) <= 16),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_logits_equal_full_recomputation_however_they_are_cut(tiny, sizes, seed):
    model = tiny()
    tokens = random_tokens(sum(sizes), seed=seed)
    full = model(torch.tensor([tokens]))
    torch.testing.assert_close(in_pieces(model, tokens, sizes), full, rtol=0, atol=1e-12)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
@settings(max_examples=40)
@torch.inference_mode()
def test_any_window_may_follow_any_other(tiny, windows):
    """What both have in common is kept, so stale keys never answer for a text that has changed."""
    model = tiny()
    cache = KVCache(model)
    for window in windows:
        expected = model(torch.tensor([window]))[:, -1].float()
        torch.testing.assert_close(next_logits(model, [window], cache).view(1, -1), expected)
        assert cache.tokens == [window]


@pytest.mark.parametrize("length", [1, 5, 16, 40])
def test_the_text_is_that_of_recomputation_past_the_window_too(tiny, length):
    model = tiny(seed=6)
    params = {"max_new_tokens": 50, "ignore_eos": True}
    prompts = [random_tokens(length, seed=seed) for seed in (0, 1)]
    cached = run(model, prompts, **params)
    assert cached == run(model, prompts, options={"use_cache": False}, **params)
    assert cached == run(model, prompts, options={"use_cache": True}, **params)


def test_the_command_line_with_and_without(cli, monkeypatch):
    chosen = []
    generate = infer.generate

    def watched(model, prompts, params, generator=None, use_cache=True, *rest):
        chosen.append(use_cache)
        return generate(model, prompts, params, generator, use_cache, *rest)

    monkeypatch.setattr(infer, "generate", watched)
    draft = ("--model", CHECKPOINTS / "stories-draft", "--prompt", "Once upon a time")
    cached = cli(*draft, "--max-new-tokens", 20)
    uncached = cli(*draft, "--max-new-tokens", 20, "--no-cache")
    assert cached[0] == 0
    assert cached[:2] == uncached[:2]
    assert chosen == [True, False]

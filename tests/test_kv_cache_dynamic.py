"""Lesson 13: with the cache each step computes its new tokens only, and the logits are those of computing all."""

import pytest
import torch
from conftest import CHECKPOINTS
from hypothesis import given
from hypothesis import strategies as st


def run(model, prompts, max_new_tokens, **options):
    from infer import SamplingParams, generate

    return list(generate(model, prompts, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True), **options))


def random_tokens(length, vocab_size=61, seed=0):
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def in_pieces(model, tokens, sizes):
    """The logits of all positions, from passes of these sizes on one cache."""
    from model import KVCache

    cache = KVCache(model)
    return torch.cat([model(piece, cache=cache) for piece in tokens.split(sizes, dim=1)], dim=1)


def test_a_decode_step_computes_one_position(tiny):
    model, widths = tiny(), []
    model.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    run(model, [[1, 2, 3, 4, 5]], 10)
    assert widths == [5] + [1] * 9


def test_without_the_cache_all_positions_are_computed(tiny):
    model, widths = tiny(), []
    model.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    run(model, [[1, 2, 3, 4, 5]], 4, use_cache=False)
    assert widths == [5, 6, 7, 8]


@given(st.lists(st.integers(1, 16), min_size=1).filter(lambda sizes: sum(sizes) <= 16), st.integers(0, 99))
def test_logits_equal_full_recomputation_however_they_are_cut(tiny, sizes, seed):
    model, tokens = tiny(), random_tokens(sum(sizes), seed=seed)
    torch.testing.assert_close(in_pieces(model, tokens, sizes), model(tokens), rtol=0, atol=1e-12)


@torch.inference_mode()
def test_each_step_on_the_embedded_model(stories):
    tokens = random_tokens(256, vocab_size=4096)
    full = stories(tokens)
    torch.testing.assert_close(in_pieces(stories, tokens, [100] + [1] * 156), full, rtol=0, atol=1e-4)
    torch.testing.assert_close(in_pieces(stories, tokens, [1, 100, 5, 3, 147]), full, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 16, 40])
def test_the_text_is_that_of_recomputation_past_the_window_too(tiny, length):
    model, prompt = tiny(seed=6), random_tokens(length)[0].tolist()
    assert run(model, [prompt], 40) == run(model, [prompt], 40, use_cache=False)


def test_rows_do_not_share_keys(tiny):
    model, prompts = tiny(seed=12), [[5, 6], [40, 2], [0, 59]]
    together = run(model, prompts, 10, use_cache=True)
    assert together == [list(step) for step in zip(*(sum(run(model, [prompt], 10), []) for prompt in prompts))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(tiny, dtype):
    model = tiny(dtype=dtype)
    logits = in_pieces(model, random_tokens(12), [8, 1, 3])
    assert logits.dtype == dtype and (logits.float() - model(random_tokens(12)).float()).abs().max() < 0.1


def test_past_and_new_tokens_together_must_fit_the_window(tiny):
    with pytest.raises(ValueError, match="7 tokens in one pass after 10 in the cache; .* block_size = 16"):
        in_pieces(tiny(), random_tokens(17), [10, 7])


def test_the_command_line_says_the_same_without_the_cache(cli):
    args = ("--model", CHECKPOINTS / "stories", "--prompt", "One day, a cat", "--max-new-tokens", 30)
    assert cli(*args)[1] == cli(*args, "--no-cache")[1] != ""


def test_still_one_token_a_prompt_and_step(tiny):
    assert [len(step) for step in run(tiny(), [[1], [2]], 3)] == [2, 2, 2]

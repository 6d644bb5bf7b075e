"""Lesson 15: past the window it moves by whole strides; cached and recomputed are one text."""

import math
import re

import pytest
import torch
from conftest import is_one_line, passed_widths, random_tokens, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st


def text(model, prompts, max_new_tokens, **options):
    return run_rows(model, prompts, max_new_tokens=max_new_tokens, ignore_eos=True, options=options)


def start_by_hand(length, block_size, stride):
    return 0 if length <= block_size else math.ceil((length - block_size) / stride) * stride


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, stride):
    """Each token from a pass of its own over its window."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        start = start_by_hand(len(tokens), model.config.block_size, stride)
        tokens.append(model(torch.tensor([tokens[start:]]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


def test_a_token_past_the_window_costs_two_positions_on_average(tiny):
    model, widths = passed_widths(tiny())
    text(model, [random_tokens(16)], 1 + 10 * 8)
    assert sum(widths[1:]) == 2 * 10 * 8  # a hop of 8 tokens: 9 positions, then one for each of 7
    assert max(widths[1:]) == 9


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_cached_is_recomputed_is_by_hand_at_four_windows(tiny, stride):
    model = tiny(seed=6)
    prompt = random_tokens(5)
    expected = [by_hand(model, prompt, 64, stride)]
    assert text(model, [prompt], 64, stride=stride) == expected
    assert text(model, [prompt], 64, stride=stride, use_cache=False) == expected


@given(length=st.integers(1, 50), stride=st.integers(1, 16), batch_size=st.integers(1, 3))
@settings(max_examples=15)
def test_any_length_and_stride(tiny, length, stride, batch_size):
    model = tiny(seed=12)
    prompts = [random_tokens(length, seed=seed) for seed in range(batch_size)]
    expected = [by_hand(model, prompt, 18, stride) for prompt in prompts]  # a hop at least
    assert text(model, prompts, 18, stride=stride) == expected


@pytest.mark.parametrize("block_size, half", [(16, 8), (5, 2), (1, 1)])
def test_a_stride_that_is_not_given_is_half_a_window(tiny, block_size, half):
    model = tiny(block_size=block_size)
    expected = text(model, [[1]], 3 * block_size, stride=half)
    assert text(model, [[1]], 3 * block_size) == expected
    assert expected == [by_hand(model, [1], 3 * block_size, stride=half)]


@pytest.mark.parametrize("stride", [0, -1, 17, 8.0, True])
def test_a_stride_out_of_range_is_refused(tiny, stride):
    allowed = "must be an integer from 1 to block_size (16)"
    with pytest.raises(ValueError, match=f"^stride {stride}: {re.escape(allowed)}$"):
        text(tiny(), [[1]], 1, stride=stride)


def test_the_command_line_takes_a_stride(cli, tiny_checkpoint):
    prompt = ("--model", tiny_checkpoint, "--prompt", "Tom " * 50)
    args = (*prompt, "--max-new-tokens", 60, "--ignore-eos", "--stride")
    code, out, _ = cli(*args, 5)
    assert code == 0
    assert out == cli(*args, 5, "--no-cache")[1] != cli(*args, 64)[1]
    assert is_one_line(cli(*args, 65), "block_size (64)")

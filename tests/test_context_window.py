"""Lesson 03: the last block_size tokens condition each step, however long the text is."""

import pytest
import torch
from conftest import random_tokens, slide


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens):
    """Each token from a pass of its own over the last block_size tokens."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-model.config.block_size :]])
        tokens.append(model(window)[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_equals_recomputing_the_window(tiny, length):
    model = tiny(seed=2)
    prompt = random_tokens(length, seed=length)
    expected = by_hand(model, prompt, 50)
    assert slide(model, [prompt], max_new_tokens=50, ignore_eos=True) == [expected]

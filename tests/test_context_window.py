"""Lesson 03: the last block_size tokens condition each step, however long the text is."""

import pytest
import torch


def run(model, prompts, max_new_tokens):
    from infer import SamplingParams, generate

    return list(generate(model, prompts, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)))


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens):
    """Each token from a pass of its own over the last block_size tokens."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(model(torch.tensor([tokens[-model.config.block_size :]]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_equals_recomputing_the_window(tiny, length):
    model = tiny(seed=2)
    prompt = torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    assert run(model, [prompt], 50) == [[token] for token in by_hand(model, prompt, 50)]


def test_rows_slide_together(tiny):
    model = tiny(seed=4)
    prompts = [list(range(20)), list(range(30, 50))]
    assert run(model, prompts, 30) == [list(step) for step in zip(*(by_hand(model, prompt, 30) for prompt in prompts))]


def test_tokens_before_the_window_do_not_matter(tiny):
    model, window = tiny(seed=5), list(range(16))
    assert run(model, [[9] * 7 + window], 10) == run(model, [window], 10)


def test_the_command_line_writes_past_the_window(cli, tiny_checkpoint):
    code, _, err = cli("--model", tiny_checkpoint, "--prompt", "Tom " * 70, "--max-new-tokens", 5, "--ignore-eos")
    assert code == 0 and err.startswith("5 tokens")


@pytest.mark.parametrize("length", [1, 3])
def test_still_the_same_within_the_window(tiny, length):
    model, prompt = tiny(), list(range(length))
    assert run(model, [prompt], 10) == [[token] for token in by_hand(model, prompt, 10)]

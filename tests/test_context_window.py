"""Lesson 03: the last block_size tokens condition each step, however long the text is."""

import importlib

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


def test_the_command_line_writes_past_the_window(cli, tiny_checkpoint):
    prompt = ("--model", tiny_checkpoint, "--prompt", "One day")
    code, _, err = cli(*prompt, "--ignore-eos", "--max-new-tokens", 80)
    assert code == 0 and err.startswith("80 tokens")


NOTE = "the context window of 64 tokens; of 100 tokens the model sees the last"


@pytest.mark.parametrize(
    "script, options, seen",
    [
        ("infer", (), 36),
        ("infer", ("--stride", 10), 60),
        ("infer", ("--num-beams", 2), 36),
        ("infer_engine", (), 36),
        ("infer_speculative", ("--draft", "lookup"), 36),
    ],
)
def test_a_prompt_that_the_window_cuts_is_noted(run_main, tiny_checkpoint, script, options, seen):
    main = importlib.import_module(script).main
    model = "--target" if script == "infer_speculative" else "--model"
    args = (model, tiny_checkpoint, "--max-new-tokens", 2, *options)
    _, _, err = run_main(main, *args, "--prompt", " dog" * 100)
    assert err.startswith(f"note: the prompt exceeds {NOTE} {seen}\n") and err.count("note") == 1
    prompts = [word for count in (64, 65, 100) for word in ("--prompt", " dog" * count)]
    _, _, err = run_main(main, *args, *prompts)
    assert err.startswith(f"note: 2 of 3 prompts exceed {NOTE} {seen}\n")
    assert "note" not in run_main(main, *args, *prompts[:2])[2]

"""Lesson 09: what has been said once costs a fixed amount: for what was generated alone."""

import pytest
import torch
from conftest import slide


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, presence):
    """Once for each token of the output."""
    output = []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([(prompt + output)[-model.config.block_size :]]))[0, -1]
        for token in set(output):
            logits[token] -= presence
        output.append(logits.argmax().item())
    return output


def test_formula():
    from sampling import apply_presence_penalty

    logits = torch.tensor([[1.0, -2.0, 3.0]])
    seen = torch.tensor([[True, True, False]])
    assert apply_presence_penalty(logits, seen, 0.5).tolist() == [[0.5, -2.5, 3.0]]
    assert apply_presence_penalty(logits, seen, -0.5).tolist() == [[1.5, -1.5, 3.0]]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize("presence", [0.3, -1.0])
def test_greedy_text_equals_the_formula_far_past_the_window(tiny, presence):
    """60 tokens through a window of 16: what has left the window is still penalised."""
    model = tiny(seed=6)
    prompt = [1, 2, 3]
    rows = slide(model, [prompt], max_new_tokens=60, ignore_eos=True, presence_penalty=presence)
    assert rows == [by_hand(model, prompt, 60, presence)]
    assert rows != [by_hand(model, prompt, 60, 0.0)]


@torch.inference_mode()
def check_the_prompt_is_not_penalised(model, **penalty):
    """Prompts that hold their own best next token, where a penalty would choose another one."""
    found = 0
    for token in range(61):
        prompt = [token, 1, 2, 3]
        logits = model(torch.tensor([prompt]))[0, -1]
        best = logits.argmax().item()
        logits[prompt] -= 2
        if best in prompt and logits.argmax().item() != best:
            found += 1
            assert slide(model, [prompt], max_new_tokens=1, **penalty) == [[best]]
    assert found > 0


def test_the_prompt_is_not_penalised(tiny):
    check_the_prompt_is_not_penalised(tiny(seed=6), presence_penalty=2.0)


def test_rows_do_not_share_it(tiny):
    model = tiny(seed=6)
    prompts = [[1, 2, 3], [50, 40, 30]]
    params = {"max_new_tokens": 30, "ignore_eos": True, "presence_penalty": 1.5}
    assert slide(model, prompts, **params) == [
        by_hand(model, prompt, 30, 1.5) for prompt in prompts
    ]


def test_the_command_line_takes_it(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, "--presence-penalty", 2)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, "--presence-penalty", 2.5)
    assert code == 2 and "presence_penalty is 2.5; it must be a number in [-2, 2]" in err

"""Lesson 09: the presence penalty, by its formula: once for each token, never for the prompt."""

import pytest
import torch
from conftest import slide


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, penalty):
    output = []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([(prompt + output)[-model.config.block_size :]]))[0, -1]
        for token in set(output):
            logits[token] -= penalty
        output.append(logits.argmax().item())
    return output


def test_formula():
    from sampling import penalize_presence

    logits = torch.tensor([[1.0, -2.0, 3.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize_presence(logits, seen, 0.5).tolist() == [[0.5, -2.5, 3.0]]
    assert penalize_presence(logits, seen, -0.5).tolist() == [[1.5, -1.5, 3.0]]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize("penalty", [2.0, 0.3, -1.0])
def test_greedy_text_equals_the_formula_far_past_the_window(tiny, penalty):
    """60 tokens through a window of 16: what has left the window is still penalised."""
    model = tiny(seed=6)
    prompt = [1, 2, 3]
    rows = slide(model, [prompt], max_new_tokens=60, ignore_eos=True, presence_penalty=penalty)
    assert rows == [by_hand(model, prompt, 60, penalty)] != [by_hand(model, prompt, 60, 0.0)]


@torch.inference_mode()
def test_the_prompt_is_not_penalised(tiny):
    """Prompts that hold their own best next token, where a penalty would choose another one."""
    model = tiny(seed=6)
    found = 0
    params = {"max_new_tokens": 1, "presence_penalty": 2.0}
    for token in range(61):
        prompt = [token, 1, 2, 3]
        logits = model(torch.tensor([prompt]))[0, -1]
        best = logits.argmax().item()
        logits[prompt] -= 2
        if best in prompt and logits.argmax().item() != best:
            found += 1
            assert slide(model, [prompt], **params) == [[best]]
    assert found > 0


def test_rows_do_not_share_it(tiny):
    model = tiny(seed=6)
    params = {"max_new_tokens": 20, "ignore_eos": True, "presence_penalty": 1.5}
    prompts = [[1, 2, 3], [50, 40, 30], [7, 7, 7]]
    alone = [slide(model, [prompt], **params)[0] for prompt in prompts]
    assert slide(model, prompts, **params) == alone


def test_the_command_line_takes_it(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, "--presence-penalty", 2)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, "--presence-penalty", 2.5)
    assert code == 2 and "presence_penalty is 2.5; it must be a number in [-2, 2]" in err

"""Lesson 10: the frequency penalty, by its formula: once for each occurrence in the output."""

import pytest
import torch
from conftest import slide


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, frequency, presence=0.0):
    output = []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([(prompt + output)[-model.config.block_size :]]))[0, -1]
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        output.append(logits.argmax().item())
    return output


def test_formula():
    from sampling import penalize_frequency

    logits, counts = torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([[2, 1, 0]])
    assert penalize_frequency(logits, counts, 0.5).tolist() == [[0.0, -2.5, 3.0]]
    assert penalize_frequency(logits, counts, -0.5).tolist() == [[2.0, -1.5, 3.0]]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize("frequency, presence", [(1.0, 0.0), (0.1, 0.0), (-0.5, 0.0), (0.4, 0.7)])
def test_greedy_text_equals_the_formula_far_past_the_window(tiny, frequency, presence):
    model, prompt, penalties = tiny(seed=6), [1, 2, 3], {"frequency_penalty": frequency, "presence_penalty": presence}
    rows = slide(model, [prompt], max_new_tokens=60, ignore_eos=True, **penalties)
    assert rows == [by_hand(model, prompt, 60, frequency, presence)] != [by_hand(model, prompt, 60, 0.0, presence)]


def test_counts_go_past_256(tiny):
    """A model that says one thing, until 301 times a penalty of 0.002 have brought its logit below the others."""
    model = tiny(block_size=4, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[5, 0] = 0.6001
    (row,) = slide(model, [[1]], max_new_tokens=302, ignore_eos=True, frequency_penalty=0.002)
    assert row[:301] == [5] * 301 and row[301] != 5


def test_rows_do_not_share_it(tiny):
    model, params = tiny(seed=6), {"max_new_tokens": 20, "ignore_eos": True, "frequency_penalty": 1.0}
    prompts = [[1, 2, 3], [50, 40, 30], [7, 7, 7]]
    assert slide(model, prompts, **params) == [slide(model, [prompt], **params)[0] for prompt in prompts]


def test_the_command_line_takes_it(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, "--frequency-penalty", 2)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, "--frequency-penalty", -3)
    assert code == 2 and "frequency_penalty is -3.0; it must be a number in [-2, 2]" in err

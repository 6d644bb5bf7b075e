"""Lesson 10: each occurrence costs, by the formula: for what was generated alone."""

import pytest
import torch
from conftest import slide
from test_presence_penalty import check_the_prompt_is_not_penalised


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, frequency=0.0, presence=0.0):
    """Once for each token of the output, and once for each of its occurrences."""
    output = []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([(prompt + output)[-model.config.block_size :]]))[0, -1]
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        output.append(logits.argmax().item())
    return output


def test_formula():
    from sampling import apply_frequency_penalty

    logits = torch.tensor([[1.0, -2.0, 3.0]])
    counts = torch.tensor([[2, 1, 0]])
    assert apply_frequency_penalty(logits, counts, 0.5).tolist() == [[0.0, -2.5, 3.0]]
    assert apply_frequency_penalty(logits, counts, -0.5).tolist() == [[2.0, -1.5, 3.0]]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize("frequency, presence", [(0.1, 0.0), (-0.5, 0.0), (0.4, 0.7)])
def test_greedy_text_equals_the_formula_far_past_the_window(tiny, frequency, presence):
    """60 tokens through a window of 16: what has left the window is still penalised."""
    model = tiny(seed=6)
    prompt = [1, 2, 3]
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
    rows = slide(model, [prompt], max_new_tokens=60, ignore_eos=True, **penalties)
    assert rows == [by_hand(model, prompt, 60, frequency, presence)]
    assert rows != [by_hand(model, prompt, 60, presence=presence)]


def test_the_prompt_is_not_penalised(tiny):
    check_the_prompt_is_not_penalised(tiny(seed=6), frequency_penalty=2.0)


def test_counts_go_past_256(tiny):
    """A model that says one thing, until 301 times 0.002 are more than its logit."""
    model = tiny(block_size=4, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[5, 0] = 0.6001
    (row,) = slide(model, [[1]], max_new_tokens=302, ignore_eos=True, frequency_penalty=0.002)
    assert row[:301] == [5] * 301 and row[301] != 5


def test_the_command_line_takes_it(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, "--frequency-penalty", 2)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, "--frequency-penalty", -3)
    assert code == 2 and "frequency_penalty is -3.0; it must be a number in [-2, 2]" in err

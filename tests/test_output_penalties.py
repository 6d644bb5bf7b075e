"""The presence and the frequency penalty, by their formulas: for what was generated alone."""

import pytest
import torch
from conftest import slide

BOTH = pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])


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


@pytest.mark.parametrize(
    "name, seen, expected",
    [
        ("penalize_presence", [True, True, False], ([0.5, -2.5, 3.0], [1.5, -1.5, 3.0])),
        ("penalize_frequency", [2, 1, 0], ([0.0, -2.5, 3.0], [2.0, -1.5, 3.0])),
    ],
)
def test_formula(name, seen, expected):
    import sampling

    logits = torch.tensor([[1.0, -2.0, 3.0]])
    for penalty, row in zip((0.5, -0.5), expected):
        penalized = getattr(sampling, name)(logits, torch.tensor([seen]), penalty)
        assert penalized.tolist() == [row]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize(
    "frequency, presence",
    [(0.0, 0.3), (0.0, -1.0), (0.1, 0.0), (-0.5, 0.0), (0.4, 0.7)],
)
def test_greedy_text_equals_the_formula_far_past_the_window(tiny, frequency, presence):
    """60 tokens through a window of 16: what has left the window is still penalised."""
    model = tiny(seed=6)
    prompt = [1, 2, 3]
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
    rows = slide(model, [prompt], max_new_tokens=60, ignore_eos=True, **penalties)
    assert rows == [by_hand(model, prompt, 60, frequency, presence)]
    assert rows != [by_hand(model, prompt, 60, presence=presence if frequency else 0.0)]


@torch.inference_mode()
@BOTH
def test_the_prompt_is_not_penalised(tiny, name):
    """Prompts that hold their own best next token, where a penalty would choose another one."""
    model = tiny(seed=6)
    found = 0
    for token in range(61):
        prompt = [token, 1, 2, 3]
        logits = model(torch.tensor([prompt]))[0, -1]
        best = logits.argmax().item()
        logits[prompt] -= 2
        if best in prompt and logits.argmax().item() != best:
            found += 1
            assert slide(model, [prompt], max_new_tokens=1, **{name: 2.0}) == [[best]]
    assert found > 0


def test_counts_go_past_256(tiny):
    """A model that says one thing, until 301 times 0.002 are more than its logit."""
    model = tiny(block_size=4, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[5, 0] = 0.6001
    (row,) = slide(model, [[1]], max_new_tokens=302, ignore_eos=True, frequency_penalty=0.002)
    assert row[:301] == [5] * 301 and row[301] != 5


@pytest.mark.parametrize("name, bad", [("presence", 2.5), ("frequency", -3.0)])
def test_the_command_line_takes_it(cli, tiny_checkpoint, name, bad):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, f"--{name}-penalty", 2)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, f"--{name}-penalty", bad)
    assert code == 2 and f"{name}_penalty is {bad}; it must be a number in [-2, 2]" in err

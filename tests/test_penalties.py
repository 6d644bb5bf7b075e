"""Lessons 09 to 11: presence, frequency and repetition penalties, by their formulas."""

import pytest
import torch
from conftest import slide, their_rows

from loading.load import save_model
from sampling import apply_frequency_penalty, apply_presence_penalty, apply_repetition_penalty


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, frequency=0.0, presence=0.0, repetition=1.0):
    """Decode greedily: the repetition penalty counts the prompt, the others only the output."""
    output = []
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([(prompt + output)[-model.config.block_size :]]))[0, -1]
        for token in set(prompt + output):
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        output.append(logits.argmax().item())
    return output


def test_formulas():
    logits = torch.tensor([[1.0, -2.0, 3.0]])
    counts = torch.tensor([[2, 1, 0]])
    assert apply_frequency_penalty(logits, counts, 0.5).tolist() == [[0.0, -2.5, 3.0]]
    assert apply_frequency_penalty(logits, counts, -0.5).tolist() == [[2.0, -1.5, 3.0]]
    assert apply_presence_penalty(logits, counts > 0, 0.5).tolist() == [[0.5, -2.5, 3.0]]
    assert apply_presence_penalty(logits, counts > 0, -0.5).tolist() == [[1.5, -1.5, 3.0]]
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_repetition_equals_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=generator)
    tokens = torch.randint(30, (6, 12), generator=generator)
    seen = torch.zeros(6, 30, dtype=torch.bool).scatter(1, tokens, True)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    assert torch.equal(apply_repetition_penalty(logits, seen, penalty), theirs)


@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_a_run_with_repetition_equals_transformers(tiny, tmp_path, penalty):
    from transformers import AutoModelForCausalLM

    model = tiny(seed=6, block_size=64)
    prompts = [[1, 2, 3], [50, 40, 50]]
    save_model(model, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = their_rows(peer, prompts, 50, repetition_penalty=penalty)
    params = {"max_new_tokens": 50, "ignore_eos": True, "repetition_penalty": penalty}
    assert slide(model, prompts, **params) == expected


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence": 0.3},
        {"presence": -1.0},
        {"frequency": 0.1},
        {"frequency": -0.5},
        {"frequency": 0.4, "presence": 0.7},
        {"frequency": 0.3, "presence": 0.4, "repetition": 1.5},  # dividing comes first
    ],
    ids=str,
)
def test_greedy_batch_equals_the_formulas_past_the_window(tiny, penalties):
    """60 tokens in a window of 16: tokens that have left the window are still penalised."""
    model = tiny(seed=6)
    prompts = [[1, 2, 3], [50, 40, 30]]
    params = {f"{name}_penalty": value for name, value in penalties.items()}
    rows = slide(model, prompts, max_new_tokens=60, ignore_eos=True, **params)
    assert rows == [by_hand(model, prompt, 60, **penalties) for prompt in prompts]
    assert rows != [by_hand(model, prompt, 60) for prompt in prompts]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@torch.inference_mode()
def test_the_prompt_is_not_penalised(tiny, name):
    """Prompts that contain their most likely next token, which a penalty would replace."""
    model = tiny(seed=6)
    count = 0
    for token in range(61):
        prompt = [token, 1, 2, 3]
        logits = model(torch.tensor([prompt]))[0, -1]
        best = logits.argmax().item()
        logits[prompt] -= 2
        if best in prompt and logits.argmax().item() != best:
            count += 1
            assert slide(model, [prompt], max_new_tokens=1, **{name: 2.0}) == [[best]]
    assert count > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_go_past_256(tiny, dtype):
    """A model repeats one token until 301 times 0.002 exceed its logit; bfloat16 has no 257."""
    model = tiny(block_size=4, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[5, 0] = 0.6001
    (row,) = slide(model, [[1]], max_new_tokens=302, ignore_eos=True, frequency_penalty=0.002)
    assert row[:301] == [5] * 301 and row[301] != 5


@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 1e39, 1e300, 2**64])
def test_an_extreme_penalty_makes_no_nan(tiny, penalty):
    logits = torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-30, -1e-30])
    seen = torch.ones(6, dtype=torch.bool)
    assert apply_repetition_penalty(logits, seen, float(penalty)).isfinite().all()
    params = {"max_new_tokens": 5, "temperature": 1.0, "repetition_penalty": penalty}
    assert slide(tiny(), [[1, 2]], **params)


@pytest.mark.parametrize(
    "name, value, wrong, allowed",
    [
        ("presence_penalty", 2, 2.5, "[-2, 2]"),
        ("frequency_penalty", 2, -3, "[-2, 2]"),
        ("repetition_penalty", 3, 0, "> 0"),
    ],
)
def test_the_command_line_takes_it(cli, tiny_checkpoint, name, value, wrong, allowed):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    option = f"--{name.replace('_', '-')}"
    code, out, _ = cli(*arguments, option, value)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, option, wrong)
    assert code == 2 and f"{name} {float(wrong)}" in err and allowed in err

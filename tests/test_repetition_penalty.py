"""Lesson 11: the repetition penalty, against transformers' processor and whole runs with it."""

import pytest
import torch
from conftest import slide, their_rows

from loading.load import save_model


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_equals_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    from sampling import apply_repetition_penalty

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=generator)
    tokens = torch.randint(30, (6, 12), generator=generator)
    seen = torch.zeros(6, 30, dtype=torch.bool).scatter(1, tokens, True)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    assert torch.equal(apply_repetition_penalty(logits, seen, penalty), theirs)


@pytest.mark.parametrize("penalty", [1.2, 2.0, 0.8])
def test_whole_run_equals_transformers_on_a_random_model(tiny, tmp_path, penalty):
    from transformers import AutoModelForCausalLM

    model = tiny(seed=6, block_size=64)
    prompts = [[1, 2, 3], [50, 40, 50]]
    save_model(model, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = their_rows(peer, prompts, 50, repetition_penalty=penalty)
    params = {"max_new_tokens": 50, "ignore_eos": True, "repetition_penalty": penalty}
    assert slide(model, prompts, **params) == expected


@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 1e39, 1e300, 2**64])
def test_an_extreme_penalty_makes_no_nan(tiny, penalty):
    from sampling import apply_repetition_penalty

    logits = torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-30, -1e-30])
    seen = torch.ones(6, dtype=torch.bool)
    assert apply_repetition_penalty(logits, seen, float(penalty)).isfinite().all()
    params = {"max_new_tokens": 5, "temperature": 1.0, "repetition_penalty": penalty}
    assert slide(tiny(), [[1, 2]], **params)


@torch.inference_mode()
def test_order_is_repetition_then_the_other_two(tiny):
    """Dividing and subtracting do not commute; both are done by hand, past the window too."""
    model = tiny(seed=6)
    prompt = [1, 2, 3]
    output = []
    for _ in range(40):
        logits = model(torch.tensor([(prompt + output)[-16:]]))[0, -1]
        for token in set(prompt + output):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        for token in set(output):
            logits[token] -= 0.4 + 0.3 * output.count(token)
        output.append(logits.argmax().item())
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    assert slide(model, [prompt], max_new_tokens=40, ignore_eos=True, **penalties) == [output]


def test_the_command_line_takes_it(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20)
    code, out, _ = cli(*arguments, "--repetition-penalty", 3)
    assert code == 0 and out != cli(*arguments)[1]
    code, _, err = cli(*arguments, "--repetition-penalty", 0)
    assert code == 2 and "repetition_penalty is 0.0; it must be a finite number > 0" in err

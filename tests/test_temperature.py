"""Lesson 05: the temperature, against transformers' TemperatureLogitsWarper and against physics."""

import pytest
import torch
from conftest import run

from sampling import SamplingParams, apply_temperature, sample

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3


def divided(logits, temperature):
    return apply_temperature(logits, temperature)


def probs(temperature, logits=LOGITS):
    return divided(logits, temperature).softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3, 5.0])
def test_equals_transformers(temperature):
    from transformers import TemperatureLogitsWarper

    theirs = TemperatureLogitsWarper(temperature)(None, LOGITS).softmax(dim=-1)
    torch.testing.assert_close(probs(temperature), theirs)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy_and_stable(temperature):
    huge = LOGITS * 1e4
    greedy = torch.nn.functional.one_hot(huge.argmax(dim=-1), 50).float()
    torch.testing.assert_close(probs(temperature, huge), greedy)


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e308])
def test_a_huge_temperature_makes_tokens_equal_but_leaves_their_order(temperature):
    """No ties, as from a divisor that is infinite in float32, and no -inf / inf."""
    torch.testing.assert_close(probs(temperature), torch.full((4, 50), 1 / 50))
    assert torch.equal(divided(LOGITS, temperature).argsort(dim=-1), LOGITS.argsort(dim=-1))
    assert divided(torch.tensor([1.0, -torch.inf]), temperature)[1] == -torch.inf


def test_logits_are_left_as_they_were():
    before = LOGITS.clone()
    divided(LOGITS, 0.5)
    assert torch.equal(LOGITS, before)


def test_generate_draws_at_its_temperature(tiny):
    """At 0.01 draws are greedy; just below 1 they are not; at 100 they are close to uniform."""
    model = tiny(seed=1, vocab_size=8, eos_token_id=7)

    def counts(temperature):
        generator = torch.Generator().manual_seed(0)
        params = {"max_new_tokens": 1, "temperature": temperature}
        (step,) = run(model, [[1, 2]] * 4000, generator=generator, **params)
        return torch.bincount(torch.tensor(step), minlength=8)

    ((greedy,),) = run(model, [[1, 2]], max_new_tokens=1)
    assert counts(0.01)[greedy] == 4000
    expected = 4000 * model(torch.tensor([[1, 2]]))[0, -1].div(0.9).softmax(dim=-1)
    chi_square = ((counts(0.9) - expected) ** 2 / expected).sum()
    assert chi_square < 24.32  # 7 degrees of freedom, p = 0.001
    assert counts(100.0).min() > 400


def test_the_command_line_takes_any_temperature(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9)
    assert cli(*arguments, "--temperature", 1e-6, "--seed", 0)[:2] == cli(*arguments)[:2]
    assert cli(*arguments, "--temperature", 0.9)[0] == 0


def test_still_greedy_at_zero_and_unchanged_at_one():
    logits = LOGITS.double()
    assert torch.equal(sample(logits, SamplingParams()), logits.argmax(dim=-1))
    drawn = sample(logits, SamplingParams(temperature=1.0), torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    expected = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
    assert torch.equal(drawn, expected)

"""Lesson 05: the temperature, against transformers' TemperatureLogitsWarper and against what physics says of it."""

import pytest
import torch
from conftest import run
from hypothesis import given
from hypothesis import strategies as st

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3


def probs(temperature, logits=LOGITS):
    from sampling import apply_temperature

    return apply_temperature(logits, temperature).softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3, 5.0])
def test_equals_transformers(temperature):
    from transformers import TemperatureLogitsWarper

    theirs = TemperatureLogitsWarper(temperature)(None, LOGITS).softmax(dim=-1)
    torch.testing.assert_close(probs(temperature), theirs)


def test_the_case_in_transformers_own_tests():
    """A uniform row stays uniform; a peak and a valley grow at 0.5 and shrink at 1.3."""
    scores = torch.full((2, 20), 1 / 20)
    scores[1, 5], scores[1, 10] = 1 / 20 + 0.1, 1 / 20 - 0.4
    before, sharp, smooth = scores.softmax(dim=-1), probs(0.5, scores), probs(1.3, scores)
    torch.testing.assert_close(sharp[0], before[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(smooth[0], before[0], rtol=0, atol=1e-3)
    assert sharp[1].max() > before[1].max() > smooth[1].max()
    assert sharp[1].min() < before[1].min() < smooth[1].min()


@given(temperature=st.floats(1e-6, 100))
def test_the_most_likely_token_stays_the_same(temperature):
    assert torch.equal(probs(temperature).argmax(dim=-1), LOGITS.argmax(dim=-1))


def test_entropy_rises_with_the_temperature():
    entropies = [torch.special.entr(probs(t)).sum(dim=-1) for t in (0.05, 0.2, 0.5, 1.0, 2.0, 10.0, 1000.0)]
    assert all((low < high).all() for low, high in zip(entropies, entropies[1:]))
    torch.testing.assert_close(entropies[-1], torch.tensor(50.0).log().expand(4), atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy_and_stable(temperature):
    huge = LOGITS * 1e4
    torch.testing.assert_close(probs(temperature, huge), torch.nn.functional.one_hot(huge.argmax(dim=-1), 50).float())


def test_logits_are_left_as_they_were():
    from sampling import apply_temperature

    before = LOGITS.clone()
    apply_temperature(LOGITS, 0.5)
    assert torch.equal(LOGITS, before)


def test_generate_draws_at_its_temperature(tiny):
    """At 0.01 draws are greedy; just below 1 they are not; at 100 they are close to uniform."""
    model = tiny(seed=1, vocab_size=8, eos_token_id=7)

    def counts(temperature):
        generator = torch.Generator().manual_seed(0)
        (step,) = run(model, [[1, 2]] * 4000, generator=generator, max_new_tokens=1, temperature=temperature)
        return torch.bincount(torch.tensor(step), minlength=8)

    ((greedy,),) = run(model, [[1, 2]], max_new_tokens=1)
    assert counts(0.01)[greedy] == 4000
    expected = 4000 * model(torch.tensor([[1, 2]]))[0, -1].div(0.9).softmax(dim=-1)
    assert ((counts(0.9) - expected) ** 2 / expected).sum() < 24.32  # chi-square, 7 degrees of freedom, p = 0.001
    assert counts(100.0).min() > 400


def test_the_command_line_takes_any_temperature(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9)
    assert cli(*arguments, "--temperature", 1e-6, "--seed", 0)[:2] == cli(*arguments)[:2]
    assert cli(*arguments, "--temperature", 0.9)[0] == 0


def test_still_greedy_at_zero_and_unchanged_at_one():
    from sampling import SamplingParams, sample

    logits = LOGITS.double()
    assert torch.equal(sample(logits, SamplingParams()), logits.argmax(dim=-1))
    drawn = sample(logits, SamplingParams(temperature=1.0), torch.Generator().manual_seed(3))
    expected = torch.multinomial(logits.softmax(dim=-1), 1, generator=torch.Generator().manual_seed(3))[:, 0]
    assert torch.equal(drawn, expected)

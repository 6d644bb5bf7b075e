"""Lesson 05: the temperature, against transformers' TemperatureLogitsWarper and against what physics says of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3


def probs(temperature, logits=LOGITS):
    from infer import apply_temperature

    return apply_temperature(logits, temperature).softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3, 5.0])
def test_equals_transformers(temperature):
    from transformers import TemperatureLogitsWarper

    theirs = TemperatureLogitsWarper(temperature)(None, LOGITS).softmax(dim=-1)
    torch.testing.assert_close(probs(temperature), theirs)


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
    from infer import apply_temperature

    before = LOGITS.clone()
    apply_temperature(LOGITS, 0.5)
    assert torch.equal(LOGITS, before)


def test_generate_draws_at_its_temperature(tiny):
    """At 0.01 draws are greedy; at 100 they are close to uniform."""
    from infer import SamplingParams, generate

    model = tiny(seed=1, vocab_size=8, eos_token_id=7)

    def drawn(temperature):
        params = SamplingParams(max_new_tokens=1, temperature=temperature)
        (step,) = generate(model, [[1, 2]] * 4000, params, torch.Generator().manual_seed(0))
        return torch.bincount(torch.tensor(step), minlength=8)

    (greedy,) = generate(model, [[1, 2]], SamplingParams(max_new_tokens=1))
    assert drawn(0.01)[greedy[0]] == 4000
    assert drawn(100.0).min() > 400


def test_the_command_line_takes_any_temperature(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9, "--seed", 0)
    assert cli(*arguments, "--temperature", 1e-6)[:2] == cli(*arguments)[:2]
    assert cli(*arguments, "--temperature", 0.9)[0] == 0


def test_still_greedy_at_zero_and_unchanged_at_one(tiny):
    from infer import SamplingParams, sample

    logits = LOGITS.double()
    assert torch.equal(sample(logits, SamplingParams()), logits.argmax(dim=-1))
    drawn = sample(logits, SamplingParams(temperature=1.0), torch.Generator().manual_seed(3))
    expected = torch.multinomial(logits.softmax(dim=-1), 1, generator=torch.Generator().manual_seed(3))[:, 0]
    assert torch.equal(drawn, expected)

"""Accept, refuse, draw again: the rule gives the target's distribution exactly, whatever the draft model's is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infer_speculative
from infer_speculative import residual, verify


def distributions(size):
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    weights = st.lists(weight, min_size=size, max_size=size).filter(any)
    return weights.map(lambda values: torch.tensor(values, dtype=torch.float64) / sum(values))


def check_rule(p, q):
    """All ways to a token: drafted and accepted, or another drafted and refused and this one drawn instead."""
    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * infer_speculative.acceptance(p[drafted], q[drafted])
    result = accepted + (1 - accepted.sum()) * infer_speculative.residual(p, q)
    assert (result - p).abs().max() < 1e-10


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
def test_accept_and_residual_give_the_targets_distribution(pair):
    check_rule(*pair)


def test_the_residual_of_equal_distributions_is_that_distribution():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert residual(p, p).tolist() == p.tolist()
    check_rule(p[0], p[0])


def test_drafts_are_accepted_from_the_left_up_to_the_first_refusal():
    certain, never = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    p = torch.stack([certain, certain, certain, never])
    assert verify(p, p[:3], [0, 0, 0]) == (3, 2)  # all accepted: the last draw is from p after the last draft
    wrong = torch.tensor([0.0, 1.0, 0.0])
    assert verify(p, torch.stack([certain, wrong, certain]), [0, 1, 0]) == (1, 0)  # drawn from the residual
    assert verify(never[None], p[:0], []) == (0, 2)


def test_two_tokens_follow_the_targets_probabilities():
    """5,000 passes of one draft: the pairs that result, counted; the second token does not depend on the first."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    q, generator, counts = torch.tensor([[0.2, 0.2, 0.6]]), torch.Generator().manual_seed(0), torch.zeros(3, 4)
    for _ in range(5000):
        draft = torch.multinomial(q[0], 1, generator=generator).item()
        accepted, token = verify(p, q, [draft], generator)
        counts[draft if accepted else token, token if accepted else 3] += 1
    first = counts.sum(dim=1) / 5000
    torch.testing.assert_close(first, p[0], rtol=0, atol=0.03)
    second = counts[:, :3].sum(dim=0) / counts[:, :3].sum()
    torch.testing.assert_close(second, p[1], rtol=0, atol=0.03)
    assert counts[:, 3].sum() / 5000 == pytest.approx(0.4, abs=0.03)  # refused: the mass of max(p - q, 0)


def test_a_residual_that_is_not_normalised_is_noticed(monkeypatch):
    """The check can fail: here is a common mistake."""
    monkeypatch.setattr(infer_speculative, "residual", lambda p, q: (p - q).clamp(min=0))
    with pytest.raises(AssertionError):
        check_rule(torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double())

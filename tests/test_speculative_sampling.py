"""Lesson 17: accept, refuse, draw again: the target's distribution results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer_speculative import acceptance, residual, verify

PROGRAM = """
import torch
from infer_speculative import verify
p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.1, 0.8])
generator = torch.Generator().manual_seed(0)
counts = [0, 0, 0]
for _ in range(5000):
    draft = torch.multinomial(q, 1, generator=generator).item()
    number, token = verify(torch.stack([p, p]), q[None], [draft], generator)
    counts[draft if number else token] += 1
print(*(round(count / 5000, 1) for count in counts))
"""


def test_draws_of_one_distribution_become_draws_of_another(run_program):
    assert run_program(PROGRAM) == (0, "0.5 0.3 0.2\n", "")


def distributions(size):
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    weights = st.lists(weight, min_size=size, max_size=size).filter(any)
    return weights.map(lambda values: torch.tensor(values, dtype=torch.float64) / sum(values))


def check_rule(p, q):
    """All ways to a token: drafted and accepted, or drawn where another one was refused."""
    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * acceptance(p[drafted], q[drafted])
    result = accepted + (1 - accepted.sum()) * residual(p, q)
    assert (result - p).abs().max() < 1e-10


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
def test_accept_and_residual_give_the_targets_distribution(pair):
    check_rule(*pair)


def test_the_residual_of_equal_distributions_is_that_distribution():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert residual(p, p).tolist() == p.tolist()
    check_rule(p[0], p[0])


def test_drafts_are_accepted_from_the_left_up_to_the_first_refusal():
    certain = torch.tensor([1.0, 0.0, 0.0])
    wrong = torch.tensor([0.0, 1.0, 0.0])
    never = torch.tensor([0.0, 0.0, 1.0])
    p = torch.stack([certain, certain, certain, never])
    # All accepted: the last draw is from p after the last draft.
    assert verify(p, p[:3], [0, 0, 0]) == (3, 2)
    # One is refused: the draw is from the residual.
    assert verify(p, torch.stack([certain, wrong, certain]), [0, 1, 0]) == (1, 0)
    assert verify(never[None], p[:0], []) == (0, 2)


def test_two_tokens_follow_the_targets_probabilities():
    """The pairs that 5,000 passes of one draft make; the second token does not see the first."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    q = torch.tensor([[0.2, 0.2, 0.6]])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(3, 4)
    for _ in range(5000):
        draft = torch.multinomial(q[0], 1, generator=generator).item()
        accepted, token = verify(p, q, [draft], generator)
        counts[draft if accepted else token, token if accepted else 3] += 1
    first = counts.sum(dim=1) / 5000
    torch.testing.assert_close(first, p[0], rtol=0, atol=0.03)
    second = counts[:, :3].sum(dim=0) / counts[:, :3].sum()
    torch.testing.assert_close(second, p[1], rtol=0, atol=0.03)
    refused = counts[:, 3].sum() / 5000
    assert refused == pytest.approx(0.4, abs=0.03)  # the mass of max(p - q, 0)

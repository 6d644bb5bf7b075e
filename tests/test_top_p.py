"""Lesson 07: top-p, against transformers' TopPLogitsWarper for p < 1; at 1 ours does nothing."""

import pytest
import torch
from conftest import run

from sampling import top_k_filter, top_p_filter

LOGITS = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
PROBS = torch.tensor([0.15, 0.5, 0.05, 0.3])


def filtered(logits, p):
    return top_p_filter(logits, p)


def ids(logits):
    """Those that a filter has left."""
    return logits.isfinite().nonzero().flatten().tolist()


def kept(p, probs=PROBS):
    return ids(filtered(probs.log(), p))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.95, 0.999])
def test_equals_transformers(p):
    from transformers import TopPLogitsWarper

    assert torch.equal(filtered(LOGITS, p), TopPLogitsWarper(p)(None, LOGITS))


@pytest.mark.parametrize(
    "p, expected",
    [(0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3])],
)
def test_the_token_that_crosses_p_stays(p, expected):
    assert kept(p) == expected


def test_a_mass_that_equals_p_is_enough():
    """Equal tokens have exact probabilities in any softmax; 0.5 and 0.3 need not sum to 0.8."""
    assert kept(0.5, torch.full((4,), 0.25)) == [0, 1]
    assert kept(0.75, torch.full((4,), 0.25)) == [0, 1, 2]


@pytest.mark.parametrize("p", [1e-12, 1e-300])
def test_a_tiny_p_is_the_most_likely_token(p):
    assert torch.equal(filtered(LOGITS, p).isfinite().nonzero()[:, 1], LOGITS.argmax(dim=-1))


def test_one_keeps_all():
    logits = torch.tensor([0.0, -200.0, -300.0])  # the last two round to no mass at all
    assert torch.equal(filtered(LOGITS, 1.0), LOGITS)
    assert torch.equal(filtered(logits, 1.0), logits)


def test_of_equal_tokens_the_lower_ids_stay():
    assert kept(0.375, torch.full((64,), 1 / 64)) == list(range(24))


def test_any_batch_shape():
    expected = filtered(LOGITS, 0.8)
    assert torch.equal(filtered(LOGITS.view(5, 10, 40), 0.8).view(50, 40), expected)
    assert torch.equal(filtered(LOGITS[0], 0.8), expected[0])


def test_draws_stay_inside_the_nucleus_after_top_k(tiny):
    """Top-k first, then top-p of what is left, as in transformers: draws are from that set."""
    model = tiny(seed=1)
    params = {"max_new_tokens": 1, "temperature": 1.5, "top_k": 10, "top_p": 0.7}
    (step,) = run(model, [[1, 2]] * 4000, generator=torch.Generator().manual_seed(0), **params)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2]]))[0, -1] / 1.5
    inside = ids(filtered(top_k_filter(logits, 10), 0.7))
    assert 1 < len(inside) < 10
    assert set(step) == set(inside)
    assert ids(top_k_filter(filtered(logits, 0.7), 10)) != inside  # the order matters here


def test_the_command_line_with_a_tiny_p_is_greedy(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9)
    greedy = cli(*arguments)
    assert cli(*arguments, "--temperature", 1, "--top-p", 1e-9)[:2] == greedy[:2]
    code, out, err = cli(*arguments, "--top-p", 0.5)
    assert (code, out) == greedy[:2]
    assert "have no effect: --top-p\n" in err

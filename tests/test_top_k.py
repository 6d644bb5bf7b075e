"""Lesson 06: top-k, against transformers' TopKLogitsWarper."""

import pytest
import torch
from conftest import run

from sampling import top_k_filter

LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))


def filtered(logits, k):
    return top_k_filter(logits, k)


@pytest.mark.parametrize("k", [1, 2, 7, 39, 40])
def test_equals_transformers(k):
    from transformers import TopKLogitsWarper

    assert torch.equal(filtered(LOGITS, k), TopKLogitsWarper(k)(None, LOGITS))


def test_ties_with_the_kth_all_stay():
    from transformers import TopKLogitsWarper

    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = filtered(logits, 2)
    assert kept.isfinite().tolist() == [[True, False, True, True, True, False]]
    assert torch.equal(kept, TopKLogitsWarper(2)(None, logits))


@pytest.mark.parametrize("k", [0, 40, 41, 10**9])
def test_off_and_more_than_there_are_keep_all(k):
    assert torch.equal(filtered(LOGITS, k), LOGITS)


def test_any_batch_shape():
    expected = filtered(LOGITS, 3)
    assert torch.equal(filtered(LOGITS.view(5, 1, 40), 3)[:, 0], expected)
    assert torch.equal(filtered(LOGITS[0], 3), expected[0])


def test_draws_are_among_the_k_most_likely_and_reach_all_of_them(tiny):
    model = tiny(seed=1)
    params = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 4}
    (step,) = run(model, [[1, 2]] * 2000, generator=torch.Generator().manual_seed(0), **params)
    with torch.inference_mode():
        best = model(torch.tensor([[1, 2]]))[0, -1].topk(4).indices.tolist()
    assert set(step) == set(best)


def test_k_1_is_greedy_at_the_highest_temperature(tiny):
    """The logits are all but equal there, and still no ties."""
    params = {"max_new_tokens": 20, "ignore_eos": True}
    hot = {"temperature": 1e308, "top_k": 1, "generator": torch.Generator().manual_seed(0)}
    assert run(tiny(), [[1, 2]], **params, **hot) == run(tiny(), [[1, 2]], **params)


def test_the_command_line_with_k_1_is_greedy(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9)
    greedy = cli(*arguments)
    assert cli(*arguments, "--temperature", 1, "--top-k", 1)[:2] == greedy[:2]
    code, out, err = cli(*arguments, "--top-k", 5)
    assert (code, out) == greedy[:2]
    assert err.startswith("note: ") and "have no effect: --top-k\n" in err
    assert "note" not in cli(*arguments, "--temperature", 1, "--top-k", 5)[2]

"""Draws from a few tokens, against all of the vocabulary, seed by seed."""

import math

import pytest
import torch
from conftest import record, run_rows
from draws import random_logits

import sampling
from sampling import SamplingParams, Sequence, apply_penalties, sample

LAST = 2**64 - 1


def drawn_by_filters(logits, params, rng_keys):
    noise = sampling.exponential_noise(torch.zeros_like(logits), rng_keys)
    logits = sampling.apply_temperature(logits, params.temperature)
    logits = sampling.top_k_filter(logits, params.top_k)
    if params.top_p < 1:
        ordered, order = (-logits).sort(dim=-1, stable=True)
        mass = (-ordered).softmax(dim=-1).cumsum(dim=-1)
        out = torch.zeros_like(mass, dtype=torch.bool)
        out[:, 1:] = mass[:, :-1] >= params.top_p
        logits = logits.masked_fill(out.scatter(-1, order, out), -math.inf)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


@pytest.fixture
def rows_of_old(monkeypatch):
    return record(monkeypatch, sampling, "sample_from_vocabulary", lambda logits, *_: len(logits))


PARAMS = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.5},
    {"temperature": 0.3, "top_k": 1},
]


def test_texts_take_few_random_numbers(tiny, torch_numbers):
    model = tiny(vocab_size=3000)
    params = {"temperature": 0.05, "seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    run_rows(model, [[1], [2, 3]], top_p=0.5, **params)
    assert len(torch_numbers) == 20 and max(torch_numbers) < 2 * 600


def test_penalties_touch_the_tokens_of_the_text_alone(tiny, monkeypatch):
    seen = record(
        monkeypatch, sampling, "apply_repetition_penalty", lambda each, *_: each.shape[-1]
    )
    run_rows(tiny(), [[1, 1, 5]], repetition_penalty=1.3, max_new_tokens=10, ignore_eos=True)
    assert seen[0] == 2 and max(seen) <= 11
    logits = torch.zeros(1, 5)  # and without a penalty they are not copied
    assert apply_penalties(logits, [Sequence([1, 2], 1, SamplingParams())]) is logits


@pytest.mark.parametrize(
    "kind", ["random", "ties", "bfloat16", "infinite", "flat", "equal", "peaked"]
)
@pytest.mark.parametrize("size", [1, 2, 7, 255, 256, 257, 300, 2000])
def test_the_same_token_of_any_logits(kind, size):
    logits = random_logits(kind, 20, size)
    rng_keys = [(LAST - row, row) for row in range(20)]
    for k in (0, 1, 50, size - 1, size, size + 1):
        for p in (1.0, 0.9, 1e-9, 1 - 1e-7):
            params = SamplingParams(temperature=0.9, top_k=max(0, k), top_p=p)
            ours = sample(logits, params, rng_keys=rng_keys)
            assert torch.equal(ours, drawn_by_filters(logits, params, rng_keys)), (k, p)


def test_rows_that_the_few_do_not_settle_go_the_old_way(rows_of_old):
    flat = torch.zeros(1000)
    steep = -torch.arange(1000.0)
    logits = torch.stack([steep, flat, steep, flat, flat])
    rng_keys = [(7, row) for row in range(5)]
    for fields in ({"top_p": 0.9}, {"top_k": 50}):
        params = SamplingParams(temperature=1.0, **fields)
        ours = sample(logits, params, rng_keys=rng_keys)
        assert torch.equal(ours, drawn_by_filters(logits, params, rng_keys))
    assert rows_of_old == [3, 3]
    logits = 3 * random_logits("random", 16, 50257)
    rng_keys = [(row, 5) for row in range(16)]
    for fields in PARAMS:  # a large vocabulary is settled by the few
        params = SamplingParams(**fields)
        ours = sample(logits, params, rng_keys=rng_keys)
        assert torch.equal(ours, drawn_by_filters(logits, params, rng_keys))
    assert rows_of_old == [3, 3]


def test_the_boundary_is_where_the_filter_has_it():
    """2 of 4 equal tokens hold 0.5, exactly; of equal tokens the first ones are in."""

    def winners(probs, p):
        size = len(probs)
        logits = torch.tensor(probs).log().expand(4000, size)
        params = SamplingParams(temperature=1.0, top_p=p)
        rng_keys = [(seed, 3) for seed in range(4000)]
        return set(sample(logits, params, rng_keys=rng_keys).tolist())

    rest = [1e-12] * 300  # so that not all tokens are among the few
    assert winners([0.25] * 4 + rest, 0.5) == {0, 1}
    assert winners([1 / 64] * 64 + rest, 0.375) == set(range(24))
    assert winners([1 / 64] * 64, 0.375) == set(range(24))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", PARAMS)
def test_some_token_of_logits_that_are_no_numbers(value, fields):
    logits = random_logits("random", 3, 400)
    logits[0, 7] = value
    logits[1] = value
    drawn = sample(logits, SamplingParams(**fields), rng_keys=[(1, 1)] * 3)
    assert all(0 <= token < 400 for token in drawn.tolist())

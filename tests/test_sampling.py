"""Temperature, filters, biases, penalties and bans, against transformers, in torch and in C."""

import math

import pytest
import torch
from conftest import load, run_rows
from draws import random_logits, seeded
from natives import check_strange_logits, in_c, in_torch, params_of
from transformers import generation

import sampling
from infer import generate
from sampling import (
    SamplingParams,
    Sequence,
    apply_logits_processors,
    apply_repetition_penalty,
    apply_temperature,
    min_p_filter,
    sample,
    sampling_probs,
    top_k_filter,
    top_p_filter,
)

LAST = 2**64 - 1
MIN_P = [
    {"min_p": 0.1},
    {"temperature": 1.5, "min_p": 0.05, "top_p": 0.9},
    {"temperature": 3.0, "min_p": 0.3, "top_k": 40, "top_p": 0.8},
    {"min_p": 1e-300},
    {"min_p": 1.0, "top_p": 0.9},  # ties with the threshold
]
FIELDS = [{"temperature": 0.1}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 299}]
FIELDS += [{"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 10, "top_p": 0.7}, *MIN_P]
KINDS = ["random", "peaked", "flat", "infinite"]


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    warpers = [generation.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(generation.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(generation.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(generation.MinPLogitsWarper(min_p))
    return generation.LogitsProcessorList(warpers)(None, logits)


def sampled(fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | fields)


def drawn(logits, fields, rng_keys):
    noise = sampling.exponential_noise(torch.zeros_like(logits), rng_keys)
    return (warped(logits.double(), **fields).softmax(dim=-1) / noise).argmax(dim=-1)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_distribution_and_unseeded_draws_are_those_of_transformers_and_torch(fields):
    for kind in KINDS:
        logits = random_logits(kind, 50, 300).double()
        ours = sampling_probs(logits, sampled(fields))
        theirs = warped(logits, **fields).softmax(dim=-1)
        assert torch.equal(ours > 0, theirs > 0) and (ours - theirs).abs().max() < 1e-14, kind
        generators = seeded(3), seeded(3)
        expected = torch.multinomial(ours, 1, generator=generators[0])[:, 0]
        assert torch.equal(sample(logits, sampled(fields), generators[1]), expected)
        assert torch.equal(*(generator.get_state() for generator in generators))


@pytest.mark.parametrize("fields", MIN_P, ids=str)
def test_seeded_draws_are_those_of_the_race_that_transformers_leaves(fields):
    for kind in KINDS:
        for size in (1, 7, 257, 2000):
            logits = random_logits(kind, 30, size, seed=size)
            rng_keys = [(LAST - row, row) for row in range(30)]
            ours = sample(logits, sampled(fields), rng_keys=rng_keys)
            assert torch.equal(ours, drawn(logits, fields, rng_keys)), (kind, size)


@pytest.mark.parametrize("fields", MIN_P, ids=str)
def test_c_draws_the_same_tokens_as_torch(library, fields):
    fields = {"temperature": 1.0} | fields
    for kind in [*KINDS, "ties", "equal"]:
        for size, rows in [(7, 300), (257, 50), (4096, 40)]:
            logits = random_logits(kind, rows, size, seed=size)
            params = params_of(fields, rows, first=LAST - 50)
            assert in_c(library, logits, params) == in_torch(logits, params), (kind, size)
    check_strange_logits(library, fields, math.nan)


PROBS = [0.15, 0.5, 0.05, 0.3]
QUARTERS = [0.25] * 4
SHARES = [0.1, 0.4, 0.2, 0.05, 0.25]


@pytest.mark.parametrize(
    "keep, value, probs, ids",
    [
        (top_k_filter, 2, [0.3, 0.1, 0.2, 0.2, 0.2], [0, 2, 3, 4]),  # ties with the k-th stay
        (top_k_filter, 10**9, PROBS, [0, 1, 2, 3]),
        (top_p_filter, 0.49, PROBS, [1]),
        (top_p_filter, 0.51, PROBS, [1, 3]),  # the token that crosses p stays
        (top_p_filter, 0.96, PROBS, [0, 1, 2, 3]),
        (top_p_filter, 1e-300, PROBS, [1]),
        (top_p_filter, 0.5, QUARTERS, [0, 1]),  # a mass equal to p is enough
        (top_p_filter, 0.375, [1 / 64] * 64, list(range(24))),
        (min_p_filter, 0.51, SHARES, [1, 4]),
        (min_p_filter, 0.49, SHARES, [1, 2, 4]),
        (min_p_filter, 0.25, [0.5, 0.25, 0.125, 0.125], [0, 1, 2, 3]),  # equal is not below
        (min_p_filter, 1.0, [0.2, 0.3, 0.3, 0.2], [1, 2]),
    ],
)
def test_the_boundaries_of_filters(keep, value, probs, ids):
    assert keep(torch.tensor(probs).log(), value).isfinite().nonzero()[:, 0].tolist() == ids


@pytest.mark.parametrize(
    "keep, value, off", [(top_k_filter, 3, 0), (top_p_filter, 0.8, 1.0), (min_p_filter, 0.1, 0.0)]
)
def test_filters_take_any_batch_shape_and_can_be_off(keep, value, off):
    logits = random_logits("random", 24, 30)
    kept = keep(logits, value)
    assert torch.equal(keep(logits.view(2, 12, 30), value).view(24, 30), kept)
    assert torch.equal(keep(logits[0], value), kept[0]) and keep(logits, off) is logits


def test_extreme_temperatures_keep_the_order():
    """No ties, as from a divisor that is infinite in float32, and no NaN."""
    logits = random_logits("random", 4, 50)
    for temperature in (1e-300, 1e-40, 1e-6):
        probs = apply_temperature(logits * 1e4, temperature).softmax(dim=-1)
        assert torch.equal(probs.max(dim=-1).values, torch.ones(4))
        assert torch.equal(probs.argmax(dim=-1), logits.argmax(dim=-1))
    for temperature in (1e38, 1e39, 1e308):
        heated = apply_temperature(logits, temperature)
        torch.testing.assert_close(heated.softmax(dim=-1), torch.full((4, 50), 1 / 50))
        assert torch.equal(heated.argsort(dim=-1), logits.argsort(dim=-1))
    assert apply_temperature(torch.tensor([1.0, -torch.inf]), 1e308)[1] == -torch.inf
    assert sampling_probs(torch.tensor([9.0, 9.0, 0.0]), SamplingParams()).tolist() == [1, 0, 0]


BIASES = ((0, -2.5), (5, 3.0), (17, -100.0), (60, 1.0))
PROCESSED = [  # fields that change logits before the temperature
    {},
    {"logit_bias": BIASES},
    {"logit_bias": BIASES, "presence_penalty": 1.5, "repetition_penalty": 2.0},
    {"logit_bias": ((3, 9.0),)},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.1},
    {"frequency_penalty": -0.5, "presence_penalty": 0.7},
    {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.5},
    {"repetition_penalty": 0.8, "min_tokens": 30, "stop_token_ids": (0, 4, 60)},
    {"repetition_penalty": 1e300, "min_tokens": 3, "stop_token_ids": (4, 0, 20, 21, 22)},
]


def processed(logits, tokens, prompt_length, params):
    """Return transformers' biases, repetition penalty and bans, and OpenAI's penalties."""
    ids = torch.tensor([tokens])
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias}
        logits = generation.SequenceBiasLogitsProcessor(biases)(ids, logits)
    penalty = min(params.repetition_penalty, 1e30)
    logits = generation.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    output = tokens[prompt_length:]
    for token in set(output):
        logits[0, token] -= params.frequency_penalty * output.count(token)
        logits[0, token] -= params.presence_penalty
    least = prompt_length, params.min_tokens, list(params.stop_token_ids), "cpu"
    if params.min_tokens:
        logits = generation.MinNewTokensLengthLogitsProcessor(*least)(ids, logits)
    return logits[0]


@torch.inference_mode()
def by_hand(model, prompt, params) -> list[int]:
    tokens = list(prompt)
    output = []
    while len(output) < params.max_new_tokens and not {*output[-1:]} & {*params.stop_token_ids}:
        logits = model(torch.tensor([tokens[-model.config.block_size :]]))[:, -1]
        tokens.append(processed(logits, tokens, len(prompt), params).argmax().item())
        output = tokens[len(prompt) :]
    return output


def test_greedy_rows_equal_the_processors_of_transformers_past_the_window(tiny):
    """60 tokens in a window of 16: tokens that have left the window are still penalised."""
    model = tiny(seed=6)
    pairs = [
        (prompt, SamplingParams(60, ignore_eos=True, **fields))
        for fields in PROCESSED
        for prompt in ([1, 2, 3], [50, 40, 30])
    ]
    steps = list(generate(model, *map(list, zip(*pairs)), stride=1))
    rows = [[token for token in row if token is not None] for row in zip(*steps)]
    assert rows == [by_hand(model, *pair) for pair in pairs]
    assert all(rows[2 * index : 2 * index + 2] != rows[:2] for index in range(1, len(PROCESSED)))


def test_processors_of_a_batch_are_those_of_transformers_row_by_row():
    each = [SamplingParams(60, **fields) for fields in PROCESSED * 2]
    tokens = [[row, 3, 5, 3, row, 60] for row in range(len(each))]
    lengths = [row % 5 + 1 for row in range(len(each))]
    stops = [params.stop_token_ids for params in each]
    sequences = [Sequence(*own) for own in zip(tokens, lengths, each, stops)]
    logits = random_logits("random", len(each), 61).double()
    before = logits.clone()
    found = apply_logits_processors(logits, sequences)
    for row, (own, length, params) in enumerate(zip(tokens, lengths, each)):
        expected = processed(before[row : row + 1], own, length, params)
        inside = expected.abs() < 1e29  # an extreme penalty is clamped to the dtype
        torch.testing.assert_close(found[row][inside], expected[inside], rtol=0, atol=1e-6)
        assert torch.equal(found[row] == -torch.inf, expected == -torch.inf)
    assert torch.equal(logits, before)
    plain = [sequences[0], sequences[10]]
    assert apply_logits_processors(logits[:2], plain).data_ptr() == logits.data_ptr()


def test_counts_go_past_256(tiny):
    """A model repeats one token until 301 times 0.002 exceed its logit; bfloat16 has no 257."""
    model = tiny(block_size=4, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[5, 0] = 0.6001
    fields = {"max_new_tokens": 302, "ignore_eos": True, "frequency_penalty": 0.002}
    (row,) = run_rows(model, [[1]], options={"stride": 1}, **fields)
    assert row[:301] == [5] * 301 and row[301] != 5


@pytest.mark.parametrize("penalty", [1e-300, 1e39, 2**64])
def test_an_extreme_penalty_makes_no_nan(tiny, penalty):
    logits = torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-30, -1e-30])
    seen = torch.ones(6, dtype=torch.bool)
    assert apply_repetition_penalty(logits, seen, float(penalty)).isfinite().all()
    params = {"max_new_tokens": 5, "temperature": 1.0, "repetition_penalty": penalty}
    assert run_rows(tiny(), [[1, 2]], **params)


def their_text(theirs, prompt, **options) -> list[int]:
    tokens = torch.tensor([prompt])
    options |= {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    found = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("min_tokens", [0, 4, 20])
def test_stop_tokens_min_tokens_and_repetition_penalty_equal_transformers(peer, min_tokens):
    theirs, directory = peer("Llama")
    model = load(directory)  # its EOS is 2
    early = 0
    for first in range(0, 60, 8):
        prompt = [first, 5, 9]
        free = their_text(theirs, prompt, eos_token_id=None)
        stops = (free[2], free[7])
        options = {"eos_token_id": [2, *stops], "min_new_tokens": min_tokens}
        expected = their_text(theirs, prompt, repetition_penalty=1.2, **options)
        fields = {"stop_token_ids": stops, "min_tokens": min_tokens, "max_new_tokens": 20}
        assert run_rows(model, [prompt], repetition_penalty=1.2, **fields) == [expected]
        early += min_tokens <= len(expected) < 20
    assert early > 1 or min_tokens > 10

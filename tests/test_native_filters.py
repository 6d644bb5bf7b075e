"""Top-k and top-p in C, against torch."""

import math

import pytest
import torch
from conftest import CHECKPOINTS, run_rows
from draws import random_logits
from engines import outputs_of, own_texts
from natives import check_strange_logits, in_c, in_torch, params_of, threads

from loading.load import load_model

LAST = 2**64 - 1
pytestmark = pytest.mark.usefixtures("compiled")
PARAMS = [
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.5},
    {"temperature": 0.3, "top_k": 1},
    {"temperature": 0},
]
FILTERS = PARAMS[1:5]
KINDS = ["random", "peaked", "ties", "flat", "equal", "infinite"]


@pytest.fixture
def native(tiny):
    """A random model with passes and draws in C."""
    from native import use_native

    model = tiny(dtype=torch.float32)
    use_native(model)
    return model


@pytest.mark.parametrize("fields", FILTERS)
def test_texts_take_no_random_numbers_of_torch(native, torch_numbers, fields):
    params = {"seed": 3, "max_new_tokens": 10, "ignore_eos": True}
    rows = run_rows(native, [[1], [2, 3]], **params, **fields)
    assert [len(row) for row in rows] == [10, 10] and torch_numbers == []


@pytest.mark.parametrize("fields", FILTERS)
def test_the_same_filtered_tokens_as_torch(library, fields):
    """5,670 draws of each. Rounding could part two scores that are nearly equal; here none are."""
    shapes = [(1, 5), (2, 200), (7, 300), (63, 300), (256, 50), (257, 50), (4096, 40)]
    for kind in KINDS:
        for size, rows in shapes:
            logits = random_logits(kind, rows, size, seed=size)
            params = params_of(fields, rows, first=LAST - 50)
            assert in_c(library, logits, params) == in_torch(logits, params), (kind, size)


@pytest.mark.parametrize("fields", FILTERS)
def test_the_same_filtered_tokens_of_a_large_vocabulary(library, fields):
    for kind in ("random", "peaked", "flat"):
        logits = random_logits(kind, 10, 50257)
        params = params_of(fields, 10)
        assert in_c(library, logits, params) == in_torch(logits, params)


@pytest.mark.parametrize("fields", FILTERS)
def test_the_same_filtered_tokens_on_every_processor_with_any_threads(library, fields):
    from native import build

    logits = random_logits("random", 33, 3001)
    params = params_of(fields, 33)
    expected = in_c(build.load(), logits, params)
    for count in (1, 2, 5):
        with threads(count):
            assert in_c(library, logits, params) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", FILTERS)
def test_filters_of_any_logits_give_an_id_and_stay_as_they_are(library, fields, value):
    check_strange_logits(library, fields, value)


def test_the_boundaries_are_those_of_the_filters(library):
    def winners(probs, **fields):
        logits = torch.tensor(probs).log().expand(2000, len(probs))
        return set(in_c(library, logits, params_of({"temperature": 1.0} | fields, 2000)))

    assert winners([0.25] * 4, top_p=0.5) == {0, 1}
    assert winners([0.25] * 4, top_p=0.75) == {0, 1, 2}
    assert winners([1 / 64] * 64, top_p=0.375) == set(range(24))
    assert winners([0.1, 0.2, 0.4, 0.2, 0.1], top_k=2) == {1, 2, 3}  # a tie with the second stays
    assert winners([0.1, 0.2, 0.4, 0.2, 0.1], top_k=2, top_p=0.6) == {1, 2}
    assert winners([0.1, 0.2, 0.4, 0.2, 0.1], top_p=1e-300) == {2}


def test_dividing_makes_ties_before_top_k_looks(library):
    """Two logits that differ, and do not after the temperature."""
    logits = torch.tensor([[1.0, 1.0 - 2**-24, 0.0]]).expand(300, 3)
    params = params_of({"temperature": 3e38, "top_k": 1}, 300)
    assert set(in_c(library, logits, params)) == set(in_torch(logits, params))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "top_k": 2**64 + 3},  # 3 in 64 bits
        {"temperature": 1.0, "top_k": 2**63},
        {"temperature": 1e300, "top_k": 2},  # infinite in float32
    ],
)
def test_numbers_that_float32_or_64_bits_do_not_hold(library, fields):
    logits = torch.tensor([[0.0, 300.0, 100.0, 300.0, 200.0, -100.0]]).expand(300, 6)
    logits = logits / 100 if "top_k" in fields and fields["top_k"] > 6 else logits
    params = params_of(fields, 300)
    tokens = in_c(library, logits, params)
    assert tokens == in_torch(logits, params)
    assert len(set(tokens)) == (6 if fields["temperature"] == 1 else 2)


def test_rows_of_all_parameters_are_one_call(native, monkeypatch):
    """Each row has its own penalties, and the logits that were given stay as they are."""
    from sampling import SamplingParams, Sequence, sample_batch

    calls = []
    draw = type(native.runner).draw

    def counted(self, logits, *args):
        calls.append(len(logits))
        return draw(self, logits, *args)

    monkeypatch.setattr(type(native.runner), "draw", counted)
    penalties = [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}]
    penalties += [{"presence_penalty": -2.0}, {"presence_penalty": 1.0, "frequency_penalty": -0.5}]
    each = [SamplingParams(seed=row, **PARAMS[row % 6], **penalties[row % 5]) for row in range(30)]
    logits = random_logits("random", 30, 61)
    before = logits.clone()
    texts = [[row, 2 * row, 3, 3, 3] for row in range(30)]
    lengths = [1 + row % 5 for row in range(30)]
    sequences = [Sequence(*own) for own in zip(texts, lengths, each)]
    ours = sample_batch(logits, sequences, native=native.runner)
    assert calls == [30] and torch.equal(logits, before)
    assert ours == sample_batch(logits, sequences)
    apart = torch.stack([logits, -logits], dim=1)[:, 0]  # each row followed by another one
    plain = params_of({"temperature": 0.8}, 30)  # without a penalty they are not copied before
    sequences = [Sequence(*own) for own in zip(texts, lengths, plain)]
    ours = sample_batch(apart, sequences, native=native.runner)
    assert ours == sample_batch(logits, sequences)


@pytest.mark.parametrize("fields", PARAMS[1:3])
def test_the_engine_and_its_drafter_draw_in_c(native, torch_numbers, fields):
    from engine.drafter import PagedModelDrafter
    from engine.engine import Engine

    prompts = [[1, 2, 3], [4], [5, 6]]
    params = params_of({"max_new_tokens": 20, "ignore_eos": True} | fields, 3)
    engine = Engine(native, drafter=PagedModelDrafter(native, native))
    texts = outputs_of(engine, prompts, params)
    assert torch_numbers == [] and engine.num_accepted_tokens > 0
    assert texts == own_texts(native, prompts, params)


def test_stories_are_those_of_torch(stories):
    """Temperature, filters and penalties, of the same logits."""
    from native import use_native
    from sampling import SamplingParams

    model = load_model(CHECKPOINTS / "stories")
    use_native(model)
    fields = [PARAMS[2], PARAMS[1], PARAMS[0] | {"repetition_penalty": 1.2}]
    params = [SamplingParams(12, True, seed=row, **own) for row, own in enumerate(fields)]
    assert own_texts(model, [[]] * 3, params) == own_texts(stories, [[]] * 3, params)


def test_top_k_tells_the_smallest_distance_from_none(library):
    """A logit that is 2**-149 below the largest after the temperature: as little as floats hold."""
    logits = torch.tensor([[0.0, -(2.0**-30), -1.0]]).expand(50, 3)
    params = params_of({"temperature": 2.0**119, "top_k": 1}, 50)
    assert set(in_c(library, logits, params)) == set(in_torch(logits, params)) == {0}

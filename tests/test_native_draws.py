"""Lesson 49: the choice of a token in C, against torch and against whole numbers."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, run_rows
from draws import bits, random_logits
from engines import outputs_of, own_texts
from natives import threads

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
KINDS = ["random", "peaked", "ties", "flat", "equal", "infinite"]


@pytest.fixture
def native(tiny):
    """A random model with passes and draws in C."""
    from native import use_native

    model = tiny(dtype=torch.float32)
    use_native(model)
    return model


def params_of(fields, count, first=0):
    return made_params(tuple(fields.items()), count, first)


@functools.lru_cache(maxsize=8)  # to make them would take longer than the draws
def made_params(fields, count, first):
    from sampling import SamplingParams

    return [SamplingParams(seed=(first + row) % 2**64, **dict(fields)) for row in range(count)]


def in_c(library, logits, params, position=9):
    from native.draw import draw

    return draw(library, logits.contiguous(), params, [position] * len(logits))


def in_torch(logits, params, position=9):
    from sampling import sample

    draws = [(own.seed, position) for own in params]
    return sample(logits, params[0], draws=draws).tolist()


def test_all_c_files_and_their_headers_are_one_library(fresh):
    header = fresh.SOURCE.with_name("part.h")
    header.write_text("enum { PART = 1 };\n")
    part = fresh.SOURCE.with_name("part.c")
    part.write_text('#include "part.h"\nint part(void) { return PART; }\n')
    assert fresh.load().part() == 1 and fresh.load().linear() == 1
    header.write_text("enum { PART = 2 };\n")
    fresh.load.cache_clear()
    assert fresh.load().part() == 2
    part.write_text('#include "part.h"\nint part(void) { return PART + 1; }\n')
    fresh.load.cache_clear()
    assert fresh.load().part() == 3


@pytest.mark.parametrize("fields", PARAMS[:5])
def test_texts_take_no_random_numbers_of_torch(native, torch_numbers, fields):
    params = {"seed": 3, "max_new_tokens": 10, "ignore_eos": True}
    rows = run_rows(native, [[1], [2, 3]], **params, **fields)
    assert [len(row) for row in rows] == [10, 10] and torch_numbers == []


@pytest.mark.parametrize("fields", PARAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_torch(library, kind, fields):
    """945 draws of each. Rounding could part two speeds that are nearly equal; here none are."""
    shapes = [(1, 5), (2, 200), (7, 300), (63, 300), (256, 50), (257, 50), (4096, 40)]
    for size, rows in shapes:
        logits = random_logits(kind, rows, size, seed=size)
        params = params_of(fields, rows, first=LAST - 50)
        assert in_c(library, logits, params) == in_torch(logits, params), size


@pytest.mark.parametrize("fields", PARAMS)
def test_the_same_tokens_of_a_large_vocabulary(library, fields):
    for kind in ("random", "peaked", "flat"):
        logits = random_logits(kind, 10, 50257)
        params = params_of(fields, 10)
        assert in_c(library, logits, params) == in_torch(logits, params)


def test_of_equal_logits_the_largest_bits_win(library):
    """The race in whole numbers, for seeds and positions of up to 64 and 63 bits."""
    from sampling import SamplingParams

    logits = torch.zeros(1, 1000)
    for seed in (0, 1, 2**63, LAST):
        params = [SamplingParams(temperature=1.0, seed=seed)]
        for position in (0, 7, 2**31 + 5, 2**40, 2**63 - 1):
            state = bits(seed, position)
            expected = max(range(1000), key=lambda token: bits(state, token) >> 12)
            assert in_c(library, logits, params, position) == [expected]


@pytest.mark.parametrize("fields", PARAMS)
def test_the_same_tokens_on_every_processor_with_any_threads(library, fields):
    from native import build

    logits = random_logits("random", 33, 3001)
    params = params_of(fields, 33)
    expected = in_c(build.load(), logits, params)
    for count in (1, 2, 5):
        with threads(count):
            assert in_c(library, logits, params) == expected


@pytest.mark.parametrize("rows, count, expected", [(500, 1, 1), (500, 2, 2), (2, 5, 2)])
def test_no_more_threads_than_torch_has_nor_than_rows(monkeypatch, rows, count, expected):
    seen = []
    counting = SimpleNamespace(draw=lambda *arguments: seen.append(arguments[-1]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    in_c(counting, torch.zeros(rows, 3), params_of({}, rows))
    assert seen == [expected]


def test_the_boundaries_are_those_of_the_filters(library):
    def winners(probs, **fields):
        logits = torch.tensor(probs).log().expand(2000, len(probs))
        return set(in_c(library, logits, params_of({"temperature": 1.0} | fields, 2000)))

    assert winners([0.3, 0.1, 0.1, 0.5], top_p=0.8) == {0, 3}
    assert winners([0.15, 0.3, 0.3, 0.25], top_p=0.8) == {1, 2, 3}
    assert winners([1 / 40] * 40, top_p=0.6) == set(range(24))
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
        {"temperature": 1e-300},  # 0 in float32
    ],
)
def test_numbers_that_float32_or_64_bits_do_not_hold(library, fields):
    logits = torch.tensor([[0.0, 300.0, 100.0, 300.0, 200.0, -100.0]]).expand(300, 6)
    logits = logits / 100 if "top_k" in fields and fields["top_k"] > 6 else logits
    params = params_of(fields, 300)
    tokens = in_c(library, logits, params)
    assert tokens == in_torch(logits, params)
    assert len(set(tokens)) == (6 if fields["temperature"] == 1 else 2)


def seed_for(bits: int, position: int, index: int) -> int:
    """The seed of which random number `index` at this position has these bits."""

    def before(number: int, index: int) -> int:
        """The state from which SplitMix64 makes this number."""
        number ^= number >> 31 ^ number >> 62
        number = number * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        number ^= number >> 27 ^ number >> 54
        number = number * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        number ^= number >> 30 ^ number >> 60
        return (number - (index + 1) * 0x9E3779B97F4A7C15) % 2**64

    return before(before(bits, index), position)


@pytest.mark.parametrize("logit", [-15.0, -20.5, -30.0])
def test_a_token_that_is_hardly_ever_drawn_can_be(library, logit):
    from sampling import SamplingParams

    logits = torch.tensor([[0.0, logit, 0.0]])
    params = [SamplingParams(temperature=1.0, seed=seed_for(LAST, 9, 1))]
    assert in_c(library, logits, params) == in_torch(logits, params) == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", PARAMS)
def test_any_logits_give_an_id_and_stay_as_they_are(library, fields, value):
    for size in (1, 7, 255, 1000):
        logits = random_logits("random", 5, size)
        logits[1] = value
        logits[2, size // 2] = value
        logits[3, : size // 2] = value
        logits[4] = -value
        before = logits.clone()
        tokens = in_c(library, logits, params_of(fields, 5))
        assert all(0 <= token < size for token in tokens)
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def test_greedy_is_the_first_of_the_largest(library):
    logits = torch.tensor([[-1.0, 2.0, 0.5, 2.0], [-0.0, 0.0, -1.0, 0.0], [-3.0, -2.0, -2.0, -9.0]])
    assert in_c(library, logits, params_of({}, 3)) == logits.argmax(dim=-1).tolist() == [1, 0, 1]
    long = torch.zeros(1, 3000)
    long[0, [700, 2999]] = 1
    assert in_c(library, long, params_of({}, 1)) == [700]


def test_rows_of_all_parameters_are_one_call(native, monkeypatch):
    """With penalties: those of each row, and the logits that were given stay as they are."""
    from sampling import SamplingParams, choose

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
    ours = choose(logits, each, texts, lengths, native=native.runner)
    assert calls == [30] and torch.equal(logits, before)
    assert ours == choose(logits, each, texts, lengths)
    apart = torch.stack([logits, -logits], dim=1)[:, 0]  # each row followed by another one
    plain = params_of({"temperature": 0.8}, 30)  # without a penalty nobody copies them before
    ours = choose(apart, plain, texts, lengths, native=native.runner)
    assert ours == choose(logits, plain, texts, lengths)


def test_still_the_generator_of_rows_without_a_seed(native):
    from sampling import SamplingParams, choose

    fields = [{"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.5}, {}]
    each = [SamplingParams(**own) for own in fields]
    logits = random_logits("random", 4, 61)
    texts = [[1, 2]] * 4

    def run(**options):
        generator = torch.Generator().manual_seed(5)
        return choose(logits, each, texts, [1] * 4, generator, **options), generator.get_state()

    (ours, state), (expected, torch_state) = run(native=native.runner), run()
    assert ours == expected and torch.equal(state, torch_state)


def test_other_dtypes_are_for_torch(native, torch_numbers):
    from sampling import choose

    logits = random_logits("random", 2, 61).double()
    params = params_of({"temperature": 1.0}, 2)
    expected = choose(logits, params, [[1]] * 2, [1] * 2)
    made = len(torch_numbers)
    assert choose(logits, params, [[1]] * 2, [1] * 2, native=native.runner) == expected
    assert len(torch_numbers) == 2 * made


@pytest.mark.parametrize("bad", ["rows", "dtype", "strides"])
def test_nothing_outside_the_rows_is_read(library, bad):
    from native.draw import draw

    logits = torch.zeros(2, 10)
    logits = {"rows": logits[:1], "dtype": logits.double(), "strides": torch.zeros(10, 2).T}[bad]
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        draw(library, logits, params_of({"temperature": 1.0}, 2), [1, 1])


@pytest.mark.parametrize("fields", PARAMS[1:3])
def test_the_engine_and_its_drafter_draw_in_c(native, torch_numbers, fields):
    from engine.drafter import PagedDrafter
    from engine.engine import Engine

    prompts = [[1, 2, 3], [4], [5, 6]]
    params = params_of({"max_new_tokens": 20, "ignore_eos": True} | fields, 3)
    engine = Engine(native, drafter=PagedDrafter(native, native))
    texts = outputs_of(engine, prompts, params)
    assert torch_numbers == [] and engine.accepted > 0
    assert texts == own_texts(native, prompts, params)


def test_still_stories_are_those_of_torch(stories):
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

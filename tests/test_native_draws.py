"""A draw in C: the race, against torch and against whole numbers."""

import math

import pytest
import torch
from conftest import run_rows
from draws import bits, random_logits
from engines import outputs_of, own_texts
from natives import check_strange_logits, in_c, in_torch, params_of, threads

LAST = 2**64 - 1
pytestmark = pytest.mark.usefixtures("compiled")
PARAMS = [{"temperature": 0.8}, {"temperature": 1.5}, {"temperature": 0.3}, {"temperature": 0}]
KINDS = ["random", "peaked", "ties", "flat", "equal", "infinite"]


@pytest.fixture
def native(tiny):
    """A random model with passes and draws in C."""
    from native import use_native

    model = tiny(dtype=torch.float32)
    use_native(model)
    return model


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_draws_take_no_random_numbers_of_torch(native, torch_numbers, temperature):
    params = {"seed": 3, "max_new_tokens": 10, "ignore_eos": True, "temperature": temperature}
    rows = run_rows(native, [[1], [2, 3]], **params)
    assert [len(row) for row in rows] == [10, 10] and torch_numbers == []


@pytest.mark.parametrize("fields", PARAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_torch(library, kind, fields):
    """945 draws of each. Rounding could part two scores that are nearly equal; here none are."""
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


@pytest.mark.parametrize("temperature", [1e300, 1e-300])
def test_temperatures_that_float32_does_not_hold(library, temperature):
    logits = torch.tensor([[0.0, 300.0, 100.0, 300.0, 200.0, -100.0]]).expand(300, 6)
    params = params_of({"temperature": temperature}, 300)
    tokens = in_c(library, logits, params)
    assert tokens == in_torch(logits, params)
    assert len(set(tokens)) == (6 if temperature > 1 else 2)


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
def test_draws_of_any_logits_give_an_id_and_stay_as_they_are(library, fields, value):
    check_strange_logits(library, fields, value)


def test_the_generator_of_rows_without_a_seed(native):
    from sampling import SamplingParams, Sequence, sample_batch

    fields = [{"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.5}, {}]
    each = [Sequence([1, 2], 1, SamplingParams(**own)) for own in fields]
    logits = random_logits("random", 4, 61)

    def run(**options):
        generator = torch.Generator().manual_seed(5)
        return sample_batch(logits, each, generator, **options), generator.get_state()

    (ours, state), (expected, torch_state) = run(native=native.runner), run()
    assert ours == expected and torch.equal(state, torch_state)


def test_other_dtypes_are_for_torch(native, torch_numbers):
    from sampling import Sequence, sample_batch

    logits = random_logits("random", 2, 61).double()
    each = [Sequence([1], 1, params) for params in params_of({"temperature": 1.0}, 2)]
    expected = sample_batch(logits, each)
    made = len(torch_numbers)
    assert sample_batch(logits, each, native=native.runner) == expected
    assert len(torch_numbers) == 2 * made


@pytest.mark.parametrize("bad", ["rows", "dtype", "strides"])
def test_nothing_outside_the_rows_is_read(library, bad):
    from native.draw import draw

    logits = torch.zeros(2, 10)
    logits = {"rows": logits[:1], "dtype": logits.double(), "strides": torch.zeros(10, 2).T}[bad]
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        draw(library, logits, params_of({"temperature": 1.0}, 2), [1, 1])


def test_the_engine_and_its_drafter_draw_in_c(native, torch_numbers):
    from engine.drafter import PagedModelDrafter
    from engine.engine import Engine

    prompts = [[1, 2, 3], [4], [5, 6]]
    params = params_of({"max_new_tokens": 20, "ignore_eos": True} | PARAMS[0], 3)
    engine = Engine(native, drafter=PagedModelDrafter(native, native))
    texts = outputs_of(engine, prompts, params)
    assert torch_numbers == [] and engine.num_accepted_tokens > 0
    assert texts == own_texts(native, prompts, params)

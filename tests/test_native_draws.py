"""Draws in C: greedy, the race, top-k and top-p, against torch and against whole numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import record, run_rows
from draws import bits, random_logits
from engines import outputs_of, own_texts
from natives import check_strange_logits, in_c, in_torch, params_of, threads

from engine.drafter import PagedModelDrafter
from engine.engine import Engine
from infer import generate
from model import PassOutput, TorchRunner
from native import build, use_native
from native.draw import draw
from sampling import SamplingParams, Sequence, sample_batch

LAST = 2**64 - 1
pytestmark = pytest.mark.usefixtures("compiled")
PARAMS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.5},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.5},
    {"temperature": 0.3, "top_k": 1},
]
EACH = pytest.mark.parametrize("fields", PARAMS, ids=str)


@pytest.fixture
def native(tiny):
    model = tiny(dtype=torch.float32)
    use_native(model)
    return model


@pytest.fixture
def chosen(native, monkeypatch) -> list:
    return record(monkeypatch, type(native.runner), "draw", lambda _, logits, *args: len(logits))


@EACH
@pytest.mark.parametrize("kind", ["random", "peaked", "ties", "flat", "equal", "infinite"])
def test_the_same_tokens_as_torch(library, kind, fields):
    """Rounding could part two scores that are nearly equal; here none are."""
    shapes = [(1, 5), (2, 200), (7, 300), (63, 300), (256, 50), (257, 50), (4096, 40)]
    for size, rows in shapes:
        logits = random_logits(kind, rows, size, seed=size)
        params = params_of(fields, rows, first=LAST - 50)
        assert in_c(library, logits, params) == in_torch(logits, params), size
    logits = random_logits(kind, 4, 50257)
    assert in_c(library, logits, params_of(fields, 4)) == in_torch(logits, params_of(fields, 4))


@EACH
def test_the_same_tokens_on_every_processor_with_any_threads(library, fields):
    logits = random_logits("random", 33, 3001)
    params = params_of(fields, 33)
    expected = in_c(build.load(), logits, params)
    for count in (1, 2, 5):
        with threads(count):
            assert in_c(library, logits, params) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@EACH
def test_any_logits_give_an_id_and_stay_as_they_are(library, fields, value):
    check_strange_logits(library, fields, value)


def test_greedy_is_the_first_of_the_largest(library):
    logits = torch.tensor([[-1.0, 2.0, 0.5, 2.0], [-0.0, 0.0, -1.0, 0.0], [-3.0, -2.0, -2.0, -9.0]])
    assert in_c(library, logits, params_of({}, 3)) == logits.argmax(dim=-1).tolist() == [1, 0, 1]
    long = torch.zeros(1, 3000)
    long[0, [700, 2999]] = 1
    assert in_c(library, long, params_of({}, 1)) == [700]


def test_of_equal_logits_the_largest_bits_win(library):
    """The race in whole numbers, for seeds and positions of up to 64 and 63 bits."""
    logits = torch.zeros(1, 1000)
    for seed in (0, 1, 2**63, LAST):
        params = [SamplingParams(temperature=1.0, seed=seed)]
        for position in (0, 7, 2**31 + 5, 2**40, 2**63 - 1):
            state = bits(seed, position)
            expected = max(range(1000), key=lambda token: bits(state, token) >> 12)
            assert in_c(library, logits, params, position) == [expected]


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
    logits = torch.tensor([[0.0, logit, 0.0]])
    params = [SamplingParams(temperature=1.0, seed=seed_for(LAST, 9, 1))]
    assert in_c(library, logits, params) == in_torch(logits, params) == [1]


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


SPREAD = [0.0, 300.0, 100.0, 300.0, 200.0, -100.0]


@pytest.mark.parametrize(
    "logits, fields, count",
    [
        ([1.0, 1.0 - 2**-24, 0.0], {"temperature": 3e38, "top_k": 1}, 2),  # equal after dividing
        ([0.0, -(2.0**-30), -1.0], {"temperature": 2.0**119, "top_k": 1}, 1),  # 2**-149 apart
        ([each / 100 for each in SPREAD], {"temperature": 1.0, "top_k": 2**64 + 3}, 6),
        ([each / 100 for each in SPREAD], {"temperature": 1.0, "top_k": 2**63}, 6),
        (SPREAD, {"temperature": 1e300, "top_k": 2}, 2),  # infinite in float32
        (SPREAD, {"temperature": 1e300}, 6),
        (SPREAD, {"temperature": 1e-300}, 2),
    ],
)
def test_numbers_at_the_limits_of_float32_and_64_bits(library, logits, fields, count):
    logits = torch.tensor([logits]).expand(300, len(logits))
    params = params_of(fields, 300)
    tokens = in_c(library, logits, params)
    assert tokens == in_torch(logits, params) and len(set(tokens)) == count


@pytest.mark.parametrize("bad", ["rows", "dtype", "strides"])
def test_nothing_outside_the_rows_is_read(library, bad):
    logits = torch.zeros(2, 10)
    logits = {"rows": logits[:1], "dtype": logits.double(), "strides": torch.zeros(10, 2).T}[bad]
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        draw(library, logits, params_of({"temperature": 1.0}, 2), [1, 1])


@pytest.mark.parametrize("rows, count, expected", [(500, 1, 1), (500, 2, 2), (2, 5, 2)])
def test_no_more_threads_than_torch_has_nor_than_rows(monkeypatch, rows, count, expected):
    seen = []
    counting = SimpleNamespace(draw=lambda *arguments: seen.append(arguments[-1]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    in_c(counting, torch.zeros(rows, 3), params_of({}, rows))
    assert seen == [expected]


# In generate, a batch and the engine


@EACH
def test_generate_and_the_engine_with_its_drafter_draw_in_c(native, chosen, torch_numbers, fields):
    run_rows(native, [[1], [2, 3]], max_new_tokens=5, ignore_eos=True, seed=3, **fields)
    assert chosen == [2] * 5
    prompts = [[1, 2, 3], [4], [5, 6]]
    params = params_of({"max_new_tokens": 20, "ignore_eos": True} | fields, 3)
    engine = Engine(native, drafter=PagedModelDrafter(native, native))
    outputs = outputs_of(engine, prompts, params)
    assert torch_numbers == [] and engine.num_accepted_tokens > 0
    assert outputs == own_texts(native, prompts, params)


def test_rows_of_all_parameters_are_one_call(native, chosen):
    """Each row has its own penalties, and the logits that were given stay as they are."""
    penalties = [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}]
    penalties += [{"presence_penalty": -2.0}, {"presence_penalty": 1.0, "frequency_penalty": -0.5}]
    each = [SamplingParams(seed=row, **PARAMS[row % 7], **penalties[row % 5]) for row in range(35)]
    logits = random_logits("random", 35, 61)
    before = logits.clone()
    texts = [[row, 2 * row % 61, 3, 3, 3] for row in range(35)]
    lengths = [1 + row % 5 for row in range(35)]
    sequences = [Sequence(*own) for own in zip(texts, lengths, each)]
    ours = sample_batch(logits, sequences, native=native.runner)
    assert chosen == [35] and torch.equal(logits, before)
    assert ours == sample_batch(logits, sequences)
    apart = torch.stack([logits, -logits], dim=1)[:, 0]  # each row followed by another one
    plain = params_of({"temperature": 0.8}, 35)  # without a penalty they are not copied before
    sequences = [Sequence(*own) for own in zip(texts, lengths, plain)]
    ours = sample_batch(apart, sequences, native=native.runner)
    assert ours == sample_batch(logits, sequences)


def test_rows_without_a_seed_take_the_generators_numbers(native, chosen):
    """They draw in torch, as without C, beside others that are chosen in C."""
    fields = [{"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.5}, {}]
    each = [Sequence([1, 2], 1, SamplingParams(**own)) for own in fields]
    logits = random_logits("random", 4, 61)

    def run(**options):
        generator = torch.Generator().manual_seed(5)
        return sample_batch(logits, each, generator, **options), generator.get_state()

    (ours, state), (expected, torch_state) = run(native=native.runner), run()
    assert ours == expected and torch.equal(state, torch_state) and chosen == [2]


def test_other_dtypes_are_for_torch(native, torch_numbers):
    logits = random_logits("random", 2, 61).double()
    each = [Sequence([1], 1, params) for params in params_of({"temperature": 1.0}, 2)]
    expected = sample_batch(logits, each)
    made = len(torch_numbers)
    assert sample_batch(logits, each, native=native.runner) == expected
    assert len(torch_numbers) == 2 * made


def test_a_backend_is_one_class(tiny):
    """`generate` and the engine run all passes and all choices by the runner of the model."""

    class Backend(TorchRunner):
        passes = []

        def forward(self, model, cache, spans, keep):
            self.passes.append([span.tokens for span in spans])
            rows = torch.zeros(sum(keep), model.config.vocab_size)
            return PassOutput(*(rows for _ in PassOutput._fields))

        def sample_batch(self, logits, sequences, *_):
            return [len(sequence.tokens) for sequence in sequences]

    model = tiny()
    model.runner = Backend()
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    assert list(generate(model, [[7, 8]], params)) == [[2], [3], [4]]
    assert outputs_of(Engine(model), [[7, 8]], params) == [[2, 3, 4]]
    assert Backend.passes == 2 * [[[7, 8]], [[2]], [[3]]]

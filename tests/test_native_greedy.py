"""The most likely token of each row, found in C."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import run_rows
from draws import random_logits
from engines import outputs_of, own_texts
from natives import check_strange_logits, in_c, in_torch, params_of, threads

pytestmark = pytest.mark.usefixtures("compiled")
KINDS = ["random", "peaked", "ties", "flat", "equal", "infinite"]
GREEDY = {"temperature": 0}


@pytest.fixture
def native(tiny):
    """A random model with passes and draws in C."""
    from native import use_native

    model = tiny(dtype=torch.float32)
    use_native(model)
    return model


@pytest.fixture
def chosen(native, monkeypatch) -> list:
    """To this list each choice in C adds its number of rows."""
    kind = type(native.runner)
    draw = getattr(kind, "draw", None)
    rows = []

    def counted(self, logits, *args):
        rows.append(len(logits))
        return draw(self, logits, *args)

    monkeypatch.setattr(kind, "draw", counted, raising=False)
    return rows


def test_greedy_texts_are_chosen_in_c(native, chosen):
    run_rows(native, [[1], [2, 3]], max_new_tokens=5, ignore_eos=True)
    assert chosen == [2] * 5


def test_the_engine_and_its_drafter_choose_in_c(native, chosen):
    from engine.drafter import PagedModelDrafter
    from engine.engine import Engine

    prompts = [[1, 2, 3], [4], [5, 6]]
    params = params_of({"max_new_tokens": 20, "ignore_eos": True}, 3)
    engine = Engine(native, drafter=PagedModelDrafter(native, native))
    texts = outputs_of(engine, prompts, params)
    assert chosen and engine.num_accepted_tokens > 0
    assert texts == own_texts(native, prompts, params)


def test_greedy_is_the_first_of_the_largest(library):
    logits = torch.tensor([[-1.0, 2.0, 0.5, 2.0], [-0.0, 0.0, -1.0, 0.0], [-3.0, -2.0, -2.0, -9.0]])
    assert in_c(library, logits, params_of({}, 3)) == logits.argmax(dim=-1).tolist() == [1, 0, 1]
    long = torch.zeros(1, 3000)
    long[0, [700, 2999]] = 1
    assert in_c(library, long, params_of({}, 1)) == [700]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_argmax(library, kind):
    for size, rows in ((1, 5), (7, 30), (256, 9), (257, 9), (4096, 9), (50257, 3)):
        logits = random_logits(kind, rows, size, seed=size)
        params = params_of(GREEDY, rows)
        assert in_c(library, logits, params) == in_torch(logits, params), size


@pytest.mark.parametrize("count", [2, 5])
def test_greedy_with_any_threads(library, count):
    logits = random_logits("random", 33, 3001)
    with threads(count):
        assert in_c(library, logits, params_of(GREEDY, 33)) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("rows, count, expected", [(500, 1, 1), (500, 2, 2), (2, 5, 2)])
def test_no_more_threads_than_torch_has_nor_than_rows(monkeypatch, rows, count, expected):
    seen = []
    counting = SimpleNamespace(draw=lambda *arguments: seen.append(arguments[-1]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    in_c(counting, torch.zeros(rows, 3), params_of({}, rows))
    assert seen == [expected]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_logits_give_an_id_and_stay_as_they_are(library, value):
    check_strange_logits(library, GREEDY, value)


@pytest.mark.parametrize("bad", ["rows", "dtype"])
def test_other_logits_are_refused(library, bad):
    logits = torch.zeros(2, 10)
    logits = {"rows": logits[:, None], "dtype": logits.double()}[bad]
    with pytest.raises(ValueError):
        in_c(library, logits, params_of(GREEDY, 2))


def test_greedy_rows_beside_others(native, chosen):
    """Rows that draw from a generator do so in torch, and get the same numbers as without C."""
    from sampling import SamplingParams, Sequence, sample_batch

    each = [Sequence([1, 2], 1, SamplingParams(temperature=own)) for own in (1.0, 0.0, 1.0, 0.0)]
    logits = random_logits("random", 4, 61)

    def run(**options):
        generator = torch.Generator().manual_seed(5)
        return sample_batch(logits, each, generator, **options)

    assert run(native=native.runner) == run()
    assert chosen == [2]


def test_a_backend_is_one_class(tiny):
    """`generate` and the engine run all passes and all choices by the runner of the model."""
    from engine.engine import Engine
    from infer import generate
    from sampling import SamplingParams

    class Backend:
        ranks = None
        passes = []

        def logits(self, model, cache, spans, keep):
            self.passes.append([span.tokens for span in spans])
            return torch.zeros(sum(keep), model.config.vocab_size)

        def sample_batch(self, logits, sequences, *_):
            return [len(sequence.tokens) for sequence in sequences]

    model = tiny()
    model.runner = Backend()
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    assert list(generate(model, [[7, 8]], params)) == [[2], [3], [4]]
    engine = Engine(model)
    request = engine.add([7, 8], params)
    while engine.busy:
        engine.step()
    assert request.output == [2, 3, 4]
    assert Backend.passes == 2 * [[[7, 8]], [[2]], [[3]]]

"""A step computes no more tokens than its budget; a long prompt comes in chunks."""

import types

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import (
    check_texts,
    finish,
    greedy,
    lettered,
    letters,
    make_engine,
    make_greedy,
    request_params,
    step,
)

from command_line import output
from engine.engine import Engine
from sampling import SamplingParams

SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.95}


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_are_equal_for_every_token_budget(build, params):
    model = build(seed=6)
    prompts = [random_tokens(length, seed=length) for length in (0, 13, 3, 21)]
    each = request_params(4, max_new_tokens=12, **params)
    for budget in (1, 3, 5, 8, 16, 40):
        engine, requests = make_engine(
            model, prompts, each, page_size=3, max_num_batched_tokens=budget
        )
        assert max(count for count, _ in lettered(engine, requests)) <= budget
        check_texts(model, requests)


@pytest.mark.parametrize(
    "lengths, count, options, steps",
    [
        # The prompts are fed in turn; the end of one shares its step with the begin of the next.
        (
            [7, 6, 5],
            3,
            {"max_num_batched_tokens": 10},
            [(10, "A"), (1 + 3 + 5, "ABC"), (3, "ABC"), (2, "BC")],
        ),
        ([8], 1, {"max_num_batched_tokens": 8}, [(8, "A")]),
        ([9], 1, {"max_num_batched_tokens": 8}, [(8, ""), (1, "A")]),
        # One row: the second prompt does not begin while the first text runs.
        (
            [6, 3],
            2,
            {"max_num_batched_tokens": 4, "max_num_seqs": 1},
            [(4, ""), (2, "A"), (1, "A"), (3, "B"), (1, "B")],
        ),
    ],
)
def test_a_budget_is_used_up_while_there_is_work(tiny, lengths, count, options, steps):
    assert lettered(*make_greedy(tiny(), lengths, count, **options)) == steps


@pytest.mark.parametrize("budget, steps", [(8, 12), (23, 3), (512, 1)])
def test_decode_does_not_wait_for_a_long_prompt(tiny, budget, steps):
    """Three texts get a token in every step; 60 others come in what they leave."""
    model = tiny(block_size=64)
    engine, requests = make_greedy(model, [2, 1, 2], 20, max_num_batched_tokens=budget)
    engine.step()
    late = engine.add(random_tokens(60, seed=9), greedy(3))
    seen = lettered(engine, [*requests, late], steps)
    assert [got for _, got in seen] == ["ABC"] * (steps - 1) + ["ABCD"]  # 60 / (budget - 3)
    assert max(count for count, _ in seen) == min(budget, 63)
    assert all("ABC" in got for got in letters(engine, [*requests, late], 19 - steps))
    finish(engine)
    check_texts(model, [late])


def test_a_context_shift_leaves_each_younger_request_a_token(tiny):
    engine, requests = make_greedy(tiny(), [1, 9, 1], 20, max_num_batched_tokens=4)
    assert lettered(engine, requests, 3) == [(1 + 3, "A"), (1 + 3, "A"), (1 + 3, "AB")]
    assert lettered(engine, requests, 7) == [(3, "ABC")] * 7
    assert requests[1].start == 8 and len(requests[1].context_window) == 9
    assert lettered(engine, requests, 6) == [(1 + 2 + 1, "AC")] * 4 + [(3, "ABC")] * 2


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_token_budget_below_max_num_seqs(tiny, budget):
    model = tiny(seed=3)
    engine, requests = make_greedy(model, [3] * 5, 6, max_num_seqs=5, max_num_batched_tokens=budget)
    while engine.busy:
        left = [request for request in requests if request.finish_reason is None]
        ((count, got),) = lettered(engine, requests, 1)
        assert count <= budget and len(engine.scheduler.running) <= budget
        decoding = [request for request in left[:budget] if len(request.output) > 1]
        assert all("ABCDE"[requests.index(request)] in got for request in decoding)
    check_texts(model, requests)


def test_no_token_is_sampled_after_a_chunk(tiny):
    """The logits after a chunk say what the model would write there; here each of them says EOS."""
    model = tiny(eos_token_ids=tuple(range(61)))
    engine, requests = make_engine(
        model, [random_tokens(9)], SamplingParams(5), max_num_batched_tokens=2
    )
    assert lettered(engine, requests) == [(2, "")] * 4 + [(1, "A")]
    assert requests[0].finish_reason == "stop" and len(requests[0].tokens) == 10


@pytest.mark.parametrize(
    "budget, steps, shared", [(3, 1, 0), (4, 1, 4), (5, 2, 8), (6, 3, 16), (7, 2, 12), (13, 1, 12)]
)
def test_chunks_of_a_prompt_are_shared_as_soon_as_they_are_computed(tiny, budget, steps, shared):
    model = tiny(block_size=32)
    engine, requests = make_greedy(model, [22], 3, page_size=4, max_num_batched_tokens=budget)
    assert letters(engine, requests, steps) == [""] * steps
    engine.abort(requests[0])
    late = engine.add(random_tokens(22), greedy(4))
    finish(engine)
    assert engine.scheduler.prefix_cache_hits == shared
    assert engine.num_computed_tokens == steps * budget + 22 - shared + 3
    check_texts(model, [late])


@pytest.fixture
def broken(tiny):
    """A GPT-2 that returns NaN for texts of ten or more tokens."""
    model = tiny(block_size=32)
    with torch.no_grad():
        model.wpe.weight[9] = torch.nan
    return model


def test_nan_in_a_chunk_ends_its_own_request_at_once(broken):
    engine, requests = make_greedy(broken, [3, 20, 2], 6, page_size=4, max_num_batched_tokens=6)
    a, b, c = requests
    assert lettered(engine, requests, 2) == [(6, "A"), (6, "A")]  # b: 3 and 5
    first, second = step(engine)  # b: positions 8 to 12
    assert first.request is a and first.error is None
    assert (second.request, second.tokens, second.finish_reason) == (b, [], "error")
    assert "NaN" in second.error and b.output == []
    finish(engine)
    check_texts(broken, [a, c])


def test_the_budget_is_512_if_not_given(tiny):
    engine = Engine(tiny(block_size=600), max_num_seqs=2)
    requests = [engine.add(random_tokens(600), greedy(1))]
    assert lettered(engine, requests) == [(512, ""), (88, "A")]


def test_the_command_line_shows_the_time_of_the_first_token_not_of_the_first_chunk(
    engine_cli, monkeypatch
):
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    clock = types.SimpleNamespace(perf_counter=lambda: float(len(steps)))
    monkeypatch.setattr(output, "time", clock)
    args = ["--model", CHECKPOINTS / "stories-draft", "--max-new-tokens", 3]
    args += ["--prompt", "Once upon a time there was", "--max-num-batched-tokens", 1]
    code, _, err = engine_cli(*args)
    assert code == 0 and "the first after 6.000 s" in err and "8 steps, 8 positions" in err

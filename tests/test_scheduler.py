"""Steps of a scheduler: token budget, chunked prefill, FIFO, and preemption of the youngest."""

import re
import types

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import check_texts, finish, greedy, lettered, letters, make_engine, make_greedy, step

from command_line import output
from engine.engine import Engine
from sampling import SamplingParams


@pytest.mark.parametrize(
    "lengths, count, budget, max_num_seqs, steps",
    [
        # The prompts are fed in turn; the end of one shares its step with the begin of the next.
        ([7, 6, 5], 3, 10, 32, [(10, "A"), (1 + 3 + 5, "ABC"), (3, "ABC"), (2, "BC")]),
        ([8], 1, 8, 32, [(8, "A")]),
        ([9], 1, 8, 32, [(8, ""), (1, "A")]),
        # One row: the second prompt does not begin while the first sequence runs.
        ([6, 3], 2, 4, 1, [(4, ""), (2, "A"), (1, "A"), (3, "B"), (1, "B")]),
        # Fewer tokens than rows: two decode, and the others wait.
        ([3] * 3, 2, 2, 3, [(2, ""), (2, "A"), (2, "A"), (2, "B"), (2, "B"), (1, "C"), (1, "C")]),
    ],
)
def test_a_budget_is_used_up_while_there_is_work(tiny, lengths, count, budget, max_num_seqs, steps):
    options = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    engine, requests = make_greedy(tiny(), lengths, count, **options)
    assert lettered(engine, requests) == steps
    check_texts(engine.model, requests)


@pytest.mark.parametrize("budget, steps", [(8, 12), (512, 1)])
def test_decode_does_not_wait_for_a_long_prompt(tiny, budget, steps):
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


def test_no_token_is_sampled_after_a_chunk(tiny):
    """The logits after a chunk say what would follow there; here each of them says EOS."""
    model = tiny(eos_token_ids=tuple(range(61)))
    prompts = [random_tokens(9)]
    engine, requests = make_engine(model, prompts, SamplingParams(5), max_num_batched_tokens=2)
    assert lettered(engine, requests) == [(2, "")] * 4 + [(1, "A")]
    assert requests[0].finish_reason == "stop" and len(requests[0].tokens) == 10


@pytest.mark.parametrize("budget, steps, shared", [(3, 1, 0), (4, 1, 4), (6, 3, 16), (7, 2, 12)])
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


def test_nan_in_a_chunk_ends_its_own_request_at_once(tiny):
    model = tiny(block_size=32)
    with torch.no_grad():
        model.wpe.weight[9] = torch.nan
    engine, requests = make_greedy(model, [3, 20, 2], 6, page_size=4, max_num_batched_tokens=6)
    a, b, c = requests
    assert lettered(engine, requests, 2) == [(6, "A"), (6, "A")]  # b: 3 and 5
    first, second = step(engine)  # b: positions 8 to 12
    assert first.request is a and first.error is None
    assert (second.request, second.tokens, second.finish_reason) == (b, [], "error")
    assert "NaN" in second.error and b.output == []
    finish(engine)
    check_texts(model, [a, c])


def test_the_youngest_request_is_preempted_and_recomputed(tiny):
    engine, requests = make_greedy(tiny(), [4, 4], 5, num_pages=3, page_size=4)
    _, b = requests
    # A page each; then the first takes the last page, so none is left for b.
    assert letters(engine, requests, 2) == ["AB", "A"]
    assert list(engine.scheduler.waiting) == [b] and b.pages == [] and b.num_computed_tokens == 0
    assert len(b.output) == 1 and b.finish_reason is None  # its token stays
    assert engine.scheduler.num_preemptions == 1
    assert letters(engine, requests) == ["A"] * 3 + ["B"] * 4
    # Twice 4, 4 times 1 for each, and the 4 of b again, or found where they were.
    assert engine.num_computed_tokens + engine.scheduler.prefix_cache_hits == 8 + 8 + 4


def test_in_every_step_the_oldest_gets_a_token_and_none_overtakes(tiny):
    for num_pages in (8, 10, 13):
        options = {"max_num_seqs": 4, "num_pages": num_pages, "page_size": 2}
        engine, requests = make_greedy(tiny(), [3, 11, 1, 20, 6, 2], 12, **options)
        while engine.busy:
            left = [request for request in requests if request.finish_reason is None]
            got = [event.request for event in step(engine)]
            assert got == left[: len(got)] and got
            left = [request for request in requests if request.finish_reason is None]
            assert [*engine.scheduler.running, *engine.scheduler.waiting] == left
        assert engine.scheduler.num_preemptions > 2
        check_texts(engine.model, requests)


def test_the_command_line_counts_preemptions_and_has_the_same_output(
    cli, engine_cli, tiny_checkpoint
):
    args = ["--model", tiny_checkpoint, "--max-new-tokens", 30, "--ignore-eos"]
    for prompt in ("Once upon a time", "One day, a big dog", "Tom and Lily"):
        args += ["--prompt", prompt]
    args += ["--temperature", 1, "--seed", 5]
    expected = cli(*args)[:2]
    for num_pages, preempted in ((16, True), (40, False)):  # of 4 positions
        code, out, err = engine_cli(*args, "--num-pages", num_pages, "--page-size", 4)
        assert (code, out) == expected
        (count,) = re.findall(r"positions computed.*, (\d+) preemptions", err)
        assert (int(count) > 0) == preempted


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

"""The scheduler alone: a function of the tokens that it hands out stands for the model."""

import pytest

from cache import ContextWindow
from engine.pages import PagePool
from engine.request import Request
from engine.scheduler import Scheduler
from errors import UserError
from sampling import SamplingParams

BLOCK_SIZE = 8
CONTEXT_WINDOW = ContextWindow(BLOCK_SIZE, 4)


def build(max_num_seqs: int = 4, pages: int | None = None):
    pool = PagePool(pages or max_num_seqs * 4, 2)  # room for all rows, and a budget
    scheduler = Scheduler(pool, max_num_seqs, 1000, CONTEXT_WINDOW)
    scheduler.held = {}  # of each request, the tokens whose keys and values would be in the cache
    return scheduler


def add(scheduler, *prompts: list[int], max_new_tokens: int = 6) -> list:
    requests = [
        Request(list(prompt), len(prompt), SamplingParams(max_new_tokens)) for prompt in prompts
    ]
    for request in requests:
        scheduler.add(request)
    return requests


def follow(window: list[int]) -> int:
    """The model: each position of what it sees counts."""
    return sum(position * token for position, token in enumerate(window, 1)) % 97


def by_hand(prompt: list[int], max_new_tokens: int = 6) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(follow(CONTEXT_WINDOW.crop(tokens)))
    return tokens[len(prompt) :]


def step(scheduler) -> list:
    """Compute what is scheduled, and end texts that are long enough: request and tokens of each."""
    scheduled = scheduler.schedule()
    for entry in scheduled:
        request = entry.request
        held = scheduler.held.setdefault(entry.request, [])
        held[request.num_computed_tokens :] = entry.tokens
        scheduler.advance(entry, [follow(held)])
        if len(request.output) == request.params.max_new_tokens:
            scheduler.finish(request, "length")
    return [(entry.request, entry.tokens) for entry in scheduled]


def finish_all(scheduler) -> list:
    """All steps that are left."""
    steps = []
    while scheduler.running or scheduler.waiting:
        steps.append(step(scheduler))
        assert len(steps) < 1000
    return steps


def who(scheduled: list) -> list:
    return [request for request, _ in scheduled]


def widths(scheduled: list) -> list[int]:
    return [len(tokens) for _, tokens in scheduled]


def test_a_prompt_and_then_token_after_token():
    scheduler = build()
    (request,) = add(scheduler, [5, 6, 7], max_new_tokens=3)
    assert step(scheduler) == [(request, [5, 6, 7])]
    first = follow([5, 6, 7])
    assert request.tokens == [5, 6, 7, first] and request.output == [first]
    assert step(scheduler) == [(request, [first])]
    assert widths(step(scheduler)) == [1]
    assert len(request.output) == 3 and request.finish_reason == "length"
    assert scheduler.schedule() == []


def test_outputs_are_by_hand_for_any_max_num_seqs():
    prompts = [
        [token, *range(length)]
        for token, length in zip(range(20, 30), (0, 3, 7, 8, 12, 1, 20, 6, 2, 9))
    ]
    for max_num_seqs in (1, 2, 3, 10, 20):
        scheduler = build(max_num_seqs)
        requests = add(scheduler, *prompts, max_new_tokens=15)
        finish_all(scheduler)
        assert [request.output for request in requests] == [
            by_hand(prompt, 15) for prompt in prompts
        ]


def test_a_prompt_joins_while_others_go_on():
    scheduler = build()
    a, b = add(scheduler, [1, 2], [3, 4, 5])
    assert widths(step(scheduler)) == [2, 3]
    (c,) = add(scheduler, [6, 7, 8, 9])
    scheduled = step(scheduler)
    assert who(scheduled) == [a, b, c] and widths(scheduled) == [1, 1, 4]
    assert widths(step(scheduler)) == [1, 1, 1]


def test_a_context_shift_recomputes_the_window():
    scheduler = build()
    (request,) = add(scheduler, list(range(6)), max_new_tokens=11)
    assert [widths(step(scheduler)) for _ in range(3)] == [[6], [1], [1]]
    # Nine tokens do not fit; of them the last five stay, at positions 0 to 4.
    assert (
        request.start == 4
        and request.context_window == request.tokens[4:9]
        and request.num_computed_tokens == 0
    )
    assert step(scheduler) == [(request, request.tokens[4:9])]
    assert [widths(step(scheduler)) for _ in range(4)] == [[1], [1], [1], [5]]
    assert request.start == 8


@pytest.mark.parametrize("length, start", [(8, 0), (9, 4), (12, 4), (13, 8), (30, 24)])
def test_a_prompt_longer_than_the_window_begins_behind_its_start(length, start):
    scheduler = build()
    prompt = list(range(length))
    (request,) = add(scheduler, prompt)
    assert step(scheduler) == [(request, prompt[start:])]
    assert request.tokens[:length] == prompt and request.prompt_length == length


def test_no_request_overtakes_the_head_of_the_queue():
    """A long text waits for pages; a short one behind it would fit."""
    scheduler = build(pages=5)
    a, _ = add(scheduler, [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], max_new_tokens=1)
    (c,) = add(scheduler, [13], max_new_tokens=1)
    assert [entry.request for entry in scheduler.schedule()] == [a] and c in scheduler.waiting


@pytest.mark.parametrize("length, count, needed", [(3, 4, 3), (6, 2, 4), (8, 1, 4), (30, 30, 4)])
def test_what_can_never_fit_is_refused(length, count, needed):
    (request,) = add(build(pages=needed), [1] * length, max_new_tokens=count)
    assert request.finish_reason is None
    scheduler = build(pages=needed - 1)
    with pytest.raises(UserError) as raised:
        add(scheduler, [1] * length, max_new_tokens=count)
    size = f"a sequence of up to {min(length + count - 1, 8)} positions (page_size 2)"
    assert str(raised.value) == f"num_pages {needed - 1}: must be at least {needed} for {size}"
    assert not scheduler.waiting


def test_without_an_answer_the_same_is_scheduled_again():
    """A step may fail; the next one computes the same."""
    scheduler = build(2)
    add(scheduler, [1, 2, 3], [4] * 8, [5])
    for _ in range(7):
        assert scheduler.schedule() == scheduler.schedule()
        step(scheduler)


def test_a_running_request_ends_and_the_next_takes_its_place():
    scheduler = build(2)
    a, b, c = add(scheduler, [1, 2], [3], [4, 5, 6])
    assert who(step(scheduler)) == [a, b]
    text = list(a.tokens)
    scheduler.finish(a, "stop")
    assert a.finish_reason == "stop" and a.tokens == text
    scheduled = step(scheduler)
    assert who(scheduled) == [b, c] and widths(scheduled) == [1, 3]
    assert b.finish_reason is None and c.finish_reason is None


def test_a_waiting_request_ends_and_never_runs():
    scheduler = build(1)
    a, b, c = add(scheduler, [1], [2], [3], max_new_tokens=2)
    assert who(step(scheduler)) == [a]
    scheduler.finish(b, "abort")
    assert b.finish_reason == "abort" and b.output == []
    # No row was given back for b.
    assert [who(scheduled) for scheduled in finish_all(scheduler)] == [[a], [c], [c]]


def test_a_request_ends_once():
    scheduler = build(1)
    a, b, c = add(scheduler, [1], [2], [3])
    step(scheduler)
    for request in (a, c):  # one that ran, and one that waited
        scheduler.finish(request, "stop")
        with pytest.raises(ValueError, match="finish_reason 'stop'$"):
            scheduler.finish(request, "abort")
        assert request.finish_reason == "stop"
    assert who(step(scheduler)) == [b]


def test_a_request_of_another_engine_is_refused():
    ours = build(1)
    other = build(1)
    (mine,) = add(ours, [1])
    running, waiting = add(other, [1], [2])
    step(other)
    for request in (running, waiting):
        with pytest.raises(ValueError, match="another engine$"):
            ours.finish(request, "abort")
        assert request.finish_reason is None
    assert who(step(ours)) == [mine] and who(step(other)) == [running]
    finish_all(other)
    assert waiting.finish_reason == "length"


def test_a_request_that_never_runs_has_its_whole_text_in_its_window():
    (request,) = add(build(), [1, 2, 3], max_new_tokens=0)
    assert request.finish_reason == "length"
    assert request.context_window == request.uncomputed_tokens == [1, 2, 3] and request.length == 3

"""Drafts for each text: fewer steps, and each text is still the one of its own run."""

import dataclasses
import re

import pytest
import torch
from conftest import random_tokens
from drafting import ALWAYS, GREEDY, MIXED, PROMPTS, knowing, spoil, write
from engines import alone, check_texts, finish, greedy, make_engine, step

from cache import ContextWindow
from engine.drafter import PromptLookupDrafter
from engine.pages import PagePool
from engine.request import Request
from engine.scheduler import Scheduler
from errors import UserError
from sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tiny):
    """One for many tests, so that `alone` remembers its texts."""
    return tiny()


def tokens_of(steps) -> list[list[int]]:
    """How many tokens each event of each step brought."""
    return [[len(event.tokens) for event in events] for events in steps]


# Texts


@pytest.mark.parametrize("gamma", [1, 3, 16])
def test_outputs_equal_generate(model, gamma):
    engine, _ = write(model, PromptLookupDrafter(), page_size=4, gamma=gamma)
    assert 0 < engine.num_accepted_tokens < engine.num_draft_tokens


# Drafters that are wrong, right, or strange


def test_right_drafts_save_steps_and_are_counted(model):
    engine, steps = write(model, knowing(model), [[5, 6]], greedy(8), gamma=3)
    # The prompt gives one token, then 3 drafts and what follows; of 3 more that lack, the last
    # comes without a draft.
    assert tokens_of(steps) == [[1], [4], [3]] and engine.passes == [[2], [4], [3]]
    assert (
        engine.steps,
        engine.num_computed_tokens,
        engine.num_draft_tokens,
        engine.num_accepted_tokens,
    ) == (3, 9, 5, 5)


def test_wrong_drafts_are_counted_and_give_a_token_a_step(model):
    engine, steps = write(model, knowing(model, wrong=ALWAYS), [[5, 6]], greedy(8), gamma=3)
    assert tokens_of(steps) == [[1]] * 8
    assert engine.drafter.counts == [[], *([count] for count in (3, 3, 3, 3, 2, 1, 0))]
    assert (engine.steps, engine.num_computed_tokens) == (8, 2 + 7 + 15)
    assert (engine.num_draft_tokens, engine.num_accepted_tokens) == (15, 0)


@pytest.mark.parametrize(
    "wrong", [(), ALWAYS, range(0, 24, 2), range(0, 24, 5)], ids=["no", "all", "every 2nd", "5th"]
)
def test_wrong_drafts_change_no_output(model, wrong):
    write(model, knowing(model, wrong), num_pages=20, page_size=2, gamma=6)


def test_excess_drafts_are_cut(tiny):
    model = tiny(block_size=64)
    knows = knowing(model, more=20)  # also what comes after the end
    _, steps = write(model, knows, params=greedy(9), gamma=3)
    assert {event.finish_reason for events in steps for event in events} == {None, "length"}


def test_no_more_drafts_are_asked_for_than_can_be_used(model):
    drafter = knowing(model, wrong=ALWAYS)
    write(model, drafter, [random_tokens(12)], greedy(12), gamma=5)
    # The lengths of the window, from the first generated token on.
    room = [*range(12 + 1, 16 + 1), *range(9, 16)]
    assert [16 - length for length in room] == [3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1]
    # In the step after a hop the window is computed, and no drafts are asked for.
    left = range(12 - 1 - 1, -1, -1)
    asked = [[min(5, 16 - length, end)] for length, end in zip(room, left)]
    assert drafter.counts == [[], *asked[:4], [], *asked[5:]]


def test_no_more_drafts_are_asked_for_than_the_budget_leaves_beside_the_texts(model):
    drafter = knowing(model, wrong=ALWAYS)
    options = {"max_num_batched_tokens": 6, "drafter": drafter, "gamma": 16}
    engine, requests = make_engine(model, [[5, 6], [7, 8]], greedy(9), **options)
    engine.step()
    engine.step()
    engine.abort(requests[0])
    engine.step()
    assert drafter.counts[1:] == [[4, 4], [5]]


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), UserError("no word"), KeyboardInterrupt()], ids=repr
)
def test_other_errors_of_a_drafter_propagate(model, error):
    drafter = knowing(model)
    propose = drafter.propose
    engine, requests = make_engine(model, PROMPTS, MIXED, drafter=drafter)
    engine.step()

    def fail(requests, counts):
        drafter.propose = propose
        raise error

    drafter.propose = fail
    with pytest.raises(type(error)):
        engine.step()
    finish(engine)
    check_texts(model, requests)


@pytest.mark.parametrize("memory", [True, False])
def test_drafts_of_a_step_that_failed_are_not_tried_again(model, memory):
    """One of them is no id of the model. The error is seen once, and the text goes on.

    memory: else the next step has no drafts, because there is no memory for any.
    """
    drafter = knowing(model)
    knows = drafter.function
    drafter.function = lambda request, count: [model.config.vocab_size] * count
    engine, requests = make_engine(model, PROMPTS, MIXED, drafter=drafter)
    engine.step()
    with pytest.raises(IndexError):
        engine.step()

    def fail(request, count):
        raise MemoryError

    drafter.function = knows if memory else fail
    finish(engine)
    check_texts(model, requests)
    assert (
        engine.num_accepted_tokens == engine.num_draft_tokens
        and (engine.num_draft_tokens > 0) == memory
    )


def test_a_missing_list_of_drafts_is_an_error(model):
    engine, _ = make_engine(model, PROMPTS[:2], GREEDY, drafter=knowing(model))
    engine.drafter.propose = lambda requests, counts: [[] for _ in requests[1:]]
    engine.step()
    with pytest.raises(ValueError, match="shorter"):
        engine.step()


# Ends of texts


ENDED = SamplingParams(14, temperature=1.0, seed=3)
ENDLESS = dataclasses.replace(ENDED, ignore_eos=True)


@pytest.fixture(scope="module")
def ending(model, tiny):
    """A model that ends its text on [5, 6] with the fifth token, and what it would write else."""
    text = alone(model, [5, 6], ENDLESS)
    assert text.index(text[4]) == 4
    return tiny(eos_token_id=text[4]), text


def test_nothing_follows_an_eos_that_was_drafted(ending):
    model, text = ending
    engine, steps = write(model, knowing(model), [[5, 6]], ENDED, gamma=10)
    events = [event[1:3] for events in steps for event in events]
    assert events == [(text[:1], None), (text[1:5], "stop")]
    assert (engine.steps, engine.num_draft_tokens, engine.num_accepted_tokens) == (2, 10, 10)


def test_a_drafted_eos_is_ignored_if_that_is_asked_for(ending):
    model, text = ending
    _, steps = write(model, knowing(model), [[5, 6]], ENDLESS, gamma=16)
    assert tokens_of(steps) == [[1], [13]]


# Pages, keys and the budget


def test_refused_drafts_evict_nothing_that_can_be_found(model):
    options = {"page_size": 1, "num_pages": 32, "drafter": knowing(model, ALWAYS)}
    engine, (first,) = make_engine(model, PROMPTS[1:2], greedy(6), **options)
    for _ in range(2):
        finish(engine)
        assert len(engine.scheduler.pool.find_cached(first.tokens[:14], "")) == 14
        engine.add(PROMPTS[0], greedy(12))
    assert engine.num_draft_tokens > 20


def test_keys_of_refused_drafts_are_never_seen_again(build):
    model = build()
    options = {"page_size": 4, "drafter": knowing(model, wrong=range(0, 24, 3)), "gamma": 7}
    engine, requests = make_engine(model, PROMPTS, GREEDY, **options)
    while engine.busy:
        step(engine)
        running = engine.scheduler.running
        spoil(engine.cache, [(request.pages, request.num_computed_tokens) for request in running])
    check_texts(model, requests)


def test_drafts_preempt_no_request(model):
    drafter = knowing(model, wrong=ALWAYS)
    pool = {"num_pages": 2 * (3 + 8 - 1), "page_size": 1}
    prompts = [[5, 6, 7], [8, 9, 10]]
    engine, steps = write(model, drafter, prompts, greedy(8), gamma=16, **pool)
    assert tokens_of(steps) == [[1, 1]] * 8
    assert engine.scheduler.num_preemptions == 0 and engine.num_draft_tokens > 20


THREE = [[5, 6], [7, 8], [9, 10]]


def test_drafts_leave_each_younger_request_a_page(model):
    options = {"num_pages": 12, "page_size": 1, "gamma": 6, "drafter": knowing(model, ALWAYS)}
    engine, _ = make_engine(model, THREE, greedy(8), **options)
    step(engine)
    # 6 pages are held, and each needs one more: 3 are left for drafts, and the oldest takes them.
    step(engine)
    assert engine.passes[1] == [4, 1, 1] and engine.scheduler.num_preemptions == 0


def test_drafts_leave_each_younger_request_a_token(model):
    options = {"max_num_batched_tokens": 6, "drafter": knowing(model, wrong=ALWAYS)}
    engine, _ = make_engine(model, THREE, greedy(8), **options)
    assert [len(step(engine)) for _ in range(4)] == [3] * 4
    assert engine.passes == [[2, 2, 2], [4, 1, 1], [4, 1, 1], [4, 1, 1]]


def test_drafts_do_not_delay_waiting_requests(model):
    options = {"max_num_batched_tokens": 4, "drafter": knowing(model, wrong=ALWAYS)}
    engine, _ = make_engine(model, [[1]], greedy(12), **options)
    step(engine)
    step(engine)
    late = engine.add([2], greedy(2))
    step(engine)
    assert len(late.output) == 1


def test_no_token_is_written_where_logits_in_the_middle_are_no_numbers(tiny, monkeypatch):
    model = tiny()
    params = greedy(8, seed=0)
    expected = alone(model, [5, 6], params)
    head = model.head

    def broken(x):
        logits = head(x)
        logits[2:3] = torch.nan  # of the 4 that a pass with 3 drafts needs
        return logits

    monkeypatch.setattr(model, "head", broken)
    engine, (request,) = make_engine(model, [[5, 6]], params, drafter=knowing(model))
    finish(engine)
    assert request.finish_reason == "error"
    assert 0 not in expected and request.output == expected[: len(request.output)]


# The scheduler


def test_preemption_drops_drafts():
    scheduler = Scheduler(PagePool(16, 2), 4, 1000, ContextWindow(8, 4))
    request = Request([1, 2, 3], 3, SamplingParams(6))
    scheduler.add(request)
    (entry,) = scheduler.schedule()
    scheduler.advance(entry, [5])
    request.drafts = [4]
    scheduler.preempt(request)
    (entry,) = scheduler.schedule()
    assert entry.tokens == request.tokens[2:] and entry.drafts == []  # a page is found again


# The command line

WRITE = ["--prompt", "Lily and Tom and Lily and", "--prompt", " the" * 50, "--max-new-tokens", 24]
WRITE += ["--ignore-eos"]
DRAWN = ["--temperature", 0.5, "--top-k", 2, "--seed", 3]
SMALL = ["--num-pages", 24, "--page-size", 4, "--max-num-batched-tokens", 9]


@pytest.mark.parametrize("options", [[], DRAWN + SMALL], ids=["greedy", "drawn, in little room"])
def test_drafts_do_not_change_the_command_lines_output(engine_cli, tiny_checkpoint, options):
    args = ["--model", tiny_checkpoint, *WRITE, *options]
    code, out, err = engine_cli(*args, "--draft", "lookup", "--gamma", 5)
    assert (code, out) == (0, engine_cli(*args)[1])
    found = re.search(r" preemptions, (\d+) of (\d+) drafts accepted\n$", err)
    accepted, drafted = map(int, found.groups())
    assert drafted > 0 and accepted <= drafted


def test_statistics_without_a_drafter(engine_cli, tiny_checkpoint):
    _, _, err = engine_cli("--model", tiny_checkpoint, "--prompt", "Once", "--max-new-tokens", 3)
    assert err.endswith(" preemptions\n")

"""Drafts for each text: fewer steps, and each text is still the one of its own run."""

import dataclasses
import re

import pytest
import torch
from conftest import outputs_of, random_tokens
from drafting import (
    ALWAYS,
    GREEDY,
    MIXED,
    PROMPTS,
    Scripted,
    check_distribution,
    check_pages,
    check_passes,
    finish,
    knowing,
    own_run,
    own_runs,
    spoil,
)

from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tiny):
    """One for many tests, so that `own_run` remembers its texts."""
    return tiny()


# Texts


@pytest.mark.parametrize("gamma", [1, 3, 16])
def test_each_text_is_that_of_its_own_run(model, gamma):
    from engine.drafter import LookupDrafter

    engine = Engine(model, page_size=4, drafter=LookupDrafter(), gamma=gamma)
    assert outputs_of(engine, PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert 0 < engine.accepted < engine.drafted


@pytest.mark.parametrize(("page_size", "stride"), [(1, 3), (3, 16)])
@pytest.mark.parametrize("budget", [2, 5, 64])
def test_in_tiny_pools_under_small_budgets(model, page_size, stride, budget):
    pool = {"num_pages": -(-16 // page_size) + 2, "page_size": page_size, "budget": budget}
    drafter = knowing(model, wrong=range(0, 24, 5))
    engine = Engine(model, max_rows=3, **pool, stride=stride, drafter=drafter, gamma=5)
    passes = check_passes(engine.cache)
    requests = [engine.add(*pair) for pair in zip(PROMPTS, MIXED)]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED, stride)
    assert max(sum(tokens) for tokens in passes) <= budget


def test_prefixes_are_shared_with_texts_that_drafts_wrote(tiny):
    model = tiny(block_size=64)
    params = SamplingParams(20, True)
    right = knowing(model, wrong=range(0, 20, 3))
    engine = Engine(model, page_size=2, drafter=right, gamma=5)
    (first,) = outputs_of(engine, PROMPTS[:1], params)
    prompts = [PROMPTS[0] + first[:17], PROMPTS[0] + first[:12] + PROMPTS[1]]
    assert outputs_of(engine, prompts, params) == own_runs(model, prompts, params)
    assert engine.scheduler.shared == (3 + 17 - 1) // 2 * 2 + (3 + 12) // 2 * 2


def test_sequences_have_the_probabilities_of_the_target(tiny):
    from engine.drafter import LookupDrafter

    check_distribution(tiny(vocab_size=5, eos_token_id=4, block_size=8), LookupDrafter())


# Drafters that are wrong, right, or strange


def test_right_drafts_save_steps_and_are_counted(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model), gamma=3)
    passes = check_passes(engine.cache)
    request = engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params)
    # The prompt gives one token, then 3 drafts and what follows; of 3 more that lack, the last
    # comes without a draft.
    assert [[len(event.tokens) for event in events] for events in steps] == [[1], [4], [3]]
    assert passes == [[2], [4], [3]]
    assert (engine.steps, engine.positions, engine.drafted, engine.accepted) == (3, 9, 5, 5)


def test_wrong_drafts_are_counted_and_give_a_token_a_step(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    request = engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params)
    assert [len(events[0].tokens) for events in steps] == [1] * 8
    assert engine.drafter.counts == [[], *([count] for count in (3, 3, 3, 3, 2, 1, 0))]
    assert (engine.steps, engine.positions) == (8, 2 + 7 + 15)
    assert (engine.drafted, engine.accepted) == (15, 0)


def test_drafts_behind_a_wrong_one_are_refused_even_where_they_are_right(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model, wrong=[3]), gamma=4)
    request = engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params)
    assert [len(events[0].tokens) for events in steps] == [1, 3, 4]
    assert (engine.drafted, engine.accepted) == (4 + 3, 2 + 3)


@pytest.mark.parametrize(
    "wrong", [(), ALWAYS, range(0, 24, 2), range(0, 24, 5)], ids=["no", "all", "every 2nd", "5th"]
)
def test_no_drafts_change_a_text(model, wrong):
    engine = Engine(model, num_pages=20, page_size=2, drafter=knowing(model, wrong), gamma=6)
    check_passes(engine.cache)
    requests = [engine.add(*each) for each in zip(PROMPTS, MIXED)]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED)


def test_no_drafts_at_all_are_a_plain_step(model):
    engine = Engine(model, drafter=Scripted(lambda request, count: []))
    assert outputs_of(engine, PROMPTS, GREEDY) == own_runs(model, PROMPTS, GREEDY)
    assert (engine.drafted, engine.steps) == (0, 24)


def test_more_drafts_than_asked_for_do_not_lengthen_a_text(tiny):
    model = tiny(block_size=64)
    params = SamplingParams(9, True)
    knows = knowing(model, more=20)  # also what comes after the end
    engine = Engine(model, drafter=knows, gamma=3)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, params)
    assert {request.finish_reason for request in requests} == {"length"}


def test_more_drafts_than_asked_for_cross_no_hop(model):
    engine = Engine(model, drafter=knowing(model, more=20), gamma=3)
    passes = check_passes(engine.cache)
    assert outputs_of(engine, PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert max(tokens for spans in passes[1:] for tokens in spans if tokens != 9) <= 4  # 9 in a hop


def test_no_more_drafts_are_asked_for_than_can_be_used(model):
    """Not past the window, as a hop comes then, and not for the last token."""
    params = SamplingParams(12, True)
    engine = Engine(model, drafter=knowing(model, wrong=ALWAYS), gamma=5)
    outputs_of(engine, [random_tokens(12)], params)
    # The lengths of the window, from the first generated token on.
    room = [*range(12 + 1, 16 + 1), *range(9, 16)]
    assert [16 - length for length in room] == [3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1]
    # In the step after a hop the window is computed, and nobody is asked for drafts.
    left = range(12 - 1 - 1, -1, -1)
    asked = [min(5, 16 - length, end) for length, end in zip(room, left)]
    assert engine.drafter.counts == [
        [],
        *([count] for count in asked[:4]),
        [],
        *([count] for count in asked[5:]),
    ]


def test_no_more_drafts_are_asked_for_than_the_budget_leaves_beside_the_texts(model):
    """Each running request takes one token of it. To write the others would be for nothing."""
    engine = Engine(model, budget=6, drafter=knowing(model, wrong=ALWAYS), gamma=16)
    for prompt in ([5, 6], [7, 8]):
        engine.add(prompt, SamplingParams(9, True))
    engine.step()
    engine.step()
    engine.abort(engine.scheduler.running[0])
    engine.step()
    assert engine.drafter.counts[1:] == [[4, 4], [5]]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr
)
def test_where_a_drafter_has_no_memory_there_are_no_drafts(model, error):
    """The texts go on, and so do the drafts of later steps."""
    drafter = knowing(model)
    propose = drafter.propose

    def sometimes(requests, counts):
        if len(drafter.counts) % 3 == 1:
            drafter.counts.append([])
            raise error
        return propose(requests, counts)

    drafter.propose = sometimes
    engine = Engine(model, page_size=4, drafter=drafter, gamma=3)
    assert outputs_of(engine, PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert engine.accepted == engine.drafted > 0


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), UserError("no such word"), KeyError("x"), KeyboardInterrupt()],
    ids=repr,
)
def test_any_other_error_of_a_drafter_is_seen(model, error):
    """It is a mistake in the code. No text has changed, and the next step goes on from there."""
    drafter = knowing(model)
    engine = Engine(model, drafter=drafter, gamma=3)
    requests = [engine.add(*pair) for pair in zip(PROMPTS, MIXED)]
    engine.step()
    propose = drafter.propose

    def fail(requests, counts):
        drafter.propose = propose
        raise error

    drafter.propose = fail
    with pytest.raises(type(error)):
        engine.step()
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED)


def test_drafts_of_a_step_that_failed_are_not_tried_again(model):
    """One of them is no id of the model. The error is seen once, and the text goes on."""
    drafter = knowing(model)
    knows = drafter.function
    drafter.function = lambda request, count: [model.config.vocab_size] * count
    engine = Engine(model, drafter=drafter, gamma=3)
    requests = [engine.add(*pair) for pair in zip(PROMPTS, MIXED)]
    engine.step()
    with pytest.raises(IndexError):
        engine.step()
    drafter.function = knows
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED)
    assert engine.accepted == engine.drafted > 0


def test_nor_are_they_where_the_next_step_has_no_drafts(model):
    drafter = Scripted(lambda request, count: [model.config.vocab_size] * count)
    engine = Engine(model, drafter=drafter, gamma=3)
    request = engine.add(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(IndexError):
        engine.step()

    def fail(request, count):
        raise MemoryError

    drafter.function = fail
    finish(engine)
    assert request.output == own_run(model, PROMPTS[0], GREEDY) and engine.drafted == 0


def test_a_drafter_that_leaves_out_a_text_is_seen(model):
    """Its other drafts might be those of another text."""
    engine = Engine(model, drafter=knowing(model), gamma=3)
    engine.drafter.propose = lambda requests, counts: [[] for _ in requests[1:]]
    for prompt in PROMPTS[:2]:
        engine.add(prompt, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="shorter"):
        engine.step()


# Ends of texts


ENDED = SamplingParams(14, temperature=1.0, seed=3)
ENDLESS = dataclasses.replace(ENDED, ignore_eos=True)


@pytest.fixture(scope="module")
def ending(model, tiny):
    """A model that ends its text on [5, 6] with the fifth token, and what it would write else."""
    text = own_run(model, [5, 6], ENDLESS)
    assert text.index(text[4]) == 4
    return tiny(eos_token_id=text[4]), text


def test_nothing_follows_an_eos_that_was_drafted(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=10)
    request = engine.add([5, 6], ENDED)
    events = [event for step in finish(engine) for event in step]
    assert request.output == own_run(model, [5, 6], ENDED) == text[:5]
    assert [event[1:3] for event in events] == [(text[:1], None), (text[1:5], "stop")]
    assert request.finish_reason == "stop"


def test_an_eos_that_follows_the_drafts_ends_the_text(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=3)
    assert outputs_of(engine, [[5, 6]], ENDED) == [text[:5]]
    assert (engine.steps, engine.drafted, engine.accepted) == (2, 3, 3)


def test_a_drafted_eos_is_ignored_if_that_is_asked_for(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=16)
    assert outputs_of(engine, [[5, 6]], ENDLESS) == [text] and engine.steps == 2


def test_a_refused_eos_ends_nothing(ending):
    model, text = ending
    engine = Engine(model, drafter=Scripted(lambda request, count: [text[4]] * count), gamma=3)
    request = engine.add([5, 6], ENDED)
    finish(engine)
    assert (request.output, request.finish_reason) == (text[:5], "stop")


def test_an_accepted_eos_is_counted_and_so_is_what_follows_it(ending):
    """As in `infer_speculative`: how many the target accepts, also where the text ends before."""
    model, _ = ending
    engine = Engine(model, drafter=knowing(model), gamma=10)
    outputs_of(engine, [[5, 6]], ENDED)
    assert (engine.steps, engine.drafted, engine.accepted) == (2, 10, 10)


# Pages, keys and the budget


@pytest.mark.parametrize("page_size", [1, 4])
def test_refused_drafts_give_their_pages_back(tiny, page_size):
    model = tiny(block_size=64)
    params = SamplingParams(12, True)
    engine = Engine(model, page_size=page_size, drafter=knowing(model, wrong=ALWAYS), gamma=16)
    passes = check_passes(engine.cache)
    engine.add([5, 6, 7], params)
    while engine.step()[0].finish_reason is None:
        check_pages(engine)  # no more pages than for the tokens that it has
    assert max(tokens for (tokens,) in passes) == 11


def test_refused_drafts_evict_nothing_that_can_be_found(model):
    engine = Engine(model, page_size=1, num_pages=32, drafter=knowing(model, ALWAYS), gamma=3)
    first = engine.add(PROMPTS[1], SamplingParams(6, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(engine.scheduler.pool.find(first.tokens[:14], "")) == 14
    engine.add(PROMPTS[0], SamplingParams(12, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(engine.scheduler.pool.find(first.tokens[:14], "")) == 14 and engine.drafted > 20


def test_keys_of_refused_drafts_are_never_seen_again(tiny, tiny_llama):
    for model in tiny(), tiny_llama():
        drafter = knowing(model, wrong=range(0, 24, 3))
        engine = Engine(model, page_size=4, drafter=drafter, gamma=7)
        requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        while engine.busy:
            engine.step()
            running = engine.scheduler.running
            spoil(engine.cache, [(request.pages, request.computed) for request in running])
        assert [request.output for request in requests] == own_runs(model, PROMPTS, GREEDY)


def test_drafts_preempt_nobody(model):
    """Both texts just fit side by side, without drafts."""
    params = SamplingParams(8, True)
    drafter = knowing(model, wrong=ALWAYS)
    prompts = [[5, 6, 7], [8, 9, 10]]
    engine = Engine(model, num_pages=2 * (3 + 8 - 1), page_size=1, drafter=drafter, gamma=16)
    requests = [engine.add(prompt, params) for prompt in prompts]
    assert all(len(events) == 2 for events in finish(engine))
    assert [request.output for request in requests] == own_runs(model, prompts, params)
    assert engine.scheduler.preemptions == 0 and engine.drafted > 20


def test_drafts_leave_each_younger_text_a_page(model):
    params = SamplingParams(8, True)
    drafter = knowing(model, wrong=ALWAYS)
    engine = Engine(model, num_pages=12, page_size=1, drafter=drafter, gamma=6)
    passes = check_passes(engine.cache)
    for prompt in ([5, 6], [7, 8], [9, 10]):
        engine.add(prompt, params)
    engine.step()
    # 6 pages are held, and each needs one more: 3 are left for drafts, and the oldest takes them.
    engine.step()
    assert passes[1] == [4, 1, 1] and engine.scheduler.preemptions == 0


def test_drafts_leave_a_text_that_hops_the_pages_of_its_window(model):
    """Without drafts both fit: the younger text, whose window hops in each step, and the older."""
    old = [1, 2]
    young = random_tokens(16)
    drafter = knowing(model, wrong=ALWAYS)
    engine = Engine(model, num_pages=16 + 6, page_size=1, stride=1, drafter=drafter, gamma=16)
    engine.add(old, SamplingParams(12, True))
    engine.add(young, SamplingParams(5, True))
    finish(engine)
    assert engine.scheduler.preemptions == 0 and engine.drafted > 0


def test_drafts_need_no_free_page_where_they_have_room(model):
    prompts = [[5, 6], [7, 8]]
    params = SamplingParams(8, True)
    engine = Engine(model, num_pages=2, page_size=16, drafter=knowing(model), gamma=3)
    assert outputs_of(engine, prompts, params) == own_runs(model, prompts, params)
    assert (engine.steps, engine.drafted) == (3, 10)


def test_drafts_leave_each_younger_text_its_token_of_the_budget(model):
    params = SamplingParams(8, True)
    engine = Engine(model, budget=6, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    passes = check_passes(engine.cache)
    for prompt in ([5, 6], [7, 8], [9, 10]):
        engine.add(prompt, params)
    steps = [engine.step() for _ in range(4)]
    assert passes == [[2, 2, 2], [4, 1, 1], [4, 1, 1], [4, 1, 1]]
    assert all(len(events) == 3 for events in steps)


def test_drafts_keep_no_waiting_text_from_its_first_token(model):
    engine = Engine(model, budget=4, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    engine.add([1], SamplingParams(12, True))
    engine.step()
    engine.step()
    late = engine.add([2], SamplingParams(2, True))
    engine.step()
    assert len(late.output) == 1


def test_a_drafted_text_that_is_preempted_or_aborted_takes_nothing_along(model):
    engine = Engine(
        model, num_pages=17, page_size=1, drafter=knowing(model, wrong=range(0, 24, 4)), gamma=4
    )
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(6):
        engine.step()
    engine.abort(requests[1])
    finish(engine)
    assert engine.scheduler.preemptions > 0
    for request, prompt in zip(requests, PROMPTS):
        expected = own_run(model, prompt, GREEDY)
        assert request.output == (
            expected[: len(request.output)] if request is requests[1] else expected
        )


def test_logits_behind_drafts_that_are_no_numbers_end_that_text_alone(tiny_llama):
    model = tiny_llama()
    params = SamplingParams(24, True, seed=0)
    expected = own_runs(model, PROMPTS, params)
    drafter = knowing(model)
    others = set().union(*PROMPTS, *expected[1:])
    broken = next(token for token in expected[0] if token not in others)
    model.embed_tokens.weight.data[broken] = torch.nan
    engine = Engine(model, page_size=2, drafter=drafter, gamma=4)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    (event,) = [event for step in finish(engine) for event in step if event.error]
    assert event.request is requests[0] and "NaN or infinite" in event.error
    assert requests[0].output == expected[0][: len(requests[0].output)]
    assert [request.output for request in requests[1:]] == expected[1:]


def test_no_token_is_written_where_logits_in_the_middle_are_no_numbers(tiny, monkeypatch):
    model = tiny()
    params = SamplingParams(8, True, seed=0)
    expected = own_run(model, [5, 6], params)
    drafter = knowing(model)
    head = model.head

    def broken(x):
        logits = head(x)
        logits[2:3] = torch.nan  # of the 4 that a pass with 3 drafts needs
        return logits

    monkeypatch.setattr(model, "head", broken)
    engine = Engine(model, drafter=drafter, gamma=3)
    request = engine.add([5, 6], params)
    while engine.busy:
        engine.step()
    assert request.finish_reason == "error"
    assert 0 not in expected and request.output == expected[: len(request.output)]


def test_still_a_pass_for_which_there_is_no_memory_ends_its_requests(model, monkeypatch):
    engine = Engine(model)
    request = engine.add([1, 2, 3], GREEDY)

    def full(spans):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.cache, "arrange", full)
    (event,) = engine.step()
    assert event.request is request and "do not fit in memory" in event.error
    assert request.finish_reason == "error"


# Bad values


@pytest.mark.parametrize("gamma", [-1, 0, 17, 2.5, True, "3", None])
def test_gamma_out_of_range_is_refused(model, gamma):
    with pytest.raises(UserError) as raised:
        Engine(model, gamma=gamma)
    assert str(raised.value) == f"gamma is {gamma!r}; it must be an integer from 1 to 16"


# The command line

WRITE = ["--prompt", "Lily and Tom and Lily and", "--prompt", " the" * 50, "--max-new-tokens", 24]
WRITE += ["--ignore-eos"]
DRAWN = ["--temperature", 0.5, "--top-k", 2, "--seed", 3]
SMALL = ["--num-pages", 24, "--page-size", 4, "--budget", 9]


@pytest.mark.parametrize("options", [[], DRAWN + SMALL], ids=["greedy", "drawn, in little room"])
def test_the_text_is_that_without_drafts(engine_cli, tiny_checkpoint, options):
    args = ["--model", tiny_checkpoint, *WRITE, *options]
    code, out, err = engine_cli(*args, "--draft", "lookup", "--gamma", 5)
    assert (code, out) == (0, engine_cli(*args)[1])
    found = re.search(r" preemptions, (\d+) of (\d+) drafts accepted\n$", err)
    accepted, drafted = map(int, found.groups())
    assert drafted > 0 and accepted <= drafted


def test_still_no_drafts_in_the_statistics_of_a_plain_run(engine_cli, tiny_checkpoint):
    _, _, err = engine_cli("--model", tiny_checkpoint, "--prompt", "Once", "--max-new-tokens", 3)
    assert err.endswith(" preemptions\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", 3], "--gamma is for --draft only"),
        (["--draft", "lookup", "--gamma", 0], "gamma is 0; it must be an integer from 1 to 16"),
        (["--draft", "lookup", "--gamma", 17], "gamma is 17; it must be an integer from 1 to 16"),
    ],
)
def test_bad_options_are_one_line(engine_cli, tiny_checkpoint, options, message):
    code, out, err = engine_cli("--model", tiny_checkpoint, "--prompt", "Once", *options)
    assert (code, out) == (2, "") and err.endswith(f": error: {message}\n")
    assert err.count("\n") == 1

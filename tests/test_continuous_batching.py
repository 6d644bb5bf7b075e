"""An engine that requests join and leave at any step: each has the text of its own run."""

import tracemalloc

import pytest
import torch
from conftest import passed_widths, random_tokens
from engines import (
    alone,
    check_pages,
    check_texts,
    events_of,
    finish,
    greedy,
    letters,
    make_engine,
    outputs_of,
    own_texts,
    raise_once,
    step,
)

from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams

ENDS = (7, 19, 23, 42, 60)  # tokens that end a text, in models whose texts are to end early


def mixture(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds, prompts within and beyond the window of 16, texts that hop."""
    kinds = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"temperature": 1.5, "top_p": 0.8, "frequency_penalty": 0.5},
    )
    lengths = (3, 17, 1, 12, 0, 30, 16)
    counts = (9, 1, 25, 4, 16, 12)
    prompts = [random_tokens(lengths[k % 7], seed=k) for k in range(count)]
    return prompts, [
        SamplingParams(counts[k % 6], ignore_eos=k % 3 == 0, seed=k, **kinds[k % 5])
        for k in range(count)
    ]


def new_engine(model, **options):
    return Engine(model, **options)


# The texts


@pytest.mark.parametrize("max_num_seqs, stride", [(1, 1), (3, None), (32, 16)])
def test_many_requests_on_few_rows_have_the_texts_of_their_own_runs(build, max_num_seqs, stride):
    model = build(seed=4, eos_token_ids=ENDS)
    engine, requests = make_engine(model, *mixture(12), max_num_seqs=max_num_seqs, stride=stride)
    finish(engine)
    check_texts(model, requests, stride)
    assert {request.finish_reason for request in requests} == {"stop", "length"}


def test_requests_join_between_steps(build):
    model = build(seed=4, eos_token_ids=ENDS)
    engine, requests = make_engine(model, [], [], max_num_seqs=4)
    left = list(zip(*mixture(12)))
    for arriving, steps in ((1, 3), (3, 1), (0, 4), (4, 0), (1, 5), (2, 60), (1, 2)):
        requests += [engine.add(*left.pop(0)) for _ in range(arriving)]
        for _ in range(steps):
            step(engine)
    finish(engine)
    check_texts(model, requests)


def test_an_empty_prompt_starts_from_the_token_that_begins_a_text(tiny_llama):
    model = tiny_llama()
    (text,) = outputs_of(new_engine(model), [[]], greedy(5))
    assert text == alone(model, [], greedy(5)) == alone(model, [59], greedy(5))


@pytest.mark.parametrize("ends", [(60, 7, 9), (9, 60, 7)])
def test_of_several_ends_the_first_begins_a_text(tiny, ends):
    """A GPT-2 has no other token for that. Each of them ends one."""
    model = tiny(seed=4, eos_token_ids=ends)
    params = [SamplingParams(40, temperature=1.0, seed=seed) for seed in range(20)]
    engine, empty = make_engine(model, [[]] * 20, params)
    begun = [engine.add([ends[0]], own) for own in params]
    finish(engine)
    check_texts(model, empty)
    assert [request.output for request in empty] == own_texts(model, [[]] * 20, params)
    assert [request.tokens for request in empty] == [request.tokens for request in begun]
    stopped = [request.output for request in empty if request.finish_reason == "stop"]
    assert {output[-1] for output in stopped} == set(ends)
    assert not any(token in ends for output in stopped for token in output[:-1])


def test_a_prompt_is_left_as_it_is(tiny):
    prompt = [1, 2, 3]
    engine, requests = make_engine(tiny(), [prompt], greedy(4))
    prompt.append(9)
    finish(engine)
    assert prompt == [1, 2, 3, 9] and requests[0].output == alone(tiny(), [1, 2, 3], greedy(4))


def test_a_prompt_may_end_in_the_end_of_a_text(tiny):
    model = tiny(seed=5)
    (text,) = outputs_of(new_engine(model), [[1, 60]], SamplingParams(4))
    assert text == alone(model, [1, 60], max_new_tokens=4) != []


# Steps


def numbered(model, counts, **options) -> tuple:
    """An engine with greedy requests. counts: the tokens of each."""
    prompts = [[row + 1] for row in range(len(counts))]
    return make_engine(model, prompts, [greedy(count) for count in counts], **options)


def test_an_idle_row_is_taken_in_the_very_next_step(tiny):
    """Which request has a token in which step, on two rows: first come, first served."""
    engine, requests = numbered(tiny(), [5, 2, 1, 4, 3, 1], max_num_seqs=2)
    steps = ["AB", "AB", "AC", "AD", "AD", "DE", "DE", "EF"]
    assert ["".join(sorted(got)) for got in letters(engine, requests)] == steps


def test_a_request_runs_in_the_step_after_it_was_added(tiny):
    engine, requests = numbered(tiny(), [9], max_num_seqs=2)
    assert letters(engine, requests, 1) == ["A"]
    requests.append(engine.add([2], greedy(9)))
    assert letters(engine, requests, 1) == ["AB"]


def test_a_step_is_one_pass_over_what_its_requests_lack(tiny):
    model, passes = passed_widths(tiny(), shapes=True)
    prompts = [random_tokens(length, seed=length) for length in (15, 5)]
    engine, _ = make_engine(model, prompts, greedy(4), max_num_seqs=3)
    step(engine)
    engine.add([1, 2, 3], greedy(2))
    finish(engine)
    # The first text grows from 15 to 16, then to 17 tokens, of which its window keeps 9. Its
    # fourth token is not computed.
    assert passes == [(20,), (1 + 1 + 3,), (9 + 1 + 1,), (2,)]
    assert (engine.steps, engine.num_computed_tokens) == (4, 38)


def test_a_step_with_nothing_to_do(tiny):
    engine = new_engine(tiny())
    assert (
        engine.step() == []
        and not engine.busy
        and (engine.steps, engine.num_computed_tokens) == (0, 0)
    )
    outputs_of(engine, [[1]], greedy(2))
    assert engine.step() == [] and engine.steps == 2


class Queue(list):
    """Waiting requests, of which a step may look at the first one alone."""

    popleft = property(lambda self: lambda: self.pop(0))

    def __iter__(self):
        raise AssertionError("a step goes through the queue")

    def __contains__(self, request):
        raise AssertionError("a step searches the queue")


def test_no_step_looks_at_2000_waiting_requests(tiny):
    """They are no requests: each use would be an error."""
    engine, requests = numbered(tiny(), [20, 3, 30], max_num_seqs=2)
    engine.scheduler.waiting = Queue([*engine.scheduler.waiting, *[object()] * 2000])
    for _ in range(19):
        engine.step()
    assert [len(request.output) for request in requests] == [19, 3, 16]
    assert len(engine.scheduler.waiting) == 2000


# Events


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_event_for_each_request_and_step(tiny, temperature):
    model = tiny(seed=6)
    prompts = [[1], [2, 3], [4] * 9]
    params = SamplingParams(max_new_tokens=7, temperature=temperature, seed=3)
    texts = own_texts(model, prompts, params)
    model = tiny(seed=6, eos_token_id=texts[1][4])  # it ends the second text
    texts = own_texts(model, prompts, params)
    engine, added = make_engine(model, prompts, params)
    steps = finish(engine)
    assert all(len({event.request for event in events}) == len(events) for events in steps)
    for text, request in zip(texts, added, strict=True):
        events = [event for events in steps for event in events if event.request is request]
        assert [event.tokens for event in events] == [[token] for token in text]
        assert request.output == text
        reason = "stop" if text[-1] in model.config.eos_token_ids else "length"
        assert [event.finish_reason for event in events] == [None] * (len(text) - 1) + [reason]
    assert {request.finish_reason for request in added} == {"stop", "length"}


def test_an_end_of_text_as_the_last_token_is_a_stop(tiny):
    (first,) = alone(tiny(), [1], greedy(1))
    for ignore, reason in ((False, "stop"), (True, "length")):
        model = tiny(eos_token_ids=(60, first))
        engine, _ = make_engine(model, [[1]], SamplingParams(1, ignore_eos=ignore))
        (event,) = events_of(engine)
        assert (event.tokens, event.finish_reason) == ([first], reason)


def test_a_request_for_no_tokens_is_over_at_once(tiny):
    engine, (running,) = numbered(tiny(), [3], max_num_seqs=1)
    request = engine.add([1, 2], greedy(0))
    assert (request.output, request.finish_reason, request.prompt_length) == ([], "length", 2)
    assert [event.request for event in events_of(engine)] == [running] * 3
    with pytest.raises(ValueError, match="finish_reason 'length'"):
        engine.abort(request)


def test_a_request_without_a_seed_gets_one_that_repeats_it(tiny):
    model = tiny()
    engine, requests = make_engine(model, [[1]] * 2, greedy(12, temperature=1.0))
    finish(engine)
    first, second = requests
    assert first.params.seed != second.params.seed and first.output != second.output
    check_texts(model, requests)


# Abort


def test_abort_frees_the_row(tiny):
    model = tiny()
    engine, requests = numbered(model, [9, 9, 9], max_num_seqs=2)
    assert letters(engine, requests, 4) == ["AB"] * 4
    engine.abort(requests[0])
    assert requests[0].finish_reason == "abort" and len(requests[0].output) == 4
    assert letters(engine, requests) == ["BC"] * 5 + ["C"] * 4
    check_texts(model, requests)


# What is wrong with a request or the options


@pytest.mark.parametrize("wrong", [61, -1, 10**30, 1.0, "1", None, torch.tensor(1)])
def test_an_id_that_is_none_is_refused_and_the_engine_goes_on(tiny, wrong):
    engine, requests = numbered(tiny(), [4])
    engine.step()
    for prompt in ([wrong], [1, wrong, 2]):
        with pytest.raises(UserError) as error:
            engine.add(prompt, greedy(4))
        ids = "ids of this model are integers from 0 to 60"
        assert str(error.value) == f"the prompt has the id {wrong!r}; {ids}"
    assert letters(engine, requests) == ["A"] * 3


def test_the_smallest_and_the_largest_id(tiny):
    (text,) = outputs_of(new_engine(tiny()), [[0, 60]], greedy(3))
    assert text == alone(tiny(), [0, 60], greedy(3))


# A step that does not end


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 14])
def test_after_any_other_exception_the_next_step_computes_the_same_again(tiny, error, after):
    """In a step that takes requests from the queue, one that decodes, and one with a hop.

    A RuntimeError that says nothing of memory is a mistake in the code, and not one of a request.
    """
    model = tiny(seed=4, eos_token_ids=ENDS)
    raise_once(model, error("stopped"), after)
    engine, requests = make_engine(model, *mixture(9), max_num_seqs=3)
    for _ in range(after):
        engine.step()
    before = [(list(request.tokens), request.finish_reason) for request in requests]
    with pytest.raises(error, match="stopped"):
        engine.step()
    assert [(request.tokens, request.finish_reason) for request in requests] == before
    finish(engine)
    check_texts(tiny(seed=4, eos_token_ids=ENDS), requests)


# Pages


BLOCK_SIZE = 16  # of the tiny models
BAD = 60  # a token that no text has by chance
SIZES = pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 16])


def prompt_of(length, seed=0):
    return random_tokens(length, BAD, seed)


def engine_of(model, page_size, num_pages=None, max_num_seqs=32):
    options = {"page_size": page_size, "num_pages": num_pages, "max_num_seqs": max_num_seqs}
    return make_engine(model, [], [], **options)[0]


def needed(page_size, positions):
    """How many pages hold positions 0, 1, 2, ..."""
    return len({position // page_size for position in range(positions)})


@pytest.fixture(scope="module")
def model(build):
    """One for many tests, so that `alone` remembers its texts."""
    return build(seed=6)


@SIZES
def test_the_texts_of_generate_for_any_page_size_and_pool(model, page_size):
    """Greedy and drawn, within the window and beyond, and prompts that fill their last page."""
    window = needed(page_size, BLOCK_SIZE)
    prompts = [prompt_of(length, length) for length in (3, 8, 12, 20, 1, 4, 14, 5)]
    params = [greedy(9)] * 4 + [greedy(7, temperature=1.0, seed=seed) for seed in range(3)]
    params.append(SamplingParams(12, repetition_penalty=1.3))
    for num_pages in (window, window + 1, None):
        options = {"page_size": page_size, "num_pages": num_pages, "max_num_seqs": 4}
        engine, requests = make_engine(model, prompts, params, **options)
        finish(engine)
        check_texts(model, requests)


def test_a_shorter_table_is_not_filled_up_with_pages_of_others(build):
    """Texts that attend together see as many positions; a mask would not hide NaN behind them."""
    model = build()
    prompts = [prompt_of(9, 1), prompt_of(5, 2)]  # of three and of two pages
    engine, requests = make_engine(model, prompts, greedy(3), page_size=4, num_pages=40)
    engine.step()
    held = {page for request in requests for page in request.pages}
    engine.cache.storage[:, :, [page for page in range(40) if page not in held]] = torch.nan
    finish(engine)
    check_texts(model, requests)


@SIZES
def test_a_text_takes_the_pages_of_its_positions_and_no_more(tiny, page_size):
    """Its last token has none: it is never passed. One page less is refused."""
    model = tiny()
    lengths = [(1, 1), (4, 1), (4, 2), (3, 2), (5, 4), (8, 5), (12, 5), (16, 1), (1, 16), (10, 9)]
    for length, max_new_tokens in lengths:
        positions = min(length + max_new_tokens - 1, BLOCK_SIZE)
        pages = needed(page_size, positions)
        engine = engine_of(model, page_size, num_pages=pages)
        request = engine.add(prompt_of(length), greedy(max_new_tokens))
        finish(engine)
        check_texts(model, [request])
        assert engine.scheduler.pool.first_unused == pages
        if pages > 1:
            with pytest.raises(UserError) as raised:
                less = engine_of(model, page_size, num_pages=pages - 1)
                less.add(prompt_of(length), greedy(max_new_tokens))
            needs = f"a sequence of up to {positions} positions needs {pages} pages"
            assert str(raised.value) == f"{needs}; there are {pages - 1} pages of {page_size}"


def test_what_can_never_fit_is_refused_at_once_and_the_others_go_on(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=3)
    requests = [engine.add(prompt_of(3, seed), greedy(10)) for seed in range(2)]  # all pages each
    engine.step()
    for length, positions in ((4, 13), (40, 16)):
        with pytest.raises(UserError) as raised:
            engine.add(prompt_of(length), greedy(10))
        needs = f"a sequence of up to {positions} positions needs 4 pages"
        assert str(raised.value) == f"{needs}; there are 3 pages of 4"
    finish(engine)
    check_texts(model, requests)


def test_a_short_text_does_not_overtake_a_long_one_that_waits_for_pages(tiny):
    engine = engine_of(tiny(), 4, num_pages=4)
    shapes = enumerate([(10, 2), (13, 1), (2, 1)])
    requests = [engine.add(prompt_of(length, row), greedy(n)) for row, (length, n) in shapes]
    assert letters(engine, requests) == ["A", "A", "B", "C"]


def test_pages_come_back_after_an_abort(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=4)
    requests = [engine.add(prompt_of(13, seed), greedy(4)) for seed in range(3)]
    engine.step()
    engine.abort(requests[1])  # it waits, and has none
    check_pages(engine)
    assert len(requests[0].pages) == 4
    engine.abort(requests[0])
    check_pages(engine)
    assert engine.scheduler.pool.num_free_pages == 4
    assert letters(engine, requests) == ["C"] * 4
    check_texts(model, requests)


def test_pages_of_which_size_and_how_many(tiny_llama):
    model = tiny_llama()
    # A page is a window here.
    assert new_engine(model, max_num_seqs=3).cache.storage.shape == (2, 2, 3, 2, 16, 6)
    assert new_engine(model, max_num_seqs=3, page_size=5).cache.storage.shape == (
        2,
        2,
        3 * 4,
        2,
        5,
        6,
    )
    assert new_engine(model, num_pages=7, page_size=2).cache.storage.shape == (2, 2, 7, 2, 2, 6)


def test_ten_million_pages_take_no_time_and_no_memory_before_they_are_used(tiny):
    model = tiny(n_layer=1, n_head=1, n_embd=1)
    tracemalloc.start()
    engine = new_engine(model, num_pages=10**7, page_size=1)
    request = engine.add(prompt_of(5), greedy(4))
    while engine.busy:
        engine.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7 and engine.scheduler.pool.num_free_pages == 10**7
    check_texts(model, [request])

"""An engine that requests join and leave at any step; hard/test_histories.py has any order."""

import pytest
import torch
from conftest import passed_widths, random_tokens
from engines import (
    alone,
    check_texts,
    events_of,
    finish,
    greedy,
    letters,
    make_engine,
    numbered,
    own_texts,
    raise_once,
    step,
)

from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams

ENDS = (7, 19, 23, 42, 60)  # tokens that end a sequence, in models whose outputs are to end early


def mixture(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of all kinds, prompts within and beyond the window of 16, context shifts."""
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


@pytest.mark.parametrize("max_num_seqs, stride", [(1, 1), (4, None), (32, 16)])
def test_requests_that_join_between_steps_equal_generate(build, max_num_seqs, stride):
    model = build(seed=4, eos_token_ids=ENDS)
    engine, requests = make_engine(model, [], [], max_num_seqs=max_num_seqs, stride=stride)
    left = list(zip(*mixture(12)))
    for arriving, steps in ((1, 3), (3, 1), (0, 4), (4, 0), (1, 5), (2, 60), (1, 2)):
        requests += [engine.add(*left.pop(0)) for _ in range(arriving)]
        for _ in range(steps):
            step(engine)
    finish(engine)
    check_texts(model, requests, stride)
    assert {request.finish_reason for request in requests} == {"stop", "length"}


def test_an_empty_prompt_becomes_bos_or_the_first_eos(tiny, tiny_llama):
    ends = (9, 60, 7)
    for model, first in ((tiny_llama(), 59), (tiny(seed=4, eos_token_ids=ends), 9)):
        params = [SamplingParams(40, temperature=1.0, seed=seed) for seed in range(20)]
        engine, empty = make_engine(model, [[]] * 20, params)
        finish(engine)
        assert [request.output for request in empty] == own_texts(model, [[first]] * 20, params)
        assert {(request.tokens[0], request.prompt_length) for request in empty} == {(first, 1)}
    stopped = [request.output for request in empty if request.finish_reason == "stop"]
    assert {output[-1] for output in stopped} == set(ends)
    assert not any(token in ends for output in stopped for token in output[:-1])


def test_the_prompt_is_copied(tiny):
    prompt = [1, 2, 60]
    engine, requests = make_engine(tiny(), [prompt], SamplingParams(4))
    prompt.append(9)
    finish(engine)
    assert prompt == [1, 2, 60, 9] and requests[0].output == alone(tiny(), [1, 2, 60], greedy(4))


def test_a_request_without_a_seed_gets_one_that_repeats_it(tiny):
    model = tiny()
    engine, requests = make_engine(model, [[1]] * 2, greedy(12, temperature=1.0))
    finish(engine)
    first, second = requests
    assert first.params.seed != second.params.seed and first.output != second.output
    check_texts(model, requests)


@pytest.mark.parametrize("wrong", [61, -1, 1.0, None, torch.tensor(1)])
def test_an_invalid_id_is_refused_and_the_engine_goes_on(tiny, wrong):
    engine, requests = numbered(tiny(), [4])
    engine.step()
    for prompt in ([wrong], [1, wrong, 2]):
        with pytest.raises(UserError) as error:
            engine.add(prompt, greedy(4))
        words = f"the prompt has the id {wrong!r}: must be an integer from 0 to 60"
        assert str(error.value) == words
    assert letters(engine, requests) == ["A"] * 3


@pytest.mark.parametrize("length, count, needed", [(3, 4, 3), (6, 2, 4), (16, 1, 8), (60, 60, 8)])
def test_what_can_never_fit_is_refused(tiny, length, count, needed):
    prompt = random_tokens(length)
    engine = Engine(tiny(), page_size=2, num_pages=needed - 1)
    words = (
        f"a sequence of up to {min(length + count - 1, 16)} positions needs {needed} pages: num_"
    )
    with pytest.raises(UserError) as error:
        engine.add(prompt, greedy(count))
    assert str(error.value).startswith(f"{words}pages is {needed - 1}") and not engine.busy
    engine, (request,) = make_engine(tiny(), [prompt], greedy(count), page_size=2, num_pages=needed)
    finish(engine)
    check_texts(tiny(), [request])


def test_a_finished_request_is_replaced_in_the_next_step(tiny):
    engine, requests = numbered(tiny(), [5, 2, 1, 4, 3, 1], max_num_seqs=2)
    steps = ["AB", "AB", "AC", "AD", "AD", "DE", "DE", "EF"]
    assert ["".join(sorted(got)) for got in letters(engine, requests)] == steps


def test_a_step_is_one_pass_over_uncomputed_tokens(tiny):
    model, passes = passed_widths(tiny(), shapes=True)
    prompts = [random_tokens(length, seed=length) for length in (15, 5)]
    engine, _ = make_engine(model, prompts, greedy(4), max_num_seqs=3)
    step(engine)
    engine.add([1, 2, 3], greedy(2))
    finish(engine)
    # The first sequence grows from 15 to 16, then to 17 tokens, of which its window keeps 9. Its
    # fourth token is not computed.
    assert passes == [(20,), (1 + 1 + 3,), (9 + 1 + 1,), (2,)]
    assert (engine.steps, engine.num_computed_tokens) == (4, 38)
    assert engine.step() == [] and engine.steps == 4 and not engine.busy


@pytest.mark.parametrize(
    "error, after", [(KeyboardInterrupt, 0), (RuntimeError, 1), (KeyboardInterrupt, 14)]
)
def test_after_any_other_exception_the_next_step_repeats_the_pass(tiny, error, after):
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


def test_an_event_for_each_request_and_step(tiny):
    prompts = [[1], [2, 3], [4] * 9]
    params = SamplingParams(max_new_tokens=7, temperature=1.0, seed=3)
    texts = own_texts(tiny(seed=6), prompts, params)
    model = tiny(seed=6, eos_token_id=texts[1][4])  # it ends the second sequence
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


def test_a_request_ends_once_and_in_its_own_engine(tiny):
    engine, (running, waiting, last) = numbered(tiny(), [3, 3, 2], max_num_seqs=1)
    none = engine.add([1, 2], greedy(0))
    assert (none.output, none.finish_reason, none.prompt_length) == ([], "length", 2)
    step(engine)
    for request in (running, waiting):
        with pytest.raises(ValueError, match="another engine$"):
            Engine(tiny()).abort(request)
        engine.abort(request)
    for request, reason in ((none, "length"), (running, "abort"), (waiting, "abort")):
        with pytest.raises(ValueError, match=f"finish_reason '{reason}'$"):
            engine.abort(request)
    assert [event.request for event in events_of(engine)] == [last] * 2
    assert [len(request.output) for request in (running, waiting, last)] == [1, 0, 2]


def test_pages_of_which_size_and_how_many(tiny_llama):
    for options, shape in (
        ({"max_num_seqs": 3}, (2, 2, 3, 2, 16, 6)),  # a page is a window here
        ({"max_num_seqs": 3, "page_size": 5}, (2, 2, 3 * 4, 2, 5, 6)),
        ({"num_pages": 7, "page_size": 2}, (2, 2, 7, 2, 2, 6)),
    ):
        assert Engine(tiny_llama(), **options).cache.storage.shape == shape

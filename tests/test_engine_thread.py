"""The engine in a thread of its own, asked by an event loop. Oracle: the engine itself."""

import asyncio
import threading

import pytest
from conftest import random_tokens
from serving import collect, failing, in_turns, results_of, run_calls, small_engine

from engine.drafter import LookupDrafter
from errors import UserError
from sampling import NOT_FINITE, SamplingParams


def texts_of(lengths) -> list[list[int]]:
    return [random_tokens(length, 4000, seed) for seed, length in enumerate(lengths)]


def test_16_tasks_at_once_have_the_texts_of_the_engine(tiny_llama):
    prompts = texts_of([1, 5, 20, 70] * 4)
    kinds = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5, "stop": ("a", "th")},
        {"logprobs": 2, "repetition_penalty": 1.2},
    )
    params = [SamplingParams(5 + 3 * row, seed=row, **kinds[row % 4]) for row in range(16)]

    async def use(thread):
        calls = [thread.generate([own], [wanted]) for own, wanted in zip(prompts, params)]
        return await asyncio.gather(*map(collect, calls))

    def make():
        return small_engine(tiny_llama, max_rows=6, drafter=LookupDrafter())

    found = run_calls(make, use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert [text[0] for text in found] == alone
    assert {reason for _, _, _, reason in alone} == {"stop", "length"}


def test_updates_come_while_the_text_is_written(tiny_llama):
    """The next step waits until the reader has had the one before, and each update is new."""
    turn = threading.Semaphore(1)

    async def use(thread):
        assert thread.thread is not threading.current_thread()
        sizes = []
        async for updates in thread.generate([[1, 2]], [SamplingParams(max_new_tokens=4)]):
            sizes.append(len(updates[0].tokens))
            turn.release()
        return sizes

    assert run_calls(lambda: in_turns(small_engine(tiny_llama), turn), use) == [1, 1, 1, 1]


def test_what_a_slow_reader_has_not_fetched_is_one_update(tiny_llama):
    from server.engine_thread import Update

    prompts = texts_of([4, 6])
    params = [SamplingParams(max_new_tokens=40, logprobs=1), SamplingParams(max_new_tokens=3)]

    async def use(thread):
        slow = thread.generate(prompts[:1], params[:1])
        first = await anext(slow)
        other = await collect(thread.generate(prompts, params))  # behind it, and as long
        rest = [step async for step in slow]
        assert len(rest) == 1
        return tuple(Update.join([first[0], rest[0][0]])), other

    found, other = run_calls(lambda: small_engine(tiny_llama), use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert found == alone[0] and [other[0], other[1]] == alone


def test_what_the_engine_refuses_is_raised_for_that_call(tiny_llama):
    params = SamplingParams(max_new_tokens=3)

    async def use(thread):
        calls = [thread.generate([[1]], [params]), thread.generate([[4096]], [params])]
        calls.append(thread.generate([[2], [3]], [params]))
        return await asyncio.gather(*map(collect, calls), return_exceptions=True)

    good, wrong, uneven = run_calls(lambda: small_engine(tiny_llama), use)
    assert good[0][3] == "length"
    assert type(wrong) is UserError
    assert str(wrong) == "the prompt has the id 4096; ids of this model are integers from 0 to 4095"
    assert type(uneven) is ValueError


def test_a_text_that_fails_is_an_error_after_what_it_has(tiny_llama):
    from server.engine_thread import TextFailed

    params = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0)

    def fails(request):
        return len(request.output) == 2 and request.tokens[0] == 5

    async def use(thread):
        good = asyncio.ensure_future(collect(thread.generate([[1]], [params])))
        counts = []
        with pytest.raises(TextFailed) as failed:
            async for step in thread.generate([[5]], [params]):
                counts.append((len(step[0].tokens), len(step[0].logprobs)))
                assert step[0].finish_reason is None
        return [sum(each) for each in zip(*counts)], str(failed.value), await good

    counts, error, good = run_calls(lambda: failing(small_engine(tiny_llama), fails), use)
    assert (counts, error) == ([2, 2], NOT_FINITE)
    assert len(good[0][0]) == 9


def test_a_text_that_is_there_is_no_error_when_the_engine_ends(tiny_llama):
    """Nobody has fetched its end by then."""

    async def use(thread):
        updates = thread.generate([[5]], [SamplingParams(max_new_tokens=3, ignore_eos=True)])
        tokens = len((await anext(updates))[0].tokens)
        while thread.engine.busy:
            await asyncio.sleep(0.001)
        thread.stop()
        await asyncio.to_thread(thread.thread.join, 10)
        while not thread.error:
            await asyncio.sleep(0)
        async for step in updates:
            tokens += len(step[0].tokens)
        return tokens, thread.error

    found = run_calls(lambda: small_engine(tiny_llama), use)
    assert found == (3, "the server is shutting down")


def test_an_engine_that_cannot_be_made():
    def make():
        raise UserError("no such model")

    with pytest.raises(UserError, match="^no such model$"):
        run_calls(make, lambda thread: None)


def test_the_thread_ends_with_the_block(tiny_llama):
    async def use(thread):
        assert thread.thread.is_alive() and thread.engine.scheduler.max_rows == 2
        return thread

    thread = run_calls(lambda: small_engine(tiny_llama, max_rows=2), use)
    assert not thread.thread.is_alive()

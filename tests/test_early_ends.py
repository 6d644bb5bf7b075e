"""Readers that leave free what they held; all readers hear that their engine died."""

import asyncio
import contextlib

import pytest
from conftest import random_tokens
from serving import collect, failing, results_of, run_calls, small_engine, started

from errors import UserError
from sampling import NOT_FINITE, SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineDead, RequestFailed


def endless(**params):
    return SamplingParams(max_new_tokens=10**9, ignore_eos=True, **params)


async def in_thread(thread, function):
    """What a function returns that runs between two steps."""
    loop = asyncio.get_running_loop()
    found = loop.create_future()
    thread.commands.put(lambda: loop.call_soon_threadsafe(found.set_result, function()))
    return await found


async def is_idle(thread) -> bool:
    """Whether nothing is computed and no page is held, when all commands so far are obeyed."""
    scheduler = thread.engine.scheduler
    pool = scheduler.pool

    def look():
        free = pool.num_free_pages == pool.num_pages
        return free and not thread.engine.busy and not thread.request_states

    return await in_thread(thread, look) and not thread.generations


def test_each_reader_hears_that_its_engine_died(tiny_llama, capfd):
    """Calls that are made after that hear it, too; stderr says where."""

    def make():
        engine = small_engine(tiny_llama)
        engine.compute = lambda scheduled: 1 / 0
        return engine

    async def read(thread):
        with pytest.raises(EngineDead, match="ZeroDivisionError: division by zero$"):
            await collect(thread.generate(GenerateInput([[1]], [SamplingParams()])))

    async def use(thread):
        for _ in range(2):
            await asyncio.gather(read(thread), read(thread))

    run_calls(make, use)
    assert capfd.readouterr().err.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_cancelled_task_frees_what_it_held(tiny_llama, count):
    """Queued (nothing is read), or after `count` updates; others go on."""
    prompts = [random_tokens(30, 4000, seed) for seed in range(3)]
    params = SamplingParams(max_new_tokens=30)

    async def use(thread):
        other = asyncio.ensure_future(collect(thread.generate(GenerateInput([[9]], [params]))))
        seen = asyncio.Event()

        async def read():
            left = count
            if not left:
                seen.set()
            async for _ in thread.generate(GenerateInput(prompts, [endless()] * 3)):
                left -= 1
                if not left:
                    seen.set()

        task = asyncio.ensure_future(read())
        await seen.wait()
        await asyncio.sleep(0)  # it waits for the next one
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = thread.engine.steps
        scheduler = thread.engine.scheduler

        def look():
            return len(scheduler.running) + len(scheduler.waiting), thread.engine.steps

        left, after = await in_thread(thread, look)
        assert left <= 1 and after <= steps + 2
        found = await other
        assert await is_idle(thread)
        return found[0]

    found = run_calls(lambda: small_engine(tiny_llama, max_num_seqs=2), use)
    assert [found] == results_of(small_engine(tiny_llama), [[9]], [params])


def test_an_iterator_that_is_closed_frees_what_it_held(tiny_llama):
    async def use(thread):
        async with contextlib.aclosing(
            thread.generate(GenerateInput([[9], [8]], [endless()] * 2))
        ) as updates:
            await anext(updates)
        return await is_idle(thread)

    assert run_calls(lambda: small_engine(tiny_llama), use)


@pytest.mark.parametrize("last, error", [(4096, UserError), (7, RequestFailed)])
def test_a_text_that_is_refused_or_fails_ends_those_of_its_call(tiny_llama, last, error):
    def make():
        return failing(small_engine(tiny_llama), lambda request: len(request.output) == 2)

    async def use(thread):
        with pytest.raises(error):
            await collect(thread.generate(GenerateInput([[9], [8], [last]], [endless()] * 3)))
        return await is_idle(thread)

    assert run_calls(make, use)


def test_the_end_of_the_thread_is_told_to_its_readers(tiny_llama):
    async def main():
        async with started(lambda: small_engine(tiny_llama)) as thread:
            reader = asyncio.ensure_future(
                collect(thread.generate(GenerateInput([[1]], [endless()])))
            )
            while not thread.engine.steps:
                await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            await asyncio.wait_for(reader, 5)
        with pytest.raises(EngineDead, match="shutting down"):
            await anext(thread.generate(GenerateInput([[1]], [endless()])))
        assert "shutting down" in thread.error

    asyncio.run(main())


def test_a_text_that_fails_is_an_error_after_what_it_has(tiny_llama):
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0)

    def fails(request):
        return len(request.output) == 2 and request.tokens[0] == 5

    async def use(thread):
        good = asyncio.ensure_future(collect(thread.generate(GenerateInput([[1]], [params]))))
        counts = []
        with pytest.raises(RequestFailed) as failed:
            async for step in thread.generate(GenerateInput([[5]], [params])):
                counts.append((len(step[0].tokens), len(step[0].logprobs)))
                assert step[0].finish_reason is None
        return [sum(each) for each in zip(*counts)], str(failed.value), await good

    counts, error, good = run_calls(lambda: failing(small_engine(tiny_llama), fails), use)
    assert (counts, error) == ([2, 2], NOT_FINITE)
    assert len(good[0][0]) == 9

"""The engine in a thread of its own, asked by an event loop. Oracle: the engine itself."""

import asyncio
import threading

import pytest
from conftest import random_tokens
from serving import collect, failing, results_of, run_calls, small_engine

from errors import UserError
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineThread, RequestFailed, Update


def endless(**params):
    return SamplingParams(max_new_tokens=10**9, ignore_eos=True, **params)


async def is_idle(thread) -> bool:
    loop = asyncio.get_running_loop()
    found = loop.create_future()
    pool = thread.engine.scheduler.pool

    def look():  # between two steps
        free = pool.num_free_pages == pool.num_pages and not thread.engine.busy
        loop.call_soon_threadsafe(found.set_result, free and not thread.request_states)

    thread.commands.put(look)
    return await found and not thread.generations


def test_what_a_slow_reader_has_not_fetched_is_one_update(tiny_llama):
    prompts = [random_tokens(4, 4000, 0), random_tokens(6, 4000, 1)]
    params = [SamplingParams(max_new_tokens=40, logprobs=1), SamplingParams(max_new_tokens=3)]

    async def use(thread):
        slow = thread.generate(GenerateInput(prompts[:1], params[:1]))
        first = await anext(slow)
        other = await collect(thread.generate(GenerateInput(prompts, params)))  # queued behind it
        (rest,) = [step async for step in slow]
        return first[0], rest[0], other

    first, rest, other = run_calls(lambda: small_engine(tiny_llama), use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert tuple(Update.join([first, rest])) == alone[0] and [other[0], other[1]] == alone


def test_what_the_engine_refuses_is_raised_for_that_call(tiny_llama):
    """The prompts beside it bring no text, though they ask for no tokens and end at once."""
    none = SamplingParams(max_new_tokens=0)

    async def use(thread):
        def ask(prompts, params):
            return collect(thread.generate(GenerateInput(prompts, params)))

        assert await ask([], []) == {}
        assert await ask([[1]], [none]) == {0: ((), "", (), "length")}
        calls = [ask([[2], [3]], [none]), ask([[1]], [SamplingParams(3)])]
        found = await asyncio.gather(*calls, return_exceptions=True)
        updates = []
        with pytest.raises(UserError) as wrong:
            async for new in thread.generate(GenerateInput([[1], [4096]], [none] * 2)):
                updates.append(new)
        return *found, updates, wrong.value

    uneven, good, updates, wrong = run_calls(lambda: small_engine(tiny_llama), use)
    assert type(uneven) is ValueError and good[0][3] == "length" and updates == []
    assert str(wrong) == "the prompt has the id 4096; ids of this model are integers from 0 to 4095"


def test_an_engine_that_cannot_be_made():
    def make():
        raise UserError("no such model")

    with pytest.raises(UserError, match="^no such model$"):
        run_calls(make, lambda thread: None)


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_if_nobody_waits_for_its_engine(tiny_llama, capfd, fails):
    """Cancelled while the engine is made, in a loop that goes on and in one that has ended."""
    made = threading.Event()

    def make():
        assert made.wait(60)
        return small_engine(tiny_llama, max_num_seqs=0 if fails else 1)

    async def main(waits):
        thread = EngineThread(make)
        thread.start()
        thread.ready.cancel()
        thread.stop()
        if waits:
            made.set()
            await asyncio.to_thread(thread.thread.join, 10)
        return thread.thread

    for waits in (False, True):
        made.clear()
        thread = asyncio.run(main(waits))
        made.set()
        thread.join(60)
        assert not thread.is_alive()
    assert capfd.readouterr().err == ""


def test_a_text_that_is_there_is_no_error_when_the_engine_ends(tiny_llama):
    """Its end is not fetched by then."""

    async def use(thread):
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        updates = thread.generate(GenerateInput([[5]], [params]))
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


@pytest.mark.parametrize("last, error", [(4096, UserError), (7, RequestFailed)])
def test_a_text_that_is_refused_or_fails_ends_those_of_its_call(tiny_llama, last, error):
    def make():
        return failing(small_engine(tiny_llama), lambda request: len(request.output) == 2)

    async def use(thread):
        with pytest.raises(error):
            await collect(thread.generate(GenerateInput([[9], [8], [last]], [endless()] * 3)))
        return await is_idle(thread)

    assert run_calls(make, use)

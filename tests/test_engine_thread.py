"""The engine in a thread of its own, asked by an event loop. Oracle: the engine itself."""

import asyncio
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, random_tokens
from serving import collect, in_turns, results_of, run_calls, small_engine, various_params

PROGRAM = """
import asyncio
from engine.engine import Engine
from loading.load import load_model
from sampling import SamplingParams
from server.engine_thread import EngineThread
from loading.tokenizer import load_encoding

name = "checkpoints/stories-llama"
encoding = load_encoding(name, 4096)

async def write(thread, prompt):
    ids = encoding.encode(prompt)
    async for updates in thread.generate([ids], [SamplingParams(max_new_tokens=6)]):
        prompt += updates[0].text
    return prompt

async def main():
    async with EngineThread(lambda: Engine(load_model(name), encoding=encoding)) as thread:
        print(await asyncio.gather(write(thread, "Lily"), write(thread, "The dog")))

asyncio.run(main())
"""


def texts_of(lengths) -> list[list[int]]:
    return [random_tokens(length, 4000, seed) for seed, length in enumerate(lengths)]


def test_a_program_writes_two_texts_at_once():
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    greedy = "['Lily and Ben were playing in the', 'The dog ran away. He ran after']\n"
    assert (found.returncode, found.stdout) == (0, greedy), found.stderr[-500:]


@pytest.mark.parametrize("drafts", [False, True])
def test_16_tasks_at_once_have_the_texts_of_the_engine(tiny_llama, drafts):
    from engine.drafter import LookupDrafter

    prompts = texts_of([1, 5, 20, 70] * 4)
    params = various_params(16)

    async def use(thread):
        calls = [thread.generate([own], [wanted]) for own, wanted in zip(prompts, params)]
        return await asyncio.gather(*map(collect, calls))

    def make():
        return small_engine(tiny_llama, max_rows=6, drafter=LookupDrafter() if drafts else None)

    found = run_calls(make, use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert [text[0] for text in found] == alone
    assert {reason for _, _, _, reason in alone} == {"stop", "length"}


def test_a_call_of_several_texts(tiny_llama):
    prompts = texts_of([3, 9, 3])
    params = various_params(3)
    found = run_calls(
        lambda: small_engine(tiny_llama), lambda thread: collect(thread.generate(prompts, params))
    )
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert [found[index] for index in range(3)] == alone


def test_no_texts_and_texts_of_no_tokens(tiny_llama):
    from sampling import SamplingParams

    none = SamplingParams(max_new_tokens=0)

    async def use(thread):
        assert await collect(thread.generate([], [])) == {}
        return await collect(thread.generate([[1], [2]], [none, none]))

    nothing = ((), "", (), "length")
    assert run_calls(lambda: small_engine(tiny_llama), use) == {0: nothing, 1: nothing}


def test_updates_come_while_the_text_is_written(tiny_llama):
    """The next step waits until the reader has had the one before, and each update is new."""
    from sampling import SamplingParams

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
    from sampling import SamplingParams
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


def test_updates_do_not_change(tiny_llama):
    from sampling import SamplingParams

    async def use(thread):
        params = SamplingParams(max_new_tokens=20, logprobs=1)
        kept = [step[0] async for step in thread.generate([[7]], [params])]
        assert all(type(part) is tuple for update in kept for part in (update[0], update[2]))
        return sum(len(update.tokens) for update in kept), sum(len(u.logprobs) for u in kept)

    assert run_calls(lambda: small_engine(tiny_llama), use) == (20, 20)


def test_what_the_engine_refuses_is_raised_for_that_call(tiny_llama):
    from errors import UserError
    from sampling import SamplingParams

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
    from sampling import NOT_FINITE, SamplingParams
    from server.engine_thread import TextFailed

    params = SamplingParams(max_new_tokens=9, ignore_eos=True)

    def make():
        engine = small_engine(tiny_llama)
        compute = engine.compute

        def broken(works):
            results = compute(works)
            bad = [len(work.request.output) == 2 and work.request.tokens[0] == 5 for work in works]
            return [None if is_bad else own for is_bad, own in zip(bad, results)]

        engine.compute = broken
        return engine

    async def use(thread):
        good = asyncio.ensure_future(collect(thread.generate([[1]], [params])))
        count = 0
        with pytest.raises(TextFailed) as failed:
            async for step in thread.generate([[5]], [params]):
                count += len(step[0].tokens)
                assert step[0].finish_reason is None
        return count, str(failed.value), await good

    count, error, good = run_calls(make, use)
    assert (count, error) == (2, NOT_FINITE)
    assert len(good[0][0]) == 9


def failing_engine(tiny_llama):
    """An engine whose texts fail after two tokens."""
    engine = small_engine(tiny_llama)
    compute = engine.compute

    def broken(works):
        results = compute(works)
        return [None if len(work.request.output) == 2 else own for work, own in zip(works, results)]

    engine.compute = broken
    return engine


def test_log_probabilities_of_a_text_that_fails_come_once(tiny_llama):
    from sampling import SamplingParams
    from server.engine_thread import TextFailed

    params = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0)

    async def use(thread):
        counts = []
        with pytest.raises(TextFailed):
            async for step in thread.generate([[5]], [params]):
                counts.append((len(step[0].tokens), len(step[0].logprobs)))
        return [sum(each) for each in zip(*counts)]

    assert run_calls(lambda: failing_engine(tiny_llama), use) == [2, 2]


def test_a_text_that_is_there_is_no_error_when_the_engine_ends(tiny_llama):
    """Nobody has fetched its end by then."""
    from sampling import SamplingParams

    async def use(thread):
        updates = thread.generate([[5]], [SamplingParams(max_new_tokens=3, ignore_eos=True)])
        tokens = len((await anext(updates))[0].tokens)
        while thread.unfinished:
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
    from errors import UserError

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


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_if_nobody_waits_for_its_engine(tiny_llama, capfd, fails):
    """Cancelled while the engine is made, in a loop that goes on and in one that has ended."""
    from server.engine_thread import EngineThread

    made = threading.Event()

    def make():
        assert made.wait(10)
        return small_engine(tiny_llama, max_rows=0 if fails else 1)

    async def main(waits):
        thread = EngineThread(make)
        entering = asyncio.ensure_future(thread.__aenter__())
        while not thread.thread.is_alive():
            await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        if waits:
            made.set()
            await asyncio.to_thread(thread.thread.join, 10)
        return thread.thread

    for waits in (False, True):
        made.clear()
        thread = asyncio.run(main(waits))
        made.set()
        thread.join(10)
        assert not thread.is_alive()
    assert capfd.readouterr().err == ""


def test_what_is_refused_brings_no_text(tiny_llama):
    """Also of those beside it, which ask for no tokens and so are over at once."""
    from errors import UserError
    from sampling import SamplingParams

    async def use(thread):
        updates = []
        with pytest.raises(UserError):
            async for new in thread.generate([[1], [4096]], [SamplingParams(max_new_tokens=0)] * 2):
                updates.append(new)
        return updates

    assert run_calls(lambda: small_engine(tiny_llama), use) == []

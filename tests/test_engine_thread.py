"""The engine in a thread of its own, asked by an event loop. Oracle: the engine itself."""

import ast
import asyncio
import threading

import pytest
from conftest import random_tokens
from serving import collect, in_turns, results_of, run_calls, small_engine

from engine.drafter import PromptLookupDrafter
from errors import UserError
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import Update


def random_prompts(lengths) -> list[list[int]]:
    return [random_tokens(length, 4000, seed) for seed, length in enumerate(lengths)]


PROGRAM = """
import asyncio
from engine.engine import Engine
from loading.load import load_model
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineThread

async def read(thread, prompt):
    inputs = GenerateInput([[prompt]], [SamplingParams(max_new_tokens=3)])
    async for updates in thread.generate(inputs):
        print(prompt, updates[0].tokens, updates[0].finish_reason)

async def main():
    thread = EngineThread(lambda: Engine(load_model("checkpoints/stories-draft")))
    thread.start()
    await thread.ready
    await asyncio.gather(read(thread, 7), read(thread, 8))
    await thread.close()

asyncio.run(main())
"""


def test_two_tasks_of_a_program_have_their_tokens_one_by_one(run_program):
    code, out, err = run_program(PROGRAM)
    assert (code, err) == (0, "")
    tokens = {"7": (), "8": ()}  # what a busy reader fetches at once comes as one update
    for line in out.splitlines():
        prompt, rest = line.split(" ", 1)
        tokens[prompt] += ast.literal_eval(rest.rsplit(" ", 1)[0])
    assert [len(its) for its in tokens.values()] == [3, 3]
    assert out.count(" length\n") == 2 and out.count(" None\n") <= 4


def test_16_tasks_at_once_have_the_texts_of_the_engine(tiny_llama):
    prompts = random_prompts([1, 5, 20, 70] * 4)
    kinds = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5, "stop": ("a", "th")},
        {"logprobs": 2, "repetition_penalty": 1.2},
    )
    params = [SamplingParams(5 + 3 * row, seed=row, **kinds[row % 4]) for row in range(16)]

    async def use(thread):
        calls = [
            thread.generate(GenerateInput([own], [wanted])) for own, wanted in zip(prompts, params)
        ]
        return await asyncio.gather(*map(collect, calls))

    def make():
        return small_engine(tiny_llama, max_num_seqs=6, drafter=PromptLookupDrafter())

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
        async for updates in thread.generate(
            GenerateInput([[1, 2]], [SamplingParams(max_new_tokens=4)])
        ):
            sizes.append(len(updates[0].tokens))
            turn.release()
        return sizes

    assert run_calls(lambda: in_turns(small_engine(tiny_llama), turn), use) == [1, 1, 1, 1]


def test_what_the_engine_refuses_is_raised_for_that_call(tiny_llama):
    params = SamplingParams(max_new_tokens=3)

    async def use(thread):
        calls = [
            thread.generate(GenerateInput([[1]], [params])),
            thread.generate(GenerateInput([[4096]], [params])),
        ]
        calls.append(thread.generate(GenerateInput([[2], [3]], [params])))
        return await asyncio.gather(*map(collect, calls), return_exceptions=True)

    good, wrong, uneven = run_calls(lambda: small_engine(tiny_llama), use)
    assert good[0][3] == "length"
    assert type(wrong) is UserError
    assert str(wrong) == "the prompt has the id 4096: must be an integer from 0 to 4095"
    assert type(uneven) is ValueError


def test_an_engine_that_cannot_be_made():
    def make():
        raise UserError("no such model")

    with pytest.raises(UserError, match="^no such model$"):
        run_calls(make, lambda thread: None)


def test_the_thread_ends_with_the_block(tiny_llama):
    async def use(thread):
        assert thread.thread.is_alive() and thread.engine.scheduler.max_num_seqs == 2
        return thread

    thread = run_calls(lambda: small_engine(tiny_llama, max_num_seqs=2), use)
    assert not thread.thread.is_alive()


def test_a_text_that_is_there_is_no_error_when_the_engine_ends(tiny_llama):
    """Its end is not fetched by then."""

    async def use(thread):
        updates = thread.generate(
            GenerateInput([[5]], [SamplingParams(max_new_tokens=3, ignore_eos=True)])
        )
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


def test_what_a_slow_reader_has_not_fetched_is_one_update(tiny_llama):
    prompts = [random_tokens(4, 4000, 0), random_tokens(6, 4000, 1)]
    params = [SamplingParams(max_new_tokens=40, logprobs=1), SamplingParams(max_new_tokens=3)]

    async def use(thread):
        slow = thread.generate(GenerateInput(prompts[:1], params[:1]))
        first = await anext(slow)
        other = await collect(thread.generate(GenerateInput(prompts, params)))  # queued behind it
        rest = [step async for step in slow]
        assert len(rest) == 1
        return tuple(Update.join([first[0], rest[0][0]])), other

    found, other = run_calls(lambda: small_engine(tiny_llama), use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert found == alone[0] and [other[0], other[1]] == alone

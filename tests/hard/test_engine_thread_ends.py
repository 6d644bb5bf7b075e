"""The engine's thread where no one waits for it, and calls that bring no text."""

import asyncio
import threading

import pytest
from serving import collect, run_calls, small_engine

from errors import UserError
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineThread


def test_no_texts_and_texts_of_no_tokens(tiny_llama):
    none = SamplingParams(max_new_tokens=0)

    async def use(thread):
        assert await collect(thread.generate(GenerateInput([], []))) == {}
        return await collect(thread.generate(GenerateInput([[1], [2]], [none, none])))

    nothing = ((), "", (), "length")
    assert run_calls(lambda: small_engine(tiny_llama), use) == {0: nothing, 1: nothing}


def test_updates_do_not_change(tiny_llama):
    async def use(thread):
        params = SamplingParams(max_new_tokens=20, logprobs=1)
        kept = [step[0] async for step in thread.generate(GenerateInput([[7]], [params]))]
        assert all(type(part) is tuple for update in kept for part in (update[0], update[2]))
        return sum(len(update.tokens) for update in kept), sum(len(u.logprobs) for u in kept)

    assert run_calls(lambda: small_engine(tiny_llama), use) == (20, 20)


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


def test_what_is_refused_brings_no_text(tiny_llama):
    """The prompts beside it bring none either, though they ask for no tokens and end at once."""

    async def use(thread):
        updates = []
        with pytest.raises(UserError):
            async for new in thread.generate(
                GenerateInput([[1], [4096]], [SamplingParams(max_new_tokens=0)] * 2)
            ):
                updates.append(new)
        return updates

    assert run_calls(lambda: small_engine(tiny_llama), use) == []

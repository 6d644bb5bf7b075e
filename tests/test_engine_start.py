"""The beginning and the end of an engine's thread, as its clients see them."""

import asyncio

from serving import run_calls, small_engine

from sampling import SamplingParams
from server.backend import GenerateInput


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

"""What a slow reader of the engine's thread has not fetched. Oracle: the engine itself."""

from conftest import random_tokens
from serving import collect, results_of, run_calls, small_engine

from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import Update


def test_what_a_slow_reader_has_not_fetched_is_one_update(tiny_llama):
    prompts = [random_tokens(4, 4000, 0), random_tokens(6, 4000, 1)]
    params = [SamplingParams(max_new_tokens=40, logprobs=1), SamplingParams(max_new_tokens=3)]

    async def use(thread):
        slow = thread.generate(GenerateInput(prompts[:1], params[:1]))
        first = await anext(slow)
        other = await collect(
            thread.generate(GenerateInput(prompts, params))
        )  # behind it, and as long
        rest = [step async for step in slow]
        assert len(rest) == 1
        return tuple(Update.join([first[0], rest[0][0]])), other

    found, other = run_calls(lambda: small_engine(tiny_llama), use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert found == alone[0] and [other[0], other[1]] == alone

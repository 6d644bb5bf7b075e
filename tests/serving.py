"""What the tests of the server share."""

import asyncio
import functools

from conftest import CHECKPOINTS

SMALL = CHECKPOINTS / "stories-llama"


@functools.cache
def small_encoding():
    from tokenizer import load_encoding

    return load_encoding(SMALL, 4096)


def small_engine(tiny_llama, **options):
    """An engine of a random model that has the vocabulary of an embedded one."""
    from engine.engine import Engine

    model = tiny_llama(vocab_size=4096, block_size=64, eos_token_id=4095, bos_token_id=4095)
    return Engine(model, encoding=small_encoding(), **options)


def various_params(count: int) -> list:
    """Greedy and sampled ones, with penalties, stop strings and log-probabilities."""
    from sampling import SamplingParams

    kinds = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5, "stop": ("a", "th")},
        {"logprobs": 2, "repetition_penalty": 1.2},
    )
    return [
        SamplingParams(max_new_tokens=5 + 3 * row, seed=row, **kinds[row % len(kinds)])
        for row in range(count)
    ]


def results_of(engine, prompts, params) -> list[tuple]:
    """What an engine writes: tokens, text, log-probabilities and finish reason of each."""
    requests = [engine.add(*pair) for pair in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
    return [
        (tuple(request.output), request.text, tuple(request.logprobs), request.finish_reason)
        for request in requests
    ]


async def collect(updates) -> dict:
    """All updates of a call, joined: by index what `results_of` has."""
    from server.engine_thread import Update

    texts = {}
    async for step in updates:
        assert step
        for index, update in step.items():
            texts.setdefault(index, []).append(update)
    return {index: tuple(Update.join(parts)) for index, parts in texts.items()}


def in_turns(engine, turn):
    """The same engine, of which each step waits for its turn, a semaphore."""
    step = engine.step

    def one_step():
        assert turn.acquire(timeout=10)
        return step()

    engine.step = one_step
    return engine


def run_calls(make, use, **options):
    """The result of an async function of an EngineThread, with its event loop."""
    from server.engine_thread import EngineThread

    async def main():
        async with EngineThread(make, **options) as thread:
            return await asyncio.wait_for(use(thread), 60)

    return asyncio.run(main())

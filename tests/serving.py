"""What the tests of the engine's thread share."""

import asyncio
import functools

from conftest import CHECKPOINTS

SMALL = CHECKPOINTS / "stories-llama"


@functools.cache
def small_encoding():
    from loading.tokenizer import load_encoding

    return load_encoding(SMALL, 4096)


def small_engine(tiny_llama, **options):
    """An engine of a random model that has the vocabulary of an embedded one."""
    from engine.engine import Engine

    model = tiny_llama(vocab_size=4096, block_size=64, eos_token_id=4095, bos_token_id=4095)
    return Engine(model, encoding=small_encoding(), **options)


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
    texts = {}
    async for step in updates:
        assert step
        for index, (tokens, text, logprobs, reason) in step.items():
            known = texts.get(index, ((), "", ()))
            texts[index] = (known[0] + tokens, known[1] + text, known[2] + logprobs, reason)
    return texts


def in_turns(engine, turn):
    """Let each step of an engine wait for its turn, a semaphore; returns the engine."""
    step = engine.step

    def one_step():
        assert turn.acquire(timeout=10)
        return step()

    engine.step = one_step
    return engine


def changed(engine, change):
    """Change each result of an engine; returns the engine. change: (work, result) to result."""
    compute = engine.compute

    def computed(works):
        return [change(*pair) for pair in zip(works, compute(works), strict=True)]

    engine.compute = computed
    return engine


def failing(engine, fails):
    """Let texts of an engine fail; returns the engine. fails: whether a request's text does."""
    return changed(engine, lambda work, own: None if fails(work.request) else own)


def run_calls(make, use, **options):
    """The result of an async function of an EngineThread, with its event loop."""
    from server.engine_thread import EngineThread

    async def main():
        async with EngineThread(make, **options) as thread:
            return await asyncio.wait_for(use(thread), 60)

    return asyncio.run(main())

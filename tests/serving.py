"""What the tests of the engine's thread share."""

import asyncio
import contextlib
import functools

from conftest import CHECKPOINTS

SMALL = CHECKPOINTS / "stories-llama"


@functools.cache
def small_encoding():
    from text.tokenizer import load_encoding

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
    outputs = {}
    async for step in updates:
        assert step
        for index, (tokens, text, logprobs, reason) in step.items():
            known = outputs.get(index, ((), "", ()))
            outputs[index] = (known[0] + tokens, known[1] + text, known[2] + logprobs, reason)
    return outputs


def in_turns(engine, turn):
    """Let each step of an engine wait for its turn, a semaphore; returns the engine."""
    step = engine.step

    def one_step():
        assert turn.acquire(timeout=60)
        return step()

    engine.step = one_step
    return engine


def changed(engine, change):
    """Change each result of an engine; returns the engine. change: (work, result) to result."""
    compute = engine.compute

    def computed(scheduled):
        return [change(*pair) for pair in zip(scheduled, compute(scheduled), strict=True)]

    engine.compute = computed
    return engine


def failing(engine, fails):
    """Let texts of an engine fail; returns the engine. fails: whether a request's text does."""
    return changed(engine, lambda work, own: None if fails(work.request) else own)


@contextlib.asynccontextmanager
async def started(make, **options):
    """An EngineThread whose engine is made, closed after the block."""
    from server.engine_thread import EngineThread

    thread = EngineThread(make, **options)
    thread.start()
    await thread.ready
    try:
        yield thread
    finally:
        await thread.close()


def run_calls(make, use, **options):
    """The result of an async function of an EngineThread, with its event loop."""

    async def main():
        async with started(make, **options) as thread:
            return await asyncio.wait_for(use(thread), 60)

    return asyncio.run(main())


def check_refused(answer: tuple, param: str | None, said: str = "", status=400, code=None) -> None:
    """Check that an answer refuses a request for this field. said: words of its short message."""
    found, body = answer
    error = body["error"]
    expected = (status, "invalid_request_error", param, code)
    assert (found, error["type"], error["param"], error["code"]) == expected, body
    message = error["message"]
    assert 0 < len(message) < 700 and all(word in message for word in said.split()), message

"""What the tests of the server share."""

import asyncio
import contextlib
import functools
import http.client
import json
import queue
import threading
from collections.abc import Iterator

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


class Door:
    """A server at a port of 127.0.0.1. thread: its EngineThread. server: uvicorn's."""

    def __init__(self, port: int, thread, server):
        self.port = port
        self.thread = thread
        self.server = server

    def send(self, method: str, path: str, body=None, headers=()) -> http.client.HTTPResponse:
        """The answer to a request, of which only the head has been read.

        body: bytes, an iterator over them, sent in chunks, or what is made JSON.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | Iterator | None) else json.dumps(body).encode()
        known = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, data, known | dict(headers))
        return connection.getresponse()

    def get(self, path: str) -> tuple:
        """Status and body, read as JSON if there is one."""
        return self.ask("GET", path)

    def post(self, path: str, body, headers=()) -> tuple:
        return self.ask("POST", path, body, headers)

    def events(self, path: str, body: dict) -> list:
        """Those of a streamed answer, read as JSON; after them comes "[DONE]", and nothing else."""
        with self.send("POST", path, body) as answer:
            assert answer.status == 200, answer.read()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            *events, empty = answer.read().decode().split("\n\n")
        assert empty == "" and all(event.startswith("data: ") for event in events)
        data = [event.removeprefix("data: ") for event in events]
        assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
        return [json.loads(event) for event in data[:-1]]

    def ask(self, *request) -> tuple:
        with self.send(*request) as answer:
            data = answer.read()
            return answer.status, json.loads(data) if data else None


@contextlib.contextmanager
def serving(make, chat=None, app_options=None, **options):
    """A Door to an engine; the event loop has a thread of its own.

    chat: the template of the model, or an error. app_options: of `make_app`.
    options: of the EngineThread.
    """
    from loading.chat import Chat
    from server.app import make_app
    from server.engine_thread import EngineThread
    from server.served import Served

    @contextlib.asynccontextmanager
    async def enter():
        async with EngineThread(make, **options) as thread:
            served = Served(thread, "small", "somewhere/small", chat or Chat(SMALL))
            yield make_app(served, **(app_options or {})), thread

    with serving_app(enter) as door:
        yield door


@contextlib.contextmanager
def serving_app(enter):
    """A Door to an app. enter: makes an asynchronous context manager of it and its EngineThread."""
    import uvicorn

    from serve import UVICORN, listen

    started = queue.SimpleQueue()

    async def main():
        async with enter() as (app, thread):
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", **UVICORN))
            sock = listen("127.0.0.1", 0)
            started.put(Door(sock.getsockname()[1], thread, server))
            await server.serve([sock])

    def work():
        try:
            asyncio.run(main())
        except BaseException as error:
            started.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    door = started.get(timeout=60)
    if isinstance(door, BaseException):
        raise door
    try:
        yield door
    finally:
        door.thread.commands.put(None)  # texts that are not over end with an error
        door.server.config.timeout_graceful_shutdown = 1  # second for answers that do not end
        door.server.should_exit = True
        worker.join(20)
        assert not worker.is_alive()

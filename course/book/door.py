"""A server in this process, whose engine goes on only when it is told to, for pictures of it."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import uvicorn

from book import recordings
from command_line import STORIES, check_text
from engine.engine import Engine
from errors import UserError
from loading.chat import Chat
from serve import UVICORN, listen
from server import engine_thread, live, metrics
from server.app import make_app
from server.engine_thread import Call, EngineThread, Update
from server.served import Served

NAME = "stories-llama"  # what `python serve.py` serves
PATH = "/v1/completions"
PATIENCE = 120  # seconds; a picture that takes longer has failed


def make_engine(**options) -> Engine:
    torch.set_num_threads(1)  # each thread has a number of its own
    return Engine(recordings.load(NAME), encoding=recordings.encoding(), **options)


def check_prompt(prompt: str, most: int, least: int = 1) -> list[int]:
    """The ids of a prompt. Raises UserError if a picture cannot show it."""
    check_text("--prompt", prompt)
    return recordings.encode(prompt, most, least)


def take(semaphore: threading.Semaphore) -> None:
    if not semaphore.acquire(timeout=PATIENCE):
        raise TimeoutError("nobody gave a turn, or took it")


class Turns:
    """An engine's thread that waits before each step, so that a picture is the same each time.

    While it waits, others may look at the engine.
    """

    def __init__(self, thread: EngineThread):
        self.thread = thread
        self.here = threading.Semaphore(0)  # while it waits
        self.turns = threading.Semaphore(0)
        self.obey = thread.obey
        thread.obey = self.wait

    def wait(self) -> bool:
        self.here.release()
        take(self.turns)
        return self.obey()

    def step(self) -> None:
        """Let it do what it is asked for, compute once, and come back."""
        take(self.here)
        self.turns.release()
        take(self.here)
        self.here.release()

    def open(self) -> None:
        """Let it go on from now."""
        self.thread.obey = self.obey
        self.turns.release()


async def turn(turns: Turns) -> None:
    """One step, and all that readers in this event loop do with what is new."""
    await asyncio.to_thread(turns.step)
    await settle()


async def settle() -> None:
    """Let every task of this loop do what it can do now."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_loop(use: Callable[[EngineThread, Turns], Awaitable], **options) -> Any:
    """What an async function returns that has an engine's thread, without a server.

    options: of the engine.
    """

    async def main():
        thread = EngineThread(lambda: make_engine(**options))
        turns = Turns(thread)
        async with thread:
            try:
                return await asyncio.wait_for(use(thread, turns), PATIENCE)
            finally:
                turns.open()

    return asyncio.run(main())


class Reply(NamedTuple):
    """What a server answers."""

    status: int
    body: Any  # of JSON, or else text
    headers: http.client.HTTPMessage


class Client:
    """Of a server at a port of 127.0.0.1."""

    def __init__(self, port: int):
        self.port = port
        self.connections: list[http.client.HTTPConnection] = []  # open while somebody has them

    def send(
        self, method: str, path: str, body: dict | None = None, **headers: str
    ) -> http.client.HTTPConnection:
        """A connection on which a request has been sent. headers: with _ for each -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body).encode()
        known = {"Content-Type": "application/json", "Connection": "close"}
        known |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, known)
        self.connections.append(connection)
        return connection

    def ask(self, *request, **headers: str) -> Reply:
        """The answer to a request, whose parts are those of `send`."""
        return read(self.send(*request, **headers))

    def write(self, body: dict, path: str = PATH) -> dict:
        """The answer to a question for texts. Raises UserError where it is refused."""
        reply = self.ask("POST", path, body)
        if reply.status != 200:
            raise UserError(reply.body["error"]["message"])
        return reply.body

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what other threads do."""
        late = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > late:
                raise TimeoutError
            time.sleep(0.001)


class Door(Client):
    """A server at a port of 127.0.0.1, and a client of it.

    asked: of each call of the engine, its ids and parameters. updates: all that was new of texts.
    heard: of each request, what the server received of it: types of ASGI's messages. function: the
    name of the one that FastAPI found for the last path, "" for none.
    """

    def __init__(
        self, port: int, served: Served, server: uvicorn.Server, turns: Turns | None = None
    ):
        super().__init__(port)
        self.served = served
        self.thread = thread = served.thread
        self.server = server
        self.turns = turns
        self.asked: list[tuple[list, list]] = []
        self.updates: list[dict[int, Update]] = []
        self.heard: list[list[str]] = []
        self.function = ""
        generate = thread.generate

        async def noted(prompts, params, *rest):
            self.asked.append((prompts, params))
            async with contextlib.aclosing(generate(prompts, params, *rest)) as found:
                async for updates in found:
                    self.updates.append(updates)
                    yield updates

        thread.generate = noted

    def call(self, body: dict) -> tuple[http.client.HTTPConnection, Call]:
        """Ask for a text, and wait until the server knows of it."""
        known = set(self.thread.calls)
        connection = self.send("POST", PATH, body)
        self.until(lambda: len(self.thread.calls) > len(known))
        (call,) = self.thread.calls - known
        return connection, call

    def step(self) -> None:
        """Let the engine do what it is asked for and compute once, and hand out what is new."""
        self.turns.step()
        asyncio.run_coroutine_threadsafe(settle(), self.thread.loop).result(PATIENCE)

    def finish(self) -> None:
        """Steps until all texts are over."""
        self.step()
        while self.thread.engine.busy:
            self.step()

    def close(self) -> None:
        """Texts that are not over end with an error."""
        self.thread.stop()
        if self.turns:
            self.turns.open()
        self.server.should_exit = True


def read(connection: http.client.HTTPConnection) -> Reply:
    """All of an answer."""
    with connection.getresponse() as answer:
        text = answer.read().decode()
        body = json.loads(text) if text.startswith("{") else text
        return Reply(answer.status, body, answer.headers)


@contextlib.contextmanager
def open_door(
    by_turns: bool = False,
    clock: float = 0,
    bounds: dict | None = None,
    app_options: dict | None = None,
    **options,
) -> Iterator[Door]:
    """A Door, whose event loop has a thread of its own. options: of the engine.

    by_turns: a step is computed when `Door.step` is called. clock: if given, a position computed
    takes so many seconds, and nothing else takes time. bounds: of the EngineThread. app_options: of
    `make_app`.
    """
    thread = EngineThread(lambda: make_engine(**options), **(bounds or {}))
    served = Served(thread, NAME, f"checkpoints/{NAME}", Chat(STORIES.with_name(NAME)))

    async def noting(scope, receive, send):
        heard = []
        door.heard.append(heard)

        async def noted():
            message = await receive()
            heard.append(message["type"])
            return message

        async def noted_send(message):
            door.function = getattr(scope.get("endpoint"), "__name__", "")
            await send(message)

        await app(scope, noted, noted_send)

    async def main():
        async with thread:
            await server.serve([sock])

    app = make_app(served, **(app_options or {}))
    quiet = UVICORN | {"log_level": "critical", "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(noting, **quiet, timeout_graceful_shutdown=1))
    now = SimpleNamespace(perf_counter=lambda: clock * getattr(thread.engine, "positions", 0))
    with contextlib.ExitStack() as stack:
        for module in (engine_thread, metrics, live) if clock else ():
            stack.enter_context(mock.patch.object(module, "time", now))
        sock = stack.enter_context(listen("127.0.0.1", 0))
        door = Door(sock.getsockname()[1], served, server, Turns(thread) if by_turns else None)
        pool = stack.enter_context(futures.ThreadPoolExecutor(1))
        working = pool.submit(asyncio.run, main())
        door.until(lambda: server.started or working.done())
        if working.done():
            working.result()
        try:
            yield door
        finally:
            door.close()
            for connection in door.connections:
                connection.close()

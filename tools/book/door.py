"""A server in this process, whose engine goes on only when it is told to, for pictures of it."""

import asyncio
import contextlib
import http.client
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import uvicorn

from book import recordings
from chat import Chat
from command_line import STORIES, check_text
from engine.engine import Engine
from errors import UserError
from serve import listen
from server.app import make_app
from server.engine_thread import EngineThread, Update
from server.served import Served

NAME = "stories-llama"  # what `python serve.py` serves
PATIENCE = 120  # seconds; a picture that takes longer has failed


def make_engine(**options) -> Engine:
    torch.set_num_threads(1)  # each thread has a number of its own
    return Engine(recordings.load(NAME), encoding=recordings.encoding(), **options)


def check_prompt(prompt: str, most: int, least: int = 1) -> list[int]:
    """The ids of a prompt. Raises UserError if a picture cannot show it."""
    check_text("--prompt", prompt)
    return recordings.encode(prompt, most, least)


class Turns:
    """An engine's thread that waits before each step, so that a picture is the same each time."""

    def __init__(self, thread: EngineThread):
        self.thread = thread
        self.turns = threading.Semaphore(0)
        self.obey = thread.obey
        thread.obey = self.wait

    def wait(self) -> bool:
        if not self.turns.acquire(timeout=PATIENCE):
            raise TimeoutError("nobody gave a turn")
        return self.obey()

    def give(self) -> None:
        """Let it do what it is asked for, and compute once."""
        self.turns.release()

    def open(self) -> None:
        """Let it go on from now."""
        self.thread.obey = self.obey
        self.turns.release()


async def turn(thread: EngineThread, turns: Turns) -> None:
    """One step, and all that readers in this event loop do with what is new."""
    delivered = asyncio.Event()
    deliver = thread.deliver

    def noted(news):
        deliver(news)
        delivered.set()

    with mock.patch.object(thread, "deliver", noted):
        turns.give()
        await asyncio.wait_for(delivered.wait(), PATIENCE)
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
    status: int
    body: Any  # JSON, None if there is none


class Door:
    """A server at a port of 127.0.0.1.

    asked: of each call of the engine, its ids and parameters. updates: all that was new of texts.
    function: the name of the one that FastAPI found for the last path, "" for none.
    """

    def __init__(self, port: int, thread: EngineThread):
        self.port = port
        self.thread = thread
        self.asked: list[tuple[list, list]] = []
        self.updates: list[dict[int, Update]] = []
        self.function = ""
        generate = thread.generate

        async def noted(prompts, params, *rest):
            self.asked.append((prompts, params))
            async with contextlib.aclosing(generate(prompts, params, *rest)) as found:
                async for updates in found:
                    self.updates.append(updates)
                    yield updates

        thread.generate = noted

    def send(self, method: str, path: str, body: dict | None = None) -> http.client.HTTPResponse:
        """The answer to a request, of which only the head has been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body).encode()
        known = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, data, known)
        return connection.getresponse()

    def ask(self, method: str, path: str, body: dict | None = None) -> Reply:
        with self.send(method, path, body) as answer:
            data = answer.read()
            return Reply(answer.status, json.loads(data) if data else None)

    def write(self, body: dict, path: str = "/v1/completions") -> dict:
        """The answer to a question for texts. Raises UserError where it is refused."""
        status, answer = self.ask("POST", path, body)
        if status != 200:
            raise UserError(answer["error"]["message"])
        return answer


@contextlib.contextmanager
def open_door(**options) -> Iterator[Door]:
    """A Door, whose event loop has a thread of its own. options: of the engine."""
    started = queue.SimpleQueue()

    async def main():
        async with EngineThread(lambda: make_engine(**options)) as thread:
            name = STORIES.with_name(NAME)
            app = make_app(Served(thread, NAME, f"checkpoints/{NAME}", Chat(name)))
            quiet = {"log_level": "critical", "access_log": False, "lifespan": "off"}
            server = uvicorn.Server(uvicorn.Config(noting(app), **quiet))
            with listen("127.0.0.1", 0) as sock:
                door = Door(sock.getsockname()[1], thread)
                started.put((door, server))
                await server.serve([sock])

    def noting(app):
        async def noted(scope, receive, send):
            async def noted_send(message):
                door.function = getattr(scope.get("endpoint"), "__name__", "")
                await send(message)

            await app(scope, receive, noted_send)

        return noted

    def work():
        try:
            asyncio.run(main())
        except BaseException as error:
            started.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    found = started.get(timeout=PATIENCE)
    if isinstance(found, BaseException):
        raise found
    door, server = found
    try:
        yield door
    finally:
        door.thread.stop()  # texts that are not over end with an error
        server.should_exit = True
        worker.join(PATIENCE)

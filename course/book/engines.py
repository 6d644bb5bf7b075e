"""Engines in processes of their own, for pictures: started, asked and ended without Ray.

What Ray does in `serve_ray.py` is done here by forks and sockets: an app with `Door`, and behind it
a `Replica` in each of several processes. All is for the inside of `processes.fresh`.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import torch
import uvicorn

import serve_ray
from book import door
from book.door import NAME, PATIENCE, Client, settle, take
from command_line import STORIES
from serve import UVICORN, listen
from server import replicas
from server.engine_thread import EngineThread
from server.replicas import Replica

OPTIONS = ("--model", STORIES.with_name(NAME), "--device", "cpu", "--backend", "torch")


def parse(*options):
    """The command line of `serve_ray.py` with these options."""
    words = [str(word) for word in (*OPTIONS, *options)]
    return serve_ray.make_parser().parse_args(words)


# In the process of an engine


class Turns(door.Turns):
    """As those of a server, but an engine that has nothing to do comes back, too."""

    def wait(self) -> bool:
        self.here.release()
        take(self.turns)
        while not self.thread.commands.empty():
            self.thread.commands.get()()
        return True


async def step(replica: Replica) -> bool:
    """Let an engine do what it is asked for, and compute once if it can. Whether it has more."""
    await settle()
    await door.turn(replica.turns)
    return replica.thread.engine.busy


def be_engine(number: int, sock: socket.socket, args, by_turns: bool) -> None:
    """What the process of an engine does: what the other end of the socket asks for."""
    torch.set_num_threads(1)
    asyncio.run(answer(number, sock, args, by_turns))


async def answer(number: int, sock: socket.socket, args, by_turns: bool) -> None:
    replica = object.__new__(Replica)  # its __init__ is asynchronous, which Ray knows

    def make_thread(*arguments) -> EngineThread:
        thread = EngineThread(*arguments)
        if by_turns:
            replica.turns = Turns(thread)
        else:
            publish = thread.publish

            def publish_and_wait(events):  # so that each update is of one step
                publish(events)
                asyncio.run_coroutine_threadsafe(settle(), thread.loop).result(PATIENCE)

            thread.publish = publish_and_wait
        return thread

    with mock.patch.object(replicas, "EngineThread", make_thread):
        await replica.__init__(args)
    replica.name = f"{random.Random(number).getrandbits(32):08x}"  # the same each time
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    tasks = {}  # number of a call -> what does it

    async def generate(number: int, arguments: tuple) -> None:
        async with contextlib.aclosing(replica.generate(*arguments)) as updates:
            async for update in updates:
                write(writer, number, False, update)
        write(writer, number, True, None)

    async def do(number: int, action: str | Callable, arguments: tuple) -> None:
        try:
            if isinstance(action, str):
                found = getattr(replica, action)(*arguments)
            else:
                found = action(replica, *arguments)
            if asyncio.iscoroutine(found):
                found = await found
        except Exception as error:
            found = error
        write(writer, number, True, found)

    while True:
        number, action, arguments = pickle.loads(await read(reader))
        if action == "cancel":
            tasks[number].cancel()
        elif action == "generate":
            tasks[number] = asyncio.create_task(generate(number, arguments))
        else:
            tasks[number] = asyncio.create_task(do(number, action, arguments))


def write(writer: asyncio.StreamWriter, *message) -> None:
    data = pickle.dumps(message)
    writer.write(len(data).to_bytes(4, "big") + data)


async def read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


# In the process of the door


class Crossed(NamedTuple):
    """A message between the door and an engine."""

    engine: int
    call: int  # its number at this engine
    kind: str  # "generate", "update", "end", "cancel", or what else is asked and "answer" to it
    value: Any  # arguments of a call, an update, ...
    size: int  # of the value, pickled


class Remote:
    """An engine in another process, for the event loop of the door."""

    def __init__(self, number: int, args, by_turns: bool):
        context = multiprocessing.get_context("fork")
        self.number = number
        self.sock, there = socket.socketpair()
        given = number, there, args, by_turns
        self.process = context.Process(target=be_engine, args=given, daemon=True)
        self.process.start()
        there.close()  # so that this end knows when the process has ended
        self.calls: dict[int, tuple[str, asyncio.Queue]] = {}  # those that are not over
        self.numbers = itertools.count()
        self.ended = False

    async def open(self, crossed: list[Crossed]) -> None:
        """Wait until the engine is there."""
        self.crossed = crossed
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.sock)
        self.task = asyncio.create_task(self.listen())
        await self.do("check_health")

    async def listen(self) -> None:
        try:
            while True:
                number, over, value = pickle.loads(await read(self.reader))
                if number not in self.calls:  # it was on its way when the call was cancelled
                    continue
                action, answers = self.calls[number]
                kind = "answer" if action != "generate" else "end" if over else "update"
                self.note(number, kind, value)
                if over:
                    del self.calls[number]
                answers.put_nowait((kind, value))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended = True
            for _, answers in self.calls.values():
                answers.put_nowait(("gone", None))

    def note(self, number: int, kind: str, value) -> None:
        self.crossed.append(Crossed(self.number, number, kind, value, len(pickle.dumps(value))))

    def ask(self, action: str | Callable, arguments: tuple) -> tuple[int, asyncio.Queue]:
        """A call: its number, and where its answers come in, with the kind of each."""
        number = next(self.numbers)
        answers = asyncio.Queue()
        if self.ended:
            answers.put_nowait(("gone", None))
            return number, answers
        self.calls[number] = action, answers
        self.note(number, action if isinstance(action, str) else action.__name__, arguments)
        write(self.writer, number, action, arguments)
        return number, answers

    async def do(self, action: str | Callable, *arguments) -> Any:
        """What a method of the Replica returns, or a function of it; raises what they raise.

        ConnectionError if the process has ended.
        """
        _, answers = self.ask(action, arguments)
        kind, value = await answers.get()
        if kind == "gone":
            raise ConnectionError("the process has ended")
        if isinstance(value, Exception):
            raise value
        return value

    def cancel(self, number: int) -> None:
        """Nothing more of a call is wanted."""
        if number in self.calls and not self.ended:
            del self.calls[number]
            self.note(number, "cancel", None)
            write(self.writer, number, "cancel", ())


class Response:
    """Of a call: what the generator of a Replica gives."""

    def __init__(self, handle: "Handle", remote: Remote, call: tuple):
        self.handle = handle
        self.remote = remote
        self.call = call
        self.number, self.answers = remote.ask("generate", call)

    def __aiter__(self):
        return self

    async def __anext__(self):
        kind, value = await self.answers.get()
        if kind == "gone":
            raise ConnectionError("the process has ended")
        if kind == "end":
            raise StopAsyncIteration
        return value

    def cancel(self) -> None:
        """However a call ends, this is its end."""
        self.remote.cancel(self.number)
        self.handle.over(self.remote, *self.call)


class Handle:
    """In the place of Ray's: each call goes to one of the engines, here to one after the other.

    crossed: what has gone from process to process.
    """

    def __init__(self, remotes: list[Remote]):
        self.remotes = remotes
        self.crossed: list[Crossed] = []
        self.turns = itertools.cycle(remotes)
        self.generate = self

    def choose(self, prompts, params, salt, name) -> Remote:
        return next(self.turns)

    def over(self, remote: Remote, prompts, params, salt, name) -> None:
        """A call has ended."""

    def options(self, stream: bool) -> "Handle":
        return self

    def remote(self, *call) -> Response:
        return Response(self, self.choose(*call), call)

    def broadcast(self, name: str) -> "Broadcast":
        return Broadcast([remote.do(name) for remote in self.remotes])


class Broadcast:
    """Of a call to all."""

    def __init__(self, calls: list):
        self.calls = calls

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list:
        found = asyncio.gather(*self.calls, return_exceptions=return_exceptions)
        return await asyncio.wait_for(found, timeout_s)


class Front(Client):
    """A client of the app, who may also look behind it."""

    loop: asyncio.AbstractEventLoop  # of the app

    def __init__(self, port: int, handle: Handle):
        super().__init__(port)
        self.handle = handle
        self.crossed = handle.crossed

    def on(self, engine: int, action: str | Callable, *arguments) -> Any:
        """What action(its Replica, *arguments) returns in the process of an engine."""
        doing = self.handle.remotes[engine].do(action, *arguments)
        return asyncio.run_coroutine_threadsafe(doing, self.loop).result(PATIENCE)

    def count(self, kind: str) -> int:
        """How many messages of a kind there have been."""
        return sum(each.kind == kind for each in self.crossed)

    def begin(self, path: str, body: dict):
        """A connection on which a text is asked for, when an engine has been called."""
        before = self.count("generate")
        connection = self.send("POST", path, body)
        self.until(lambda: self.count("generate") > before)
        return connection

    def step(self, engine: int) -> bool:
        """Where engines go by turns: let one compute once. Whether it has more to do."""
        return self.on(engine, step)

    def finish(self) -> None:
        """Let all engines compute, one step of each in turn, until all texts are over."""
        living = [remote.number for remote in self.handle.remotes if not remote.ended]
        while any([self.step(engine) for engine in living]):
            pass

    def kill(self, engine: int) -> None:
        """As with kill -9; it is over when the door has noticed."""
        remote = self.handle.remotes[engine]
        remote.process.kill()
        self.until(lambda: remote.ended)


@contextlib.contextmanager
def open_engines(
    count: int, *options, by_turns: bool = False, handle: type[Handle] = Handle
) -> Iterator[Front]:
    """So many engines in processes, and before them an app in this one.

    options: of the command line of `serve_ray.py`. by_turns: an engine computes when it is told to,
    by `Front.step`. handle: what chooses engines.
    """
    args = parse(*options)
    remotes = [Remote(number, args, by_turns) for number in range(count)]
    made = handle(remotes)
    app = replicas.Door(args, made).__serve_build_asgi_app__()
    quiet = UVICORN | {"log_level": "critical", "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, **quiet, timeout_graceful_shutdown=1))

    async def main():
        front.loop = asyncio.get_running_loop()
        await asyncio.gather(*(remote.open(made.crossed) for remote in remotes))
        made.crossed.clear()
        await server.serve([sock])

    with contextlib.ExitStack() as stack:
        for remote in remotes:
            stack.callback(remote.process.kill)
        sock = stack.enter_context(listen("127.0.0.1", 0))
        front = Front(sock.getsockname()[1], made)
        pool = stack.enter_context(futures.ThreadPoolExecutor(1))
        working = pool.submit(asyncio.run, main())
        front.until(lambda: server.started or working.done())
        if working.done():
            working.result()
        try:
            yield front
        finally:
            for connection in front.connections:
                connection.close()
            server.should_exit = True

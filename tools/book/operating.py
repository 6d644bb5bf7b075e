"""Pictures of lessons 64 to 70: a server of an embedded model, asked over real sockets."""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import math
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable
from email.parser import BytesHeaderParser
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import uvicorn
from pydantic_core import to_json
from starlette.middleware.cors import CORSMiddleware

import serve
from book import recordings
from book.door import check_prompt
from book.draw import (
    Drawing,
    Picture,
    bars,
    escape,
    key,
    panel,
    panels,
    percent,
    token,
)
from engine.engine import Engine
from engine.request import Request
from errors import UserError
from load import parse_name
from server import app as app_module
from server import completions, engine_thread, live, metrics
from server.app import make_app
from server.engine_thread import EngineThread
from server.served import Served

LETTERS = "ABCDEFGH"  # of clients
NO_CHAT = UserError("there is no chat here")
PATH = "/v1/completions"
YES, NO = "\u2713", "\u2715"
GREEDY = {"ignore_eos": True, "temperature": 0}


class Answer(NamedTuple):
    """What a server answers to a request."""

    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes


class Gate(threading.Semaphore):
    """What each step of an engine takes one of. waiting: whether a step waits for it."""

    waiting = False

    def pass_through(self) -> None:
        self.waiting = True
        self.acquire()
        self.waiting = False


class Door:
    """A server, and an engine that waits for leave to make each of its steps."""

    def __init__(self, thread: EngineThread, port: int, gate: Gate):
        self.thread = thread
        self.port = port
        self.gate = gate
        self.stepped = asyncio.Event()
        publish = thread.publish

        def published(events) -> None:
            publish(events)
            thread.tell(self.stepped.set)

        thread.publish = published

    def hold(self) -> threading.Event:
        """Until it is set, nothing is added; then what was asked for is, in that order."""
        held = threading.Event()
        self.thread.commands.put(held.wait)
        return held

    async def step(self) -> None:
        """Let the engine make a step, hand out what it brought, and come to the next one.

        What happens after that happens during the next step, as nearly all does in a server.
        """
        await self.until(lambda: self.gate.waiting)
        self.stepped.clear()
        self.gate.release()
        await asyncio.wait_for(self.stepped.wait(), 20)
        await self.until(lambda: self.gate.waiting or not self.thread.engine.busy)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what other threads or the system do; so many seconds are for ever."""
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.001)

    async def send(self, method: str, path: str, body=None, **headers) -> tuple:
        """A reader and a writer of a connection on which a request has been sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = b"" if body is None else to_json(body)
        fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(data)}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.0", *(f"{name}: {fields[name]}" for name in fields)]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return reader, writer

    async def ask(self, method: str, path: str, body=None, **headers) -> Answer:
        """The whole answer to a request."""
        return await read(*await self.send(method, path, body, **headers))

    async def call(self, body: dict) -> tuple:
        """Ask for a text, as `send` does, and wait until the server knows of it."""
        known = len(self.thread.calls)
        connection = await self.send("POST", PATH, body)
        await self.until(lambda: len(self.thread.calls) > known)
        return connection


async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    """The rest of an answer, to the end of the connection."""
    data = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    headers = BytesHeaderParser().parsebytes(fields)
    named = {name.lower(): value for name, value in headers.items()}
    return Answer(int(first.split()[1]), named, body)


def gated(gate: Gate, clock: SimpleNamespace | None = None, **options) -> Engine:
    """An engine that takes one of a gate for each step. clock: its `now` grows
    by `position` for each one computed.
    """
    model = recordings.load("stories-llama")
    engine = Engine(model, encoding=recordings.encoding(), **options)
    step = engine.step

    def one_step():
        gate.pass_through()
        events = step()
        if clock:
            clock.now = clock.position * engine.positions
        return events

    engine.step = one_step
    return engine


@contextlib.asynccontextmanager
async def serving(
    app_options: dict | None = None,
    bounds: dict | None = None,
    around: Callable | None = None,
    clock: SimpleNamespace | None = None,
    **options,
) -> AsyncIterator[Door]:
    """A Door. app_options: of `make_app`. bounds: of the EngineThread. options: of the Engine.

    around: makes another app of the app. clock: what the server takes for the time.
    """
    gate = Gate(0)
    with contextlib.ExitStack() as stack:
        for module in (engine_thread, metrics, live) if clock else ():
            time = SimpleNamespace(perf_counter=lambda: clock.now)
            stack.enter_context(mock.patch.object(module, "time", time))
        thread = EngineThread(lambda: gated(gate, clock, **options), **(bounds or {}))
        async with thread:
            served = Served(thread, "stories-llama", "here", NO_CHAT)
            app = make_app(served, **(app_options or {}))
            app = around(app) if around else app
            config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off")
            config.timeout_graceful_shutdown = 1
            server = uvicorn.Server(config)
            with serve.listen("127.0.0.1", 0) as sock:
                door = Door(thread, sock.getsockname()[1], gate)
                door.served = served
                task = asyncio.create_task(server.serve([sock]))
                try:
                    yield door
                finally:
                    served.live.close()
                    thread.stop()
                    gate.release(1000)
                    server.should_exit = True
                    await task


def name_of(client: int) -> str:
    """The letter of a client, in its colour."""
    return f'<b class="tint{client % 6} letter">{LETTERS[client]}</b>'


# 64


class Step(NamedTuple):
    """What an engine did in a step, and how it stood then. Clients are numbers."""

    work: dict[int, int]  # positions computed for each client
    waiting: list[int]
    owners: list[int | None]  # of each page
    left: dict[int, str]  # who left while it was computed, and where his text was


class Leaving(NamedTuple):
    steps: list[Step]
    ends: list[str]  # how the text of each client ended
    free: int  # pages in the end


STAYS, LEAVES_LATE, LONG, LEAVES_QUEUE, COMES = range(5)
TOKENS = {STAYS: 10, LEAVES_LATE: 100, LONG: 20, LEAVES_QUEUE: 100, COMES: 6}
LEAVES = {2: [LEAVES_QUEUE, LONG], 5: [LEAVES_LATE]}  # step: who leaves while it is computed
NUM_PAGES = 14
SHAPE = {"max_rows": 3, "num_pages": NUM_PAGES, "page_size": 8, "budget": 26}


def record_leaving(prompt: str) -> Leaving:
    """Five clients, three rows: one leaves the queue, one in his prompt, one in his text."""
    check_prompt(prompt, 8)
    return asyncio.run(leave(prompt))


async def leave(prompt: str) -> Leaving:
    steps = []
    requests = {}
    async with serving(**SHAPE) as door:
        engine = door.thread.engine
        scheduler = engine.scheduler

        class Notes:
            """What the engine's thread tells."""

            def stepped(self, events) -> None:
                for request, text in door.thread.texts.items():
                    requests[text.number - 1] = request
                numbers = {request: number for number, request in requests.items()}
                owners = [None] * NUM_PAGES
                for request in scheduler.running:
                    for page in request.pages:
                        owners[page] = numbers[request]
                work = {numbers[work.request]: len(work.tokens) for work in engine.works}
                waiting = [numbers[request] for request in scheduler.waiting]
                left = {
                    client: where(requests[client], client in waiting)
                    for client in LEAVES.get(len(steps) + 1, [])
                }
                steps.append(Step(work, waiting, owners, left))

            def aborted(self, request: Request) -> None:
                pass

        door.thread.observers.append(Notes())
        held = door.hold()
        clients = []
        for client, tokens in TOKENS.items():
            text = 2 * recordings.STORY if client == LONG else prompt
            # The same texts, and with salts of their own they share no pages.
            body = GREEDY | {"prompt": text, "max_tokens": tokens, "cache_salt": LETTERS[client]}
            body["stream"] = client == STAYS
            clients.append(await door.call(body))
        held.set()
        while len(steps) < max(TOKENS[STAYS], TOKENS[COMES]):
            for client in LEAVES.get(len(steps) + 1, []):
                known = len(door.thread.calls)
                clients[client][1].close()
                await door.until(lambda known=known: len(door.thread.calls) < known)
            await door.step()
        for client in (STAYS, COMES):
            await read(*clients[client])
        ends = [requests[client].finish_reason for client in TOKENS]
        return Leaving(steps, ends, scheduler.pool.available)


def where(request: Request, waits: bool) -> str:
    if waits:
        return "leaves the queue"
    return "leaves while writing" if request.output else "leaves in the prompt"


def draw_leaving(record: Leaving) -> Drawing:
    left = {client: words for step in record.steps for client, words in step.left.items()}
    rows = ""
    for client in range(len(record.ends)):
        cells = ""
        for step in record.steps:
            count = step.work.get(client, "")
            kind = f"tint{client}" if count else "idle" if client in step.waiting else ""
            cross = f'<b class="gone-here">{NO}</b>' if client in step.left else ""
            cells += f'<td class="{kind}">{cross or count}</td>'
        words = left.get(client, "stays to the end")
        rows += (
            f'<tr><th scope="row">{name_of(client)}</th>{cells}<td class="says">{words}</td></tr>'
        )
    pages = ""
    for page in range(NUM_PAGES):
        owners = [step.owners[page] for step in record.steps]
        cells = "".join(
            f'<td class="{"free" if owner is None else f"tint{owner}"}"></td>' for owner in owners
        )
        pages += f"<tr><th></th>{cells}"
        if page == 0:
            pages += f'<td class="says" rowspan="{NUM_PAGES}">the cache: {NUM_PAGES} pages</td>'
        pages += "</tr>"
    head = "".join(f"<th>{number}</th>" for number in range(1, len(record.steps) + 1))
    body = (
        f'<table class="batch over-time"><thead><tr><th></th>{head}<th>steps</th></tr></thead>'
        f'<tbody>{rows}</tbody><tbody class="pages">{pages}</tbody></table>'
    )
    note = (
        "A number is how many positions a step computed for a client; hatched: it waits for one "
        "of three rows; \u2715: it leaves during that step."
    )
    aborted = record.ends.count("abort")
    kept = [LETTERS[client] for client, end in enumerate(record.ends) if end != "abort"]
    caption = (
        "Once the server has noticed that a client has left, its text costs nothing from the next "
        "step on, wherever it was: its row goes to who waits, and its pages are free."
    )
    text = (
        f"A grid of {len(record.steps)} steps and {len(record.ends)} clients, of which {aborted} "
        f"leave and {' and '.join(kept)} get their texts; below it who owns each of {NUM_PAGES} "
        f"pages after each step, of which {record.free} are free in the end."
    )
    return Drawing(f'{body}<p class="note">{note}</p>', caption, text)


# 65


class Asked(NamedTuple):
    """A request, what became of it, and what counts after it."""

    client: int
    texts: int  # that it asks for
    tokens: int  # in all its prompts
    status: int
    retry: str | None  # the header Retry-After
    message: str  # why it was refused
    held: list[tuple[int, int, int]]  # client, texts that are not over, tokens of prompts not begun
    steps: int  # of the engine before


class Queue(NamedTuple):
    most: int  # texts
    most_tokens: int
    asked: list[Asked]


ROWS, WAITING = 2, 2


def record_queue(prompt: str) -> Queue:
    """Requests come to a server with two rows that lets two more wait."""
    length = len(check_prompt(prompt, 8))
    long = len(recordings.encoding().encode(recordings.STORY))
    most = long + 4 * length
    return Queue(ROWS + WAITING, most, asyncio.run(queue(prompt, most)))


async def queue(prompt: str, most: int) -> list[Asked]:
    asked = []
    owners = {}  # call -> client
    answers = {}
    bounds = {"max_waiting": WAITING, "max_waiting_tokens": most}
    async with serving(bounds=bounds, max_rows=ROWS) as door:
        calls = door.thread.calls

        async def ask(client: int, text: str, texts: int = 1, tokens: int = 9) -> None:
            known = set(calls)
            body = GREEDY | {"prompt": [text] * texts, "max_tokens": tokens}
            task = asyncio.create_task(door.ask("POST", PATH, body))
            await door.until(lambda: calls - known or task.done())
            status, retry, message = 200, None, ""
            for call in calls - known:
                owners[call] = client
                answers[client] = task
            if task.done():
                answer = task.result()
                status, retry = answer.status, answer.headers.get("retry-after")
                message = json.loads(answer.body)["error"]["message"]
            held = [(owners[call], call.left, call.waiting) for call in calls]
            size = texts * len(recordings.encoding().encode(text, allowed_special="all"))
            steps = door.thread.engine.steps
            asked.append(Asked(client, texts, size, status, retry, message, sorted(held), steps))

        held = door.hold()
        await ask(0, prompt, tokens=1)
        await ask(1, prompt, tokens=2)
        await ask(2, recordings.STORY)
        await ask(3, recordings.STORY)
        await ask(4, prompt)
        await ask(5, prompt)
        await ask(6, prompt, texts=ROWS + WAITING + 1)
        held.set()
        for over, client, text in ((0, 5, prompt), (1, 3, recordings.STORY)):
            await door.step()
            await answers[over]
            await ask(client, text)
    return asked


def draw_queue(record: Queue) -> Drawing:
    rows = ""
    steps = 0
    for each in record.asked:
        if each.steps != steps:
            over = f"a step: the text of {LETTERS[each.steps - 1]} ends"
            rows += f'<tr class="between"><td colspan="4">{over}; a second later</td></tr>'
            steps = each.steps
        slots = [client for client, texts, _ in each.held for _ in range(texts)]
        boxes = "".join(
            f'<i class="slot tint{client}">{LETTERS[client]}</i>' for client in slots
        ) + '<i class="slot"></i>' * (record.most - len(slots))
        parts = "".join(
            f'<i class="part tint{client}" style="width:{100 * count / record.most_tokens:.2f}%">'
            "</i>"
            for client, _, count in each.held
            if count
        )
        many = f"{each.texts} texts, " if each.texts > 1 else ""
        ending = "s" if each.tokens > 1 else ""
        what = f"{name_of(each.client)} {many}{each.tokens} token{ending}"
        kind = {200: "good", 429: "bad", 400: "never"}[each.status]
        what_for = "tokens" if "tokens" in each.message else "texts"
        words = {
            200: "gets in",
            429: f"too many {what_for}: again in {each.retry} s",
            400: f"so many {what_for} never fit",
        }
        answer = f'<b class="status {kind}">{each.status}</b> {words[each.status]}'
        rows += (
            f'<tr><th scope="row">{what}</th><td>{boxes}</td>'
            f'<td class="tokens"><span class="meter">{parts}</span></td><td>{answer}</td></tr>'
        )
    head = (
        f"<th>asks for</th><th>texts, at most {record.most}</th>"
        f"<th>tokens, at most {record.most_tokens}</th><th>answer</th>"
    )
    note = (
        f"Boxes: the texts that count, at most {record.most}, in two rows and a queue of two. Bar: "
        f"tokens of prompts whose texts have not begun, at most {record.most_tokens}."
    )
    body = (
        f'<table class="queue"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f'<p class="note">{note}</p>'
    )
    refused = [each for each in record.asked if each.status != 200]
    again = [LETTERS[each.client] for each in record.asked if each.steps]
    caption = (
        "Two bounds: the texts that are not over, and the tokens of prompts whose text has not "
        f"begun. What does not fit is refused at once; {' and '.join(again)} come again and get in."
    )
    said = "; ".join(f"{LETTERS[each.client]}: {each.status}, {each.message}" for each in refused)
    text = f"{len(record.asked)} requests, one after the other; {len(refused)} are refused: {said}."
    return Drawing(body, caption, text)


# 66


class Visit(NamedTuple):
    """A request, and how far it gets."""

    who: str
    what: str
    passed: list[str]  # "origin", "key", and "body" if that was read
    status: int
    origin: str | None  # of web pages that may read the answer, by its header
    reads: bool  # whether that is the page that asks; no page asks for a program
    text: str  # of the answer


OURS, THEIRS = "https://page.example", "https://other.example"


def record_visits(prompt: str) -> list[Visit]:
    """Programs and web pages ask a server that has a key and knows one web page."""
    check_prompt(prompt, 8)
    return asyncio.run(visit(prompt))


async def visit(prompt: str) -> list[Visit]:
    entered = []

    def noting(name: str, kind: type):
        """A method of a middleware that notes that it was called."""
        real = kind.__call__

        async def called(self, scope, receive, send):
            if scope["type"] == "http":
                entered.append(name)
            await real(self, scope, receive, send)

        return mock.patch.object(kind, "__call__", called)

    def around(app):
        async def outer(scope, receive, send):
            async def noted():
                message = await receive()
                if message["type"] == "http.request":
                    entered.append("read")
                return message

            await app(scope, noted, send)

        return outer

    body = GREEDY | {"prompt": prompt, "max_tokens": 1}
    asking = {"Access_Control_Request_Method": "POST"}
    good, wrong = ({"Authorization": f"Bearer {key}"} for key in ("secret", "guess"))
    requests = [
        ("a program", "the key", "POST", PATH, body, good),
        ("a program", "another key", "POST", PATH, body, wrong),
        ("a program", "no key", "POST", PATH, body, {}),
        ("a load balancer", "GET /health", "GET", "/health", None, {}),
        ("a browser", "may page.example ask?", "OPTIONS", PATH, None, asking | {"Origin": OURS}),
        ("a browser", "may other.example ask?", "OPTIONS", PATH, None, asking | {"Origin": THEIRS}),
        ("page.example", "the key", "POST", PATH, body, good | {"Origin": OURS}),
        ("page.example", "another key", "POST", PATH, body, wrong | {"Origin": OURS}),
    ]
    visits = []
    options = {"app_options": {"api_key": "secret", "origins": [OURS]}, "around": around}
    with (
        noting("cors", CORSMiddleware),
        noting("key", app_module.KeyMiddleware),
        noting("inside", app_module.BodyLimit),
    ):
        async with serving(**options) as door:
            door.gate.release(100)
            for who, what, method, path, sent, headers in requests:
                entered.clear()
                answer = await door.ask(method, path, sent, **headers)
                marks = {"origin": "key", "key": "inside", "body": "read"}
                passed = [name for name, mark in marks.items() if mark in entered]
                origin = answer.headers.get("access-control-allow-origin")
                text = ""
                if path == PATH and answer.status == 200 and method == "POST":
                    text = json.loads(answer.body)["choices"][0]["text"]
                reads = "Origin" not in headers or origin == headers["Origin"]
                visits.append(Visit(who, what, passed, answer.status, origin, reads, text))
    return visits


def draw_visits(record: list[Visit]) -> Drawing:
    rows = ""
    for each in record:
        cells = ""
        kind = "good" if each.status == 200 else "bad"
        answer = f'<td class="{kind} status">{each.status}</td>'
        for name in ("origin", "key"):
            passed = name in each.passed
            cells += f'<td class="passed">{YES}</td>' if passed else answer
            answer = answer if passed else "<td></td>"
        cells += answer
        words = token(each.text) if each.text else ""
        if each.who == "a browser":
            words = "yes" if each.reads else "no"
        rows += (
            f'<tr><th scope="row">{escape(each.who)}<span>{escape(each.what)}</span></th>{cells}'
            f"<td>{words}</td></tr>"
        )
    head = "<th></th><th>origin</th><th>key</th><th>the rest</th><th></th>"
    body = f'<table class="visits"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    stopped = [each for each in record if each.status == 401]
    unread = sum("body" not in each.passed for each in stopped)
    note = (
        f"The server has a key and knows one web page, {OURS}. \u2713: let through. A number: the "
        f"status, where the answer was made. Of {unread} of {len(stopped)} requests with 401 "
        "nobody has read the body."
    )
    caption = (
        "Doors, one behind the other. Without the key only /health and questions of browsers are "
        "answered; what else comes is refused before its body is read. Whether a page may ask, a "
        "browser asks at the first door."
    )
    said = "; ".join(
        f"{each.who}, {each.what}: {each.status}, passed {' and '.join(each.passed) or 'nothing'}"
        for each in record
    )
    text = f"How far {len(record)} requests get. {said}."
    return Drawing(f'{body}<p class="note">{note}</p>', caption, text)


# 67


class Lane(NamedTuple):
    """A client of a server that begins and ends."""

    asks: int  # in this column
    computed: list[int]  # columns in which it got a token
    status: int | None  # None: nobody listened
    end: str  # the finish reason, or the error
    last: int  # the column in which it was over


class Life(NamedTuple):
    """A process; a column is a moment: 0 while the model is loaded, then the engine's steps."""

    columns: int
    signals: list[int]  # after these columns
    limit: int | None  # the seconds of the drain are over after this one
    lanes: list[Lane]
    code: int  # of its exit


class Ended(Exception):
    """Instead of the end of this process."""


SIGNAL, LATER, LIMIT, SECOND = 4, 5, 9, 6  # columns
DRAIN = 1000.0  # seconds, which do not pass: the limit is called
LASTING = {1: 7, 2: 2**10}  # tokens of clients


def record_lives(prompt: str) -> list[Life]:
    """A server that gets a signal, and one that gets two."""
    check_prompt(prompt, 8)
    return [asyncio.run(live_once(prompt, second)) for second in (False, True)]


async def live_once(prompt: str, second: bool) -> Life:
    loop = asyncio.get_running_loop()
    args = argparse.Namespace(max_waiting=9, max_waiting_tokens=999, api_key=None)
    args.__dict__ |= {"allow_origin": [], "drain_seconds": DRAIN}
    source = parse_name("checkpoints/stories-llama")
    gate, loading = Gate(0), threading.Event()
    servers, limits = [], []

    def load_engine(*_) -> Engine:
        loading.wait(20)
        return gated(gate)

    class Server(serve.Server):
        def __init__(self, *given):
            super().__init__(*given)
            servers.append(self)

    def end(code: int):
        raise Ended(code)

    real = loop.call_later

    def call_later(seconds, function, *given):
        if seconds != DRAIN:
            return real(seconds, function, *given)
        limits.append(function)

    with (
        mock.patch.object(serve, "load_engine", load_engine),
        mock.patch.object(serve, "Server", Server),
        mock.patch.object(os, "_exit", end),
        mock.patch.object(loop, "call_later", call_later),
        contextlib.redirect_stdout(io.StringIO()),
        serve.listen("127.0.0.1", 0) as sock,
    ):
        process = asyncio.create_task(serve.serve(args, source, "cpu", sock))
        while not servers:
            await asyncio.sleep(0)
        server = servers[0]
        door = Door(server.thread, sock.getsockname()[1], gate)
        body = GREEDY | {"prompt": prompt, "stream": True}
        early = await door.ask("POST", PATH, body | {"max_tokens": 3})
        lanes = [Lane(0, [], early.status, message_of(early.body), 0)]
        loading.set()
        await asyncio.wait_for(server.thread.ready, 20)
        held = door.hold()
        calls = [await door.call(body | {"max_tokens": count}) for count in LASTING.values()]
        tasks = [asyncio.create_task(read(*call)) for call in calls]
        held.set()
        got = [[] for _ in tasks]
        over = [None] * len(tasks)

        class Notes:
            def stepped(self, events) -> None:
                for event in events if noting else ():
                    client = server.thread.texts[event.request].number - 1
                    got[client].append(column)
                    if event.finish_reason:
                        over[client] = column

            def aborted(self, request: Request) -> None:
                pass

        code = None
        noting = True
        server.thread.observers.append(Notes())
        for column in range(1, LIMIT + 1):
            await door.step()
            if column == SIGNAL:
                server.handle_exit(signal.SIGTERM, None)
                await door.until(lambda: limits)
            if column == LATER:
                try:
                    status = (await door.ask("GET", "/health")).status
                except OSError:
                    status = None
                late = Lane(LATER, [], status, "nobody listens", LATER)
            if second and column == SECOND:
                try:
                    server.handle_exit(signal.SIGTERM, None)
                except Ended as ended:
                    code = ended.args[0]
                break
        noting = False  # of the step that is waiting to be computed
        for limit in limits:
            limit()
        gate.release(1000)
        result = await asyncio.wait_for(process, 20)
        answers = await asyncio.gather(*tasks)
    for client, answer in enumerate(answers):
        cut = second and over[client] is None
        said = "the process is gone" if cut else message_of(answer.body)
        lanes.append(Lane(1, got[client], answer.status, said, over[client] or column))
    code = {signal.SIGTERM: 0}[result] if code is None else code
    signals = [SIGNAL, SECOND] if second else [SIGNAL]
    return Life(column, signals, None if second else LIMIT, [*lanes, late], code)


def message_of(body: bytes) -> str:
    """What an answer says in the end: an error, or how its text ended."""
    if body.startswith(b"{"):
        return json.loads(body)["error"]["message"]
    *_, last, done = [part for part in body.decode().split("\n\n") if part]
    assert done == "data: [DONE]"
    said = json.loads(last.removeprefix("data: "))
    return said["error"]["message"] if "error" in said else said["choices"][0]["finish_reason"]


def draw_lives(record: list[Life]) -> Drawing:
    def table(life: Life) -> str:
        head = '<th></th><th class="loads">load</th>'
        for column in range(1, life.columns + 1):
            kind = "after" if column in life.signals else "time-up" if column == life.limit else ""
            head += f'<th class="{kind}">{column}</th>'
        rows = ""
        for number, lane in enumerate(life.lanes):
            cells = ""
            for column in range(life.columns + 1):
                kinds = ["loads"] if not column else []
                words = ""
                if column in lane.computed:
                    kinds.append(f"tint{number}")
                if column in life.signals:
                    kinds.append("after")
                if column == life.limit:
                    kinds.append("time-up")
                if column == lane.last:
                    whole = lane.end == "length"
                    words = YES if whole else NO
                cells += f'<td class="{" ".join(kinds)}">{words}</td>'
            status = "no connection" if lane.status is None else str(lane.status)
            if lane.end == "length":
                said = f"{status}, whole"
            else:
                said = status if lane.status is None else f"{status}, {escape(lane.end)}"
            name = f'<th scope="row">{name_of(number)}</th>'
            rows += f'<tr>{name}{cells}<td class="says">{said}</td></tr>'
        return (
            f'<table class="batch over-time life"><thead><tr>{head}<th></th></tr></thead>'
            f"<tbody>{rows}</tbody></table>"
        )

    one, two = record
    body = panels(
        panel(f"One signal: exit code {one.code}", table(one)),
        panel(f"A second one: exit code {two.code}, at once", table(two)),
    )
    legend = (
        '<ul class="key"><li><i class="bad"></i>a signal comes</li>'
        '<li><i class="second"></i>the time for texts that run is over</li></ul>'
    )
    cut = next(lane for lane in one.lanes if "shutting" in lane.end)
    caption = (
        "After a signal nobody new gets in, but what runs may end. Who is not done in time is told "
        f"why: \u201c{escape(cut.end)}\u201d. A second signal asks nobody."
    )
    said = " ".join(
        f"Signals after steps {life.signals}, exit code {life.code}: "
        + "; ".join(f"{LETTERS[n]} {lane.status} {lane.end}" for n, lane in enumerate(life.lanes))
        + "."
        for life in record
    )
    text = f"Two time lines of a server with {len(one.lanes)} clients. {said}"
    return Drawing(body + legend, caption, text)


# 68


class Counted(NamedTuple):
    """A histogram as Prometheus reads it."""

    seen: list[float]  # seconds
    lines: list[str]  # of its buckets
    buckets: list[tuple[float, int]]  # up to so many seconds: how many


FAMILY = "vllm:time_to_first_token_seconds"
OUTPUTS = (3, 9, 5, 4, 7, 3, 8, 6)  # tokens


def record_metrics(prompt: str) -> Counted:
    """Eight texts in two rows, on a clock on which a position takes a millisecond."""
    check_prompt(prompt, 8)
    return asyncio.run(measure(prompt))


async def measure(prompt: str) -> Counted:
    seen = []
    clock = SimpleNamespace(now=0.0, position=0.001)
    async with serving(clock=clock, max_rows=2) as door:
        histogram = door.served.metrics.first_gap
        observe = histogram.observe

        def noted(value: float) -> None:
            seen.append(value)
            observe(value)

        with mock.patch.object(histogram, "observe", noted):
            held = door.hold()
            calls = [
                await door.call(GREEDY | {"prompt": prompt, "max_tokens": tokens})
                for tokens in OUTPUTS
            ]
            held.set()
            door.gate.release(1000)
            for call in calls:
                await read(*call)
        text = (await door.ask("GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{FAMILY}_bucket")]
    found = [re.search(r'le="([^"]+)".* ([\d.]+)$', line) for line in lines]
    return Counted(seen, lines, [(float(each[1]), int(float(each[2]))) for each in found])


def quantile(buckets: list[tuple[float, int]], share: float) -> tuple:
    """Prometheus' histogram_quantile: the bucket's ends, the counts there, the rank, the value."""
    rank = share * buckets[-1][1]
    low, below = 0.0, 0
    for high, count in buckets:
        if count >= rank:
            break
        low, below = high, count
    if high == math.inf:
        return low, high, below, count, rank, low
    return low, high, below, count, rank, low + (high - low) * (rank - below) / (count - below)


def draw_metrics(record: Counted) -> Drawing:
    rows = ""
    before = 0
    full = record.buckets[-1][1]
    lowest = min(record.seen)
    shown = [
        (limit, count)
        for limit, count in record.buckets
        if limit * 3 > lowest
        and (count < full or limit / 3 < max(record.seen) or limit == math.inf)
    ]
    for limit, count in shown:
        old = '<i class="one old"></i>' * before
        new = "".join(
            f'<i class="one">{1000 * value:.0f}</i>' for value in sorted(record.seen)[before:count]
        )
        name = "+Inf" if limit == math.inf else f"{limit:g}"
        rows += (
            f'<tr><th scope="row"><code>{{le="{name}"}}</code></th>'
            f'<td class="value"><b>{count}</b></td><td>{old}{new}</td></tr>'
        )
        before = count
    low, high, below, count, rank, value = quantile(record.buckets, 0.5)
    ordered = sorted(record.seen)
    middle = 500 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
    width = f"({1000 * high:g} \u2212 {1000 * low:g})"
    part = f"({rank:g} \u2212 {below}) / ({count} \u2212 {below})"
    sum_of = f"{1000 * low:g} + {width} \u00b7 {part} = <b>{1000 * value:.1f} ms</b>"
    body = (
        f'<p class="title">Lines of /metrics: <code>{FAMILY}_bucket</code></p>'
        f'<table class="buckets"><tbody>{rows}</tbody></table>'
        '<p class="note">A box is a text, with its time to first token in ms where it is '
        "new. On this clock a position takes 1 ms.</p>"
        f'<p class="worked">The median, from these lines alone: {sum_of}; of the boxes: '
        f"<b>{middle:.1f} ms</b>.</p>"
    )
    caption = (
        "A histogram forgets the times and keeps counts: each line says how many were at most so "
        "long, so a line has those of the line before. Prometheus guesses between two lines."
    )
    said = ", ".join(f"{1000 * value:.0f}" for value in ordered)
    counts = ", ".join(f"{limit:g}: {count}" for limit, count in shown[:-1])
    text = (
        f"Times to first token of {len(ordered)} texts, {said} ms, in buckets, by seconds and "
        f"count: {counts}. The median is {middle:.1f} ms, and from the buckets {1000 * value:.1f}."
    )
    return Drawing(body, caption, text)


# 69


class Look(NamedTuple):
    """A frame of /live, and what the engine was then."""

    setup: dict
    frame: dict
    bytes: int


async def look(prompt: str) -> Look:
    clock = SimpleNamespace(now=0.0, position=1.0)
    ids = itertools.count(1)
    named = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(ids):032x}"))
    shape = {"max_rows": 2, "num_pages": 16, "page_size": 4, "budget": 16}
    with mock.patch.object(completions, "uuid", named):
        async with serving(clock=clock, **shape) as door:
            reader, writer = await door.send("GET", "/live")
            await door.until(lambda: door.thread.calls)
            held = door.hold()
            calls = []
            for text in (prompt, recordings.STORY, prompt):
                body = GREEDY | {"prompt": text, "max_tokens": 9, "cache_salt": str(len(calls))}
                calls.append(await door.call(body))
            held.set()
            await door.step()
            await door.step()
            found = []
            while not found or found[-1].get("steps") != 2:
                line = await asyncio.wait_for(reader.readline(), 20)
                if line.startswith(b"data: "):
                    found.append(json.loads(line.removeprefix(b"data: ")))
            for _, each in [(reader, writer), *calls]:
                each.close()
    return Look(found[0], found[-1], len(line))


def record_look(prompt: str) -> Look:
    """Three clients of an engine with two rows, and one that looks."""
    check_prompt(prompt, 8)
    return asyncio.run(look(prompt))


def draw_look(record: Look) -> Drawing:
    frame, setup = record.frame, record.setup

    def brief(row: dict) -> str:
        said = row | {"name": f"cmpl-\u2026{row['name'][-3:]}"}
        return escape(json.dumps(said, separators=(",", ":"), ensure_ascii=False))

    lines = []
    for name in ("steps", "positions", "queued"):
        lines.append(f'"{name}":{frame[name]},')
    for name in ("running", "waiting"):
        lines.append(f'"{name}":[')
        for row in frame[name]:
            kind = f"tint{row['number'] - 1}"
            lines.append(f'<span class="{kind}">{brief(row)}</span>,')
        lines.append("],")
    sent = panel(
        f"Sent: {record.bytes} bytes",
        f'<pre class="frame">{chr(10).join(lines)}</pre>',
        "Some of its fields. There are numbers and ids, and nobody\u2019s text.",
    )
    rows = ""
    for row in frame["running"] + frame["waiting"]:
        now = row["work"][0]
        squares = "".join(
            f'<i class="cell {kind}"></i>' * count
            for kind, count in (
                ("kept", row["computed"] - now),
                ("first", now),
                ("hollow", row["tokens"] - row["computed"]),
            )
        )
        what = "runs" if row in frame["running"] else "waits"
        rows += (
            f'<tr><th scope="row">{name_of(row["number"] - 1)} {what}</th><td>{squares}</td></tr>'
        )
    owners = {page: row["number"] - 1 for row in frame["running"] for page in row["pages"]}
    pool = "".join(
        f'<i class="page {f"tint{owners[page]}" if page in owners else "free"}">{page}</i>'
        for page in range(setup["num_pages"])
    )
    legend = key(first="computed since the frame before", kept="before", hollow="not yet")
    waiting = f"{frame['queued']} in the queue"
    drawn = panel(
        "What it says",
        f'<table class="live-rows"><tbody>{rows}</tbody></table>{legend}'
        '<p class="title pages-title">Pages of the cache, by owner</p>'
        f'<p class="page-row">{pool}</p>',
        f"{frame['positions']} positions in {frame['steps']} steps, {waiting}.",
    )
    caption = (
        "What /live sends is small: a few numbers of each request, from which whoever looks can "
        "draw the rows, the queue and the pages, and not read a word."
    )
    said = "; ".join(
        f"{LETTERS[row['number'] - 1]}: {row['computed']} of {row['tokens']} positions, "
        f"{row['work'][0]} of them new"
        for row in frame["running"] + frame["waiting"]
    )
    text = (
        f"A frame after step {frame['steps']}. {said}. {len(owners)} of {setup['num_pages']} pages "
        "have an owner."
    )
    return Drawing(panels(sent, drawn), caption, text)


# 70


class Written(NamedTuple):
    """A text as the page gets it."""

    prompt: str
    tokens: list[tuple[str, float]]  # with their probabilities
    others: list[list[tuple[str, float]]]  # at each token the likeliest ones
    shades: list[float]  # of server/page.html: the least probability of each


def record_page(prompt: str) -> Written:
    """A text of 48 tokens from the server, with what the page asks for."""
    check_prompt(prompt, 20)
    page = Path(app_module.HERE, "page.html").read_text("utf-8")
    shades = json.loads(re.search(r"const SHADES = (\[.*?\]);", page)[1])
    asked = int(re.search(r"const ASKED = (\d+);", page)[1])
    return asyncio.run(write(prompt, shades, asked))


async def write(prompt: str, shades: list[float], asked: int) -> Written:
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 1}
    async with serving() as door:
        door.gate.release(1000)
        answer = await door.ask("POST", PATH, body | {"logprobs": asked})
    found = json.loads(answer.body)["choices"][0]["logprobs"]
    tokens = [
        (text, math.exp(value)) for text, value in zip(found["tokens"], found["token_logprobs"])
    ]
    others = [
        sorted(((text, math.exp(value)) for text, value in top.items()), key=lambda one: -one[1])
        for top in found["top_logprobs"]
    ]
    return Written(prompt, tokens, others, shades)


def draw_page(record: Written) -> Drawing:
    def shade(p: float) -> int:
        return next(index for index, least in enumerate(record.shades) if p >= least)

    rare = min(range(len(record.tokens)), key=lambda place: record.tokens[place][1])
    spans = ""
    for place, (text, p) in enumerate(record.tokens):
        mark = " at" if place == rare else ""
        spans += f'<span class="written p{shade(p)}{mark}">{escape(text)}</span>'
    page = (
        f'<p class="page-text"><span class="given">{escape(record.prompt)}</span>{spans}</p>'
        + '<p class="scale-row">at least '
        + " ".join(
            f'<span class="written p{index}">{f"{100 * least:g} %" if least else "less"}</span>'
            for index, least in enumerate(record.shades)
        )
        + "</p>"
    )
    text, p = record.tokens[rare]
    rows = [(token(name), value, percent(value), "") for name, value in record.others[rare]]
    if text not in [name for name, _ in record.others[rare]]:
        rows.append((token(text), p, percent(p), "second"))
    body = panels(
        f'<div class="panel page-view">{page}</div>',
        panel(f"Instead of {token(text)}", bars(rows), "What a tap on a token shows."),
    )
    sure = sum(value >= record.shades[0] for _, value in record.tokens)
    caption = (
        f"The page colours each token by its probability: {sure} of {len(record.tokens)} had "
        f"{percent(record.shades[0])} or more, and the outlined one {percent(p)}."
    )
    words = "".join(name for name, _ in record.tokens)
    text = (
        f"The text {words!r} after the prompt {record.prompt!r}, shaded by probability, and the "
        f"likeliest tokens in the place of {text!r}, which had {percent(p)}."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "disconnects": Picture("Once upon a time", record_leaving, draw_leaving),
    "full-queue": Picture("Once upon a time", record_queue, draw_queue),
    "keys-and-origins": Picture("Once upon a", record_visits, draw_visits),
    "draining": Picture("Once upon a time", record_lives, draw_lives),
    "metrics": Picture("Once upon a time", record_metrics, draw_metrics),
    "live": Picture("Once upon a time", record_look, draw_look),
    "page": Picture("One day, a little girl named Lily", record_page, draw_page),
}

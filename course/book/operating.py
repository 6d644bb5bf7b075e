"""Pictures of lessons 64 to 70: a server of an embedded model, asked over real sockets."""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import math
import os
import queue
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from starlette.middleware.cors import CORSMiddleware

import serve
from book import recordings
from book.door import NAME, PATH, PATIENCE, Door, Turns, check_prompt, make_engine, open_door, read
from book.draw import Drawing, Picture, escape, key, panel, panels, percent, stacks, token
from book.playing import Arrival, Run, play, player
from loading.load import parse_name
from sampling import SamplingParams
from server import app as app_module
from server import completions

LETTERS = "ABCDEFGH"  # of clients
YES, NO = "\u2713", "\u2715"
GREEDY = {"ignore_eos": True, "temperature": 0}


def name_of(client: int) -> str:
    """The letter of a client, in its colour, of which there are six."""
    kind = f"tint{client} letter" if client < 6 else "letter"
    return f'<b class="{kind}">{LETTERS[client]}</b>'


# 64


class Vanishing(NamedTuple):
    """What a server does when a client vanishes. Clients are numbers."""

    heard: list[str]  # what its handler received
    working: list[bool]  # before each step: whether that handler awaits the text
    told: list[bool]  # before each step: whether it has received that its client is gone
    work: list[dict[int, int]]  # of each step: positions computed for each client
    waiting: list[list[int]]  # before each step
    ends: list[str]  # how each text ended


GONE, STAYS, WAITS = range(3)
TOKENS = {GONE: 11, STAYS: 7, WAITS: 4}
LEAVES = 3  # after this step
ROWS = 2


def record_leaving(prompt: str) -> list[Vanishing]:
    """Three clients of two rows; one vanishes, and nobody listens, or somebody does."""
    check_prompt(prompt, 8)
    with mock.patch.object(completions, "unless_gone", lambda request, work: work):
        plain = leave(prompt, False)
    return [plain, leave(prompt, True)]


def leave(prompt: str, listens: bool) -> Vanishing:
    work = []
    waiting = []
    working = []
    told = []
    with open_door(by_turns=True, max_rows=ROWS) as door:
        calls = [
            door.call(GREEDY | {"prompt": prompt, "max_tokens": tokens, "cache_salt": str(tokens)})
            for tokens in TOKENS.values()
        ]
        engine = door.thread.engine
        while not work or engine.busy:
            if len(work) == LEAVES:
                calls[GONE][0].close()
                door.until(lambda: len(door.server.server_state.connections) < len(TOKENS))
                if listens:
                    door.until(lambda: len(door.thread.calls) < len(TOKENS))
            working.append(calls[GONE][1] in door.thread.calls)
            told.append("http.disconnect" in door.heard[GONE])
            door.step()
            requests = [call.requests[0] for _, call in calls]
            work.append({requests.index(each.request): len(each.tokens) for each in engine.works})
            waiting.append([requests.index(request) for request in engine.scheduler.waiting])
        for client in (STAYS, WAITS):
            read(calls[client][0])
    ends = [request.finish_reason for request in requests]
    return Vanishing(door.heard[GONE], working, told, work, waiting, ends)


def draw_leaving(record: list[Vanishing]) -> Drawing:
    columns = max(len(run.work) for run in record)

    def group(words: str, rows: str) -> str:
        return f'<tbody><tr><th colspan="{columns + 1}">{words}</th></tr>{rows}</tbody>'

    def handler(run: Vanishing) -> str:
        """What A's handler waits for in each step: the text, and that its client is gone."""
        cells = ""
        for number in range(columns):
            works = number < len(run.work) and run.working[number]
            kind = "lost" if works and number >= LEAVES else "tint0" if works else ""
            cells += f'<td class="{kind}{" after" * (number == LEAVES - 1)}"></td>'
        rows = f'<tr><th scope="row">the text</th>{cells}</tr>'
        listens = run.told.count(False) if any(run.told) else 0
        cells = "".join(
            f'<td class="tint0{" after" * (number == LEAVES - 1)}"></td>'
            for number in range(listens)
        )
        words = "http.disconnect" if listens else "nobody calls it"
        cells += f'<td class="says" colspan="{columns - listens}">{words}</td>'
        return f'{rows}<tr><th scope="row">receive()</th>{cells}</tr>'

    def table(run: Vanishing) -> str:
        rows = ""
        for client in TOKENS:
            cells = ""
            for number in range(columns):
                count = run.work[number].get(client, "") if number < len(run.work) else ""
                lost = count and client == GONE and number >= LEAVES
                waits = number < len(run.work) and client in run.waiting[number]
                kind = "lost" if lost else f"tint{client}" if count else "idle" if waits else ""
                cells += f'<td class="{kind}{" after" * (number == LEAVES - 1)}">{count}</td>'
            rows += f'<tr><th scope="row">{name_of(client)}</th>{cells}</tr>'
        head = "".join(f"<th>{number}</th>" for number in range(1, columns + 1))
        return (
            f'<table class="batch over-time life"><thead><tr><th></th>{head}</tr></thead>'
            f"{group(f'The handler of {name_of(GONE)} awaits', handler(run))}"
            f"{group('The engine computes', rows)}</table>"
        )

    plain, ours = record
    wasted = sum(GONE in step for step in plain.work[LEAVES:])
    begins = [next(n for n, step in enumerate(run.work, 1) if WAITS in step) for run in record]
    body = panels(
        panel(
            "A handler that awaits its text only",
            table(plain),
            f"In {wasted} steps A is computed for nobody, and C begins in step {begins[0]}.",
        ),
        panel(
            "The text and receive() race",
            table(ours),
            f"receive() is first: the text is aborted, and C begins in step {begins[1]}.",
        ),
    )
    body += (
        '<ul class="key"><li><i class="bad"></i>A vanishes: its socket is closed</li>'
        '<li><i class="lost"></i>for nobody</li>'
        '<li><i class="idle"></i>waits for one of two rows</li></ul>'
        '<p class="note">A column is a step; a number is how many positions it computed. receive() '
        "is the server&rsquo;s call that tells what a client sends, and that it is gone. Until an "
        "answer begins, that call and the text race: the first ends the other.</p>"
    )
    caption = (
        "A client that goes away before its answer begins is noticed, and its text ends at once: "
        f"C begins in step {begins[1]} instead of {begins[0]}."
    )
    said = "; ".join(
        f"having received {' and '.join(run.heard)}, the server computes for A in "
        f"{sum(GONE in step for step in run.work)} steps, its text ends with {run.ends[GONE]}, and "
        f"C begins in step {begin}"
        for run, begin in zip(record, begins)
    )
    text = f"Two grids of steps and clients; A vanishes after step {LEAVES}: {said}."
    return Drawing(body, caption, text)


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


WAITING = 2


def record_queue(prompt: str) -> Queue:
    """Requests come to a server with two rows that lets two more wait."""
    length = len(check_prompt(prompt, 8))
    encode = recordings.encoding().encode
    most = len(encode(recordings.STORY)) + 4 * length
    bounds = {"max_waiting": WAITING, "max_waiting_tokens": most}
    asked = []
    owners = {}  # call -> client
    connections = {}  # of clients that got in
    with open_door(by_turns=True, bounds=bounds, max_rows=ROWS) as door:
        calls = door.thread.calls

        def ask(client: int, text: str, texts: int = 1, tokens: int = 9) -> None:
            known = set(calls)
            body = GREEDY | {"prompt": [text] * texts, "max_tokens": tokens}
            connection = door.send("POST", PATH, body)
            door.until(lambda: calls - known or select.select([connection.sock], [], [], 0)[0])
            status, retry, message = 200, None, ""
            if calls - known:
                (call,) = calls - known
                owners[call] = client
                connections[client] = connection
            else:
                status, refusal, headers = read(connection)
                retry = headers["retry-after"]
                message = refusal["error"]["message"]
            held = [(owners[call], call.left, call.waiting) for call in calls]
            size = texts * len(encode(text, allowed_special="all"))
            steps = door.thread.engine.steps
            asked.append(Asked(client, texts, size, status, retry, message, sorted(held), steps))

        ask(0, prompt, tokens=1)
        ask(1, prompt, tokens=2)
        ask(2, recordings.STORY)
        ask(3, recordings.STORY)
        ask(4, prompt)
        ask(5, prompt)
        ask(6, prompt, texts=ROWS + WAITING + 1)
        for over, client, text in ((0, 5, prompt), (1, 3, recordings.STORY)):
            door.step()
            read(connections[over])
            ask(client, text)
    return Queue(ROWS + WAITING, most, asked)


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
    bounds = (
        f"1: texts not over, {record.most} at most",
        f"2: prompts not begun, {record.most_tokens} tokens at most",
    )
    head = "".join(f"<th>{words}</th>" for words in ("asks with", *bounds, "is answered"))
    body = (
        f'<table class="queue"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        '<p class="note">A line is a request, and how full both bounds are after it. The first '
        f"one, {record.most} at most, counts texts in {ROWS} rows and a queue of {WAITING}; the "
        f"second one, {record.most_tokens} at most, the tokens of a prompt until its text has its "
        "first token.</p>"
    )
    refused = [each for each in record.asked if each.status != 200]
    again = [LETTERS[each.client] for each in record.asked if each.steps]
    caption = (
        "A queue with two bounds: texts, and tokens of prompts. What does not fit is refused at "
        f"once, before anything is computed; here {' and '.join(again)} come again and get in."
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
    entered = []

    def noting(name: str, kind: type):
        """A method of a middleware that notes that it was called."""
        real = kind.__call__

        async def called(self, scope, receive, send):
            if scope["type"] == "http":
                entered.append(name)
            await real(self, scope, receive, send)

        return mock.patch.object(kind, "__call__", called)

    body = GREEDY | {"prompt": prompt, "max_tokens": 1}
    asking = {"Access_Control_Request_Method": "POST"}
    good, wrong = ({"Authorization": f"Bearer {key}"} for key in ("secret", "guess"))
    from_ours, from_theirs = {"Origin": OURS}, {"Origin": THEIRS}
    preflight = "OPTIONS", PATH, None
    requests = [
        ("a program", "the key", "POST", PATH, body, good),
        ("a program", "another key", "POST", PATH, body, wrong),
        ("a program", "no key", "POST", PATH, body, {}),
        ("a load balancer", "no key: GET /health", "GET", "/health", None, {}),
        ("a browser", "no key: OPTIONS, may page.example ask?", *preflight, asking | from_ours),
        ("a browser", "no key: OPTIONS, may other.example ask?", *preflight, asking | from_theirs),
        ("page.example", "the key", "POST", PATH, body, good | from_ours),
        ("page.example", "another key", "POST", PATH, body, wrong | from_ours),
    ]
    visits = []
    marks = {"origin": "key", "key": "inside", "body": "http.request"}
    options = {"api_key": "secret", "origins": [OURS]}
    with (
        noting("cors", CORSMiddleware),
        noting("key", app_module.KeyMiddleware),
        noting("inside", app_module.BodyLimit),
        open_door(app_options=options) as door,
    ):
        for who, what, method, path, sent, headers in requests:
            entered.clear()
            answer = door.ask(method, path, sent, **headers)
            passed = [name for name, mark in marks.items() if mark in entered + door.heard[-1]]
            origin = answer.headers["access-control-allow-origin"]
            text = answer.body["choices"][0]["text"] if "choices" in answer.body else ""
            reads = "Origin" not in headers or origin == headers["Origin"]
            visits.append(Visit(who, what, passed, answer.status, origin, reads, text))
    return visits


def draw_visits(record: list[Visit]) -> Drawing:
    rows = ""
    for each in sorted(record, key=lambda each: each.who != "a browser"):
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
        elif each.status != 200 and each.origin:
            words = "may see the error"
        rows += (
            f'<tr><th scope="row">{escape(each.who)}<span>{escape(each.what)}</span></th>{cells}'
            f"<td>{words}</td></tr>"
        )
    doors = ("door 1: origin", "door 2: key, for /v1/", "inside: the answer", "and gets")
    head = "<th>asks</th>" + "".join(f"<th>{words}</th>" for words in doors)
    body = f'<table class="visits"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    stopped = [each for each in record if each.status == 401]
    unread = sum("body" not in each.passed for each in stopped)
    note = (
        f"The server has a key and knows one web page by its address, the origin {OURS}. \u2713: "
        "let through. A number: the status, where the answer was made. Of "
        f"{unread} of {len(stopped)} requests with 401 nobody has read the body. OPTIONS needs no "
        "key, nor does /health."
    )
    caption = (
        "Door 1: a browser first asks (OPTIONS) whether this web page may use the server. Door 2: "
        "requests to /v1/ without the key end."
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


SIGNAL, LATER, LIMIT, SECOND = 4, 5, 9, 6  # columns
LASTING = {1: 7, 2: 2**10}  # tokens of clients


def record_lives(prompt: str) -> list[Life]:
    """A server that gets a signal, and one that gets two."""
    check_prompt(prompt, 8)
    return [live_once(prompt, second) for second in (False, True)]


def live_once(prompt: str, second: bool) -> Life:
    # A thousand seconds do not pass here: what the timer would call is called.
    args = argparse.Namespace(max_waiting=9, max_waiting_tokens=999, drain_seconds=1000.0)
    args.__dict__ |= {"api_key": None, "allow_origin": []}
    loading = threading.Event()
    servers = queue.SimpleQueue()

    def load_engine(*_):
        loading.wait(PATIENCE)
        return make_engine()

    class Server(serve.Server):
        def __init__(self, app, *given):
            super().__init__(app, *given)
            servers.put((self, app.state.served))

    body = GREEDY | {"prompt": prompt, "stream": True}
    got = [[] for _ in LASTING]
    over = [None] * len(LASTING)
    code = None
    with (
        mock.patch.object(serve, "load_engine", load_engine),
        mock.patch.object(serve, "Server", Server),
        mock.patch.object(os, "_exit", sys.exit),
        contextlib.redirect_stdout(io.StringIO()),
        serve.listen("127.0.0.1", 0) as sock,
        futures.ThreadPoolExecutor() as pool,
    ):
        source = parse_name(f"checkpoints/{NAME}")
        process = pool.submit(asyncio.run, serve.serve(args, source, "cpu", sock))
        server, served = servers.get(timeout=PATIENCE)
        thread = served.thread
        door = Door(sock.getsockname()[1], served, server, Turns(thread))
        early = door.ask("POST", PATH, body | {"max_tokens": 3})
        lanes = [Lane(0, [], early.status, ending(early.body), 0)]
        loading.set()
        door.until(lambda: thread.error is None)
        calls = [door.call(body | {"max_tokens": count}) for count in LASTING.values()]
        answers = [pool.submit(read, connection) for connection, _ in calls]
        for column in range(1, LIMIT + 1):
            door.step()
            for client, (_, call) in enumerate(calls):
                (request,) = call.requests
                if any(work.request is request for work in thread.engine.works):
                    got[client].append(column)
                    over[client] = column if request.finish_reason else None
            if column == SIGNAL:
                server.handle_exit(signal.SIGTERM, None)
                door.until(lambda: server.live.closed)
            if column == LATER:
                status = None
                with contextlib.suppress(OSError):
                    status = door.ask("GET", "/health").status
                late = Lane(LATER, [], status, "nobody listens", LATER)
            if second and column == SECOND:
                try:
                    server.handle_exit(signal.SIGTERM, None)
                except SystemExit as ended:
                    code = ended.code
                break
        door.close()
        if process.result(PATIENCE) == signal.SIGTERM and code is None:
            code = 0
    for client, answer in enumerate(answers):
        status, said, _ = answer.result()
        cut = second and over[client] is None
        said = "the process is gone" if cut else ending(said)
        lanes.append(Lane(1, got[client], status, said, over[client] or column))
    signals = [SIGNAL, SECOND] if second else [SIGNAL]
    return Life(column, signals, None if second else LIMIT, [*lanes, late], code)


def ending(body: dict | str) -> str:
    """What an answer says in the end: an error, or how its text ended."""
    if isinstance(body, str):
        *_, last, done = [part for part in body.split("\n\n") if part]
        assert done == "data: [DONE]"
        body = json.loads(last.removeprefix("data: "))
    return body["error"]["message"] if "error" in body else body["choices"][0]["finish_reason"]


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
            elif lane.status == 200:
                said = f"{status}, then an error: {escape(lane.end)}"
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
        '<p class="note">A column is a step, the first one the time while the model is loaded.</p>'
    )
    caption = (
        "After a signal nobody new gets in, and texts may go on for a time. Those not over then "
        "end with an error; a second signal ends all at once."
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
    """Steps of an engine, and what /metrics has after one of them. Texts are numbers."""

    times: list[int]  # at the end of each step, in milliseconds
    work: list[dict[int, int]]  # of each step: positions computed for each text
    waiting: list[list[int]]  # before each step
    running: list[int]  # when somebody asks
    queue: list[int]  # then
    pages: tuple[int, int]  # then: in use, and all
    preempted: int  # then
    gaps: list[int]  # noted until then, in milliseconds
    lines: dict[str, float]  # of /metrics


OUTPUTS = (3, 6, 4, 3)  # tokens
LOOKED = 5  # after this step somebody asks
FIRST = "vllm:time_to_first_token_seconds"
GAP = "vllm:inter_token_latency_seconds"
LENGTH = 'vllm:request_success_total{finished_reason="length"}'


def record_metrics(prompt: str) -> Counted:
    """Four texts in two rows, on a clock on which a position takes a millisecond."""
    check_prompt(prompt, 8)
    times, work, waiting, gaps = [], [], [], []
    with open_door(by_turns=True, clock=0.001, max_rows=2) as door:
        observe = door.served.metrics.gap.observe

        def noted(value: float) -> None:
            gaps.append(round(1000 * value))
            observe(value)

        with mock.patch.object(door.served.metrics.gap, "observe", noted):
            calls = [
                door.call(GREEDY | {"prompt": prompt, "max_tokens": tokens})[1]
                for tokens in OUTPUTS
            ]
            requests = None
            engine = door.thread.engine
            scheduler = engine.scheduler
            while not times or engine.busy:
                door.step()
                requests = requests or [call.requests[0] for call in calls]
                times.append(engine.positions)
                work.append(
                    {requests.index(each.request): len(each.tokens) for each in engine.works}
                )
                waiting.append([requests.index(request) for request in scheduler.waiting])
                if len(times) == LOOKED:
                    text = door.ask("GET", "/metrics").body
                    running, queue = (
                        [requests.index(request) for request in kind]
                        for kind in (scheduler.running, scheduler.waiting)
                    )
                    pages = len(scheduler.pool.holders), scheduler.pool.num_pages
                    preempted = scheduler.preemptions
                    until = list(gaps)
    lines = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',?model_name="[^"]*"', "", name).replace("{}", "")
            lines[name] = float(value)
    return Counted(times, work, waiting, running, queue, pages, preempted, until, lines)


def firsts_of(record: Counted) -> dict[int, int]:
    """The step, from 0, of the first token of each text."""
    found = {}
    for number, step in enumerate(record.work):
        for text in step:
            found.setdefault(text, number)
    return found


def draw_metrics(record: Counted) -> Drawing:
    firsts = firsts_of(record)
    head = "".join(f"<th>{number}</th>" for number in range(1, len(record.work) + 1))
    times = "".join(
        f'<td class="{"after" if number == LOOKED - 1 else ""}">{moment}</td>'
        for number, moment in enumerate(record.times)
    )
    rows = ""
    for text in range(len(OUTPUTS)):
        cells = ""
        for number, step in enumerate(record.work):
            kind = "first" if firsts[text] == number else "kept" if text in step else ""
            kind = "idle" if text in record.waiting[number] else kind
            after = " after" * (number == LOOKED - 1)
            cells += f'<td class="{kind}{after}">{step.get(text, "")}</td>'
        rows += f'<tr><th scope="row">{LETTERS[text]}</th>{cells}</tr>'
    grid = (
        f'<table class="batch over-time life noted"><thead><tr><th>step</th>{head}</tr></thead>'
        f'<tbody>{rows}<tr><th scope="row">ms</th>{times}</tr></tbody></table>'
        '<ul class="key"><li><i class="first"></i>a first token</li><li><i class="kept"></i>a '
        'further token</li><li><i class="idle"></i>waits for one of two rows</li><li><i '
        'class="bad"></i>GET /metrics</li></ul>'
    )

    def letters(texts: list[int]) -> str:
        return " ".join(LETTERS[text] for text in texts) or "nobody"

    seen = [text for text, step in firsts.items() if step < LOOKED]
    waits = {text: record.times[firsts[text]] for text in seen}
    in_use, pages = record.pages
    now = {
        "vllm:num_requests_running": letters(record.running),
        "vllm:num_requests_waiting": letters(record.queue),
        "vllm:kv_cache_usage_perc": f"{in_use} of {pages} pages",
        "vllm:num_preemptions_total": f"{record.preempted} times that a text lost its pages",
    }
    noted = {}
    for name in record.lines:
        limit = re.fullmatch(FIRST + r'_bucket{le="([\d.]+)"}', name)
        if limit and min(waits.values()) <= 1000 * float(limit[1]) <= 2 * max(waits.values()):
            under = [text for text in seen if waits[text] <= 1000 * float(limit[1])]
            noted[name] = f"{letters(under)} took at most {1000 * float(limit[1]):g} ms"
    over = [text for text in seen if text not in record.running]
    noted |= {
        f"{FIRST}_count": letters(seen),
        f"{FIRST}_sum": " + ".join(str(waits[text]) for text in seen) + " ms",
        f"{GAP}_count": "the further tokens",
        f"{GAP}_sum": " + ".join(map(str, record.gaps)) + " ms",
        LENGTH: f"{letters(over)}: all tokens are there",
    }
    lists = []
    for which in (now, noted):
        lines = ""
        for name, source in which.items():
            broken = escape(name).replace("_", "_<wbr>").replace("{", "<wbr>{")
            lines += (
                f"<tr><td><code>{broken}</code><span>{source}</span></td>"
                f'<td class="value"><b>{record.lines[name]:g}</b></td></tr>'
            )
        lists.append(f'<table class="metrics"><tbody>{lines}</tbody></table>')
    note = (
        "The clock of this picture: a position takes 1 ms. A number in the grid is how many "
        "positions a step computes for a text; all texts are asked for at 0 ms."
    )
    names = (
        "Names, with vllm: before them, are those of vLLM, another server, which dashboards look "
        "for. A bucket{le=&hellip;} counts how many took so many seconds or less."
    )
    body = panels(
        panel("The engine, step by step", grid, note),
        panel("Read when somebody asks: what the engine counts", lists[0], names),
        panel("Noted after each step: what happened until then", lists[1]),
    )
    caption = (
        "Two kinds of numbers in /metrics: what the engine counts anyway is read when somebody "
        "asks; what happens at a moment is noted after its step."
    )
    said = ", ".join(
        f"{name} {record.lines[name]:g} ({source})" for name, source in (now | noted).items()
    )
    text = (
        f"{len(OUTPUTS)} texts of {', '.join(map(str, OUTPUTS))} tokens in two rows; steps end at "
        f"{', '.join(map(str, record.times))} ms. After step {LOOKED} /metrics has {said}."
    )
    return Drawing(body, caption, text)


# 69


class Look(NamedTuple):
    """A frame of /live, and what the engine was then."""

    setup: dict
    frame: dict
    sent: str  # as it came


def record_look(prompt: str) -> Look:
    """Three clients of an engine with two rows, and one that looks."""
    check_prompt(prompt, 8)
    shape = {"max_rows": 2, "num_pages": 16, "page_size": 4, "budget": 16}
    with numbered(), open_door(by_turns=True, clock=1.0, **shape) as door:
        frames = events(door.send("GET", "/live"))
        setup = json.loads(next(frames))
        for number, text in enumerate((prompt, recordings.STORY, prompt)):
            body = {"prompt": text, "max_tokens": 9, "cache_salt": str(number)}
            door.call(GREEDY | body)
        door.step()
        door.step()
        sent = next(line for line in frames if json.loads(line)["steps"] == 2)
        frames.close()
    return Look(setup, json.loads(sent), sent)


def numbered():
    """Names of texts that are the same each time."""
    ids = itertools.count(1)
    named = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(ids):032x}"))
    return mock.patch.object(completions, "uuid", named)


def events(connection: HTTPConnection) -> Iterator[str]:
    """The data of server-sent events, as they come."""
    with contextlib.closing(connection), connection.getresponse() as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode().strip()


def draw_look(record: Look) -> Drawing:
    frame, setup = record.frame, record.setup

    def shown(data) -> str:
        return escape(json.dumps(data, separators=(",", ":"), ensure_ascii=False))

    fields = []
    for name, value in frame.items():
        words = shown(value)
        if name in ("running", "waiting"):
            lines = [f'<span class="tint{row["number"] - 1}">{shown(row)}</span>' for row in value]
            words = f"[{',<wbr>'.join(lines)}]"
        fields.append(f"{shown(name)}:{words}")
    sent = panel(
        f"A frame, one message, as it is sent: {len(record.sent.encode())} bytes of JSON",
        f'<pre class="frame">{{{",<wbr>".join(fields)}}}</pre>',
        "All of it. There are numbers and names of requests, and nobody\u2019s text.",
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
        "/live sends a few numbers of each request, and nobody&rsquo;s text: enough to draw the "
        "rows, the queue and the pages."
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


class Moment(NamedTuple):
    """What the page got after a step, from its two streams."""

    token: str
    p: float
    own: int  # positions that the step computed for this text
    all: int  # for all texts
    texts: int  # for which it computed any
    pages: int  # in use


class Written(NamedTuple):
    """A text as the page gets it."""

    prompt: str
    moments: list[Moment]  # one a step
    shades: list[float]  # of server/page.html: the least probability of each
    run: Run  # the same texts in an engine without a server


STEPS = 12
SHAPE = {"max_rows": 4, "num_pages": 12}
OTHERS = {0: ("The dog", 7), 5: (recordings.STORY, 5)}  # come after so many steps: prompt, tokens


def record_page(prompt: str) -> Written:
    """Somebody writes on the page while two others ask; the frames say which text is the page's."""
    ids = check_prompt(prompt, 20)
    page = Path(app_module.HERE, "page.html").read_text("utf-8")
    shades = json.loads(re.search(r"const SHADES = (\[.*?\]);", page)[1])
    body = {"prompt": prompt, "max_tokens": STEPS, "temperature": 0.8, "top_p": 0.95, "seed": 1}
    moments = []
    with open_door(by_turns=True, clock=1.0, **SHAPE) as door:
        frames = events(door.send("GET", "/live"))
        next(frames)
        own, _ = door.call(body | {"logprobs": 1, "stream": True, "ignore_eos": True})
        chunks = events(own)
        for step in range(STEPS):
            if step in OTHERS:
                text, tokens = OTHERS[step]
                door.call(GREEDY | {"prompt": text, "max_tokens": tokens})
            door.step()
            chunk = json.loads(next(chunks))
            frame = next(each for each in map(json.loads, frames) if each["steps"] == step + 1)
            rows = frame["running"] + frame["over"]
            work = {row["name"]: row["work"][0] for row in rows}
            pages = {page for row in frame["running"] for page in row["pages"]}
            ((token,), (logprob,), *_) = chunk["choices"][0]["logprobs"].values()
            counts = (work[f"{chunk['id']}-0"], sum(work.values()), len(work), len(pages))
            moments.append(Moment(token, math.exp(logprob), *counts))
        for stream in (frames, chunks):
            stream.close()
    params = SamplingParams(STEPS, True, temperature=0.8, top_p=0.95, seed=1)
    arrivals = [Arrival(0, ids, params)]
    encode = recordings.encoding().encode
    for after, (text, tokens) in OTHERS.items():
        arrivals.append(Arrival(after, encode(text), SamplingParams(tokens, True)))
    return Written(prompt, moments, shades, play(make_engine(**SHAPE), arrivals, "pages"))


def draw_page(record: Written) -> Drawing:
    def shaded(moment: Moment) -> str:
        shade = next(index for index, least in enumerate(record.shades) if moment.p >= least)
        return f'<span class="written p{shade}">{escape(moment.token)}</span>'

    spans = "".join(map(shaded, record.moments))
    scale = " ".join(
        f'<span class="written p{index}">{f"{100 * least:g} %" if least else "less"}</span>'
        for index, least in enumerate(record.shades)
    )
    page = (
        f'<p class="page-text"><span class="given">{escape(record.prompt)}</span>{spans}</p>'
        f'<p class="scale-row">probability at least {scale}</p>'
    )
    largest = max(moment.all for moment in record.moments)
    rows = [
        (
            shaded(moment),
            [(moment.own, ""), (moment.all - moment.own, "other")],
            f"{moment.all}, {moment.pages} pages",
        )
        for moment in record.moments
    ]
    back = "At the end all pages are given back." if not record.moments[-1].pages else ""
    title = (
        "The engine, from /live: positions computed, and pages in use, in the step of each token"
    )
    body = panels(
        panel("Your text, from /v1/completions", f'<div class="page-view">{page}</div>'),
        panel(title, stacks(rows, largest) + key(first="for your text", soft="for others"), back),
    )
    number, most = max(enumerate(record.moments, 1), key=lambda one: one[1].all)
    caption = (
        "One page, two streams: your text, and the engine that writes it. In the step of your "
        f"token {number} it computed {most.all} positions: {most.own} for you, "
        f"{most.all - most.own} for {most.texts - 1} others."
    )
    said = "; ".join(
        f"{moment.token!r} with {percent(moment.p)}, {moment.own} of {moment.all} positions, "
        f"{moment.pages} pages"
        for moment in record.moments
    )
    text = f"The text after {record.prompt!r}, a token a step: {said}."
    return Drawing(body, caption, text, player(record.run, number - 1))


PICTURES = {  # slug of a lesson -> its picture
    "disconnects": Picture("Once upon a time", record_leaving, draw_leaving),
    "full-queue": Picture("Once upon a time", record_queue, draw_queue),
    "keys-and-origins": Picture("Once upon a", record_visits, draw_visits),
    "draining": Picture("Once upon a time", record_lives, draw_lives),
    "metrics": Picture("Once upon a time", record_metrics, draw_metrics),
    "live": Picture("Once upon a time", record_look, draw_look),
    "page": Picture("One day, a little girl named Lily", record_page, draw_page),
}

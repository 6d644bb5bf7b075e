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
from load import parse_name
from server import app as app_module
from server import completions

LETTERS = "ABCDEFGH"  # of clients
YES, NO = "\u2713", "\u2715"
GREEDY = {"ignore_eos": True, "temperature": 0}


def name_of(client: int) -> str:
    """The letter of a client, in its colour."""
    return f'<b class="tint{client % 6} letter">{LETTERS[client]}</b>'


# 64


class Vanishing(NamedTuple):
    """What a server does when a client vanishes. Clients are numbers."""

    heard: list[str]  # what its handler received
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
            door.step()
            requests = [call.requests[0] for _, call in calls]
            work.append({requests.index(each.request): len(each.tokens) for each in engine.works})
            waiting.append([requests.index(request) for request in engine.scheduler.waiting])
        for client in (STAYS, WAITS):
            read(calls[client][0])
    ends = [request.finish_reason for request in requests]
    return Vanishing(door.heard[GONE], work, waiting, ends)


def draw_leaving(record: list[Vanishing]) -> Drawing:
    columns = max(len(run.work) for run in record)

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
            f"<tbody>{rows}</tbody></table>"
        )

    plain, ours = record
    notes = [f"A\u2019s handler has received: {', '.join(run.heard)}." for run in record]
    body = panels(
        panel("A handler that only writes", table(plain), notes[0]),
        panel("One that listens to the socket, too", table(ours), notes[1]),
    )
    body += (
        '<ul class="key"><li><i class="bad"></i>A vanishes: its socket is closed</li>'
        '<li><i class="lost"></i>computed for nobody</li>'
        '<li><i class="idle"></i>waits for one of two rows</li></ul>'
        '<p class="note">A column is a step; a number is how many positions it computed.</p>'
    )
    wasted = sum(GONE in step for step in plain.work[LEAVES:])
    begins = [next(n for n, step in enumerate(run.work, 1) if WAITS in step) for run in record]
    caption = (
        "A client that vanishes does not say so: its socket is closed, and only a handler that "
        f"listens there hears of it. One that only writes lets {wasted} steps compute for nobody, "
        f"and C waits until step {begins[0]}; one that listens aborts the text, and C begins in "
        f"step {begins[1]}."
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
        f"one counts texts in {ROWS} rows and a queue of {WAITING}; the second one the tokens of a "
        "prompt until its text has its first token.</p>"
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
    doors = ("door 1: origin", "door 2: key", "inside: the answer", "and gets")
    head = "<th>asks</th>" + "".join(f"<th>{words}</th>" for words in doors)
    body = f'<table class="visits"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    stopped = [each for each in record if each.status == 401]
    unread = sum("body" not in each.passed for each in stopped)
    note = (
        f"The server has a key and knows one web page by its address, the origin {OURS}. \u2713: "
        "let through. A number: the status, where the answer was made. Of "
        f"{unread} of {len(stopped)} requests with 401 nobody has read the body."
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
    buckets: list[tuple[float, int]]  # up to so many seconds: how many


FAMILY = "vllm:time_to_first_token_seconds"
OUTPUTS = (3, 9, 5, 4, 7, 3, 8, 6)  # tokens


def record_metrics(prompt: str) -> Counted:
    """Eight texts in two rows, on a clock on which a position takes a millisecond."""
    check_prompt(prompt, 8)
    seen = []
    with open_door(by_turns=True, clock=0.001, max_rows=2) as door:
        histogram = door.served.metrics.first_gap
        observe = histogram.observe

        def noted(value: float) -> None:
            seen.append(value)
            observe(value)

        with mock.patch.object(histogram, "observe", noted):
            for tokens in OUTPUTS:
                door.call(GREEDY | {"prompt": prompt, "max_tokens": tokens})
            door.finish()
        text = door.ask("GET", "/metrics").body
    found = re.findall(rf'^{FAMILY}_bucket.*le="([^"]+)".* ([\d.]+)$', text, re.MULTILINE)
    return Counted(seen, [(float(limit), int(float(count))) for limit, count in found])


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
        f"Sent: {len(record.sent.encode())} bytes",
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


STEPS = 12
OTHERS = {0: ("The dog", 7), 5: (recordings.STORY, 5)}  # come after so many steps: prompt, tokens


def record_page(prompt: str) -> Written:
    """Somebody writes on the page while two others ask; the frames say which text is the page's."""
    check_prompt(prompt, 20)
    page = Path(app_module.HERE, "page.html").read_text("utf-8")
    shades = json.loads(re.search(r"const SHADES = (\[.*?\]);", page)[1])
    body = {"prompt": prompt, "max_tokens": STEPS, "temperature": 0.8, "top_p": 0.95, "seed": 1}
    moments = []
    with open_door(by_turns=True, clock=1.0) as door:
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
    return Written(prompt, moments, shades)


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
    title = "The engine, from /live: positions that it computed in the step of each token"
    body = panels(
        panel("Your text, from /v1/completions", f'<div class="page-view">{page}</div>'),
        panel(title, stacks(rows, largest) + key(first="for your text", soft="for others")),
    )
    number, most = max(enumerate(record.moments, 1), key=lambda one: one[1].all)
    caption = (
        "One page, two streams: your text, each token in the colour of its probability, and the "
        f"engine that writes it. In the step of your token {number} it computed {most.all} "
        f"positions: {most.own} for you, {most.all - most.own} for {most.texts - 1} other texts."
    )
    said = "; ".join(
        f"{moment.token!r} with {percent(moment.p)}, {moment.own} of {moment.all} positions, "
        f"{moment.pages} pages"
        for moment in record.moments
    )
    return Drawing(body, caption, f"The text after {record.prompt!r}, a token a step: {said}.")


PICTURES = {  # slug of a lesson -> its picture
    "disconnects": Picture("Once upon a time", record_leaving, draw_leaving),
    "full-queue": Picture("Once upon a time", record_queue, draw_queue),
    "keys-and-origins": Picture("Once upon a", record_visits, draw_visits),
    "draining": Picture("Once upon a time", record_lives, draw_lives),
    "metrics": Picture("Once upon a time", record_metrics, draw_metrics),
    "live": Picture("Once upon a time", record_look, draw_look),
    "page": Picture("One day, a little girl named Lily", record_page, draw_page),
}

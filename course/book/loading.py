"""Pictures of lessons 71 to 73: clients of a server, on a clock that only waiting moves."""

import asyncio
import json
import math
import selectors
import statistics
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from benchmarks import client
from book import recordings
from book.door import check_prompt
from book.draw import (
    Drawing,
    Picture,
    box,
    label,
    panel,
    panels,
    path,
    svg,
    token,
)
from engine.engine import Engine
from sampling import SamplingParams

URL = "http://127.0.0.1:1"


class Clock(selectors.DefaultSelector):
    """Jumps to the next moment that anybody waits for."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class Server:
    """An engine whose steps take known times, and which talks to clients without a network.

    seconds: of a step of so many positions. stall: from when to when it does nothing. name: of the
    model.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        stall: tuple[float, float] = (math.inf, math.inf),
        name: str = "stories-draft",
        **options,
    ):
        model = recordings.load(name)
        self.engine = Engine(model, encoding=recordings.encoding(), **options)
        self.seconds = seconds
        self.stall = stall
        self.streams = {}  # request: where its events go

    def run(self, load: Coroutine) -> client.Load:
        """What came of a load, as `client.run` says, on a clock that begins at 0."""
        clock = Clock()

        def make_loop():
            loop = asyncio.SelectorEventLoop(clock)
            loop.time = lambda: clock.now
            loop.create_connection = self.connect
            return loop

        async def main():
            self.came = asyncio.Event()
            working = asyncio.create_task(self.work())
            try:
                return await load
            finally:
                working.cancel()

        with asyncio.Runner(loop_factory=make_loop) as runner:
            exchanges, began, seconds = runner.run(main())
        return client.Load([client.read(each) for each in exchanges], began, seconds, 0.0)

    async def connect(self, factory, *_) -> tuple:
        """A connection of a client: in the place of the loop's method."""
        stream = Stream(self, factory())
        stream.protocol.connection_made(stream)
        return stream, stream.protocol

    def add(self, stream: "Stream", body: dict) -> None:
        ids = recordings.encoding().encode(body["prompt"], allowed_special="all")
        params = SamplingParams(max_new_tokens=body["max_tokens"], ignore_eos=True)
        self.streams[self.engine.add(ids, params)] = stream
        self.came.set()

    async def work(self) -> None:
        """Step after step, each of which takes its time."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.engine.busy:
                self.came.clear()
                await self.came.wait()
            begins, ends = self.stall
            if begins <= loop.time() < ends:
                await asyncio.sleep(ends - loop.time())
            before = self.engine.positions
            events = self.engine.step()
            await asyncio.sleep(self.seconds(self.engine.positions - before))
            for request, tokens, reason, _ in events:
                self.streams[request].tell(request.output, tokens, reason)
            for _ in range(9):  # who has an answer may ask again before the next step
                await asyncio.sleep(0)


class Stream:
    """The server's end of a connection, and the client's transport."""

    def __init__(self, server: Server, protocol: client.Exchange):
        self.server = server
        self.protocol = protocol

    def write(self, data: bytes) -> None:
        """A request comes, in one piece."""
        self.protocol.data_received(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        self.server.add(self, json.loads(data.partition(b"\r\n\r\n")[2]))

    def tell(self, output: list[int], tokens: list[int], reason: str | None) -> None:
        """Send what a step brought."""
        text = recordings.encoding().decode(tokens)
        said = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
        said["usage"] = {"completion_tokens": len(output)}
        self.protocol.data_received(b"data: %s\n\n" % json.dumps(said).encode())
        if reason:
            self.protocol.data_received(b"data: [DONE]\n\n")
            self.protocol.connection_lost(None)

    def close(self) -> None:
        """The client has all."""


def exchanges(prompt: str, sizes):
    """Requests for so many tokens each."""
    for size in sizes:
        body = {"prompt": prompt, "max_tokens": size, "temperature": 0}
        yield client.Exchange(URL, body | client.ASKED)


# 72


class Seen(NamedTuple):
    """What clients saw of a server that stalls."""

    name: str
    spans: list[tuple[float, float]]  # of each request: when it was due, and its first token
    values: dict[str, float]  # by `measures`


class Stalled(NamedTuple):
    stall: tuple[float, float]
    seconds: float
    closed: Seen
    open: Seen


STEP = 0.1  # seconds of any step
STALL = (5.0, 7.0)
LASTS = 13.0


def record_stall(prompt: str) -> Stalled:
    """The same server, as many requests: first each waits for the one before, then none does."""
    check_prompt(prompt, 8)

    def seen(name: str, load: Callable) -> Seen:
        server = Server(lambda positions: STEP, STALL, max_rows=32)
        result = server.run(load())
        spans = [(answer.due, answer.times[0]) for answer in result.answers]
        return Seen(name, spans, client.measures(result, math.inf, math.inf))

    def closed():
        return client.closed_loop(exchanges(prompt, iter(lambda: 1, 0)), 1, LASTS)

    one = seen("closed", closed)
    count = len(one.spans)

    def opened():
        moments = client.arrivals(count, count / LASTS, "0")
        return client.open_loop(list(exchanges(prompt, [1] * count)), moments)

    return Stalled(STALL, LASTS, one, seen("open", opened))


def draw_stall(record: Stalled) -> Drawing:
    limit = 3 * STEP
    left, wide, row = 8, 300, 2.2
    end = max(last for seen in (record.closed, record.open) for _, last in seen.spans)

    def place(moment: float) -> float:
        return left + wide * moment / end

    def chart(seen: Seen) -> str:
        height = row * len(seen.spans) + 12
        begins, ends = map(place, record.stall)
        body = box(begins, 0, ends - begins, height, "stall")
        body += label((begins + ends) / 2, height + 15, "the server stalls", "middle soft")
        body += path([(left, height), (left + wide, height)], "grid")
        body += label(left, height + 15, "0 s", "soft")
        body += label(left + wide, height + 15, f"{end:.0f} s", "end soft")
        for number, (due, first) in enumerate(seen.spans):
            kind = "bad" if first - due > limit else "first"
            size = max(place(first) - place(due), 1)
            body += box(place(due), 6 + row * number, size, row - 0.4, kind)
        return svg(left + wide + 8, height + 20, body, "chart loop-chart")

    def side(title: str, seen: Seen) -> str:
        late = sum(first - due > limit for due, first in seen.spans)
        p99 = seen.values["ttft, ms, p99"]
        words = f"{late} late of {len(seen.spans)}; 99th percentile: <b>{p99:,.0f} ms</b>"
        words += " (99 of 100 wait no longer)"
        return panel(title, chart(seen), words)

    body = panels(
        side("Closed loop: a client waits, then asks again", record.closed),
        side("Open loop: requests are due whatever happens", record.open),
    )
    p99s = [seen.values["ttft, ms, p99"] for seen in (record.closed, record.open)]
    lates = [sum(f - d > limit for d, f in seen.spans) for seen in (record.closed, record.open)]
    begins, ends = record.stall
    note = (
        f"A line is a request, the first at the top, from when it was due to its first token. Red: "
        f"more than {1000 * limit:.0f} ms. Each step of the server takes {1000 * STEP:.0f} ms on "
        "this clock."
    )
    caption = (
        f"A server stalls for {ends - begins:g} seconds. In a closed loop nobody asks meanwhile: "
        f"{lates[0]} answer is late. In an open one requests do not wait, and {lates[1]} are late."
    )
    text = (
        f"Two charts of {len(record.closed.spans)} requests each. In a closed loop {lates[0]} is "
        f"late and the 99th percentile of time to first token is {p99s[0]:.0f} ms; in an open loop "
        f"{lates[1]} are late, and it is {p99s[1]:.0f} ms."
    )
    return Drawing(f'{body}<p class="note">{note}</p>', caption, text)


# 71


class Text(NamedTuple):
    """A text as its client saw it, in milliseconds."""

    client: int
    due: float
    times: list[float]
    tokens: list[str]
    ttft: float
    tpot: float


class Closed(NamedTuple):
    texts: list[Text]  # in the order they were sent
    ends: float  # after this moment nobody asks again
    values: dict[str, float]


PROMPT = "Once upon a time, there was a little girl named Lily."
CLIENTS, UNTIL = 3, 0.3
SIZES = (6, 9, 5, 4, 7, 6, 5, 8, 4, 6, 7, 5)


def record_clients(prompt: str) -> Closed:
    """Three clients, an engine with three rows; a position takes 2 ms, and a step 4 ms more."""
    check_prompt(prompt, 30)
    server = Server(
        lambda positions: 0.004 + 0.002 * positions, name="stories-llama", max_rows=CLIENTS
    )
    load = server.run(client.closed_loop(exchanges(prompt, SIZES), CLIENTS, UNTIL))
    outputs = [request.output for request in server.streams]
    texts = []
    free = [0.0] * CLIENTS  # when each client has its answer
    for answer, output in zip(load.answers, outputs, strict=True):
        row = min(range(CLIENTS), key=lambda row: (abs(free[row] - answer.due), row))
        free[row] = answer.times[-1]
        names = [recordings.text_of(id) for id in output]
        times = [1000 * moment for moment in answer.times]
        texts.append(Text(row, 1000 * answer.due, times, names, answer.ttft, answer.tpot))
    return Closed(texts, 1000 * UNTIL, client.measures(load, math.inf, math.inf))


def draw_clients(record: Closed) -> Drawing:
    end = max(text.times[-1] for text in record.texts)
    lanes = [""] * CLIENTS
    for text in record.texts:
        for kind, start, stop in (
            ("wait", text.due, text.times[0]),
            ("kept", text.times[0], text.times[-1]),
        ):
            place = f"left:{100 * start / end:.2f}%;width:{100 * (stop - start) / end:.2f}%"
            lanes[text.client] += f'<i class="{kind}" style="{place}"></i>'
        for moment in text.times:
            lanes[text.client] += f'<b style="left:{100 * moment / end:.2f}%"></b>'
    rows = "".join(
        f'<tr><th scope="row">{"ABC"[number]}</th><td><div class="lane">{lane}</div></td></tr>'
        for number, lane in enumerate(lanes)
    )
    legend = (
        '<ul class="key"><li><i class="wait"></i>sent, no token yet</li>'
        "<li><i></i>a token comes</li></ul>"
    )
    text = max(record.texts, key=lambda text: max(gaps(text)))
    begins, ends = text.due, text.times[-1]
    rows += (
        '<tr><th></th><td><div class="times">'
        f'<span style="left:{100 * begins / end:.2f}%">{begins:.0f} ms</span>'
        f'<span style="right:{100 - 100 * ends / end:.2f}%">{ends:.0f} ms</span></div></td></tr>'
    )
    drawing = f'<table class="lanes"><tbody>{rows}</tbody></table>'
    shown = "".join(
        f"<li>{token(name)}<span>{moment:.0f}</span></li>"
        for name, moment in zip(text.tokens, text.times)
    )
    moments = text.times
    every = sorted(gap for each in record.texts for gap in gaps(each))
    count = len(moments) - 1
    lines = [
        (
            "ttft: time to first token",
            f"{moments[0]:.0f} \u2212 {text.due:.0f}",
            f"{text.ttft:.0f} ms",
        ),
        (
            "itl: between two tokens",
            ", ".join(f"{gap:.0f}" for gap in gaps(text)),
            f"{max(gaps(text)):.0f} at most",
        ),
        (
            "tpot: a token, on average",
            f"({moments[-1]:.0f} \u2212 {moments[0]:.0f}) / {count}",
            f"{text.tpot:.1f} ms",
        ),
    ]
    table = "".join(
        f'<tr><th scope="row">{name}</th><td>{how}</td><td class="value"><b>{value}</b></td></tr>'
        for name, how, value in lines
    )
    example = f'<ol class="chips">{shown}</ol><table class="sums"><tbody>{table}</tbody></table>'
    body = (
        f'<p class="title">{CLIENTS} clients, {len(record.texts)} texts</p>'
        f"{drawing}{legend}"
        + panel(
            f"The text of {'ABC'[text.client]} that was sent at {text.due:.0f} ms",
            example,
            "Each token with its time in ms. A step takes 4 ms, and 2 ms for each position.",
        )
    )
    middle = statistics.median(every)
    longest = max(gaps(text))
    waits = (
        f"While others\u2019 prompts are read it waits: a gap of {longest:.0f} ms, and its average "
        f"of {text.tpot:.1f} does not show it."
        if longest > 1.5 * middle
        else f"Prompts are short here, so the longest gap is {longest:.0f} ms, and the median of "
        f"all {middle:.0f}."
    )
    caption = f"A client asks again when it has its answer. {waits}"
    said = ", ".join(f"{moment:.0f}" for moment in moments)
    words = (
        f"Time lines of {CLIENTS} clients with {len(record.texts)} texts. One was sent at "
        f"{text.due:.0f} ms and its tokens came at {said}: time to first token {text.ttft:.0f}, "
        f"time per output token {text.tpot:.1f}, the largest gap {max(gaps(text)):.0f} ms."
    )
    return Drawing(body, caption, words)


def gaps(text: Text) -> list[float]:
    return [after - before for before, after in zip(text.times, text.times[1:])]


# 73


PICTURES = {  # slug of a lesson -> its picture
    "closed-loop": Picture(PROMPT, record_clients, draw_clients),
    "open-loop": Picture("Once upon a time", record_stall, draw_stall),
}

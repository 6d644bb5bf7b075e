"""Closed-loop and open-loop clients on a simulated clock."""

import asyncio
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace as Record

from benchmarks import client
from benchmarks.client import LoadResult, RequestOutput
from engine.engine import Engine
from engine.request import Request
from pictures import runs, scene
from sampling import SamplingParams


class Clock(selectors.DefaultSelector):
    """A simulated clock that jumps to the next timeout instead of waiting."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class Server:
    """An engine whose steps take simulated time.

    seconds: number of positions -> duration of a step. stall: start and end of a pause without
    steps.
    """

    def __init__(
        self, seconds: Callable[[int], float], stall: tuple[float, float] = (math.inf, math.inf)
    ):
        self.engine = Engine(runs.load("stories-draft"))
        self.seconds = seconds
        self.stall = stall
        self.exchanges: dict[Request, Exchange] = {}
        self.request_added = asyncio.Event()

    def run(self, load: Coroutine) -> LoadResult:
        """Return the result of a load: `client.open_loop` or `client.closed_loop`."""
        clock = Clock()

        def make_loop() -> asyncio.AbstractEventLoop:
            loop = asyncio.SelectorEventLoop(clock)
            loop.time = lambda: clock.now
            return loop

        async def main() -> tuple:
            working = asyncio.create_task(self.work())
            try:
                return await load
            finally:
                working.cancel()

        with asyncio.Runner(loop_factory=make_loop) as runner:
            exchanges, began, seconds = runner.run(main())
        return LoadResult([each.output() for each in exchanges], began, seconds, 0.0)

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.engine.busy:
                self.request_added.clear()
                await self.request_added.wait()
            begin, end = self.stall
            if begin <= loop.time() < end:
                await asyncio.sleep(end - loop.time())
            before = self.engine.num_computed_tokens
            events = self.engine.step()
            await asyncio.sleep(self.seconds(self.engine.num_computed_tokens - before))
            for event in events:
                self.exchanges[event.request].times.append(loop.time())
                if event.finish_reason:
                    self.exchanges[event.request].finished.set_result(None)
            for _ in range(9):  # let clients send new requests before the next step
                await asyncio.sleep(0)


class Exchange:
    """A request that replaces `client.Exchange` and needs no network."""

    def __init__(self, server: Server, body: dict):
        self.server = server
        self.ids = runs.encoding().encode(body["prompt"], allowed_special="all")
        self.params = SamplingParams(body["max_tokens"], ignore_eos=True)
        self.times: list[float] = []  # arrival of each token, seconds

    async def run(self, arrival_time: float) -> None:
        loop = asyncio.get_running_loop()
        self.arrival_time = arrival_time
        self.send_time = loop.time()
        self.finished = loop.create_future()
        self.server.exchanges[self.server.engine.add(self.ids, self.params)] = self
        self.server.request_added.set()
        await self.finished

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.arrival_time, self.send_time, self.times, self.params.max_new_tokens, "", ""
        )


def exchanges(server: Server, prompt: str, words, tokens) -> Iterator[Exchange]:
    """Return endless requests. words, tokens: as in `client.request_bodies`."""
    runs.encode(prompt, 20)
    return (Exchange(server, body) for body in client.request_bodies("0", words, tokens, prompt))


STALL = (2.0, 3.0)


def record_stall(prompt: str) -> Record:
    """Record both loops on a server that stalls; other steps take 10 ms."""

    def load(make: Callable[[Iterator[Exchange]], Coroutine]) -> LoadResult:
        server = Server(lambda _: 0.01, STALL)
        return server.run(make(exchanges(server, prompt, (5, 9), (5, 15))))

    arrival_times = client.poisson_arrivals(100, 20.0, "0")
    return Record(
        closed=load(lambda exchanges: client.closed_loop(exchanges, 2, 5.0)),
        open=load(
            lambda exchanges: client.open_loop(
                list(itertools.islice(exchanges, 100)), arrival_times
            )
        ),
    )


def draw_stall(record: Record) -> scene.Scene:
    panels = []
    late = []
    for name, load in (
        ("Closed loop, 2 clients", record.closed),
        ("Open loop, 20 requests a second", record.open),
    ):
        points = [(output.arrival_time, output.ttft) for output in load.outputs]
        late.append(f"{sum(ttft > 100 for _, ttft in points)} of {len(points)}")
        curve = scene.Curve("", points, "first", dots=True)
        marks = [scene.Mark("stall", x=STALL[0]), scene.Mark("", x=STALL[1])]
        axes = (
            scene.Axis("scheduled time, s"),
            scene.Axis("TTFT, ms", [(0, "0"), (500, "500"), (1000, "1,000")]),
        )
        panels.append(scene.Panel(f"{name}: {late[-1]} late", scene.Lines([curve], *axes, marks)))
    panels[-1].note = "Late: more than 100 ms. The clock is simulated; a step takes 10 ms."
    return scene.Scene(
        f"A server stalls for {STALL[1] - STALL[0]:g} s. In a closed loop clients wait and send "
        f"nothing meanwhile, so only {late[0]} requests are late. In an open loop requests keep "
        f"arriving, and {late[1]} are late.",
        *panels,
    )


PROMPT = "Once upon a time"
PICTURES = {"load-generator": scene.Picture(PROMPT, record_stall, draw_stall)}

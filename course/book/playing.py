"""The engine's player on a page: a run, recorded step by step, for `server/player.js`."""

import inspect
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

from book import recordings
from engine.engine import Engine
from engine.request import Request
from sampling import SamplingParams
from server.engine_thread import Text
from server.live import Frame, Live

PAGE = 4  # positions, so that a picture has several pages
USUAL = inspect.signature(Engine).parameters["page_size"].default
SMALL_PAGES = (
    f"A page has {PAGE} positions here, so that several can be seen; usually it has {USUAL}."
)


class Arrival(NamedTuple):
    """A request, and after how many steps it comes."""

    after: int
    prompt: list[int]
    params: SamplingParams
    salt: str = ""


class Run(NamedTuple):
    """What an engine did."""

    setup: dict[str, Any]  # as player.js has it
    frames: list[Frame]  # one a step
    requests: list[Request]  # number 1 first
    drafts: list[dict[int, list[int]]]  # of each step: number of a request -> what was drafted

    def texts(self) -> list[list[str]]:
        """The tokens of each request."""
        return [[recordings.text_of(id) for id in request.tokens] for request in self.requests]


class Stage:
    """In the place of an EngineThread: an engine whose frames are kept."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.texts: dict[Request, Text] = {}
        self.observers = []
        self.frames: list[Frame] = []

    def tell(self, _, frame: Frame) -> None:
        self.frames.append(frame)


def play(engine: Engine, arrivals: list[Arrival], *shows: str) -> Run:
    """Let an engine do all that arrives, the earliest first. shows: PARTS of player.js."""
    stage = Stage(engine)
    live = Live(stage, "")
    live.clear()
    live.watched = 1
    arrivals = list(arrivals)
    drafts = []
    while engine.busy or arrivals:
        while arrivals and arrivals[0].after <= engine.steps:
            _, *asked = arrivals.pop(0)
            number = len(stage.texts) + 1
            stage.texts[engine.add(*asked)] = Text(SimpleNamespace(name=""), 0, number)
        live.due = 0.0  # a frame for each step
        live.stepped(engine.step())
        drafts.append({stage.texts[work.request].number: work.drafts for work in engine.works})
    requests = list(stage.texts)
    scheduler = engine.scheduler
    setup = {
        "max_rows": scheduler.max_rows,
        "num_pages": scheduler.pool.num_pages,
        "page_size": scheduler.pool.page_size,
        "block_size": scheduler.block_size,
        "budget": min(scheduler.budget, max(work_of(frame, 0) for frame in stage.frames)),
        "gamma": engine.gamma if engine.drafter else 0,
        "recorded": True,
        "shows": shows,
        "most_pages": max(
            [1] + [len(row["pages"]) for frame in stage.frames for row in frame["running"]]
        ),
    }
    return Run(setup, stage.frames, requests, drafts)


def rows_of(frame: Frame) -> list[Frame]:
    return frame["running"] + frame["waiting"] + frame["over"]


def row_of(frame: Frame, number: int) -> Frame | None:
    """What a frame tells of a request; None if that is not there yet, or no more."""
    return next((row for row in rows_of(frame) if row["number"] == number), None)


def work_of(frame: Frame, number: int) -> int:
    """Positions that a step computed of a request; of all for number 0."""
    return sum(row["work"][0] for row in rows_of(frame) if number in (0, row["number"]))


SMALL = {"name", "drafts"}  # what the player does not need of a row


def player(run: Run, first: int = 0) -> str:
    """HTML for the player; without JavaScript it is not there. first: the frame it shows first."""
    frames = []
    for frame in run.frames:
        short = {"time": frame["steps"]}  # each step takes as long
        for kind in ("running", "waiting", "over"):
            rows = frame[kind]
            short[kind] = [{k: v for k, v in row.items() if k not in SMALL} for row in rows]
        frames.append(frame | short)
    texts = dict(enumerate(run.texts(), 1))
    data = {"setup": run.setup | {"texts": texts}, "frames": frames, "first": first}
    shown = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<section class="recorded" aria-label="The same run, step by step" hidden>'
        '<p class="title">Step by step: play it, or drag the slider</p><div></div>'
        f'<script type="application/json">{shown}</script></section>'
    )

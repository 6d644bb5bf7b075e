"""The embedded models, loaded once, and runs that several pictures share."""

import functools
from typing import Any, NamedTuple

import torch

from command_line import STORIES
from engine.engine import Engine
from engine.request import Request
from errors import UserError
from infer import generate
from loading.load import load_model
from loading.tokenizer import IncrementalDetokenizer, load_encoding
from model import Model
from native import BuildError, use_native
from pictures.scene import Player
from sampling import SamplingParams
from server.live import Frame, Live

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys and eat "
    "yummy food. One day, she found a big, red ball in her room."
)


def load(name: str = STORIES.name) -> Model:
    """An embedded model, in float32 on the CPU; the same one for each call."""
    return loaded(name)  # a default and its value would be two keys of a cache


@functools.cache
def loaded(name: str) -> Model:
    torch.set_num_threads(1)  # fast enough, and on a busy machine several wait for each other
    return load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)


@functools.cache
def native(name: str = STORIES.name, dtype: torch.dtype = torch.float32) -> Model:
    """A model that C computes. Raises UserError where its code cannot be compiled."""
    torch.set_num_threads(1)
    model = load_model(STORIES.with_name(name), dtype, "cpu")
    try:
        use_native(model)
    except BuildError as error:
        raise UserError(f"this picture needs compiled code: {error}") from None
    return model


@functools.cache
def encoding():
    """The vocabulary that all embedded models share."""
    return load_encoding(STORIES, load().config.vocab_size)


def encode(prompt: str, most: int, least: int = 1) -> list[int]:
    """The ids of a prompt. Raises UserError if they are fewer or more than a picture can show."""
    ids = encoding().encode(prompt, allowed_special="all")
    if not least <= len(ids) <= most:
        raise UserError(f"the prompt has {len(ids)} tokens; this picture shows {least} to {most}")
    return ids


def texts_of(ids: list[int]) -> list[str]:
    """The text of each token; a character cut into several stands whole at its last one."""
    stream = IncrementalDetokenizer(encoding())
    texts = [stream.add(id) for id in ids]
    if texts:
        texts[-1] += stream.end()
    return texts


def text_of(id: int) -> str:
    """The text of a token that stands alone; bytes of a part of a character as \\xc3."""
    return encoding().decode_single_token_bytes(id).decode("utf-8", "backslashreplace")


@torch.inference_mode()
def next_logits(text: list[int], name: str = STORIES.name) -> torch.Tensor:
    """The logits after a text, (vocab_size,)."""
    return load(name)(torch.tensor([text]))[0, -1]


def likely(probs: torch.Tensor, count: int) -> list[tuple[str, float]]:
    """The most likely tokens, best first."""
    best = probs.topk(count)
    return [(text_of(id), p) for id, p in zip(best.indices.tolist(), best.values.tolist())]


def write(ids: list[int], name: str = STORIES.name, **params) -> list[int]:
    """What `generate` writes after these ids. params: those of SamplingParams, and stride."""
    stride = params.pop("stride", None)
    steps = generate(load(name), [ids], SamplingParams(**params), stride=stride)
    return [token for (token,) in steps]


class Pass(NamedTuple):
    """What a call of `Model.hidden` computes."""

    tokens: list[list[int]]  # (B, T)
    positions: list[list[int]]  # of each token, (B, T)


def watched(name: str = STORIES.name) -> tuple[Model, list[Pass]]:
    """A model of its own, and a list that grows by each pass it computes."""
    model = load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)
    passes = []
    hidden = model.hidden

    def noted(tokens, positions, attend):
        passes.append(Pass(tokens.tolist(), positions.expand(tokens.shape).tolist()))
        return hidden(tokens, positions, attend)

    model.hidden = noted
    return model, passes


# The engine, step by step


class Arrival(NamedTuple):
    """A request, and after how many steps it comes."""

    after: int
    prompt: list[int]
    params: SamplingParams
    cache_salt: str = ""


class Run(NamedTuple):
    """What an engine did."""

    setup: dict[str, Any]  # as player.js has it
    frames: list[Frame]  # one a step, as server/live.py makes them
    requests: list[Request]  # number 1 first
    drafts: list[dict[int, list[int]]]  # of each step: number of a request -> what was drafted

    def texts(self) -> list[list[str]]:
        """The tokens of each request."""
        return [texts_of(request.tokens) for request in self.requests]


class Numbered(NamedTuple):
    """What Live reads of a text: the call it belongs to, and its numbers."""

    call: Any
    index: int
    number: int


class Stage:
    """Stands in for an EngineThread: Live hands its frames to `tell`."""

    name = ""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.texts: dict[Request, Numbered] = {}
        self.observers = []
        self.frames: list[Frame] = []

    def tell(self, _, frame: Frame) -> None:
        self.frames.append(frame)


def play(engine: Engine, arrivals: list[Arrival], *shows: str) -> Run:
    """Run all arrivals, the earliest first, to their end. shows: PARTS of player.js."""
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
            stage.texts[engine.add(*asked)] = Numbered(stage, 0, number)
        live.due = 0.0  # a frame for each step
        live.stepped(engine.step())
        drafts.append(
            {stage.texts[entry.request].number: entry.drafts for entry in engine.scheduled}
        )
    scheduler = engine.scheduler
    setup = {
        "max_num_seqs": scheduler.max_num_seqs,
        "num_pages": scheduler.pool.num_pages,
        "page_size": scheduler.pool.page_size,
        "block_size": scheduler.block_size,
        "max_num_batched_tokens": min(
            scheduler.token_budget, max(work_of(frame, 0) for frame in stage.frames)
        ),
        "gamma": engine.gamma if engine.drafter else 0,
        "recorded": True,
        "shows": shows,
        "most_pages": max(
            [1] + [len(row["pages"]) for frame in stage.frames for row in frame["running"]]
        ),
    }
    return Run(setup, stage.frames, list(stage.texts), drafts)


def rows_of(frame: Frame) -> list[Frame]:
    return frame["running"] + frame["waiting"] + frame["over"]


def row_of(frame: Frame, number: int) -> Frame | None:
    """What a frame tells of a request; None if that is not there yet, or no more."""
    return next((row for row in rows_of(frame) if row["number"] == number), None)


def work_of(frame: Frame, number: int) -> int:
    """Positions that a step computed of a request; of all for number 0."""
    return sum(row["work"][0] for row in rows_of(frame) if number in (0, row["number"]))


def seat(places: list[int | None], now: list[int]) -> list[int | None]:
    """Who has each row of a batch: those that stay keep theirs, a new one takes the first free."""
    places = [number if number in now else None for number in places]
    for number in now:
        if number not in places:
            places[places.index(None)] = number
    return places


UNUSED = {"name", "drafts"}  # what player.js does not need of a row


def player(run: Run, first: int = 0) -> Player:
    """The form that plays a run. first: the frame it shows first."""
    frames = []
    for frame in run.frames:
        short = {"time": frame["steps"]}  # each step takes as long
        for kind in ("running", "waiting", "over"):
            rows = frame[kind]
            short[kind] = [{k: v for k, v in row.items() if k not in UNUSED} for row in rows]
        frames.append(frame | short)
    return Player(run.setup | {"texts": dict(enumerate(run.texts(), 1))}, frames, first)

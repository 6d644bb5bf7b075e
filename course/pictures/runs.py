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
from server.live import EngineMonitor, Frame

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


def encode(prompt: str, max_tokens: int, min_tokens: int = 1) -> list[int]:
    """The ids of a prompt. Raises UserError if they are fewer or more than a picture can show."""
    ids = encoding().encode(prompt, allowed_special="all")
    if not min_tokens <= len(ids) <= max_tokens:
        raise UserError(
            f"the prompt has {len(ids)} tokens; this picture shows {min_tokens} to {max_tokens}"
        )
    return ids


def token_texts(ids: list[int]) -> list[str]:
    """The text of each token; a character cut into several stands whole at its last one."""
    stream = IncrementalDetokenizer(encoding())
    texts = [stream.add(id) for id in ids]
    if texts:
        texts[-1] += stream.end()
    return texts


def token_text(id: int) -> str:
    """The text of a token that stands alone; bytes of a part of a character as \\xc3."""
    return encoding().decode_single_token_bytes(id).decode("utf-8", "backslashreplace")


@torch.inference_mode()
def next_logits(text: list[int], name: str = STORIES.name) -> torch.Tensor:
    """The logits after a text, (vocab_size,)."""
    return load(name)(torch.tensor([text]))[0, -1]


def top_tokens(probs: torch.Tensor, count: int) -> list[tuple[str, float]]:
    """The most likely tokens, best first."""
    best = probs.topk(count)
    return [(token_text(id), p) for id, p in zip(best.indices.tolist(), best.values.tolist())]


def generate_tokens(ids: list[int], name: str = STORIES.name, **params) -> list[int]:
    """What `generate` writes after these ids. params: those of SamplingParams, and stride."""
    stride = params.pop("stride", None)
    steps = generate(load(name), [ids], SamplingParams(**params), stride=stride)
    return [token for (token,) in steps]


class Pass(NamedTuple):
    """What a call of `Model.hidden` computes."""

    tokens: list[list[int]]  # (B, T)
    positions: list[list[int]]  # of each token, (B, T)


def record_passes(name: str = STORIES.name) -> tuple[Model, list[Pass]]:
    """A model of its own, and a list that grows by each pass it computes."""
    model = load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)
    passes = []
    hidden = model.hidden

    def recorded_hidden(tokens, positions, attend):
        passes.append(Pass(tokens.tolist(), positions.expand(tokens.shape).tolist()))
        return hidden(tokens, positions, attend)

    model.hidden = recorded_hidden
    return model, passes


# The engine, step by step


class AddedRequest(NamedTuple):
    """A request, and after how many steps it comes."""

    arrival_step: int
    prompt: list[int]
    params: SamplingParams
    cache_salt: str = ""


class Trace(NamedTuple):
    """What an engine did."""

    setup: dict[str, Any]  # as player.js has it
    frames: list[Frame]  # one a step, as server/live.py makes them
    requests: list[Request]  # number 1 first
    drafts: list[dict[int, list[int]]]  # of each step: number of a request -> what was drafted

    def token_texts(self) -> list[list[str]]:
        """The tokens of each request."""
        return [token_texts(request.tokens) for request in self.requests]


class RequestInfo(NamedTuple):
    """What EngineMonitor reads of a text: the call it belongs to, and its numbers."""

    generation: Any
    index: int
    number: int


class FakeEngineThread:
    """Stands in for an EngineThread: EngineMonitor hands its frames to `call_in_event_loop`."""

    request_id = ""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.request_states: dict[Request, RequestInfo] = {}
        self.observers = []
        self.frames: list[Frame] = []

    def call_in_event_loop(self, _, frame: Frame) -> None:
        self.frames.append(frame)


def run_engine(engine: Engine, arrivals: list[AddedRequest], *shows: str) -> Trace:
    """Run all arrivals, the earliest first, to their end. shows: PARTS of player.js."""
    engine_thread = FakeEngineThread(engine)
    monitor = EngineMonitor(engine_thread, "")
    monitor.reset()
    monitor.num_subscribers = 1
    arrivals = list(arrivals)
    drafts = []
    while engine.busy or arrivals:
        while arrivals and arrivals[0].arrival_step <= engine.steps:
            _, *request_args = arrivals.pop(0)
            number = len(engine_thread.request_states) + 1
            engine_thread.request_states[engine.add(*request_args)] = RequestInfo(
                engine_thread, 0, number
            )
        monitor.due = 0.0  # a frame for each step
        monitor.on_step(engine.step())
        drafts.append(
            {
                engine_thread.request_states[entry.request].number: entry.drafts
                for entry in engine.scheduled
            }
        )
    scheduler = engine.scheduler
    setup = {
        "max_num_seqs": scheduler.max_num_seqs,
        "num_pages": scheduler.pool.num_pages,
        "page_size": scheduler.pool.page_size,
        "block_size": scheduler.block_size,
        "max_num_batched_tokens": min(
            scheduler.token_budget,
            max(num_scheduled_tokens(frame, 0) for frame in engine_thread.frames),
        ),
        "gamma": engine.gamma if engine.drafter else 0,
        "recorded": True,
        "shows": shows,
        "most_pages": max(
            [1]
            + [len(state["pages"]) for frame in engine_thread.frames for state in frame["running"]]
        ),
    }
    return Trace(setup, engine_thread.frames, list(engine_thread.request_states), drafts)


def requests_of(frame: Frame) -> list[Frame]:
    return frame["running"] + frame["waiting"] + frame["over"]


def find_request(frame: Frame, number: int) -> Frame | None:
    """What a frame tells of a request; None if that is not there yet, or no more."""
    return next((state for state in requests_of(frame) if state["number"] == number), None)


def num_scheduled_tokens(frame: Frame, number: int) -> int:
    """Positions that a step computed of a request; of all for number 0."""
    return sum(state["work"][0] for state in requests_of(frame) if number in (0, state["number"]))


def assign_slots(slots: list[int | None], now: list[int]) -> list[int | None]:
    """Who has each slot of a batch: those that stay keep theirs, a new one takes the first free."""
    slots = [number if number in now else None for number in slots]
    for number in now:
        if number not in slots:
            slots[slots.index(None)] = number
    return slots


UNUSED = {"name", "drafts"}  # what player.js does not need of a request


def player(run: Trace, first: int = 0) -> Player:
    """The form that plays a run. first: the frame it shows first."""
    frames = []
    for frame in run.frames:
        short = {"time": frame["steps"]}  # each step takes as long
        for kind in ("running", "waiting", "over"):
            states = frame[kind]
            short[kind] = [{k: v for k, v in state.items() if k not in UNUSED} for state in states]
        frames.append(frame | short)
    return Player(run.setup | {"texts": dict(enumerate(run.token_texts(), 1))}, frames, first)

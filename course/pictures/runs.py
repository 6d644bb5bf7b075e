"""The embedded models, loaded once, and helpers to run and record them."""

import functools
from typing import Any, NamedTuple

import torch

from command_line.options import STORIES
from engine.engine import Engine
from engine.request import Request
from errors import UserError
from infer import generate
from loading.load import load_model
from model import Model
from native import BuildError, use_native
from pictures.scene import Player
from sampling import SamplingParams
from server.live import EngineMonitor, Frame
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import load_encoding

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys and eat "
    "yummy food. One day, she found a big, red ball in her room."
)


def load(name: str = STORIES.name) -> Model:
    """Return an embedded model in float32 on the CPU, the same object on each call."""
    return loaded(name)  # a cache here would key load() and load(STORIES.name) separately


@functools.cache
def loaded(name: str) -> Model:
    torch.set_num_threads(1)  # fast enough; on a busy machine threads wait for each other
    return load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)


@functools.cache
def native(name: str = STORIES.name, dtype: torch.dtype = torch.float32) -> Model:
    """Return a model with the native backend. Raises UserError if it cannot be compiled."""
    torch.set_num_threads(1)
    model = load_model(STORIES.with_name(name), dtype, "cpu")
    try:
        use_native(model)
    except BuildError as error:
        raise UserError(f"this picture needs the native backend: {error}") from None
    return model


@functools.cache
def encoding():
    """Return the encoding that all embedded models share."""
    return load_encoding(STORIES, load().config.vocab_size)


def encode(prompt: str, max_tokens: int, min_tokens: int = 1) -> list[int]:
    """Return the token ids of a prompt. Raises UserError if a picture cannot show their number."""
    ids = encoding().encode(prompt, allowed_special="all")
    if not min_tokens <= len(ids) <= max_tokens:
        raise UserError(
            f"the prompt has {len(ids)} tokens; this picture shows {min_tokens} to {max_tokens}"
        )
    return ids


def token_texts(ids: list[int]) -> list[str]:
    """Return the text of each token; a character split across tokens appears at its last one."""
    stream = IncrementalDetokenizer(encoding())
    texts = [stream.add(id) for id in ids]
    if texts:
        texts[-1] += stream.end()
    return texts


def token_text(id: int) -> str:
    """Return the text of a single token, with the bytes of a partial character as \\xc3."""
    return encoding().decode_single_token_bytes(id).decode("utf-8", "backslashreplace")


@torch.inference_mode()
def next_logits(text: list[int], name: str = STORIES.name) -> torch.Tensor:
    """Return the logits after the last token, (vocab_size,)."""
    return load(name)(torch.tensor([text]))[0, -1]


def top_tokens(probs: torch.Tensor, count: int) -> list[tuple[str, float]]:
    """Return the most likely tokens and their probabilities, best first."""
    best = probs.topk(count)
    return [(token_text(id), p) for id, p in zip(best.indices.tolist(), best.values.tolist())]


def generate_tokens(ids: list[int], name: str = STORIES.name, **params) -> list[int]:
    """Return the tokens `generate` yields after ids. params: fields of SamplingParams, stride."""
    stride = params.pop("stride", None)
    steps = generate(load(name), [ids], SamplingParams(**params), stride=stride)
    return [token for (token,) in steps]


class Pass(NamedTuple):
    """The input of one call of `Model.hidden`."""

    tokens: list[list[int]]  # (B, T)
    positions: list[list[int]]  # (B, T)


def record_passes(name: str = STORIES.name) -> tuple[Model, list[Pass]]:
    """Return a fresh model and a list to which each of its forward passes is appended."""
    model = load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)
    passes = []
    hidden = model.hidden

    def recorded_hidden(tokens, positions, attend):
        passes.append(Pass(tokens.tolist(), positions.expand(tokens.shape).tolist()))
        return hidden(tokens, positions, attend)

    model.hidden = recorded_hidden
    return model, passes


# The engine, step by step.


class AddedRequest(NamedTuple):
    """A request and the engine step at which it arrives."""

    arrival_step: int
    prompt: list[int]
    params: SamplingParams
    cache_salt: str = ""


class Trace(NamedTuple):
    """The recorded run of an engine."""

    setup: dict[str, Any]  # in the format of player.js
    frames: list[Frame]  # one per step, from EngineMonitor in server/live.py
    requests: list[Request]  # in the order of their numbers, from 1
    drafts: list[dict[int, list[int]]]  # per step: request number -> draft tokens

    def token_texts(self) -> list[list[str]]:
        """Return the token texts of each request."""
        return [token_texts(request.tokens) for request in self.requests]


class RequestInfo(NamedTuple):
    """The state that EngineMonitor reads of a request: its generation and its numbers."""

    generation: Any
    index: int
    number: int


class FakeEngineThread:
    """An EngineThread substitute; EngineMonitor passes its frames to `call_in_event_loop`."""

    request_id = ""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.request_states: dict[Request, RequestInfo] = {}
        self.observers = []
        self.frames: list[Frame] = []

    def call_in_event_loop(self, _, frame: Frame) -> None:
        self.frames.append(frame)


def run_engine(engine: Engine, arrivals: list[AddedRequest], *shows: str) -> Trace:
    """Run all requests until they finish. arrivals: earliest first. shows: PARTS of player.js."""
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
        monitor.due = 0.0  # make a frame for each step
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
        "block_size": scheduler.context_window.block_size,
        "max_num_batched_tokens": min(
            scheduler.token_budget,
            max(num_scheduled_tokens(frame, 0) for frame in engine_thread.frames),
        ),
        "gamma": engine.config.gamma if engine.drafter else 0,
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
    """Return the state of a request in a frame; None before it arrives or after it has left."""
    return next((state for state in requests_of(frame) if state["number"] == number), None)


def num_scheduled_tokens(frame: Frame, number: int) -> int:
    """Return how many positions a step computed for a request; number 0 counts all requests."""
    return sum(state["work"][0] for state in requests_of(frame) if number in (0, state["number"]))


def assign_slots(slots: list[int | None], now: list[int]) -> list[int | None]:
    """Assign requests to batch slots: running ones keep theirs, new ones take the first free."""
    slots = [number if number in now else None for number in slots]
    for number in now:
        if number not in slots:
            slots[slots.index(None)] = number
    return slots


UNUSED = {"name", "drafts"}  # fields of a request that player.js does not need


def player(run: Trace, first: int = 0) -> Player:
    """Return a Player of a run. first: index of the frame shown first."""
    frames = []
    for frame in run.frames:
        short = {"time": frame["steps"]}  # every step takes one unit
        for kind in ("running", "waiting", "over"):
            states = frame[kind]
            short[kind] = [{k: v for k, v in state.items() if k not in UNUSED} for state in states]
        frames.append(frame | short)
    return Player(run.setup | {"texts": dict(enumerate(run.token_texts(), 1))}, frames, first)

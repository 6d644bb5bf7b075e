"""Engine in a background thread, with an asyncio interface for requests."""

import asyncio
import contextlib
import functools
import itertools
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from constraints.matcher import Matcher
from engine.engine import Engine
from engine.request import Event, Request
from errors import UserError
from parallel.ranks import RankError
from server.backend import ConstraintFailed, EngineDead, GenerateInput, RequestFailed, Update
from server.structured_output import (
    MaskTimeBudget,
    QueueFull,
    TimedMatcher,
    make_matcher_in_thread,
    stall_reason,
)
from text.tokenizer import Encoding

STALLED_SECONDS = 10  # duration of a step after which the engine counts as stalled


class Observer(Protocol):
    """An observer of steps and aborted requests, called in the engine's thread.

    `EngineThread.request_states` still has the requests during the call.
    """

    def on_step(self, events: list[Event]) -> None: ...

    def on_abort(self, request: Request) -> None: ...


class Generation:
    """One call of `generate`: its requests, and the updates that the reader has not fetched.

    matcher: keeps the compiled constraint alive, if there is one.
    """

    def __init__(self, inputs: GenerateInput, matcher: Matcher | None):
        self.request_id = inputs.request_id
        self.matcher = matcher
        self.arrival_time = time.perf_counter()
        self.requests: list[Request] = []  # only for the engine's thread
        # The fields below are only for the event loop.
        self.num_requests = len(inputs.prompts)
        self.num_unfinished = self.num_requests
        self.waiting_tokens = inputs.num_tokens  # prompt tokens; 0 from the first update on
        self.updates: dict[int, list[Update]] = {}  # by index: not fetched yet
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def add_update(self, index: int, update: Update) -> None:
        """Queue new output of a sequence for the reader."""
        self.waiting_tokens = 0
        self.num_unfinished -= update.finish_reason is not None
        self.updates.setdefault(index, []).append(update)
        self.changed.set()

    def fetch(self) -> dict[int, Update]:
        """Return and clear the new output of each sequence, joined into one update each."""
        updates = {index: Update.join(parts) for index, parts in self.updates.items()}
        self.updates = {}
        self.changed.clear()
        return updates

    def fail(self, error: Exception) -> None:
        """Set the error that ends the generation, unless all its sequences are finished."""
        if self.num_unfinished:
            self.error = error
            self.changed.set()


@dataclass
class RequestState:
    """Where a request's updates are delivered."""

    generation: Generation
    index: int
    number: int  # serial number of the request in this engine
    num_chars_sent: int = 0


class EngineThread:
    """An engine that runs in its own thread, for readers in an event loop.

    make_engine: returns the engine. It is called in the thread, because it may take a long time.
    max_waiting: maximum number of requests in addition to max_num_seqs.
    max_waiting_tokens: maximum total of prompt tokens of calls that have no output yet.
    clock: returns seconds, to measure the duration of a step.
    Only this thread uses the engine, so it needs no lock, and no reader waits for a step. Requests
    enter through a queue, and after each step the new output goes to the event loop.
    `start` it, await `ready`, and `close` it at the end.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        max_waiting: int = 1024,
        max_waiting_tokens: int = 2**20,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.make_engine = make_engine
        self.clock = clock
        self.busy_since: float | None = None  # start of the current step or command; None: idle
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.engine: Engine | None = None  # None while the model loads
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.request_states: dict[Request, RequestState] = {}  # only for the engine's thread
        self.observers: list[Observer] = []
        self.request_numbers = itertools.count(1)
        self.generations: set[Generation] = set()  # with a reader; only for the event loop
        # Why the engine is not running; None while it is.
        self.error: str | None = "the model is still loading"
        # A daemon thread, so that the process can exit during a step.
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which makes the engine. The future `ready` resolves once it exists."""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()
        self.thread.start()

    def stop(self) -> None:
        """End the thread after the current step; no request continues."""
        self.commands.put(None)

    async def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self.stop()
        await asyncio.to_thread(self.thread.join)

    @property
    def config(self):
        """Return the configuration of the engine's model."""
        return self.engine.model.config

    @property
    def encoding(self) -> Encoding:
        return self.engine.encoding

    @property
    def stall_reason(self) -> str | None:
        """Return why a live engine seems to be stuck; None if it does not."""
        busy_since = self.busy_since
        if busy_since is not None and self.clock() - busy_since > STALLED_SECONDS:
            return f"no step has ended for more than {STALLED_SECONDS} s"
        return stall_reason()

    @property
    def num_open_requests(self) -> int:
        """Return the number of requests of open calls, finished ones included."""
        return sum(generation.num_requests for generation in self.generations)

    @property
    def waiting_tokens(self) -> int:
        """Return the total of prompt tokens of calls that have no output yet."""
        return sum(generation.waiting_tokens for generation in self.generations)

    def admit(self, num_requests: int, num_tokens: int = 0) -> None:
        """Check that the queue has room for more requests, with `num_tokens` prompt tokens in all.

        Raises QueueFull if it has no room now, UserError if it never could, and EngineDead.
        """
        if self.error:
            raise EngineDead(self.error)
        max_requests = self.engine.scheduler.max_num_seqs + self.max_waiting
        limits = (
            ("sequences", num_requests, self.num_open_requests, max_requests),
            ("prompt tokens", num_tokens, self.waiting_tokens, self.max_waiting_tokens),
        )
        for unit, new, current, limit in limits:
            if new > limit:
                raise UserError(f"the request has {new} {unit}: at most {limit} are allowed")
            if current + new > limit:
                raise QueueFull(f"the queue is full ({current} {unit}): try again later")

    async def generate(
        self, inputs: GenerateInput, matcher: Matcher | None = None
    ) -> AsyncIterator[dict[int, Update]]:
        """Yield new output of the prompts until all are finished.

        Each item has an Update for one or more prompts, by their indices. Updates that are not
        fetched in time are joined. matcher: as in Backend.
        Raises the errors of `admit` before any work; EngineDead may also come later. Raises what
        `Engine.add` raises, RequestFailed after the last update of a request that fails, and
        QueueFull if the constraints of all requests take too much memory or time.
        Unfinished requests are aborted when the generator closes and count towards the limits until
        then. A reader that may leave early must close it: `async with contextlib.aclosing(...)`.
        """
        self.admit(len(inputs.prompts), inputs.num_tokens)
        generation = Generation(inputs, matcher)
        self.generations.add(generation)
        try:
            if matcher is None and inputs.params:
                # Not in the engine's thread, where compiling would block all requests.
                generation.matcher = await make_matcher_in_thread(
                    inputs.params[0], self.encoding, self.config
                )
            self.commands.put(functools.partial(self.add, generation, inputs))
            while generation.num_unfinished or generation.updates:
                await generation.changed.wait()
                updates = generation.fetch()
                if updates:
                    yield updates
                if generation.error:
                    raise generation.error
        finally:
            self.generations.remove(generation)
            if generation.num_unfinished:
                self.commands.put(functools.partial(self.abort, generation))

    def deliver_outputs(self, outputs: list[tuple[RequestState, Update, Exception | None]]) -> None:
        """Deliver the output of a step to its readers, in the event loop."""
        for state, update, error in outputs:
            state.generation.add_update(state.index, update)
            if error:
                state.generation.fail(error)

    def set_ready(self, error: Exception | None = None) -> None:
        """Report, in the event loop, that the engine is loaded or failed to load."""
        if self.ready.done():  # the waiting task was cancelled
            return
        if error:
            self.ready.set_exception(error)
        else:
            self.error = None
            self.ready.set_result(None)

    def mark_dead(self, error: str) -> None:
        """Record why the engine has ended, and fail all readers, in the event loop."""
        self.error = error
        for generation in self.generations:
            generation.fail(EngineDead(error))

    # The methods below run in the engine's thread.

    def call_in_event_loop(self, function: Callable, *args) -> None:
        """Schedule a function in the event loop, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def run(self) -> None:
        """Run commands and engine steps until stopped, or until the engine fails."""
        try:
            self.engine = self.make_engine()
        except BaseException as error:
            if not isinstance(error, Exception):  # raised in the event loop, it would end the loop
                error = RuntimeError(repr(error))
            self.call_in_event_loop(self.set_ready, error)
            return
        self.call_in_event_loop(self.set_ready)
        reason = "the server is shutting down"
        try:
            while self.run_commands():
                self.busy_since = self.clock()
                self.publish_events(self.engine.step())
        except RankError as error:
            reason = str(error)
        except BaseException as error:
            traceback.print_exc()
            reason = f"the engine has failed: {type(error).__name__}: {error}"
        self.call_in_event_loop(self.mark_dead, reason)
        self.engine.close()

    def run_commands(self) -> bool:
        """Run queued commands, and wait for more while idle; return False on shutdown."""
        while not self.engine.busy or not self.commands.empty():
            self.busy_since = None
            command = self.commands.get()
            if command is None:
                return False
            self.busy_since = self.clock()
            command()
        return True

    def add(self, generation: Generation, inputs: GenerateInput) -> None:
        """Add the requests of a call to the engine, all or none."""
        finished = []
        budget = MaskTimeBudget()
        try:
            for index, (prompt, params) in enumerate(
                zip(inputs.prompts, inputs.params, strict=True)
            ):
                request = self.engine.add(
                    prompt, params, cache_salt=inputs.cache_salt, adapter=inputs.adapter
                )
                if request.matcher and request.matcher.grammar:
                    request.matcher = TimedMatcher(request.matcher, budget)
                generation.requests.append(request)
                state = RequestState(generation, index, next(self.request_numbers))
                if request.finish_reason:  # zero tokens requested: no step emits an event
                    scored = tuple(request.prompt_logprobs)
                    update = Update((), "", (), request.finish_reason, prompt_logprobs=scored)
                    finished.append((state, update, None))
                else:
                    self.request_states[request] = state
        except Exception as error:  # fails only this call
            self.abort(generation, notify=False)
            self.call_in_event_loop(generation.fail, error)
        else:
            if finished:
                self.call_in_event_loop(self.deliver_outputs, finished)

    def abort(self, generation: Generation, notify: bool = True) -> None:
        """Abort the unfinished requests of a call. notify: whether to call observers."""
        for request in generation.requests:
            if request in self.request_states:
                self.engine.abort(request)
                for observer in self.observers if notify else ():
                    observer.on_abort(request)
                del self.request_states[request]

    def publish_events(self, events: list[Event]) -> None:
        """Send all output of a step to the event loop in one call."""
        for observer in self.observers:
            observer.on_step(events)
        outputs = []
        for event in events:
            request, tokens, reason = event[:3]
            state = self.request_states[request]
            if reason:
                del self.request_states[request]
            text = request.text[state.num_chars_sent :]
            state.num_chars_sent += len(text)
            logprobs = request.logprobs[len(request.logprobs) - len(tokens) :]
            error = event_error(event)
            first = len(request.output) == len(tokens) and not error
            update = Update(
                tuple(tokens),
                text,
                tuple(logprobs),
                None if error else reason,
                request.num_cached_tokens,
                tuple(request.prompt_logprobs) if first else (),
            )
            outputs.append((state, update, error))
        if outputs:  # prefill chunks emit none
            self.call_in_event_loop(self.deliver_outputs, outputs)


def event_error(event: Event) -> Exception | None:
    """Return the error that an event reports to the request's reader, if any."""
    if not event.error:
        return None
    if not event.constraint_failed:
        return RequestFailed(event.error)
    if getattr(event.request.matcher, "busy", False):  # masks of other requests are slow
        return QueueFull(event.error)
    return ConstraintFailed(event.error)

"""The engine in a thread of its own, and how an event loop asks it for texts."""

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
from typing import NamedTuple, Protocol

from constraints import GrammarMatcher, Matcher
from engine.engine import Engine
from engine.request import Event, Request
from errors import UserError
from loading.tokenizer import Encoding
from parallel.ranks import RankError
from sampling import SamplingParams, TokenLogprob
from server.structured_output import (
    MaskTimeBudget,
    QueueFull,
    TimedMatcher,
    compile_matcher,
    run_in_compile_pool,
    stall_reason,
)

STALLED_SECONDS = 10  # without the end of a step, after which the engine counts as stuck


class EngineDead(Exception):
    """There is no engine, any more or yet."""


class RequestFailed(Exception):
    """A text could not be computed."""


class ConstraintFailed(RequestFailed):
    """A text could not be computed because of the constraint that its request asks for."""


class Update(NamedTuple):
    """What is new of a text. It never changes; the Request that it comes from does."""

    tokens: tuple[int, ...]  # EOS included
    text: str
    logprobs: tuple[TokenLogprob, ...]  # of each token, if the parameters ask for them
    finish_reason: str | None  # "stop" or "length" if this is the last

    @staticmethod
    def join(parts: list["Update"]) -> "Update":
        """What is new of one text, part after part, as one."""
        if len(parts) == 1:
            return parts[0]
        tokens = itertools.chain.from_iterable(part.tokens for part in parts)
        text = "".join(part.text for part in parts)
        logprobs = itertools.chain.from_iterable(part.logprobs for part in parts)
        return Update(tuple(tokens), text, tuple(logprobs), parts[-1].finish_reason)


class Observer(Protocol):
    """What hears, in the engine's thread, of each step and of each text that is aborted.

    `EngineThread.request_states` still has the requests then.
    """

    def on_step(self, events: list[Event]) -> None: ...

    def on_abort(self, request: Request) -> None: ...


class Generation:
    """Texts that are asked for together, and what is new of them."""

    def __init__(self, num_requests: int, num_tokens: int, request_id: str):
        self.request_id = request_id
        self.arrival_time = time.perf_counter()
        self.requests: list[Request] = []  # the engine's thread alone has them
        self.matcher: Matcher | None = None  # holds the compiled constraint of the texts
        # All else is the event loop's.
        self.num_requests = num_requests
        self.num_unfinished = num_requests
        self.waiting_tokens = num_tokens  # of prompts, until a text begins
        self.updates: dict[int, list[Update]] = {}  # by text: not fetched yet
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def add_update(self, index: int, update: Update) -> None:
        """Something is new of a text."""
        self.waiting_tokens = 0
        self.num_unfinished -= update.finish_reason is not None
        self.updates.setdefault(index, []).append(update)
        self.changed.set()

    def fetch(self) -> dict[int, Update]:
        """What is new since the last time; several updates if the engine is faster."""
        updates = {index: Update.join(parts) for index, parts in self.updates.items()}
        self.updates = {}
        self.changed.clear()
        return updates

    def fail(self, error: Exception) -> None:
        """Nothing more comes but this error, unless all is there."""
        if self.num_unfinished:
            self.error = error
            self.changed.set()


@dataclass
class RequestState:
    """Where to send what is new of a request."""

    generation: Generation
    index: int
    number: int  # of this engine's texts
    num_chars_sent: int = 0  # characters


class EngineThread:
    """An engine that computes in a thread of its own, for readers in an event loop.

    make_engine: makes the engine; it is called in the thread, because it may take long.
    max_waiting: how many texts there may be besides those that can run at once.
    max_waiting_tokens: in all prompts together for which no text has begun.
    clock: returns seconds; it tells how long a step takes.
    The engine is that thread's alone. So there is no lock, and no reader waits for a step: requests
    go in through a queue, and after each step all that is new goes to the event loop.
    Use it as an asynchronous context manager.
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
        self.busy_since: float | None = None  # when the thread began what it does; None: it waits
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.engine: Engine | None = None  # None until it is made
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.request_states: dict[Request, RequestState] = {}  # the engine's thread alone has it
        self.observers: list[Observer] = []
        self.request_numbers = itertools.count(1)
        self.generations: set[Generation] = set()  # that have a reader; the event loop's
        # Why there is no engine, None while there is one.
        self.error: str | None = "the model is being loaded"
        # A daemon: the process does not wait for a step when it exits.
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    async def __aenter__(self) -> "EngineThread":
        """Start, and wait for the engine. Raises what `make_engine` raises."""
        self.start()
        try:
            await self.ready
        except asyncio.CancelledError:  # the thread ends when the engine is made
            self.stop()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to make the engine. `ready` is a future for when that is done."""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end after the step that is being computed; no text goes on."""
        self.commands.put(None)

    async def close(self) -> None:
        """Let the thread end, and wait for it."""
        self.stop()
        await asyncio.to_thread(self.thread.join)

    @property
    def config(self):
        """The configuration of the engine's model."""
        return self.engine.model.config

    @property
    def encoding(self) -> Encoding:
        return self.engine.encoding

    @property
    def stall_reason(self) -> str | None:
        """Why a text may never come although there is an engine; None if nothing says so."""
        busy_since = self.busy_since
        if busy_since is not None and self.clock() - busy_since > STALLED_SECONDS:
            return f"no step has ended for more than {STALLED_SECONDS} s"
        return stall_reason()

    @property
    def num_unfinished_requests(self) -> int:
        """Texts of calls that are not closed: one that is over counts until its reader is done."""
        return sum(generation.num_requests for generation in self.generations)

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the prompts of calls of which no text has begun."""
        return sum(generation.waiting_tokens for generation in self.generations)

    def admit(self, num_requests: int, num_tokens: int = 0) -> None:
        """Check that there is room for more texts, with this number of tokens in their prompts.

        Raises QueueFull if there is none now, UserError if there never is, and EngineDead.
        """
        if self.error:
            raise EngineDead(self.error)
        limit = self.engine.scheduler.max_num_seqs + self.max_waiting
        limits = (
            ("texts", num_requests, self.num_unfinished_requests, limit),
            ("tokens of prompts", num_tokens, self.waiting_tokens, self.max_waiting_tokens),
        )
        for unit, new, current, limit in limits:
            if new > limit:
                raise UserError(f"{new} {unit} in one request; there is room for {limit}")
            if current + new > limit:
                raise QueueFull(f"the queue is full, with {current} {unit}: try again")

    async def generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str = "",
        request_id: str = "",
        adapter: str = "",
    ) -> AsyncIterator[dict[int, Update]]:
        """What is new of the texts of these prompts, again and again until all are over.

        Each time there is an Update for one or more of them, by their places in `prompts`. What is
        not fetched in time is joined into one. Raises what `Engine.add` raises, RequestFailed if
        one of the texts fails, after what is new of it, QueueFull where the constraints of all
        texts take too much memory or time, and, before anything is done, what `admit` raises;
        EngineDead later, too. However it ends, texts that are not over are aborted. Where you may
        leave it before, close it: `async with contextlib.aclosing(...)`. Its texts count until
        then.
        """
        num_tokens = sum(map(len, prompts))
        self.admit(len(prompts), num_tokens)
        generation = Generation(len(prompts), num_tokens, request_id)
        self.generations.add(generation)
        try:
            if params and params[0].constraint_field:  # the engine's thread compiles none
                arguments = params[0], self.encoding, self.config
                generation.matcher = await run_in_compile_pool(compile_matcher, *arguments)
            self.commands.put(
                functools.partial(self.add, generation, prompts, params, cache_salt, adapter)
            )
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
        """In the event loop: hand out what a step has brought."""
        for state, update, error in outputs:
            state.generation.add_update(state.index, update)
            if error:
                state.generation.fail(error)

    def set_ready(self, error: Exception | None = None) -> None:
        """In the event loop: the engine is made, or could not be."""
        if self.ready.done():  # cancelled: the waiting task has gone
            return
        if error:
            self.ready.set_exception(error)
        else:
            self.error = None
            self.ready.set_result(None)

    def mark_dead(self, error: str) -> None:
        """In the event loop: there is no engine any more; each reader gets the error."""
        self.error = error
        for generation in self.generations:
            generation.fail(EngineDead(error))

    # All below is for the engine's thread.

    def call_in_event_loop(self, function: Callable, *args) -> None:
        """Have the event loop call a function, if it has not ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def run(self) -> None:
        """Do what is asked for, and compute, until told to end, or all of it fails."""
        try:
            self.engine = self.make_engine()
        except BaseException as error:
            if not isinstance(error, Exception):  # no future takes it, and readers must hear
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

    def run_commands(self) -> bool:
        """Do what is asked for; with nothing to compute, wait for it. False if that is to end."""
        while not self.engine.busy or not self.commands.empty():
            self.busy_since = None
            command = self.commands.get()
            if command is None:
                return False
            self.busy_since = self.clock()
            command()
        return True

    def add(
        self,
        generation: Generation,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str,
        adapter: str,
    ) -> None:
        """Queue the texts of a call, all or none."""
        finished = []
        budget = MaskTimeBudget()
        try:
            for index, (prompt, sampling_params) in enumerate(zip(prompts, params, strict=True)):
                request = self.engine.add(prompt, sampling_params, cache_salt, adapter)
                if isinstance(request.matcher, GrammarMatcher):
                    request.matcher = TimedMatcher(request.matcher, budget)
                generation.requests.append(request)
                state = RequestState(generation, index, next(self.request_numbers))
                if request.finish_reason:  # no tokens are wanted, and no event comes
                    finished.append((state, Update((), "", (), request.finish_reason), None))
                else:
                    self.request_states[request] = state
        except Exception as error:  # of this call alone
            self.abort(generation, notify=False)
            self.call_in_event_loop(generation.fail, error)
        else:
            if finished:
                self.call_in_event_loop(self.deliver_outputs, finished)

    def abort(self, generation: Generation, notify: bool = True) -> None:
        """End the texts of a call that are not over. notify: the observers, too."""
        for request in generation.requests:
            if request in self.request_states:
                self.engine.abort(request)
                for observer in self.observers if notify else ():
                    observer.on_abort(request)
                del self.request_states[request]

    def publish_events(self, events: list[Event]) -> None:
        """Tell the event loop what a step has brought, all at once."""
        for observer in self.observers:
            observer.on_step(events)
        outputs = []
        for request, tokens, reason, message, constraint_failed in events:
            state = self.request_states[request]
            if reason:
                del self.request_states[request]
            new = request.text[state.num_chars_sent :]
            state.num_chars_sent += len(new)
            logprobs = request.logprobs[len(request.logprobs) - len(tokens) :]
            error = None
            if message:
                error = ConstraintFailed(message) if constraint_failed else RequestFailed(message)
                if constraint_failed and getattr(request.matcher, "busy", False):  # with others'
                    error = QueueFull(message)
            update = Update(tuple(tokens), new, tuple(logprobs), None if error else reason)
            outputs.append((state, update, error))
        if outputs:  # chunks of prompts bring none
            self.call_in_event_loop(self.deliver_outputs, outputs)

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
from server.forms import Budget, QueueFull, TimedMatcher, compile_form, in_pool, stuck

STALLED_SECONDS = 10  # without the end of a step, after which the engine counts as stuck


class EngineDead(Exception):
    """There is no engine, any more or yet."""


class TextFailed(Exception):
    """A text could not be computed."""


class FormFailed(TextFailed):
    """A text could not be computed because of the form that its request asks for."""


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

    `EngineThread.texts` still has the requests then.
    """

    def stepped(self, events: list[Event]) -> None: ...

    def aborted(self, request: Request) -> None: ...


class Call:
    """Texts that are asked for together, and what is new of them."""

    def __init__(self, texts: int, tokens: int, name: str):
        self.name = name
        self.asked = time.perf_counter()
        self.requests: list[Request] = []  # the engine's thread alone has them
        self.matcher: Matcher | None = None  # holds the compiled form of the texts
        # All else is the event loop's.
        self.texts = texts
        self.left = texts  # that are not over
        self.waiting = tokens  # of prompts, until a text begins
        self.updates: dict[int, list[Update]] = {}  # by text: not fetched yet
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def update(self, index: int, update: Update) -> None:
        """Something is new of a text."""
        self.waiting = 0
        self.left -= update.finish_reason is not None
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
        if self.left:
            self.error = error
            self.changed.set()


@dataclass
class Text:
    """Where to send what is new of a request."""

    call: Call
    index: int
    number: int  # of this engine's texts
    sent: int = 0  # characters


class EngineThread:
    """An engine that computes in a thread of its own, for readers in an event loop.

    make: a function that makes the engine; it is called in the thread, because it may take long.
    max_waiting: how many texts there may be besides those that can run at once.
    max_waiting_tokens: in all prompts together for which no text has begun.
    clock: returns seconds; it tells how long a step takes.
    The engine is that thread's alone. So there is no lock, and no reader waits for a step: requests
    go in through a queue, and after each step all that is new goes to the event loop.
    Use it as an asynchronous context manager.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        max_waiting: int = 1024,
        max_waiting_tokens: int = 2**20,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.make = make
        self.clock = clock
        self.began: float | None = None  # when the thread began what it does; None: it waits
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.engine: Engine | None = None  # None until it is made
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.texts: dict[Request, Text] = {}  # unfinished ones; the engine's thread alone has it
        self.observers: list[Observer] = []
        self.numbers = itertools.count(1)
        self.calls: set[Call] = set()  # that have a reader; the event loop's
        # Why there is no engine, None while there is one.
        self.error: str | None = "the model is being loaded"
        # A daemon: the process does not wait for a step when it exits.
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    async def __aenter__(self) -> "EngineThread":
        """Start, and wait for the engine. Raises what `make` raises."""
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
    def stuck(self) -> str | None:
        """Why a text may never come although there is an engine; None if nothing says so."""
        began = self.began
        if began is not None and self.clock() - began > STALLED_SECONDS:
            return f"no step has ended for more than {STALLED_SECONDS} s"
        return stuck()

    @property
    def unfinished(self) -> int:
        """Texts of calls that are not closed: one that is over counts until its reader is done."""
        return sum(call.texts for call in self.calls)

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the prompts of calls of which no text has begun."""
        return sum(call.waiting for call in self.calls)

    def admit(self, texts: int, tokens: int = 0) -> None:
        """Check that there is room for more texts, with this number of tokens in their prompts.

        Raises QueueFull if there is none now, UserError if there never is, and EngineDead.
        """
        if self.error:
            raise EngineDead(self.error)
        most = self.engine.scheduler.max_num_seqs + self.max_waiting
        limits = (
            ("texts", texts, self.unfinished, most),
            ("tokens of prompts", tokens, self.waiting_tokens, self.max_waiting_tokens),
        )
        for what, new, present, most in limits:
            if new > most:
                raise UserError(f"{new} {what} in one request; there is room for {most}")
            if present + new > most:
                raise QueueFull(f"the queue is full, with {present} {what}: try again")

    async def generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str = "",
        name: str = "",
        adapter: str = "",
    ) -> AsyncIterator[dict[int, Update]]:
        """What is new of the texts of these prompts, again and again until all are over.

        Each time there is an Update for one or more of them, by their places in `prompts`. What is
        not fetched in time is joined into one. Raises what `Engine.add` raises, TextFailed if one
        of the texts fails, after what is new of it, QueueFull where the forms of all texts take too
        much memory or time, and, before anything is done, what `admit` raises; EngineDead later,
        too.
        However it ends, texts that are not over are aborted. Where you may leave it before, close
        it: `async with contextlib.aclosing(...)`. Its texts count until then.
        """
        tokens = sum(map(len, prompts))
        self.admit(len(prompts), tokens)
        call = Call(len(prompts), tokens, name)
        self.calls.add(call)
        try:
            if params and params[0].form:  # one for all; the engine's thread compiles none
                known = params[0], self.encoding, self.config
                call.matcher = await in_pool(compile_form, *known)
            self.commands.put(
                functools.partial(self.add, call, prompts, params, cache_salt, adapter)
            )
            while call.left or call.updates:
                await call.changed.wait()
                updates = call.fetch()
                if updates:
                    yield updates
                if call.error:
                    raise call.error
        finally:
            self.calls.remove(call)
            if call.left:
                self.commands.put(functools.partial(self.abort, call))

    def deliver(self, news: list[tuple[Text, Update, Exception | None]]) -> None:
        """In the event loop: hand out what a step has brought."""
        for text, update, error in news:
            text.call.update(text.index, update)
            if error:
                text.call.fail(error)

    def be_ready(self, error: Exception | None = None) -> None:
        """In the event loop: the engine is made, or could not be."""
        if self.ready.done():  # cancelled: the waiting task has gone
            return
        if error:
            self.ready.set_exception(error)
        else:
            self.error = None
            self.ready.set_result(None)

    def end(self, error: str) -> None:
        """In the event loop: there is no engine any more; each reader gets the error."""
        self.error = error
        for call in self.calls:
            call.fail(EngineDead(error))

    # All below is for the engine's thread.

    def tell(self, function: Callable, *args) -> None:
        """Have the event loop call a function, if it has not ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def run(self) -> None:
        """Do what is asked for, and compute, until told to end, or all of it fails."""
        try:
            self.engine = self.make()
        except BaseException as error:
            if not isinstance(error, Exception):  # no future takes it, and readers must hear
                error = RuntimeError(repr(error))
            self.tell(self.be_ready, error)
            return
        self.tell(self.be_ready)
        reason = "the server is shutting down"
        try:
            while self.obey():
                self.began = self.clock()
                self.publish(self.engine.step())
        except RankError as error:
            reason = str(error)
        except BaseException as error:
            traceback.print_exc()
            reason = f"the engine has failed: {type(error).__name__}: {error}"
        self.tell(self.end, reason)

    def obey(self) -> bool:
        """Do what is asked for; with nothing to compute, wait for it. False if that is to end."""
        while not self.engine.busy or not self.commands.empty():
            self.began = None
            command = self.commands.get()
            if command is None:
                return False
            self.began = self.clock()
            command()
        return True

    def add(
        self,
        call: Call,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str,
        adapter: str,
    ) -> None:
        """Queue the texts of a call, all or none."""
        over = []
        budget = Budget()
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                request = self.engine.add(prompt, own, cache_salt, adapter)
                if isinstance(request.matcher, GrammarMatcher):
                    request.matcher = TimedMatcher(request.matcher, budget)
                call.requests.append(request)
                text = Text(call, index, next(self.numbers))
                if request.finish_reason:  # no tokens are wanted, and no event comes
                    over.append((text, Update((), "", (), request.finish_reason), None))
                else:
                    self.texts[request] = text
        except Exception as error:  # of this call alone
            self.abort(call, tell=False)
            self.tell(call.fail, error)
        else:
            if over:
                self.tell(self.deliver, over)

    def abort(self, call: Call, tell: bool = True) -> None:
        """End the texts of a call that are not over. tell: the observers, too."""
        for request in call.requests:
            if request in self.texts:
                self.engine.abort(request)
                for observer in self.observers if tell else ():
                    observer.aborted(request)
                del self.texts[request]

    def publish(self, events: list[Event]) -> None:
        """Tell the event loop what a step has brought, all at once."""
        for observer in self.observers:
            observer.stepped(events)
        news = []
        for request, tokens, reason, message, constraint_failed in events:
            text = self.texts[request]
            if reason:
                del self.texts[request]
            new = request.text[text.sent :]
            text.sent += len(new)
            logprobs = request.logprobs[len(request.logprobs) - len(tokens) :]
            error = None
            if message:
                error = FormFailed(message) if constraint_failed else TextFailed(message)
                if constraint_failed and getattr(request.matcher, "busy", False):  # with others'
                    error = QueueFull(message)
            update = Update(tuple(tokens), new, tuple(logprobs), None if error else reason)
            news.append((text, update, error))
        if news:  # chunks of prompts bring none
            self.tell(self.deliver, news)

"""The engine at work, for whoever looks: how it stands, and what it did since the last frame."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from cache import common_prefix_length
from engine.request import Event, Request
from server.answers import EventStream, to_event
from server.engine_thread import EngineThread

PERIOD = 0.02  # seconds between frames, at least
SHARE = 0.02  # of the engine thread's time may go into frames
MAX_LATE = 500  # frames that a client has not fetched; then it is cut off
PATIENCE = 10  # seconds in which it must take what is sent
MAX_WAITING = 40  # requests of the queue that are in a frame

Frame = dict[str, Any]


class Watcher:
    """Frames for one client, a call without texts. For the event loop's thread alone."""

    texts = 0
    waiting = 0

    def __init__(self):
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def fail(self, error: Exception) -> None:
        """No more comes."""
        self.frames.put_nowait(None)


class LiveStream(EventStream):
    """Frames for one client, which is cut off where it does not take them."""

    def __init__(self, frames: AsyncIterator[bytes]):
        super().__init__(frames, frames)

    async def __call__(self, scope, receive, send) -> None:
        async def send_soon(message) -> None:
            async with asyncio.timeout(PATIENCE):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_soon)


class Live:
    """Makes frames of numbers: of a request they have its number and counts, but no text.

    A frame comes after a step, where the last one is PERIOD ago, and when the engine comes to rest.
    While no one watches it does nothing.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        self.model_name = model_name
        thread.observers.append(self)
        # These are for the event loop's thread alone, all else is for the engine's.
        self.watchers: set[Watcher] = set()
        self.closed = False
        self.watched = 0  # how many watch
        self.due = 0.0  # when the next frame is

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events: what the engine is, then frames, to its end or the client's."""
        if self.closed or self.thread.error:
            return
        engine = self.thread.engine
        scheduler = engine.scheduler
        kind = {
            "model": self.model_name,
            "max_num_seqs": scheduler.max_num_seqs,
            "num_pages": scheduler.pool.num_pages,
            "page_size": scheduler.pool.page_size,
            "block_size": scheduler.block_size,
            "max_num_batched_tokens": scheduler.token_budget,
            "gamma": engine.gamma if engine.drafter else 0,
            "period": PERIOD,
        }
        watcher = Watcher()
        watcher.frames.put_nowait(to_event(kind))
        self.watchers.add(watcher)
        self.thread.calls.add(watcher)
        self.thread.commands.put(self.join)
        try:
            while event := await watcher.frames.get():
                yield event
        finally:
            self.thread.calls.remove(watcher)
            self.drop(watcher)

    def drop(self, watcher: Watcher) -> None:
        """Send nothing more except what is queued."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)
            self.thread.commands.put(self.leave)
            watcher.frames.put_nowait(None)

    def send(self, frame: Frame) -> None:
        """Hand out a frame."""
        event = to_event(frame)
        for watcher in list(self.watchers):
            if watcher.frames.qsize() < MAX_LATE:
                watcher.frames.put_nowait(event)
            else:
                self.drop(watcher)

    def close(self) -> None:
        """End all streams and refuse new ones, or shutdown would wait for them."""
        self.closed = True
        for watcher in list(self.watchers):
            self.drop(watcher)

    # In the engine's thread.

    def clear(self) -> None:
        """Begin to note what the next frame tells."""
        # By request: positions computed, drafts among them, accepted ones, new tokens.
        self.work: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[int]] = {}  # accepted ones, by their place in the output
        self.over: list[Frame] = []
        self.preempted: list[int] = []

    def join(self) -> None:
        """One more watches, and gets a frame at once."""
        if not self.watched:
            self.clear()
        self.watched += 1
        self.flush()

    def leave(self) -> None:
        """One less watches."""
        self.watched -= 1

    def stepped(self, events: list[Event]) -> None:
        """Note what a step did; make a frame if it is time."""
        if not self.watched:
            return
        engine = self.thread.engine
        scheduled = {entry.request: entry for entry in engine.scheduled}
        for request, entry in scheduled.items():
            done = self.work.setdefault(request, [0, 0, 0, 0])
            done[0] += len(entry.tokens)
            done[1] += len(entry.drafts)
        for request, tokens, reason, *_ in events:
            if tokens:
                accepted = common_prefix_length(tokens, scheduled[request].drafts)
                self.work[request][2] += accepted
                self.work[request][3] += len(tokens)
                first = len(request.output) - len(tokens)
                places = range(first, first + accepted)
                self.drafts.setdefault(request, []).extend(places)
            if reason:
                self.over.append(self.row(request) | {"reason": reason})
        texts = self.thread.texts
        self.preempted += [texts[request].number for request in engine.scheduler.preempted]
        if time.perf_counter() >= self.due or not engine.busy:
            self.flush()

    def aborted(self, request: Request) -> None:
        """Note that a client has left."""
        if not self.watched:
            return
        self.over.append(self.row(request) | {"reason": "abort"})
        if not self.thread.engine.busy:
            self.flush()

    def flush(self) -> None:
        """Make a frame now."""
        began = time.perf_counter()
        frame = self.frame(began)
        self.clear()
        self.thread.tell(self.send, frame)
        now = time.perf_counter()
        self.due = now + max(PERIOD, (now - began) / SHARE)

    def frame(self, now: float) -> Frame:
        """How the engine stands at a time, in seconds, and what it did since the last frame."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        running = [self.row(request) | {"pages": request.pages[:]} for request in scheduler.running]
        # Requests that were computed since are in front: they have been preempted.
        waiting = itertools.islice(scheduler.waiting, max(MAX_WAITING, len(self.work)))
        return {
            "time": round(now, 4),
            "steps": engine.steps,
            "positions": engine.num_computed_tokens,
            "shared": scheduler.prefix_cache_hits,
            "preemptions": scheduler.num_preemptions,
            "drafted": engine.num_draft_tokens,
            "accepted": engine.num_accepted_tokens,
            "queued": len(scheduler.waiting),
            "running": running,
            "waiting": [self.row(request) for request in waiting],
            "over": self.over,
            "preempted": self.preempted,
            "cached": [page for page in pool.free_pages if page in pool.page_to_hash],
        }

    def row(self, request: Request) -> Frame:
        """What a frame tells of a request."""
        text = self.thread.texts[request]
        return {
            "number": text.number,
            "name": f"{text.call.name}-{text.index}",
            "prompt": request.prompt_length,
            "tokens": len(request.tokens),
            "start": request.start,
            "computed": request.num_computed_tokens,
            "work": self.work.get(request, [0, 0, 0, 0]),
            "drafts": self.drafts.get(request, []),
        }

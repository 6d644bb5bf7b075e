"""The engine at work, for whoever looks: how it stands, and what it did since the last frame."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from cache import common_prefix_length
from engine.request import Event, Request
from server.answers import EventStreamResponse, to_event
from server.engine_thread import EngineThread

PERIOD = 0.02  # seconds between frames, at least
MAX_TIME_SHARE = 0.02  # of the engine thread's time may go into frames
MAX_QUEUED_FRAMES = 500  # frames that a client has not fetched; then it is cut off
SEND_TIMEOUT = 10  # seconds in which it must take what is sent
MAX_WAITING = 40  # requests of the queue that are in a frame

Frame = dict[str, Any]


class Subscriber:
    """Frames for one client, a call without texts. For the event loop's thread alone."""

    num_requests = 0
    waiting_tokens = 0

    def __init__(self):
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def fail(self, error: Exception) -> None:
        """No more comes."""
        self.frames.put_nowait(None)


class FrameStream(EventStreamResponse):
    """Frames for one client, which is cut off where it does not take them."""

    def __init__(self, frames: AsyncIterator[bytes]):
        super().__init__(frames, frames)

    async def __call__(self, scope, receive, send) -> None:
        async def send_soon(message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_soon)


class EngineMonitor:
    """Makes frames of numbers: of a request they have its number and counts, but no text.

    A frame comes after a step, where the last one is PERIOD ago, and when the engine comes to rest.
    While no one watches it does nothing.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        self.model_name = model_name
        thread.observers.append(self)
        # These are for the event loop's thread alone, all else is for the engine's.
        self.subscribers: set[Subscriber] = set()
        self.closed = False
        self.num_subscribers = 0  # how many watch
        self.due = 0.0  # when the next frame is

    async def subscribe(self) -> AsyncIterator[bytes]:
        """Server-sent events: what the engine is, then frames, to its end or the client's."""
        if self.closed or self.thread.error:
            return
        engine = self.thread.engine
        scheduler = engine.scheduler
        engine_info = {
            "model": self.model_name,
            "max_num_seqs": scheduler.max_num_seqs,
            "num_pages": scheduler.pool.num_pages,
            "page_size": scheduler.pool.page_size,
            "block_size": scheduler.block_size,
            "max_num_batched_tokens": scheduler.token_budget,
            "gamma": engine.gamma if engine.drafter else 0,
            "period": PERIOD,
        }
        subscriber = Subscriber()
        subscriber.frames.put_nowait(to_event(engine_info))
        self.subscribers.add(subscriber)
        self.thread.generations.add(subscriber)
        self.thread.commands.put(self.on_subscribe)
        try:
            while event := await subscriber.frames.get():
                yield event
        finally:
            self.thread.generations.remove(subscriber)
            self.unsubscribe(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Send nothing more except what is queued."""
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
            self.thread.commands.put(self.on_unsubscribe)
            subscriber.frames.put_nowait(None)

    def broadcast(self, frame: Frame) -> None:
        """Hand out a frame."""
        event = to_event(frame)
        for subscriber in list(self.subscribers):
            if subscriber.frames.qsize() < MAX_QUEUED_FRAMES:
                subscriber.frames.put_nowait(event)
            else:
                self.unsubscribe(subscriber)

    def close(self) -> None:
        """End all streams and refuse new ones, or shutdown would wait for them."""
        self.closed = True
        for subscriber in list(self.subscribers):
            self.unsubscribe(subscriber)

    # In the engine's thread.

    def reset(self) -> None:
        """Begin to note what the next frame tells."""
        # By request: positions computed, drafts among them, accepted ones, new tokens.
        self.work: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[int]] = {}  # accepted ones, by their place in the output
        self.finished: list[Frame] = []
        self.preempted: list[int] = []

    def on_subscribe(self) -> None:
        """One more watches, and gets a frame at once."""
        if not self.num_subscribers:
            self.reset()
        self.num_subscribers += 1
        self.flush()

    def on_unsubscribe(self) -> None:
        """One less watches."""
        self.num_subscribers -= 1

    def on_step(self, events: list[Event]) -> None:
        """Note what a step did; make a frame if it is time."""
        if not self.num_subscribers:
            return
        engine = self.thread.engine
        scheduled = {entry.request: entry for entry in engine.scheduled}
        for request, entry in scheduled.items():
            counts = self.work.setdefault(request, [0, 0, 0, 0])
            counts[0] += len(entry.tokens)
            counts[1] += len(entry.drafts)
        for request, tokens, reason, *_ in events:
            if tokens:
                accepted = common_prefix_length(tokens, scheduled[request].drafts)
                self.work[request][2] += accepted
                self.work[request][3] += len(tokens)
                first = len(request.output) - len(tokens)
                indices = range(first, first + accepted)
                self.drafts.setdefault(request, []).extend(indices)
            if reason:
                self.finished.append(self.request_frame(request) | {"reason": reason})
        states = self.thread.request_states
        self.preempted += [states[request].number for request in engine.scheduler.preempted]
        if time.perf_counter() >= self.due or not engine.busy:
            self.flush()

    def on_abort(self, request: Request) -> None:
        """Note that a client has left."""
        if not self.num_subscribers:
            return
        self.finished.append(self.request_frame(request) | {"reason": "abort"})
        if not self.thread.engine.busy:
            self.flush()

    def flush(self) -> None:
        """Make a frame now."""
        began = time.perf_counter()
        frame = self.frame(began)
        self.reset()
        self.thread.call_in_event_loop(self.broadcast, frame)
        now = time.perf_counter()
        self.due = now + max(PERIOD, (now - began) / MAX_TIME_SHARE)

    def frame(self, now: float) -> Frame:
        """How the engine stands at a time, in seconds, and what it did since the last frame."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        running = [
            self.request_frame(request) | {"pages": request.pages[:]}
            for request in scheduler.running
        ]
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
            "waiting": [self.request_frame(request) for request in waiting],
            "over": self.finished,
            "preempted": self.preempted,
            "cached": [page for page in pool.free_pages if page in pool.page_to_hash],
        }

    def request_frame(self, request: Request) -> Frame:
        """What a frame tells of a request."""
        state = self.thread.request_states[request]
        return {
            "number": state.number,
            "name": f"{state.generation.request_id}-{state.index}",
            "prompt": request.prompt_length,
            "tokens": len(request.tokens),
            "start": request.start,
            "computed": request.num_computed_tokens,
            "work": self.work.get(request, [0, 0, 0, 0]),
            "drafts": self.drafts.get(request, []),
        }

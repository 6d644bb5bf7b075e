"""Live view of the engine: its state, and its work since the last frame, for subscribers."""

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

PERIOD = 0.02  # minimum seconds between frames
MAX_TIME_SHARE = 0.02  # of the engine thread's time, spent on frames
MAX_QUEUED_FRAMES = 500  # unread frames of a client, before it is disconnected
SEND_TIMEOUT = 10  # seconds for a client to take a frame
MAX_WAITING = 40  # waiting requests in a frame

Frame = dict[str, Any]


class Subscriber:
    """Queue of frames for a client, a Generation without requests. Only for the event loop."""

    num_requests = 0
    waiting_tokens = 0

    def __init__(self):
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def fail(self, error: Exception) -> None:
        """End the stream."""
        self.frames.put_nowait(None)


class FrameStream(EventStreamResponse):
    """A stream of frames that disconnects a client that does not read."""

    def __init__(self, frames: AsyncIterator[bytes]):
        super().__init__(frames, frames)

    async def __call__(self, scope, receive, send) -> None:
        async def send_soon(message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_soon)


class EngineMonitor:
    """Observer that sends frames to subscribers: numbers and counts of requests, but no text.

    It sends a frame after a step if the last one is PERIOD old, and when the engine becomes idle.
    Without subscribers it does nothing.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        self.model_name = model_name
        thread.observers.append(self)
        # The next two are only for the event loop, all others only for the engine's thread.
        self.subscribers: set[Subscriber] = set()
        self.closed = False
        self.num_subscribers = 0  # as the engine's thread counts them
        self.due = 0.0  # time of the next frame, in seconds

    async def subscribe(self) -> AsyncIterator[bytes]:
        """Yield the engine's settings, then frames, as events until the engine or client ends."""
        if self.closed or self.thread.error:
            return
        engine = self.thread.engine
        scheduler = engine.scheduler
        engine_info = {
            "model": self.model_name,
            "max_num_seqs": scheduler.max_num_seqs,
            "num_pages": scheduler.pool.num_pages,
            "page_size": scheduler.pool.page_size,
            "block_size": scheduler.context_window.block_size,
            "max_num_batched_tokens": scheduler.token_budget,
            "gamma": engine.config.gamma if engine.drafter else 0,
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
        """End a subscriber's stream after its queued frames."""
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
            self.thread.commands.put(self.on_unsubscribe)
            subscriber.frames.put_nowait(None)

    def broadcast(self, frame: Frame) -> None:
        """Queue a frame for each subscriber; disconnect those that do not read."""
        event = to_event(frame)
        for subscriber in list(self.subscribers):
            if subscriber.frames.qsize() < MAX_QUEUED_FRAMES:
                subscriber.frames.put_nowait(event)
            else:
                self.unsubscribe(subscriber)

    def close(self) -> None:
        """End all streams and refuse new ones, because shutdown would wait for them."""
        self.closed = True
        for subscriber in list(self.subscribers):
            self.unsubscribe(subscriber)

    # The methods below run in the engine's thread.

    def reset(self) -> None:
        """Clear the records for the next frame."""
        # By request: computed positions, draft tokens among them, accepted ones, new tokens.
        self.work: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[int]] = {}  # output indices of accepted draft tokens
        self.finished: list[Frame] = []
        self.preempted: list[int] = []

    def on_subscribe(self) -> None:
        """Count a new subscriber and send a frame immediately."""
        if not self.num_subscribers:
            self.reset()
        self.num_subscribers += 1
        self.flush()

    def on_unsubscribe(self) -> None:
        """Count a subscriber that has left."""
        self.num_subscribers -= 1

    def on_step(self, events: list[Event]) -> None:
        """Record the work of a step and send a frame if one is due."""
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
        """Record an aborted request."""
        if not self.num_subscribers:
            return
        self.finished.append(self.request_frame(request) | {"reason": "abort"})
        if not self.thread.engine.busy:
            self.flush()

    def flush(self) -> None:
        """Send a frame now."""
        began = time.perf_counter()
        frame = self.frame(began)
        self.reset()
        self.thread.call_in_event_loop(self.broadcast, frame)
        now = time.perf_counter()
        self.due = now + max(PERIOD, (now - began) / MAX_TIME_SHARE)

    def frame(self, now: float) -> Frame:
        """Return the engine's state at time `now` (seconds), and its work since the last frame."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        running = [
            self.request_frame(request) | {"pages": request.pages[:]}
            for request in scheduler.running
        ]
        # Preempted requests with work since the last frame come first in the queue.
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
        """Return a request's entry in a frame."""
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

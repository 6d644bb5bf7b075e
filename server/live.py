"""Live view of the engine: its state, for subscribers."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from engine.request import Event, Request
from server.answers import to_event
from server.engine_thread import EngineThread

PERIOD = 0.02  # minimum seconds between frames

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
        """Queue a frame for each subscriber."""
        event = to_event(frame)
        for subscriber in list(self.subscribers):
            subscriber.frames.put_nowait(event)

    def close(self) -> None:
        """End all streams and refuse new ones, because shutdown would wait for them."""
        self.closed = True
        for subscriber in list(self.subscribers):
            self.unsubscribe(subscriber)

    # The methods below run in the engine's thread.

    def on_subscribe(self) -> None:
        """Count a new subscriber and send a frame immediately."""
        self.num_subscribers += 1
        self.flush()

    def on_unsubscribe(self) -> None:
        """Count a subscriber that has left."""
        self.num_subscribers -= 1

    def on_step(self, events: list[Event]) -> None:
        """Send a frame after a step if one is due."""
        if not self.num_subscribers:
            return
        if time.perf_counter() >= self.due or not self.thread.engine.busy:
            self.flush()

    def on_abort(self, request: Request) -> None:
        """Send a frame if the engine becomes idle because a request is aborted."""
        if not self.num_subscribers:
            return
        if not self.thread.engine.busy:
            self.flush()

    def flush(self) -> None:
        """Send a frame now."""
        now = time.perf_counter()
        self.thread.call_in_event_loop(self.broadcast, self.frame(now))
        self.due = now + PERIOD

    def frame(self, now: float) -> Frame:
        """Return the engine's state at time `now` (seconds)."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        running = [
            self.request_frame(request) | {"pages": request.pages[:]}
            for request in scheduler.running
        ]
        return {
            "time": round(now, 4),
            "steps": engine.steps,
            "queued": len(scheduler.waiting),
            "running": running,
        }

    def request_frame(self, request: Request) -> Frame:
        """Return a request's entry in a frame."""
        state = self.thread.request_states[request]
        return {
            "number": state.number,
            "name": f"{state.generation.request_id}-{state.index}",
            "prompt": request.prompt_length,
            "tokens": len(request.tokens),
        }

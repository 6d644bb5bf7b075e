"""How the engine stands, for whoever looks."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from engine.request import Event, Request
from server.answers import to_event
from server.engine_thread import EngineThread

PERIOD = 0.02  # seconds between frames, at least

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
            "max_rows": scheduler.max_rows,
            "num_pages": scheduler.pool.num_pages,
            "page_size": scheduler.pool.page_size,
            "block_size": scheduler.block_size,
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
            watcher.frames.put_nowait(event)

    def close(self) -> None:
        """End all streams and refuse new ones, or shutdown would wait for them."""
        self.closed = True
        for watcher in list(self.watchers):
            self.drop(watcher)

    # In the engine's thread.

    def join(self) -> None:
        """One more watches, and gets a frame at once."""
        self.watched += 1
        self.flush()

    def leave(self) -> None:
        """One less watches."""
        self.watched -= 1

    def stepped(self, events: list[Event]) -> None:
        """Make a frame after a step, if it is time."""
        if self.watched and (time.perf_counter() >= self.due or not self.thread.engine.busy):
            self.flush()

    def aborted(self, request: Request) -> None:
        """Make a frame if the engine comes to rest because a client has left."""
        if self.watched and not self.thread.engine.busy:
            self.flush()

    def flush(self) -> None:
        """Make a frame now."""
        now = time.perf_counter()
        self.thread.tell(self.send, self.frame(now))
        self.due = now + PERIOD

    def frame(self, now: float) -> Frame:
        """How the engine stands at a time, in seconds."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        running = [self.row(request) | {"pages": request.pages[:]} for request in scheduler.running]
        return {
            "time": round(now, 4),
            "steps": engine.steps,
            "queued": len(scheduler.waiting),
            "running": running,
        }

    def row(self, request: Request) -> Frame:
        """What a frame tells of a request."""
        text = self.thread.texts[request]
        return {
            "number": text.number,
            "name": f"{text.call.name}-{text.index}",
            "prompt": request.prompt_length,
            "tokens": len(request.tokens),
        }

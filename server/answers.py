"""What answers with texts have in common, whole or as server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json

from errors import UserError
from server.engine_thread import EngineDead, QueueFull, Update
from server.protocol import APIError, GenerationRequest


def api_error(error: Exception) -> APIError:
    """What a client is told of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, QueueFull):
        return APIError(429, str(error), code="rate_limit_exceeded")
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))


async def unless_gone(request: Request, work: Coroutine[None, None, Response]) -> Response:
    """The answer that some work makes. If its client leaves before, the work is cancelled.

    The body of the request has been read, so all that can still be received is that the client is
    gone; and until an answer begins nobody else listens.
    """
    working = asyncio.ensure_future(work)
    first = {"timeout": 1, "return_when": asyncio.FIRST_COMPLETED}
    try:
        done = ()
        while not done:
            # Again and again: where bytes come after the body, uvicorn reads on in this call only.
            leaving = asyncio.ensure_future(request.receive())
            done, _ = await asyncio.wait((working, leaving), **first)
            leaving.cancel()
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, also before it begins, what makes them is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], updates: AsyncIterator[dict[int, Update]]):
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self.updates = updates

    async def __call__(self, scope, receive, send) -> None:
        async with contextlib.aclosing(self.updates), contextlib.aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


def to_event(data: dict) -> bytes:
    return b"data: %b\n\n" % to_json(data)


class Answer:
    """Builds the answer to a request from what is new of its texts. A subclass knows its form.

    name: its id. updates: of `EngineThread.generate`. prompt_tokens: of all prompts.
    """

    kind: str  # what "object" says
    event_kind: str  # and in an event

    def __init__(
        self,
        name: str,
        body: GenerationRequest,
        model: str,
        prompt_tokens: int,
        updates: AsyncIterator[dict[int, Update]],
    ):
        self.body = body
        self.updates = updates
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.always_usage = self.include_usage and options.continuous_usage_stats
        self.head = {
            "id": name,
            "object": self.event_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, update: Update) -> dict:
        """A text of the answer. update: all of it."""
        raise NotImplementedError

    def delta(self, index: int, update: Update) -> dict:
        """What is new of a text, in an event."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    async def respond(self) -> Response:
        """The answer: when it is complete, or, in events, when it begins.

        Raises what goes wrong until then.
        """
        if self.body.stream:
            first = await anext(self.updates)
            return EventStream(self.events(first), self.updates)
        parts: dict[int, list[Update]] = {}
        async for updates in self.updates:
            for index, update in updates.items():
                parts.setdefault(index, []).append(update)
        texts = {index: Update.join(parts[index]) for index in sorted(parts)}
        self.completion_tokens = sum(len(text.tokens) for text in texts.values())
        choices = [self.choice(*text) for text in texts.items()]
        return JSONResponse(self.head | {"choices": choices, "usage": self.usage()})

    async def events(self, first: dict[int, Update]) -> AsyncIterator[bytes]:
        """The answer as events, one or more at a time. What goes wrong is one, too."""
        try:
            yield self.deltas(first)
            async for updates in self.updates:
                yield self.deltas(updates)
            if self.include_usage:
                yield to_event(self.head | {"choices": [], "usage": self.usage()})
        except Exception as error:
            yield to_event(api_error(error).body)
        yield b"data: [DONE]\n\n"

    def deltas(self, updates: dict[int, Update]) -> bytes:
        """An event for each text of which something is new."""
        events = []
        for index, update in updates.items():
            self.completion_tokens += len(update.tokens)
            event = self.head | {"choices": [self.delta(index, update)]}
            if self.include_usage:
                event["usage"] = self.usage() if self.always_usage else None
            events.append(to_event(event))
        return b"".join(events)

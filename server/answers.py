"""What answers with texts have in common, whole or as server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json

from errors import UserError
from server.allowed import AllowedTokensTracker
from server.engine_thread import ConstraintFailed, EngineDead, QueueFull, Update
from server.protocol import IGNORED_HEADER, APIError, GenerationRequest

MAX_CHUNK_BYTES = 2**16  # bytes of an answer


def api_error(error: Exception) -> APIError:
    """What a client is told of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, QueueFull):
        return APIError(429, str(error), code="rate_limit_exceeded")
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))


async def with_cancellation(request: Request, handler: Coroutine[None, None, Response]) -> Response:
    """The answer that some work makes. If its client leaves before, the work is cancelled.

    The body of the request has been read, so all that can still be received is that the client is
    gone; and until an answer begins nothing else receives.
    """
    handler_task = asyncio.ensure_future(handler)
    disconnect_task = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((handler_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        return handler_task.result() if handler_task.done() else Response(status_code=499)
    finally:
        handler_task.cancel()
        disconnect_task.cancel()


def with_ignored_fields(response: Response, fields: list[str]) -> Response:
    """Name, in a header, the fields of the request that were taken and did nothing."""
    if fields:
        response.headers[IGNORED_HEADER] = ", ".join(fields)
    return response


def split_chunks(data: bytes) -> Iterator[bytes]:
    """Cut bytes into pieces of MAX_CHUNK_BYTES."""
    return (data[start : start + MAX_CHUNK_BYTES] for start in range(0, len(data), MAX_CHUNK_BYTES))


class ChunkedResponse(StreamingResponse):
    """An answer in parts: each waits until the client has taken the one before.

    However it ends, also before it begins, what makes it is closed.
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        updates: AsyncIterator[dict[int, Update]],
        headers: Mapping[str, str],
    ):
        super().__init__(parts, headers=headers)
        self.updates = updates

    async def __call__(self, scope, receive, send) -> None:
        async with contextlib.aclosing(self.updates), contextlib.aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


class EventStreamResponse(ChunkedResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], updates: AsyncIterator[dict[int, Update]]):
        super().__init__(events, updates, {"Cache-Control": "no-cache"})


def to_event(data: dict) -> bytes:
    return b"data: %b\n\n" % to_json(data)


class ResponseBuilder:
    """Builds the answer to a request from what is new of its texts. A subclass knows its form.

    response_id: its id. prompt_tokens: of all prompts. updates: of `EngineThread.generate`. They
    stay open until the client has taken nearly all of the answer, and until then the texts count
    against --max-waiting: a client that does not read cannot pile up answers.
    """

    object_type: str  # what "object" says
    chunk_object_type: str  # and in an event

    def __init__(
        self,
        response_id: str,
        body: GenerationRequest,
        model: str,
        prompt_tokens: int,
        updates: AsyncIterator[dict[int, Update]],
    ):
        self.body = body
        self.updates = updates
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.allowed_tracker: AllowedTokensTracker | None = None  # for show_allowed
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and options.continuous_usage_stats
        self.head = {
            "id": response_id,
            "object": self.chunk_object_type if body.stream else self.object_type,
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, update: Update) -> dict:
        """A text of the answer. update: all of it."""
        raise NotImplementedError

    def full_response(self, outputs: dict[int, Update]) -> dict:
        """The answer. outputs: each as one update."""
        choices = [self.choice(*output) for output in outputs.items()]
        return self.head | {"choices": choices, "usage": self.usage()}

    def delta(self, index: int, update: Update) -> list[dict]:
        """What is new of a text, in one event or more."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    async def to_response(self) -> Response:
        """The answer: when it is complete, or, in events, when it begins.

        Raises what goes wrong until then.
        """
        if self.body.stream:
            update_stream = self.update_stream()
            first = await anext(update_stream)
            return EventStreamResponse(self.events(first, update_stream), self.updates)
        parts: dict[int, list[Update]] = {}
        async for updates in self.update_stream():
            for index, update in updates.items():
                parts.setdefault(index, []).append(update)
        outputs = {index: Update.join(parts[index]) for index in sorted(parts)}
        self.completion_tokens = sum(len(output.tokens) for output in outputs.values())
        try:
            full_response = JSONResponse(self.full_response(outputs))
        except BaseException:  # else its texts would count until garbage is looked for
            await self.updates.aclose()
            raise
        return ChunkedResponse(
            self.body_chunks(full_response.body), self.updates, full_response.headers
        )

    async def update_stream(self) -> AsyncIterator[dict[int, Update]]:
        """What is new until all texts are over; `updates` stays open.

        Raises APIError, which names the field, if a text cannot have the form asked for.
        """
        num_unfinished = self.body.num_choices
        try:
            async for updates in self.updates:
                num_unfinished -= sum(
                    update.finish_reason is not None for update in updates.values()
                )
                if self.allowed_tracker:
                    try:
                        await asyncio.to_thread(self.allowed_tracker.read, updates)
                    except BaseException:  # as when the client has left
                        await self.updates.aclose()
                        raise
                yield updates
                if not num_unfinished:
                    return
        except ConstraintFailed as error:
            field, form = self.body.constraint
            raise APIError(
                400, str(error), field if form else "tools", "constraint_failed"
            ) from error

    async def body_chunks(self, answer: bytes) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        *most, last = split_chunks(answer)
        for chunk in most:
            yield chunk
        await self.updates.aclose()
        yield last

    async def events(
        self, first: dict[int, Update], update_stream: AsyncIterator[dict[int, Update]]
    ) -> AsyncIterator[bytes]:
        """The answer as events, one or more at a time. What goes wrong is one, too."""
        try:
            for chunk in split_chunks(self.deltas(first)):
                yield chunk
            async for updates in update_stream:
                for chunk in split_chunks(self.deltas(updates)):
                    yield chunk
            if self.include_usage:
                yield to_event(self.head | {"choices": [], "usage": self.usage()})
        except Exception as error:
            yield to_event(api_error(error).body)
        await self.updates.aclose()
        yield b"data: [DONE]\n\n"

    def deltas(self, updates: dict[int, Update]) -> bytes:
        """Events for each text of which something is new."""
        events = []
        for index, update in updates.items():
            self.completion_tokens += len(update.tokens)
            for delta in self.delta(index, update):
                event = self.head | {"choices": [delta]}
                if self.include_usage:
                    event["usage"] = self.usage() if self.continuous_usage else None
                events.append(to_event(event))
        return b"".join(events)

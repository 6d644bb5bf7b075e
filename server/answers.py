"""Responses to generation requests, as JSON or as server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json

from errors import UserError
from server.allowed import AllowedTokensTracker
from server.backend import ConstraintFailed, EngineDead, GenerateInput, Update
from server.protocol import IGNORED_HEADER, APIError, GenerationRequest
from server.served import ServedModel
from server.structured_output import QueueFull

MAX_CHUNK_BYTES = 2**16  # bytes


def api_error(error: Exception) -> APIError:
    """Convert an exception to the error that a client gets."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, QueueFull):
        return APIError(429, str(error), code="rate_limit_exceeded")
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))


async def with_cancellation(request: Request, handler: Coroutine[None, None, Response]) -> Response:
    """Return a handler's response, or cancel the handler if its client disconnects first.

    The request's body has been read, so `receive` can only return the disconnect. Until the
    response starts, nothing else calls it.
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
    """Name the request's ignored fields in a response header."""
    if fields:
        response.headers[IGNORED_HEADER] = ", ".join(fields)
    return response


def split_chunks(data: bytes) -> Iterator[bytes]:
    """Split bytes into chunks of MAX_CHUNK_BYTES."""
    return (data[start : start + MAX_CHUNK_BYTES] for start in range(0, len(data), MAX_CHUNK_BYTES))


class ChunkedResponse(StreamingResponse):
    """A response in parts, each sent once the client has taken the previous one.

    However it ends, even before its first part, it closes the generators of its parts and updates.
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
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], updates: AsyncIterator[dict[int, Update]]):
        super().__init__(events, updates, {"Cache-Control": "no-cache"})


def to_event(data: dict) -> bytes:
    return b"data: %b\n\n" % to_json(data)


class ResponseBuilder:
    """Builder of a response from updates. Each subclass implements one API.

    updates: from `Backend.generate` for these inputs. They stay open until the client has taken all
    of the response but its last chunk. Until then its requests count against --max-waiting, so a
    client that does not read cannot pile up responses.
    """

    object_type: str  # the "object" of a response
    chunk_object_type: str  # the "object" of an event

    def __init__(
        self,
        body: GenerationRequest,
        served: ServedModel,
        inputs: GenerateInput,
        updates: AsyncIterator[dict[int, Update]],
    ):
        self.body = body
        self.served = served
        self.updates = updates
        self.params = inputs.params[0]  # of the first choice; the others have other seeds
        self.prompt_tokens = inputs.num_tokens // (body.n or 1)  # inputs has each n times
        self.completion_tokens = 0
        self.cached_tokens = 0  # prompt tokens that no choice has computed
        self.num_cached_tokens: dict[int, int] = {}  # by index, of choices with output
        self.allowed_tracker: AllowedTokensTracker | None = None
        if body.show_allowed is not None:
            self.allowed_tracker = served.allowed_tracker(self.params, body.show_allowed)
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and options.continuous_usage_stats
        self.head = {
            "id": inputs.request_id,
            "object": self.chunk_object_type if body.stream else self.object_type,
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    @property
    def ignored(self) -> list[str]:
        """Return the names of the request's fields that are accepted but ignored."""
        return self.body.ignored

    def choice(self, index: int, update: Update) -> dict:
        """Return a choice of the response. update: its whole output."""
        raise NotImplementedError

    def full_response(self, outputs: dict[int, Update]) -> dict:
        """Return the response. outputs: the whole output of each choice, as one update."""
        choices = [self.choice(*output) for output in outputs.items()]
        return self.head | {"choices": choices, "usage": self.usage()}

    def delta(self, index: int, update: Update) -> list[dict]:
        """Return the choices of one or more events for an update."""
        raise NotImplementedError

    def count(self, index: int, update: Update) -> None:
        """Add an update of a choice to the usage.

        A prompt counts once, with the tokens that none of its n choices has computed. Its cached
        tokens count when all its choices have output, so the total never falls.
        """
        self.completion_tokens += len(update.tokens)
        if index in self.num_cached_tokens:
            return
        self.num_cached_tokens[index] = update.num_cached_tokens
        n = self.body.n or 1
        first = index - index % n
        choices = [self.num_cached_tokens.get(choice) for choice in range(first, first + n)]
        if None not in choices:
            self.cached_tokens += min(choices)

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    async def to_response(self) -> Response:
        """Return the complete response, or a stream of events once the first update has arrived.

        Raises any error that occurs before that.
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
        for output in outputs.items():
            self.count(*output)
        try:
            full_response = JSONResponse(self.full_response(outputs))
        except BaseException:  # else its requests would count until garbage collection
            await self.updates.aclose()
            raise
        return ChunkedResponse(
            self.last_chunks(full_response.body), self.updates, full_response.headers
        )

    async def update_stream(self) -> AsyncIterator[dict[int, Update]]:
        """Yield updates until all choices are finished; `self.updates` stays open.

        Raises APIError, which names the field, if the output cannot satisfy its constraint.
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
                    except BaseException:  # such as cancellation when the client leaves
                        await self.updates.aclose()
                        raise
                yield updates
                if not num_unfinished:
                    return
        except ConstraintFailed as error:
            field = self.body.constraint_field if self.body.constraint else "tools"
            raise APIError(400, str(error), field, "constraint_failed") from error

    async def last_chunks(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the end of a response in chunks; close `updates` before the last."""
        *chunks, last = split_chunks(data)
        for chunk in chunks:
            yield chunk
        await self.updates.aclose()
        yield last

    async def events(
        self, first: dict[int, Update], update_stream: AsyncIterator[dict[int, Update]]
    ) -> AsyncIterator[bytes]:
        """Yield the response as events, one or more at a time. An error also becomes an event."""
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
        """Encode the events of each updated choice."""
        events = []
        for index, update in updates.items():
            self.count(index, update)
            for delta in self.delta(index, update):
                event = self.head | {"choices": [delta]}
                if self.include_usage:
                    event["usage"] = self.usage() if self.continuous_usage else None
                events.append(to_event(event))
        return b"".join(events)

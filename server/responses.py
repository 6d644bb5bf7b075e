"""OpenAI's Responses API (/v1/responses), on top of chat completions."""

import asyncio
import functools
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from errors import UserError
from server.answers import api_error, split_chunks, with_cancellation
from server.backend import Update
from server.chat_completions import ChatCompletionBuilder, create_chat_completion
from server.protocol import APIError
from server.responses_protocol import ResponsesRequest, to_responses_names
from server.served import ServedModel

MAX_STORED_BYTES = 2**24  # bytes of JSON

router = APIRouter()


class ItemStore:
    """LRU store of output items, for requests that refer to them by id.

    Clients are not distinguished: whoever sends an id gets its item. An id is 128 random bits from
    `secrets` and appears only in the response with the item, so it cannot be guessed.
    Nothing is written to disk, and items of requests with store: false are not kept.

    max_bytes: maximum total size of the items' JSON.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.items: OrderedDict[str, bytes] = OrderedDict()  # JSON by id

    def add(self, item: dict) -> None:
        """Store an output item without its log-probabilities."""
        if item["type"] == "message":
            item = item | {"content": [part | {"logprobs": []} for part in item["content"]]}
        self.items[item["id"]] = to_json(item)
        self.num_bytes += len(self.items[item["id"]])
        while self.num_bytes > self.max_bytes:
            _, oldest = self.items.popitem(last=False)
            self.num_bytes -= len(oldest)

    def get(self, name: str) -> bytes | None:
        """Return an item's JSON and mark the item as recently used; None if it is not kept."""
        if name in self.items:
            self.items.move_to_end(name)
        return self.items.get(name)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Reply to input items. Each request has the whole conversation, or ids of kept items."""
    state = request.app.state
    return await with_cancellation(request, create_response(body, state.served, state.item_store))


@router.api_route(
    "/v1/responses/{name:path}", methods=["GET", "HEAD", "POST", "DELETE"], include_in_schema=False
)
async def stored(name: str) -> Response:
    """Answer 404 for any stored response, because none is stored."""
    raise APIError(404, "the server stores no responses: none can be read, cancelled or deleted")


@router.api_route("/v1/embeddings", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def embeddings() -> Response:
    """Answer 404, with the reason for clients that try."""
    raise APIError(404, "embeddings are not supported: this server only generates text")


async def create_response(
    body: ResponsesRequest, served: ServedModel, item_store: ItemStore
) -> Response:
    """Answer with the equivalent chat request. Errors name the fields of the response request."""
    body = body.resolve_references(item_store.get)
    make_builder = functools.partial(ResponsesBuilder, body, item_store)
    try:
        chat = await asyncio.to_thread(body.to_chat)
        return await create_chat_completion(chat, served, make_builder, "resp_")
    except APIError as error:
        message = to_responses_names(str(error))
        if error.param == "response_format":  # SamplingParams has the schema by this name
            message = re.sub(r"^json_schema\b", "text.format.schema", message)
        field = error.param and to_responses_names(error.param).partition(".")[0]
        raise APIError(error.status, message, field, error.code) from None
    except UserError as error:
        raise UserError(to_responses_names(str(error))) from None


class ResponsesBuilder(ChatCompletionBuilder):
    """Builder of a response, whose output items are reasoning, a message and function calls.

    responses_request: the response request. The base class answers its equivalent chat request.
    item_store: keeps the output items, unless the client sets store: false.
    """

    def __init__(self, responses_request: ResponsesRequest, item_store: ItemStore, *call):
        super().__init__(*call)
        self.responses_request = responses_request
        self.item_store = item_store
        self.output: list[dict] = []  # completed items
        self.item: dict | None = None  # in progress
        self.item_text: list[str] = []  # text or arguments so far, of the item in progress
        self.logprobs: list[dict] = []  # of the tokens of the item in progress
        self.held_logprobs: list[dict] = []  # of tokens before the message
        self.events_sent = 0

    @functools.cached_property
    def ignored(self) -> list[str]:
        return [*map(to_responses_names, super().ignored), *self.responses_request.ignored]

    def full_response(self, outputs: dict[int, Update]) -> dict:
        for _ in self.message_events(outputs[0]):
            pass
        return self.response(self.status(outputs[0]))

    async def events(
        self, first: dict[int, Update], update_stream: AsyncIterator[dict[int, Update]]
    ) -> AsyncIterator[bytes]:
        """Yield the response as events, in chunks. An error also becomes an event."""
        for event_type in ("response.created", "response.in_progress"):
            for chunk in split_chunks(
                self.event(event_type, response=self.response("in_progress"))
            ):
                yield chunk
        try:
            for chunk in self.encode_events(first):
                yield chunk
            update = first[0]
            async for updates in update_stream:
                for chunk in self.encode_events(updates):
                    yield chunk
                update = updates[0]
            status = self.status(update)
            last = self.event(f"response.{status}", response=self.response(status))
        except Exception as error:
            message = str(api_error(error))
            last = self.event("error", code="server_error", message=message, param=None)
            failed = self.response("failed", {"code": "server_error", "message": message})
            last += self.event("response.failed", response=failed)
        async for chunk in self.last_chunks(last):
            yield chunk

    def event(self, event_type: str, **fields) -> bytes:
        """Encode a server-sent event with the next sequence_number."""
        data = {"type": event_type, "sequence_number": self.events_sent} | fields
        self.events_sent += 1
        return b"event: %b\ndata: %b\n\n" % (event_type.encode(), to_json(data))

    def encode_events(self, updates: dict[int, Update]) -> Iterator[bytes]:
        """Yield the encoded events for updates, in chunks."""
        self.count(0, updates[0])
        for event_type, fields in self.message_events(updates[0]):
            yield from split_chunks(self.event(event_type, **fields))

    def message_events(self, update: Update) -> Iterator[tuple[str, dict]]:
        """Yield the type and fields of each event for an update of the reply."""
        message = self.parse_message(0, update)
        logprobs = self.logprobs_and_finish_reason(0, update)["logprobs"]
        entries = self.held_logprobs + (logprobs["content"] if logprobs else [])
        self.held_logprobs = []
        if message["content"] is None and "tool_calls" not in message:
            self.held_logprobs = entries  # a reasoning item cannot have them
            entries = []
        calls = message.get("tool_calls", ())
        if reasoning := message.get("reasoning_content"):
            if not self.item:
                yield from self.start_item("rs_", type="reasoning", summary=[], content=[])
            self.item_text.append(reasoning)
            fields = {"content_index": 0, "delta": reasoning}
            yield "response.reasoning_text.delta", self.item_location | fields
        last = update.finish_reason and not calls
        if message["content"] or entries or (last and not self.item):
            if self.item and self.item["type"] == "reasoning":
                yield from self.finish_item("completed")
            if not self.item:
                yield from self.start_item("msg_", type="message", role="assistant", content=[])
            self.item_text.append(message["content"] or "")
            self.logprobs += entries
            fields = {"content_index": 0, "delta": message["content"] or "", "logprobs": entries}
            if message["content"] or entries:
                yield "response.output_text.delta", self.item_location | fields
        for part in calls:
            function = part["function"]
            if "id" in part:
                yield from self.finish_item("completed")
                item_fields = {"call_id": part["id"], "name": function["name"], "arguments": ""}
                yield from self.start_item("fc_", type="function_call", **item_fields)
            if function["arguments"]:
                self.item_text.append(function["arguments"])
                delta = {"delta": function["arguments"]}
                yield "response.function_call_arguments.delta", self.item_location | delta
        if update.finish_reason:
            is_cut = update.finish_reason == "length"
            if self.item["type"] == "function_call":
                # A stop string can cut a call, and a call that ends at max_tokens can be complete.
                is_cut = self.parsers[0].state == "arguments"
            yield from self.finish_item("incomplete" if is_cut else "completed")

    @property
    def item_location(self) -> dict:
        """Return the id and output index of the item in progress."""
        return {"item_id": self.item["id"], "output_index": len(self.output)}

    def start_item(self, prefix: str, **fields) -> Iterator[tuple[str, dict]]:
        """Begin an output item and yield its events."""
        self.item = {"id": prefix + secrets.token_hex(16), "status": "in_progress"} | fields
        self.item_text = []
        self.logprobs = []
        item_location = {"output_index": len(self.output)}
        yield "response.output_item.added", item_location | {"item": self.item}
        if "content" in self.item:
            part = {"content_index": 0, "part": content_part(self.item["type"], "", [])}
            yield "response.content_part.added", self.item_location | part

    def finish_item(self, status: str) -> Iterator[tuple[str, dict]]:
        """Complete the item in progress, if any, and yield its events."""
        if not self.item:
            return
        text = "".join(self.item_text)
        if "content" in self.item:
            part = content_part(self.item["type"], text, self.logprobs)
            index = {"content_index": 0}
            message = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", self.item_location | index | message
            yield "response.content_part.done", self.item_location | index | {"part": part}
            self.item["content"] = [part]
        else:
            message = {"name": self.item["name"], "arguments": text}
            yield "response.function_call_arguments.done", self.item_location | message
            self.item["arguments"] = text
        self.item["status"] = status
        item_location = {"output_index": len(self.output)}
        self.output.append(self.item)
        if self.responses_request.store is not False:
            self.item_store.add(self.item)
        yield "response.output_item.done", item_location | {"item": self.item}
        self.item = None

    def status(self, update: Update) -> str:
        """Return the status of a response after its last update."""
        return "incomplete" if update.finish_reason == "length" else "completed"

    def response(self, status: str, error: dict | None = None) -> dict:
        """Return the response object in its current state."""
        is_over = status in ("completed", "incomplete")
        effort = self.body.reasoning_effort
        effort = None if "reasoning.effort" in self.ignored else effort
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "background": False,
            "max_tool_calls": None,
            "model": self.head["model"],
            "output": self.output,
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.params.temperature,
            "top_logprobs": self.body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "usage": self.usage() if is_over else None,
        } | self.responses_request.echo

    def usage(self) -> dict:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def content_part(item_type: str, text: str, logprobs: list[dict]) -> dict:
    """Return the only part of the content of a message or of reasoning."""
    if item_type == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

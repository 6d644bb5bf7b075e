"""/v1/responses: OpenAI's newer API for replies. Each is the reply of a chat request."""

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
from server.answers import api_error, pieces, unless_gone
from server.chat_completions import Reply, answer
from server.engine_thread import Update
from server.protocol import APIError
from server.responses_protocol import ResponsesRequest, in_own_terms
from server.served import Served

MAX_KEPT = 2**24  # bytes of JSON

router = APIRouter()


class KeptItems:
    """The newest output items, for requests that refer to them by id. Others are forgotten.

    Clients are not told apart: an item is for whoever names its id. An id is 128 random bits from
    `secrets`, and only the answer that the item is part of says it, so nobody can guess one.
    Nothing is on disk, and items of requests with store: false are not here.

    max_bytes: of the JSON of all items. The least recently used leave first.
    """

    def __init__(self, max_bytes: int = MAX_KEPT):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.items: OrderedDict[str, bytes] = OrderedDict()  # JSON by id

    def keep(self, item: dict) -> None:
        """Keep an output item, without its log-probabilities."""
        if item["type"] == "message":
            item = item | {"content": [part | {"logprobs": []} for part in item["content"]]}
        self.items[item["id"]] = to_json(item)
        self.num_bytes += len(self.items[item["id"]])
        while self.num_bytes > self.max_bytes:
            _, oldest = self.items.popitem(last=False)
            self.num_bytes -= len(oldest)

    def find(self, name: str) -> bytes | None:
        """Return the JSON of the item with this id, and use it; None if it is not kept."""
        if name in self.items:
            self.items.move_to_end(name)
        return self.items.get(name)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Reply to input items. Each request brings the whole conversation, or ids of kept items."""
    state = request.app.state
    return await unless_gone(request, respond(body, state.served, state.kept_items))


@router.api_route(
    "/v1/responses/{name:path}", methods=["GET", "HEAD", "POST", "DELETE"], include_in_schema=False
)
async def stored(name: str) -> Response:
    """Say that there is no stored response of any name."""
    raise APIError(404, "no response is stored here: none can be read, cancelled or deleted")


@router.api_route("/v1/embeddings", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def embeddings() -> Response:
    """Say that there are none, to clients that try."""
    raise APIError(404, "there are no embeddings here: this server's models only write text")


async def respond(body: ResponsesRequest, served: Served, kept: KeptItems) -> Response:
    """Answer the chat request that this one stands for. Raises in terms of this one."""
    body = body.with_items(kept.find)
    make = functools.partial(ResponseReply, body, kept)
    try:
        chat = await asyncio.to_thread(body.to_chat)
        return await answer(chat, served, make, "resp_")
    except APIError as error:
        message = in_own_terms(str(error))
        if error.param == "response_format":  # SamplingParams has the schema by this name
            message = re.sub(r"^json_schema\b", "text.format.schema", message)
        field = error.param and in_own_terms(error.param).partition(".")[0]
        raise APIError(error.status, message, field, error.code) from None
    except UserError as error:
        raise UserError(in_own_terms(str(error))) from None


class ResponseReply(Reply):
    """Builds a response: output items, which are a message, if there is text, and function calls.

    asked: the response request. The Reply answers the chat request that it stands for.
    kept: where its output items go, unless the client asks not to store.
    """

    def __init__(self, asked: ResponsesRequest, kept: KeptItems, *reply):
        super().__init__(*reply)
        self.asked = asked
        self.kept = kept
        self.output: list[dict] = []  # items that are complete
        self.item: dict | None = None  # that is being written
        self.written: list[str] = []  # its text or arguments so far
        self.logprobs: list[dict] = []  # of its tokens
        self.events_sent = 0

    @functools.cached_property
    def ignored(self) -> list[str]:
        return [*map(in_own_terms, super().ignored), *self.asked.ignored]

    def whole(self, texts: dict[int, Update]) -> dict:
        for _ in self.take(texts[0]):
            pass
        return self.response(self.status(texts[0]))

    async def events(
        self, first: dict[int, Update], news: AsyncIterator[dict[int, Update]]
    ) -> AsyncIterator[bytes]:
        """Yield the response as events, in pieces. What goes wrong is an event, too."""
        for kind in ("response.created", "response.in_progress"):
            for piece in pieces(self.event(kind, response=self.response("in_progress"))):
                yield piece
        try:
            for piece in self.take_all(first):
                yield piece
            update = first[0]
            async for updates in news:
                for piece in self.take_all(updates):
                    yield piece
                update = updates[0]
            status = self.status(update)
            last = self.event(f"response.{status}", response=self.response(status))
        except Exception as error:
            message = str(api_error(error))
            last = self.event("error", code="server_error", message=message, param=None)
            failed = self.response("failed", {"code": "server_error", "message": message})
            last += self.event("response.failed", response=failed)
        *most, end = pieces(last)
        for piece in most:
            yield piece
        await self.updates.aclose()
        yield end

    def event(self, kind: str, **fields) -> bytes:
        """Return a server-sent event with the next sequence_number."""
        data = {"type": kind, "sequence_number": self.events_sent} | fields
        self.events_sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(data))

    def take_all(self, updates: dict[int, Update]) -> Iterator[bytes]:
        """Yield the events that updates amount to, in pieces."""
        self.completion_tokens += len(updates[0].tokens)
        for kind, fields in self.take(updates[0]):
            yield from pieces(self.event(kind, **fields))

    def take(self, update: Update) -> Iterator[tuple[str, dict]]:
        """Yield the type and the fields of each event that an update of the text amounts to."""
        said = self.read(0, update)
        logprobs = self.rest(0, update)["logprobs"]
        entries = logprobs["content"] if logprobs else []
        calls = said.get("tool_calls", ())
        last = update.finish_reason and not calls
        if said["content"] or entries or (last and not self.item):
            if not self.item:
                yield from self.begin("msg_", type="message", role="assistant", content=[])
            self.written.append(said["content"] or "")
            self.logprobs += entries
            fields = {"content_index": 0, "delta": said["content"] or "", "logprobs": entries}
            if said["content"] or entries:
                yield "response.output_text.delta", self.place | fields
        for part in calls:
            function = part["function"]
            if "id" in part:
                yield from self.end("completed")
                known = {"call_id": part["id"], "name": function["name"], "arguments": ""}
                yield from self.begin("fc_", type="function_call", **known)
            if function["arguments"]:
                self.written.append(function["arguments"])
                delta = {"delta": function["arguments"]}
                yield "response.function_call_arguments.delta", self.place | delta
        if update.finish_reason:
            is_cut = update.finish_reason == "length"
            if self.item["type"] == "function_call":  # whole or not, however the text has ended
                is_cut = self.readers[0].state == "arguments"
            yield from self.end("incomplete" if is_cut else "completed")

    @property
    def place(self) -> dict:
        """Return where in the output the item is that is being written."""
        return {"item_id": self.item["id"], "output_index": len(self.output)}

    def begin(self, prefix: str, **fields) -> Iterator[tuple[str, dict]]:
        """Begin an output item, and yield the events for it."""
        self.item = {"id": prefix + secrets.token_hex(16), "status": "in_progress"} | fields
        self.written = []
        self.logprobs = []
        place = {"output_index": len(self.output)}
        yield "response.output_item.added", place | {"item": self.item}
        if self.item["type"] == "message":
            part = {"content_index": 0, "part": text_part("", [])}
            yield "response.content_part.added", self.place | part

    def end(self, status: str) -> Iterator[tuple[str, dict]]:
        """Complete the item that is being written, if there is one, and yield the events for it."""
        if not self.item:
            return
        text = "".join(self.written)
        if self.item["type"] == "message":
            part = text_part(text, self.logprobs)
            index = {"content_index": 0}
            said = {"text": text, "logprobs": self.logprobs}
            yield "response.output_text.done", self.place | index | said
            yield "response.content_part.done", self.place | index | {"part": part}
            self.item["content"] = [part]
        else:
            said = {"name": self.item["name"], "arguments": text}
            yield "response.function_call_arguments.done", self.place | said
            self.item["arguments"] = text
        self.item["status"] = status
        place = {"output_index": len(self.output)}
        self.output.append(self.item)
        if self.asked.store is not False:
            self.kept.keep(self.item)
        yield "response.output_item.done", place | {"item": self.item}
        self.item = None

    def status(self, update: Update) -> str:
        """Return the status of a response of which this is the last update."""
        return "incomplete" if update.finish_reason == "length" else "completed"

    def response(self, status: str, error: dict | None = None) -> dict:
        """Return the response as it is now."""
        is_over = status in ("completed", "incomplete")
        effort = self.body.reasoning_effort
        effort = None if "reasoning.effort" in self.ignored else effort
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": cut,
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
        } | self.asked.echo

    def usage(self) -> dict:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def text_part(text: str, logprobs: list[dict]) -> dict:
    """Return a part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

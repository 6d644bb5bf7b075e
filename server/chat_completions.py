"""OpenAI's chat completions (/v1/chat/completions)."""

import asyncio
import functools
import secrets
import string
import uuid
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.allowed import AllowedTokens
from server.answers import ResponseBuilder, with_cancellation, with_ignored_fields
from server.backend import GenerateInput, Update
from server.protocol import ChatRequest
from server.served import ServedModel
from text.reasoning import ReasoningParser, ReasoningState, ReasoningTracker
from text.tools import CALL_ID_LENGTH, ToolCallDelta, ToolCallParser, ToolFormat

router = APIRouter()
ID_ALPHABET = string.ascii_letters + string.digits


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Reply to messages. Output continues past the context window by context shift."""
    return await with_cancellation(request, create_chat_completion(body, request.app.state.served))


async def create_chat_completion(
    body: ChatRequest,
    served: ServedModel,
    make_builder: "Callable[..., ChatCompletionBuilder] | None" = None,
    prefix: str = "chatcmpl-",
) -> Response:
    """Answer a chat request. make_builder: class of the builder. prefix: of the response id."""
    adapter = served.find_adapter(body.model)
    served.backend.admit(body.num_choices)  # before any work
    chat = await asyncio.to_thread(served.prepare_chat, body)
    max_new_tokens = body.max_new_tokens
    window = served.backend.config.block_size
    # Room for the reply, with truncate_prompt_tokens -1.
    reserved_tokens = window // 2 if max_new_tokens is None else max_new_tokens
    prompt = served.truncate_prompt(
        chat.tokens, body.truncate_prompt_tokens, reserved_tokens, "messages"
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if max_new_tokens is None:  # as many as the window and a response can hold
        max_new_tokens = max(min(window - len(prompt), body.max_tokens_limit(logprobs)), 1)
    skip = served.skip_token_ids(body, chat.tool_format)
    params = body.to_sampling_params(
        max_new_tokens, logprobs, chat.tool_grammar, skip, served.defaults, chat.reasoning
    )
    matcher = await served.check_params(
        params[0], "tools" if chat.tool_grammar else body.constraint_field
    )
    inputs = GenerateInput(
        [prompt] * len(params),
        params,
        body.cache_salt or "",
        request_id=f"{prefix}{uuid.uuid4().hex}",
        adapter=adapter,
    )
    updates = served.backend.generate(inputs, matcher)
    builder = (make_builder or ChatCompletionBuilder)(
        body, served, inputs, updates, chat.tool_format
    )
    return with_ignored_fields(await builder.to_response(), builder.ignored)


class ChatCompletionBuilder(ResponseBuilder):
    object_type = "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        served: ServedModel,
        inputs: GenerateInput,
        updates: AsyncIterator[dict[int, Update]],
        tool_format: ToolFormat | None = None,
    ):
        super().__init__(body, served, inputs, updates)
        self.tool_format = tool_format
        self.parsers: dict[int, ToolCallParser | None] = {}  # by choice, from its first update on
        self.reasoning_parsers: dict[int, ReasoningParser] = {}  # by choice
        self.reasoning_states: dict[int, ReasoningState] = {}  # by choice
        self.reasoning_tokens = 0
        self.tracker: ReasoningTracker | None = None
        if self.params.reasoning:
            self.tracker = ReasoningTracker(self.params, served.backend.encoding)

    @functools.cached_property
    def ignored(self) -> list[str]:
        names = self.served.variables(self.body)[1]
        has_effect = self.body.thinking_token_budget is None or self.params.reasoning
        return names if has_effect else [*names, "thinking_token_budget"]

    def count(self, index: int, update: Update) -> None:
        super().count(index, update)
        if self.tracker:
            before = self.reasoning_states.get(index, self.tracker.start)
            state = functools.reduce(self.tracker.advance, update.tokens, before)
            self.reasoning_tokens += state.num_tokens - before.num_tokens
            self.reasoning_states[index] = state

    def usage(self) -> dict:
        details = {"reasoning_tokens": self.reasoning_tokens}
        return super().usage() | {"completion_tokens_details": details}

    def choice(self, index: int, update: Update) -> dict:
        message = self.parse_message(index, update)
        if "tool_calls" in message:
            tool_calls = {}
            for part in message["tool_calls"]:
                merged_call = tool_calls.setdefault(part.pop("index"), part)
                if merged_call is not part:
                    merged_call["function"]["arguments"] += part["function"]["arguments"]
            message["tool_calls"] = list(tool_calls.values())
        return {
            "index": index,
            "message": {"role": "assistant"} | message,
        } | self.logprobs_and_finish_reason(index, update)

    def delta(self, index: int, update: Update) -> list[dict]:
        # The role comes with the first update, because clients measure the time to the first chunk.
        role = {} if index in self.parsers else {"role": "assistant"}
        message = self.parse_message(index, update)
        parts = [{"tool_calls": [part]} for part in message.pop("tool_calls", ())]
        # In a chunk of its own: some clients drop a call that begins in the finish reason's chunk.
        finish_events = [{}] if parts and update.finish_reason else []
        if message["content"] is None and not role:
            del message["content"]
        first, *others = [message | (parts.pop(0) if parts else {}), *parts, *finish_events]
        deltas = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in (role | first, *others)
        ]
        deltas[-1] |= self.logprobs_and_finish_reason(index, update)
        return deltas

    def parse_message(self, index: int, update: Update) -> dict:
        """Return the reasoning, content and tool call deltas of an update.

        The content is None, not "", in an update that ends before the answer.
        """
        if index not in self.parsers:
            self.parsers[index] = ToolCallParser(self.tool_format) if self.tool_format else None
            if self.params.reasoning:
                encoding = self.served.backend.encoding
                self.reasoning_parsers[index] = ReasoningParser(self.params, encoding)
        message = {"content": update.text}
        parts = []
        if reasoning_parser := self.reasoning_parsers.get(index):
            is_last = update.finish_reason is not None
            reasoning, message["content"] = reasoning_parser.add(update.text, is_last)
            if reasoning and self.body.include_reasoning is not False:
                message["reasoning_content"] = reasoning
        if parser := self.parsers[index]:
            message["content"], parts = parser.add(message["content"])
            message["content"] += parser.end() if update.finish_reason else ""
        if parts or (reasoning_parser and not reasoning_parser.in_answer):
            message["content"] = message["content"] or None
        return message | ({"tool_calls": list(map(tool_call_delta, parts))} if parts else {})

    def logprobs_and_finish_reason(self, index: int, update: Update) -> dict:
        reason = update.finish_reason
        if reason == "stop" and self.tool_format and self.parsers[index].is_complete:
            reason = "tool_calls"
        logprobs = None
        if self.body.logprobs:
            content = [
                self.entry(token, logprob) | {"top_logprobs": [self.entry(*pair) for pair in top]}
                for token, (logprob, top) in zip(update.tokens, update.logprobs)
            ]
            logprobs = {"content": content}
            if self.allowed_tracker:
                positions, after = self.allowed_tracker.pop_positions(index)
                for entry, allowed in zip(content, positions, strict=True):
                    entry["allowed"] = self.allowed_entry(allowed)
                logprobs["next_allowed"] = after and self.allowed_entry(after)
        return {"logprobs": logprobs, "finish_reason": reason}

    def entry(self, token: int, logprob: float) -> dict:
        data = self.served.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    def allowed_entry(self, allowed: AllowedTokens) -> dict:
        named = [self.served.token_bytes(token) for token in allowed.tokens]
        tokens = [{"token": data.decode(errors="replace"), "bytes": list(data)} for data in named]
        return {"count": allowed.count, "tokens": tokens}


def tool_call_delta(part: ToolCallDelta) -> dict:
    """Return the JSON of a delta. The first of a call has its id, to which the result refers."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    id = "".join(secrets.choice(ID_ALPHABET) for _ in range(CALL_ID_LENGTH))
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": id, "type": "function", "function": function}

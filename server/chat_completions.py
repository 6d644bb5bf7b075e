"""OpenAI's chat completions (/v1/chat/completions)."""

import asyncio
import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answers import ResponseBuilder, with_cancellation
from server.backend import GenerateInput, Update
from server.protocol import ChatRequest
from server.served import ServedModel

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Reply to messages. Output continues past the context window by context shift."""
    return await with_cancellation(request, create_chat_completion(body, request.app.state.served))


async def create_chat_completion(body: ChatRequest, served: ServedModel) -> Response:
    adapter = served.find_adapter(body.model)
    served.backend.admit(body.num_choices)  # before any work
    prompt = await asyncio.to_thread(served.prepare_chat, body)
    max_new_tokens = body.max_new_tokens
    window = served.backend.config.block_size
    # Room for the reply, with truncate_prompt_tokens -1.
    reserved_tokens = window // 2 if max_new_tokens is None else max_new_tokens
    prompt = served.truncate_prompt(
        prompt, body.truncate_prompt_tokens, reserved_tokens, "messages"
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if max_new_tokens is None:  # as many as the window and a response can hold
        max_new_tokens = max(min(window - len(prompt), body.max_tokens_limit(logprobs)), 1)
    params = body.to_sampling_params(max_new_tokens, logprobs)
    matcher = await served.check_params(params[0], body.constraint_field)
    inputs = GenerateInput(
        [prompt] * len(params),
        params,
        body.cache_salt or "",
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        adapter=adapter,
    )
    updates = served.backend.generate(inputs, matcher)
    return await ChatCompletionBuilder(body, served, inputs, updates).to_response()


class ChatCompletionBuilder(ResponseBuilder):
    object_type = "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        served: ServedModel,
        inputs: GenerateInput,
        updates: AsyncIterator[dict[int, Update]],
    ):
        super().__init__(body, served, inputs, updates)
        self.started: set[int] = set()  # choices that have had an event

    def choice(self, index: int, update: Update) -> dict:
        message = {"role": "assistant", "content": update.text}
        return {"index": index, "message": message} | self.logprobs_and_finish_reason(update)

    def delta(self, index: int, update: Update) -> dict:
        # The role comes with the first update, because clients measure the time to the first chunk.
        role = {} if index in self.started else {"role": "assistant"}
        self.started.add(index)
        delta = role | {"content": update.text}
        return {"index": index, "delta": delta} | self.logprobs_and_finish_reason(update)

    def logprobs_and_finish_reason(self, update: Update) -> dict:
        logprobs = None
        if self.body.logprobs:
            content = [
                self.entry(token, logprob) | {"top_logprobs": [self.entry(*pair) for pair in top]}
                for token, (logprob, top) in zip(update.tokens, update.logprobs)
            ]
            logprobs = {"content": content}
        return {"logprobs": logprobs, "finish_reason": update.finish_reason}

    def entry(self, token: int, logprob: float) -> dict:
        data = self.served.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

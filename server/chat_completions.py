"""/v1/chat/completions: replies to messages."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answers import Answer, unless_gone
from server.engine_thread import Update
from server.protocol import ChatRequest
from server.served import Served

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Reply to messages. A text that outgrows the model's window goes on: the window slides."""
    return await unless_gone(request, answer(body, request.app.state.served))


async def answer(body: ChatRequest, served: Served) -> Response:
    adapter = served.find_adapter(body.model)
    served.thread.admit(body.texts)  # before there is work
    variables = body.chat_template_kwargs or {}
    prompt = await asyncio.to_thread(served.encode_chat, body.messages, variables)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    window = served.thread.config.block_size
    room = window // 2 if wanted is None else wanted  # a prompt that is cut leaves so much
    prompt = served.fit(prompt, body.truncate_prompt_tokens, room, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if wanted is None:  # what the window and the answer have room for
        wanted = max(min(window - len(prompt), body.most_tokens(logprobs)), 1)
    params = body.params(wanted, logprobs)
    served.check_ids(params[0])
    await asyncio.to_thread(served.check_form, body, params[0])
    name = f"chatcmpl-{uuid.uuid4().hex}"
    asked = [prompt] * len(params), params, body.cache_salt or "", name, adapter
    updates = served.thread.generate(*asked)
    return await Reply(name, body, served, len(prompt), updates).respond()


class Reply(Answer):
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def __init__(self, name: str, body: ChatRequest, served: Served, prompt_tokens: int, updates):
        super().__init__(name, body, body.model or served.name, prompt_tokens, updates)
        self.served = served
        self.begun: set[int] = set()  # choices that had an event

    def choice(self, index: int, update: Update) -> dict:
        message = {"role": "assistant", "content": update.text}
        return {"index": index, "message": message} | self.rest(update)

    def delta(self, index: int, update: Update) -> dict:
        delta = {"content": update.text}
        if index not in self.begun:  # not before: clients take it for the first token
            self.begun.add(index)
            delta = {"role": "assistant", "content": update.text}
        return {"index": index, "delta": delta} | self.rest(update)

    def rest(self, update: Update) -> dict:
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

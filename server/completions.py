"""/v1/completions: texts that go on from prompts."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answers import Answer
from server.engine_thread import Update
from server.protocol import CompletionRequest
from server.served import Served

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts. A text that outgrows the model's window goes on: the window slides."""
    served: Served = request.app.state.served
    served.check_model(body.model)
    params = body.params(16 if body.max_tokens is None else body.max_tokens)
    # In another thread, because a long text takes long.
    prompts = await asyncio.to_thread(served.encode, body.prompts)
    texts = [prompt for prompt in prompts for _ in params]
    updates = served.thread.generate(texts, params * len(prompts), body.cache_salt or "")
    answer = Completion(body, served.name, sum(map(len, prompts)), updates)
    if body.echo:
        echoes = await asyncio.to_thread(list, map(served.decode, body.prompts))
        answer.echoes = [text for text in echoes for _ in params]
    return await answer.respond()


class Completion(Answer):
    prefix = "cmpl"
    kind = "text_completion"
    event_kind = kind

    def __init__(self, *args):
        super().__init__(*args)
        self.echoes: list[str] = []  # of each choice, what its text begins with

    def choice(self, index: int, update: Update) -> dict:
        echo = ""
        if self.echoes:
            echo = self.echoes[index]
            self.echoes[index] = ""  # once
        return {
            "index": index,
            "text": echo + update.text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
        }

    delta = choice

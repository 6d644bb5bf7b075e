"""/v1/completions: a text that goes on from a prompt."""

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
    """Continue a prompt. A text that outgrows the model's window goes on: the window slides."""
    served: Served = request.app.state.served
    served.check_model(body.model)
    params = body.params(16 if body.max_tokens is None else body.max_tokens)
    # In another thread, because a long text takes long.
    prompt = await asyncio.to_thread(served.encode, body.prompt or "")
    updates = served.thread.generate([prompt], [params], body.cache_salt or "")
    return await Completion(body, served.name, len(prompt), updates).respond()


class Completion(Answer):
    prefix = "cmpl"
    kind = "text_completion"
    event_kind = kind

    def choice(self, index: int, update: Update) -> dict:
        return {
            "index": index,
            "text": update.text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
        }

    delta = choice

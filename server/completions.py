"""OpenAI's completions (/v1/completions)."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answers import ResponseBuilder
from server.backend import GenerateInput, Update
from server.protocol import CompletionRequest
from server.served import ServedModel

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt. Output continues past the context window by context shift."""
    served: ServedModel = request.app.state.served
    served.check_model(body.model)
    max_new_tokens = 16 if body.max_tokens is None else body.max_tokens
    params = body.to_sampling_params(max_new_tokens)
    # In another thread, because encoding a long prompt is slow.
    prompt = await asyncio.to_thread(served.encode, body.prompt or "")
    inputs = GenerateInput(
        [prompt], [params], body.cache_salt or "", request_id=f"cmpl-{uuid.uuid4().hex}"
    )
    builder = CompletionBuilder(body, served, inputs, served.backend.generate(inputs))
    return await builder.to_response()


class CompletionBuilder(ResponseBuilder):
    object_type = "text_completion"
    chunk_object_type = object_type

    def choice(self, index: int, update: Update) -> dict:
        return {
            "index": index,
            "text": update.text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
        }

    def delta(self, index: int, update: Update) -> dict:
        return self.choice(index, update)

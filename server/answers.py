"""Responses to generation requests."""

import time
from collections.abc import AsyncIterator

from fastapi.responses import JSONResponse, Response

from errors import UserError
from server.backend import EngineDead, GenerateInput, Update
from server.protocol import APIError, GenerationRequest
from server.served import ServedModel


def api_error(error: Exception) -> APIError:
    """Convert an exception to the error that a client gets."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))


class ResponseBuilder:
    """Builder of a response from updates. Each subclass implements one API.

    updates: from `Backend.generate` for these inputs.
    """

    object_type: str  # the "object" of a response

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
        self.prompt_tokens = inputs.num_tokens
        self.completion_tokens = 0
        self.head = {
            "id": inputs.request_id,
            "object": self.object_type,
            "created": int(time.time()),
            "model": served.name,
        }

    def choice(self, index: int, update: Update) -> dict:
        """Return a choice of the response. update: its whole output."""
        raise NotImplementedError

    def full_response(self, outputs: dict[int, Update]) -> dict:
        """Return the response. outputs: the whole output of each choice, as one update."""
        choices = [self.choice(*output) for output in outputs.items()]
        return self.head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    async def to_response(self) -> Response:
        """Return the response once all output is complete."""
        parts: dict[int, list[Update]] = {}
        async for updates in self.updates:
            for index, update in updates.items():
                parts.setdefault(index, []).append(update)
        outputs = {index: Update.join(parts[index]) for index in sorted(parts)}
        self.completion_tokens = sum(len(output.tokens) for output in outputs.values())
        return JSONResponse(self.full_response(outputs))

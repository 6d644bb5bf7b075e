"""What answers with texts have in common."""

import time
import uuid
from collections.abc import AsyncIterator

from fastapi.responses import JSONResponse, Response

from errors import UserError
from server.engine_thread import EngineDead, Update
from server.protocol import APIError, GenerationRequest


def api_error(error: Exception) -> APIError:
    """What a client is told of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))


class Answer:
    """Builds the answer to a request from what is new of its text. A subclass knows its form.

    updates: of `EngineThread.generate`. prompt_tokens: how many.
    """

    prefix: str  # of the id
    kind: str  # what "object" says

    def __init__(
        self,
        body: GenerationRequest,
        model: str,
        prompt_tokens: int,
        updates: AsyncIterator[dict[int, Update]],
    ):
        self.body = body
        self.updates = updates
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, update: Update) -> dict:
        """A text of the answer. update: all of it."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    async def respond(self) -> Response:
        """The answer, when it is complete."""
        parts: dict[int, list[Update]] = {}
        async for updates in self.updates:
            for index, update in updates.items():
                parts.setdefault(index, []).append(update)
        texts = {index: Update.join(parts[index]) for index in sorted(parts)}
        self.completion_tokens = sum(len(text.tokens) for text in texts.values())
        choices = [self.choice(*text) for text in texts.items()]
        return JSONResponse(self.head | {"choices": choices, "usage": self.usage()})

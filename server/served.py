"""What an app serves: a model and its engine."""

import time

from command_line import check_text
from server.engine_thread import EngineThread
from server.protocol import APIError


class Served:
    """A model by the name that clients know. root: where it comes from."""

    def __init__(self, thread: EngineThread, name: str, root: str):
        self.thread = thread
        self.name = name
        self.root = root
        self.created = int(time.time())

    def model(self) -> dict:
        """What /v1/models says of it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "serve.py",
            "root": self.root,
            "parent": None,
            "max_model_len": self.thread.engine.model.config.block_size,
        }

    def check_model(self, name: str | None) -> None:
        """Raise APIError for the name of another model."""
        if name not in (None, self.name):
            message = f"the model {name[:100]!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, "model", "model_not_found")

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a text; the BOS token for none, as in the engine.

        Raises UserError for a text that is not UTF-8.
        """
        check_text("prompt", prompt)
        engine = self.thread.engine
        ids = engine.encoding.encode(prompt, allowed_special="all")
        return ids or [engine.model.config.bos_token_id]

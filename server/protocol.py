"""Request models and error bodies of OpenAI's API."""

from typing import Annotated

from pydantic import BaseModel, Field

from sampling import SamplingParams


class APIError(Exception):
    """An HTTP error response.

    param: the invalid field of the request. code: a machine-readable error code.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict:
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}


class GenerationRequest(BaseModel):
    """Fields common to all generation requests. Null equals an absent field."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: float | None = None

    def to_sampling_params(self, max_new_tokens: int) -> SamplingParams:
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(max_new_tokens, temperature=temperature)


class CompletionRequest(GenerationRequest):
    prompt: str | None = None

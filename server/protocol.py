"""What a client may ask for, and how it is told what is wrong, in the form of OpenAI's API."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from errors import check_limits
from sampling import LIMITS, SamplingParams


class APIError(Exception):
    """An answer that is not the one asked for.

    param: the field of the request that is wrong. code: a name for what is wrong, for programs.
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
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class GenerationRequest(BaseModel):
    """What all requests for texts have in common. Null is the same as nothing."""

    model_config = ConfigDict(strict=True)  # "1" is no number

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: float | None = None

    @field_validator("temperature")
    @classmethod
    def in_range(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check_limits(LIMITS, **{info.field_name: value})
        return value

    def params(self, max_new_tokens: int) -> SamplingParams:
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(max_new_tokens, temperature=temperature)


class CompletionRequest(GenerationRequest):
    prompt: str | None = None

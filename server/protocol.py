"""What a client may ask for, and how it is told what is wrong, in the form of OpenAI's API."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from errors import check_limits
from sampling import LIMITS, SamplingParams

# Fields of OpenAI's and vLLM's API that nothing here does, and values of them that ask for nothing.
UNSUPPORTED = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


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

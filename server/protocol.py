"""Request models and error bodies of OpenAI's API."""

import contextlib
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

from errors import UserError, check_limits
from sampling import LIMITS, Reasoning, SamplingParams, is_logit_bias
from text.chat import RESERVED_VARIABLES
from text.tools import MAX_TOOLS

MAX_RESPONSE_BYTES = 2**22  # estimated with TOKEN_BYTES and LOGPROB_BYTES
TOKEN_BYTES = 16
LOGPROB_BYTES = 64  # for the sampled token, and for each of its top_logprobs
MAX_ECHO = 2**20  # bytes of echoed prompts in a response
MAX_ITEMS = 2**14  # prompts, messages, or parts of a message
MAX_BIASES = 2**10
LONE_SURROGATE = "not UTF-8 text: it has a lone surrogate"
CONFLICTS_WITH_TOOLS = "cannot be combined with tools, unless tool_choice is none"
MAX_CHOICES = 2**10  # each of up to 128 sequences is matched against all choices

SAMPLING_FIELDS = (  # fields of SamplingParams with the same name
    "ignore_eos",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


# Fields of OpenAI's and vLLM's API that never change the output: client ids and cache hints.
SILENTLY_IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)

# Fields of the APIs of OpenAI, vLLM, llama.cpp and Ollama that do not change the output, with their
# no-op values. Any other value is accepted, and a response header names the field.
IGNORED_FIELDS = {
    "cache_prompt": (True,),
    "enable_thinking": (False,),
    "guided_decoding_backend": (),
    "id_slot": (-1,),
    "keep_alive": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "think": (False,),
    "timings_per_token": (False,),
    "verbosity": ("medium",),
}
IGNORED_HEADER = "X-Ignored-Fields"
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Synonyms across APIs. The error for an unknown one suggests the first that the request defines.
SYNONYMS = (
    (
        "max_tokens",
        "max_output_tokens",
        "max_completion_tokens",
        "max_length",
        "max_new_tokens",
        "n_predict",
        "num_predict",
    ),
    ("repetition_penalty", "repeat_penalty"),
    ("stop", "stop_sequences"),
)

# Unsupported fields of OpenAI's and vLLM's API, with the no-op values that are accepted.
# A request model that defines a field of the same name supports it.
UNSUPPORTED_FIELDS = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


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


def first_error(error: ValidationError) -> dict[str, Any]:
    """Return the first error's details without the invalid value, which may be long."""
    return error.errors(include_url=False, include_input=False)[0]


def field_error(field: str, what: str) -> PydanticCustomError:
    """Return an error about a field, for validators of a whole request."""
    # The name comes last: pydantic substitutes in order, and the name itself may be "{what}".
    return PydanticCustomError("field", "{field} {what}", {"what": what, "field": field})


def must_be(allowed: str) -> WrapValidator:
    """Return a validator with one error for a union, where pydantic has one for each type."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                if detail["type"] == "field":  # from the validator of a nested object
                    path = [str(part) for part in detail["loc"] if isinstance(part, int)]
                    name = ".".join([*path, detail["ctx"]["field"]])
                    raise field_error(name, detail["ctx"]["what"]) from None
            raise ValueError(f"must be {allowed}") from None

    return WrapValidator(check)


def prompt_type(prompt: Any) -> str:
    """Return the tag of a prompt's type, so that pydantic validates only this type."""
    if isinstance(prompt, list):
        return f"list of {type(prompt[0]).__name__}" if prompt else "empty list"
    return type(prompt).__name__


def parse_logit_bias(value: Any) -> Any:
    """Convert the keys of a logit_bias object to integers.

    Each key must be in canonical JSON notation. Raises ValueError at the first invalid entry.
    """

    def is_entry(name: str, bias: Any) -> bool:
        is_number = name.isascii() and name.isdecimal() and len(name) <= 10
        return is_number and str(int(name)) == name and is_logit_bias(bias)

    if value is None:
        return None
    if isinstance(value, dict) and len(value) <= MAX_BIASES:
        if all(is_entry(*pair) for pair in value.items()):
            return {int(name): float(bias) for name, bias in value.items()}
    allowed = f"an object of up to {MAX_BIASES} token ids, each with a number in [-100, 100]"
    raise ValueError(f"must be {allowed}")


# A list fails at its first bad element. A body of 1 MiB can hold half a million of them, and
# collecting an error for each would block the event loop, and so all streams, for seconds.
StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=16)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopTokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=128)]
ListLimits = Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], ListLimits, Tag("list of str")]
    | Annotated[TokenIds, Tag("list of int")]
    | Annotated[list[TokenIds], ListLimits, Tag("list of list")],
    Discriminator(prompt_type),
]


class StrictModel(BaseModel):
    """An object in a request that rejects unknown fields by name.

    Null equals an absent field.
    """

    model_config = ConfigDict(strict=True)  # "1" is not a number

    # Further known fields, with their no-op values.
    no_op_values: ClassVar[dict[str, tuple]] = {}
    silently_ignored: ClassVar[frozenset[str]] = frozenset()  # fields with any value

    @model_validator(mode="before")
    @classmethod
    def check_known_fields(cls, data: Any) -> Any:
        """Raise PydanticCustomError for the first unknown field, or unsupported value of one."""
        names = field_names(cls)
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in names or name in cls.silently_ignored:
                continue
            if name not in cls.no_op_values:
                raise field_error(
                    ascii(name[:100])[1:-1],
                    describe_unknown_field(name, names - IGNORED_FIELDS.keys()),
                )
            if value is not None and value not in cls.no_op_values[name]:
                hint = ": use structured_outputs" if name.startswith("guided_") else ""
                raise field_error(name, f"is not supported{hint}")
        return data


@functools.cache
def field_names(model: type[BaseModel]) -> set[str]:
    """Return the names of a model's fields in a request."""
    return {field.alias or name for name, field in model.model_fields.items()}


def describe_unknown_field(name: str, names: Iterable[str]) -> str:
    """Return the error for an unknown field, with the likely intended name."""
    synonyms = next((group for group in SYNONYMS if name in group), ())
    matches = [other for other in synonyms if other in names][:1]
    matches = matches or difflib.get_close_matches(name[:100], names, 1)
    return "is not a field of this request" + "".join(
        f"; did you mean {other}?" for other in matches
    )


def find_lone_surrogate(body: Any) -> tuple[str | int, ...] | None:
    """Return the path to a string with a lone surrogate; None if the body has none.

    The path has up to 6 parts. Keys of nested objects are checked, keys of the body are not.
    """
    with contextlib.suppress(ValueError):  # to_json also rejects objects nested too deeply
        to_json(body)
        return None
    pending = [((), body)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict) and path and has_lone_surrogate("".join(value)):
            return path
        inner = []
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, str) and has_lone_surrogate(each):
                return (*path, name)[:6]
            if each and isinstance(each, dict | list):  # long bodies consist mostly of numbers
                inner.append(((*path, name)[:6], each))
        pending += reversed(inner)
    return None


def has_lone_surrogate(text: str) -> bool:
    """Return whether a string has a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class RequestBody(StrictModel):
    """The JSON body of a request."""

    @model_validator(mode="before")
    @classmethod
    def check_utf8(cls, data: Any) -> Any:
        """Raise ValidationError for a string that UTF-8 cannot encode."""
        path = find_lone_surrogate(data) if isinstance(data, dict) else None
        if path is not None:
            path = [ascii(part[:100])[1:-1] if isinstance(part, str) else part for part in path]
            error = PydanticCustomError("not_utf8", LONE_SURROGATE)
            raise ValidationError.from_exception_data(
                "body", [{"type": error, "loc": tuple(path), "input": None}]
            )
        return data


def with_untyped_fields(base: type[StrictModel], names: Iterable[str]) -> type[StrictModel]:
    """Return a model with further optional fields of any type."""
    return create_model(base.__name__, __base__=base, **dict.fromkeys(names, (Any, None)))


class StreamOptions(StrictModel):
    """Options for the events of a streamed response."""

    include_obfuscation: bool | None = None  # hides event lengths; not supported
    include_usage: bool | None = None  # in an additional last event
    continuous_usage_stats: bool | None = None  # usage in every event, vLLM's extension


class JSONSchema(StrictModel):
    """A schema as OpenAI's API names it. Output follows it even without strict."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$", max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The output constraint in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def check_complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error(
                "json_schema", "must be set for the type json_schema, and only for it"
            )
        return self

    @functools.cached_property
    def constraint(self) -> dict:
        """Return fields of SamplingParams. Cached, because serialising a schema may be slow."""
        if self.type == "text":
            return {}
        schema = self.json_schema.schema_ if self.json_schema else {"type": "object"}
        return {"json_schema": json.dumps(schema)}


class StructuredOutputs(StrictModel):
    """The output constraint in vLLM's API: exactly one field is set."""

    no_op_values = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (True, False),  # output never has any
        "disable_fallback": (True, False),  # no fallback exists
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_: Annotated[
        dict[str, Any] | str | None, must_be("an object or its JSON"), Field(alias="json")
    ] = None
    json_object: bool | None = None
    regex: Annotated[str | None, Field(min_length=1)] = None
    choice: Annotated[
        Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)] | None,
        must_be(f"a list of 1 to {MAX_CHOICES} strings"),
    ] = None
    grammar: Annotated[str | None, Field(min_length=1)] = None

    @model_validator(mode="after")
    def check_single_constraint(self) -> "StructuredOutputs":
        if len(self.constraint) != 1:
            raise ValueError(
                "must have exactly one of json, json_object, regex, choice and grammar"
            )
        return self

    @functools.cached_property
    def constraint(self) -> dict:
        """Return fields of SamplingParams. Cached, because serialising a schema may be slow."""
        schema = self.json_ if isinstance(self.json_, str | None) else json.dumps(self.json_)
        values = {"json_schema": schema, "regex": self.regex, "grammar": self.grammar}
        values["choices"] = None if self.choice is None else tuple(self.choice)
        values = {name: value for name, value in values.items() if value is not None}
        if self.json_object:
            values["json_schema" if schema is None else "json_object"] = '{"type": "object"}'
        return values


MaxTokens = Annotated[int | None, Field(ge=-1)]  # -1: no explicit limit, as in llama.cpp


class GenerationRequest(with_untyped_fields(RequestBody, IGNORED_FIELDS)):
    """Fields and checks common to all generation requests."""

    no_op_values = UNSUPPORTED_FIELDS
    silently_ignored = SILENTLY_IGNORED_FIELDS

    model: str | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None  # sequences per prompt
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    # Number of last prompt tokens to keep; -1: as many as leave room for max_tokens.
    truncate_prompt_tokens: Annotated[
        Literal[-1] | Annotated[int, Field(ge=1)] | None, must_be("-1 or an integer >= 1")
    ] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: Annotated[
        StopString | StopStrings | None,
        must_be("a string or a list of up to 16, each of 1 to 256 characters"),
    ] = None
    stop_token_ids: Annotated[StopTokenIds | None, must_be("a list of up to 128 token ids")] = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(parse_logit_bias)] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # null means true, as in OpenAI's and vLLM's API
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    # Only in this server: maximum number of tokens allowed by the constraint to list with each
    # log-probability.
    show_allowed: Annotated[int | None, Field(ge=0, le=20)] = None

    @field_validator("stop", mode="before")
    @classmethod
    def drop_empty_strings(cls, value: Any) -> Any:
        """Drop empty stop strings, which clients send to set none."""
        if isinstance(value, list):
            return [text for text in value if text != ""]
        return None if value == "" else value

    @field_validator("top_k")
    @classmethod
    def disable_top_k(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value  # -1 disables top_k in vLLM

    @field_validator(*SAMPLING_FIELDS)
    @classmethod
    def check_range(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check_limits(LIMITS, **{info.field_name: value})
        return value

    @model_validator(mode="after")
    def check_best_of(self) -> "GenerationRequest":
        if self.best_of not in (None, self.n or 1):
            raise field_error("best_of", "must equal n")
        return self

    @model_validator(mode="after")
    def one_constraint(self) -> "GenerationRequest":
        if self.structured_outputs and self.response_format and self.response_format.constraint:
            raise field_error("structured_outputs", "cannot be combined with response_format")
        return self

    @model_validator(mode="after")
    def check_show_allowed(self) -> "GenerationRequest":
        if self.show_allowed is not None and not self.constraint:
            raise field_error("show_allowed", "requires response_format or structured_outputs")
        if self.show_allowed is not None and (self.logprobs is None or self.logprobs is False):
            raise field_error("show_allowed", "requires logprobs")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields that are set but ignored, and do not change the output."""
        names = [
            name
            for name, no_op in IGNORED_FIELDS.items()
            if getattr(self, name) not in (None, *no_op)
        ]
        if self.stream_options and self.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
        return names

    @property
    def constraint_field(self) -> str:
        """Return the name of the field that may constrain the output."""
        return "structured_outputs" if self.structured_outputs else "response_format"

    @property
    def constraint(self) -> dict:
        """Return the constraint as fields of SamplingParams; empty without one."""
        field = self.structured_outputs or self.response_format
        return field.constraint if field else {}

    @property
    def num_choices(self) -> int:
        """Return the number of choices in the response."""
        return self.n or 1

    def token_bytes(self, logprobs: int | None) -> int:
        """Return the estimated size of an output token with its log-probabilities."""
        entries = 0 if logprobs is None else 1 + logprobs
        if self.show_allowed is not None:  # and of the next position
            entries += (1 + self.show_allowed) * (2 if self.stream else 1)
        return TOKEN_BYTES + entries * LOGPROB_BYTES

    def max_tokens_limit(self, logprobs: int | None) -> int:
        """Return the largest max_tokens that keeps the response within MAX_RESPONSE_BYTES."""
        return MAX_RESPONSE_BYTES // (self.num_choices * self.token_bytes(logprobs))

    def to_sampling_params(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        tool_grammar: str | None = None,
        skip_token_ids: tuple[int, ...] = (),
        defaults: Mapping[str, float] | None = None,
        reasoning: Reasoning | None = None,
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each of a prompt's n choices; choice i has seed + i.

        tool_grammar: the grammar of a reply that may call tools. skip_token_ids: tokens left out of
        the text. defaults: values of fields that are not set. reasoning: as in SamplingParams.
        Raises APIError if the response could be too long, if min_tokens exceeds max_new_tokens, or
        if the constraint is too large or conflicts with other fields.
        """
        limit = self.max_tokens_limit(logprobs)
        if max_new_tokens > limit:
            size = f"sequences: {self.num_choices}, log-probabilities per token: {logprobs or 0}"
            if self.show_allowed is not None:
                size += f", allowed tokens: {self.show_allowed}"
            message = f"max_tokens {max_new_tokens}: must be at most {limit} ({size})"
            raise APIError(400, message, "max_tokens")
        if (self.min_tokens or 0) > max_new_tokens:
            message = f"min_tokens {self.min_tokens}: must be at most max_tokens ({max_new_tokens})"
            raise APIError(400, message, "min_tokens")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        given["thinking_token_budget"] = getattr(self, "thinking_token_budget", None)
        given = {name: value for name, value in given.items() if value is not None}
        given = {"temperature": 1.0} | dict(defaults or {}) | given
        given["logit_bias"] = self.logit_bias or {}
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given |= self.constraint | {"tool_grammar": tool_grammar, "skip_token_ids": skip_token_ids}
        given["reasoning"] = reasoning
        try:
            params = SamplingParams(
                max_new_tokens, stop=self.stop_strings, logprobs=logprobs, **given
            )
        except UserError as error:
            name = str(error).partition(" ")[0]
            field = name
            if name not in type(self).model_fields:
                field = "tools" if tool_grammar else self.constraint_field
            raise APIError(400, str(error), field) from None
        return [replace(params, seed=self.child_seed(index)) for index in range(self.n or 1)]

    def child_seed(self, index: int) -> int | None:
        return None if self.seed is None else (self.seed + index) % 2**64


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        Prompt | None,
        must_be(
            "a string, a list of strings, a list of token ids or a list of such lists, "
            f"at most {MAX_ITEMS} prompts"
        ),
    ] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list; an absent prompt is one empty string."""
        given = self.prompt or ""
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * (self.n or 1)

    def check_echo(self, prompts: list[str]) -> None:
        """Raise APIError if the response would echo too many bytes: each prompt n times."""
        size = sum(len(text.encode(errors="replace")) for text in prompts) * (self.n or 1)
        if size > MAX_ECHO:
            message = f"echo would repeat {size} bytes of prompts: at most {MAX_ECHO} are allowed"
            raise APIError(400, message, "echo")

    def check_echoed_logprobs(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise APIError if echoed log-probabilities could exceed MAX_RESPONSE_BYTES.

        prompt_tokens: of all choices.
        """
        limit = MAX_RESPONSE_BYTES // self.token_bytes(self.logprobs)
        tokens = prompt_tokens + self.num_choices * max_new_tokens
        if tokens > limit:
            message = f"log-probabilities of {tokens} tokens, prompts included, were requested"
            raise APIError(400, f"echo: {message}: at most {limit} are allowed", "echo")


FunctionName = Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9_-]+$")]


# Client metadata in messages and their parts: cache hints and display fields.
METADATA_FIELDS = frozenset(
    {
        "additional_kwargs",
        "annotations",
        "cache_control",
        "citations",
        "created",
        "createdAt",
        "created_at",
        "extra_content",
        "finish_reason",
        "id",
        "index",
        "metadata",
        "model",
        "opts",
        "parsed",  # the content as parsed by the official client's .parse()
        "prompt_cache_breakpoint",
        "providerMetadata",
        "providerOptions",
        "provider_metadata",
        "provider_options",
        "provider_specific_fields",
        "reasoning_details",
        "response_metadata",
        "status",
        "thinking_blocks",
        "timestamp",
        "timings",
        "usage",
        "usage_metadata",
    }
)


class ContentPart(StrictModel):
    """A part of a message's content; only text is supported."""

    no_op_values = {"file": (), "image_url": (), "input_audio": (), "refusal": ()}
    silently_ignored = METADATA_FIELDS
    type: Literal["text"]
    text: str


class Arguments(str):
    """The JSON of a call's arguments. given: the parsed object, so that it is parsed only once."""

    given: dict[str, Any]


class FunctionCall(StrictModel):
    """A function's name, and the JSON of its arguments."""

    silently_ignored = frozenset({"parsed_arguments"})  # of the official client's .parse()
    name: FunctionName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def is_object(cls, value: str) -> str:
        try:
            arguments = Arguments(value or "{}")
            arguments.given = json.loads(arguments)
            if isinstance(arguments.given, dict):
                if "\\u" in value:  # reject lone surrogates
                    json.dumps(arguments.given, ensure_ascii=False).encode()
                return arguments
        except UnicodeEncodeError:
            raise ValueError(LONE_SURROGATE) from None
        except (ValueError, RecursionError):
            pass
        raise ValueError("must be a JSON object, as a string")


class ToolCall(StrictModel):
    """A tool call in an earlier reply."""

    silently_ignored = METADATA_FIELDS  # includes the index from a stream
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: FunctionCall

    @property
    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments.given}
        return {"id": self.id, "type": self.type, "function": function}


class NamedFunction(StrictModel):
    name: FunctionName


class NamedTool(StrictModel):
    """The tool that a reply must call."""

    type: Literal["function"]
    function: NamedFunction


class Message(StrictModel):
    # A client may send a response's message back unchanged; litellm's has the most fields.
    no_op_values = {"audio": (), "function_call": (), "images": ([],), "refusal": ("",)}
    silently_ignored = METADATA_FIELDS

    # A template writes the role verbatim, so it must not be able to close a message and start one.
    role: Annotated[str, Field(pattern="^[a-z_]+$", max_length=64)]
    name: Annotated[str | None, Field(pattern="^[A-Za-z0-9_-]+$", max_length=64)] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    # The reasoning before a reply, for templates that render it; `reasoning` is vLLM's name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)],
        must_be(f"a string or a list of up to {MAX_ITEMS} parts of the type text"),
    ] = Field(default=None, validate_default=True)

    @field_validator("content", mode="before")
    @classmethod
    def allow_null_content(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept null as empty content in replies and tool results."""
        return "" if value is None and info.data.get("role") in ("assistant", "tool") else value

    @model_validator(mode="after")
    def check_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise field_error("tool_calls", "is allowed for the role assistant only")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise field_error("tool_call_id", "must be set for the role tool, and only for it")
        return self

    @property
    def text_fields(self) -> list[str]:
        """Return the content, reasoning and call arguments as a template writes them."""
        arguments = [
            json.dumps(call.function.arguments.given, ensure_ascii=False)
            for call in self.tool_calls or ()
        ]
        return [self.text, *filter(None, [self.reasoning_text]), *arguments]

    @property
    def reasoning_text(self) -> str:
        """Return the reasoning before a reply."""
        return self.reasoning_content or self.reasoning or "" if self.role == "assistant" else ""

    @property
    def as_dict(self) -> dict[str, Any]:
        """Return the message as a template gets it."""
        fields = {"role": self.role, "content": self.text}
        if self.name:  # most templates ignore it
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.reasoning_text:
            fields["reasoning_content"] = self.reasoning_text
        return fields

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


def effort_variables(effort: str) -> dict[str, bool | str]:
    """Return the template variables of an effort; none if it is not in REASONING_EFFORTS.

    A template would write an unknown effort verbatim, control tokens included.
    """
    variables = {"reasoning_effort": effort} if effort in REASONING_EFFORTS else {}
    return variables | ({"enable_thinking": False} if effort == "none" else {})


class ChatRequest(GenerationRequest):
    no_op_values = UNSUPPORTED_FIELDS | {
        "add_special_tokens": (True, False)
    }  # templates add their own

    messages: Annotated[list[Message], ListLimits]
    # No strings: a template would write them verbatim, control tokens included.
    chat_template_kwargs: Annotated[
        Annotated[dict[str, bool], Field(max_length=16)] | None,
        must_be("an object of up to 16 fields, each true or false"),
    ] = None
    max_completion_tokens: MaxTokens = None
    # Template variables, where the template reads them.
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, Field(max_length=64)] = None
    include_reasoning: bool | None = None  # false: leave reasoning_content out
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None  # of the reasoning block
    think: Annotated[
        bool | Literal[REASONING_EFFORTS] | None,
        must_be(f"true, false or one of {', '.join(REASONING_EFFORTS)}"),
    ] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        must_be('none, auto, required or {"type": "function", "function": {"name": ...}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def check_names(cls, value: dict[str, bool] | None) -> dict[str, bool] | None:
        for name in value or {}:
            if name in RESERVED_VARIABLES:
                raise ValueError(f"{name} cannot be set by a request")
        return value

    @model_validator(mode="after")
    def check_combination(self) -> "ChatRequest":
        if self.echo:
            raise field_error("echo", "is not supported for messages")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "requires logprobs: true")
        return self

    @field_validator("tools")
    @classmethod
    def drop_cache_control(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Drop cache hints, which a template would write into the prompt."""
        return value and [
            {name: part for name, part in tool.items() if name != "cache_control"} for tool in value
        ]

    @field_validator("messages")
    @classmethod
    def check_tool_call_ids(cls, value: list[Message]) -> list[Message]:
        call_ids = set()
        for index, message in enumerate(value):
            if message.tool_call_id is not None and message.tool_call_id not in call_ids:
                raise field_error(f"{index}.tool_call_id", "is not the id of an earlier tool call")
            call_ids |= {call.id for call in message.tool_calls or ()}
        return value

    @model_validator(mode="after")
    def check_tool_choice(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise field_error("tool_choice", "requires tools")
        if self.tools and self.tool_mode != "none" and self.constraint:
            raise field_error(self.constraint_field, CONFLICTS_WITH_TOOLS)
        return self

    @property
    def ignored(self) -> list[str]:
        return [name for name in super().ignored if name not in self.reasoning_variables]

    @property
    def reasoning_variables(self) -> dict[str, dict[str, bool | str]]:
        """Return the template variables that each reasoning field requests.

        `enable_thinking` switches reasoning on or off, as in Qwen3. `reasoning_effort` sets its
        amount.
        """
        variables = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = effort_variables(self.reasoning_effort)
        if isinstance(self.think, str):
            variables["think"] = effort_variables(self.think)
        elif self.think is not None:
            variables["think"] = {"enable_thinking": self.think}
        if self.enable_thinking is not None:
            variables["enable_thinking"] = {"enable_thinking": self.enable_thinking}
        return variables

    @property
    def max_new_tokens(self) -> int | None:
        """Return the requested maximum length of the reply; None for no explicit limit."""
        given = self.max_completion_tokens
        given = self.max_tokens if given is None else given
        return None if given == -1 else given

    @property
    def tool_mode(self) -> str:
        """Return the tool_choice for `build_tool_grammar`: none, auto or required."""
        if not self.tools:
            return "none"
        return "required" if self.named_tool else self.tool_choice or "auto"

    @property
    def named_tool(self) -> str | None:
        """Return the tool that the reply must call, if the request names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

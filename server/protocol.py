"""What a client may ask for, and how it is told what is wrong, in the form of OpenAI's API."""

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
from loading.chat import RESERVED_VARIABLES
from loading.tools import MAX_TOOLS
from sampling import LIMITS, SamplingParams, is_logit_bias

MAX_RESPONSE_BYTES = 2**22  # of an answer, at TOKEN_BYTES for each token and so on
TOKEN_BYTES = 16
LOGPROB_BYTES = 64  # of which a token has one, and one for each of the best
MAX_ECHO = 2**20  # bytes of prompts that an answer repeats
MAX_ITEMS = 2**14  # prompts, messages, or parts of a message
MAX_BIASES = 2**10
LONE_SURROGATE = "not UTF-8 text; it has half of a surrogate pair"
MAX_CHOICES = 2**10  # each of up to 128 texts is checked and looked up by all of them

SAMPLING_FIELDS = (  # fields of SamplingParams by the same name
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


# Fields of OpenAI's and vLLM's API that change no text: who a client is, and hints for speed.
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

# Fields that change no text, of the APIs of OpenAI, vLLM, llama.cpp and Ollama, and values of them
# that ask for nothing. Another value is taken, and the answer's header names the field.
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
# Names that APIs give to one field. The first that a request has is suggested for the others.
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

# Fields of OpenAI's and vLLM's API that nothing here does, and values of them that ask for nothing.
# A request with a field of that name does it.
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
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}


def field_error(field: str, what: str) -> PydanticCustomError:
    """What is wrong with a field, where a whole request is looked at."""
    # The name comes last: pydantic fills in one after the other, and it may be "{what}".
    return PydanticCustomError("field", "{field} {what}", {"what": what, "field": field})


def must_be(allowed: str) -> WrapValidator:
    """One sentence for a value of several types, where pydantic has one for each type."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            for found in error.errors(include_url=False, include_input=False):
                if found["type"] == "field":  # an object inside has said what is wrong
                    path = [str(part) for part in found["loc"] if isinstance(part, int)]
                    name = ".".join([*path, found["ctx"]["field"]])
                    raise field_error(name, found["ctx"]["what"]) from None
            raise ValueError(f"it must be {allowed}") from None

    return WrapValidator(check)


def prompt_type(prompt: Any) -> str:
    """The only type a prompt can have, as its first element tells: no other is validated."""
    if isinstance(prompt, list):
        return f"list of {type(prompt[0]).__name__}" if prompt else "empty list"
    return type(prompt).__name__


def parse_logit_bias(value: Any) -> Any:
    """An object of biases with integers for its names, each written as JSON writes it.

    Raises ValueError at the first that is wrong.
    """

    def good(name: str, bias: Any) -> bool:
        is_number = name.isascii() and name.isdecimal() and len(name) <= 10
        return is_number and str(int(name)) == name and is_logit_bias(bias)

    if value is None:
        return None
    if isinstance(value, dict) and len(value) <= MAX_BIASES:
        if all(good(*pair) for pair in value.items()):
            return {int(name): float(bias) for name, bias in value.items()}
    what = f"an object of up to {MAX_BIASES} token ids, each with a number in [-100, 100]"
    raise ValueError(f"it must be {what}")


# A list fails at its first bad element: a body of 1 MiB can hold half a million of them, and an
# error for each would stop all streams for seconds.
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
    """An object in a request: a field that is not known is refused by its name.

    Null is the same as nothing.
    """

    model_config = ConfigDict(strict=True)  # "1" is no number

    # Names of fields that are known beside its own, and values of them that ask for nothing.
    no_op_values: ClassVar[dict[str, tuple]] = {}
    silently_ignored: ClassVar[frozenset[str]] = frozenset()  # fields that may have any value

    @model_validator(mode="before")
    @classmethod
    def check_known_fields(cls, data: Any) -> Any:
        """Raise PydanticCustomError for the first field that is unknown, or asks for something."""
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
    """The names of its fields in a request."""
    return {field.alias or name for name, field in model.model_fields.items()}


def describe_unknown_field(name: str, names: Iterable[str]) -> str:
    """What is wrong with a field of this name, and which name it may have been meant to have."""
    synonyms = next((group for group in SYNONYMS if name in group), ())
    matches = [other for other in synonyms if other in names][:1]
    matches = matches or difflib.get_close_matches(name[:100], names, 1)
    return "is not a field of this request" + "".join(
        f"; did you mean {other}?" for other in matches
    )


def find_lone_surrogate(body: Any) -> tuple[str | int, ...] | None:
    """Return the path to a text with half of a surrogate pair; None if there is none.

    It has up to 6 parts. An object's own names count, but not those of the body's fields.
    """
    with contextlib.suppress(ValueError):  # also for objects that are too deep for it
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
            if each and isinstance(each, dict | list):  # most of a long body is numbers
                inner.append(((*path, name)[:6], each))
        pending += reversed(inner)
    return None


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class RequestBody(StrictModel):
    """A whole request."""

    @model_validator(mode="before")
    @classmethod
    def check_utf8(cls, data: Any) -> Any:
        """Raise ValidationError for a text that UTF-8 cannot write."""
        path = find_lone_surrogate(data) if isinstance(data, dict) else None
        if path is not None:
            path = [ascii(part[:100])[1:-1] if isinstance(part, str) else part for part in path]
            error = PydanticCustomError("not_utf8", LONE_SURROGATE)
            raise ValidationError.from_exception_data(
                "body", [{"type": error, "loc": tuple(path), "input": None}]
            )
        return data


def with_untyped_fields(base: type[StrictModel], names: Iterable[str]) -> type[StrictModel]:
    """Return a model with further fields, each of which may be left out or have any value."""
    return create_model(base.__name__, __base__=base, **dict.fromkeys(names, (Any, None)))


class StreamOptions(StrictModel):
    """What an answer in events tells of its tokens."""

    include_obfuscation: bool | None = None  # against who sees how long events are; not done
    include_usage: bool | None = None  # in one more event, the last
    continuous_usage_stats: bool | None = None  # then also in each other, vLLM's addition


class JSONSchema(StrictModel):
    """OpenAI's way to name a schema. Texts are held to it, strict or not."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$", max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The constraint on a text in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def check_complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error("json_schema", "is needed for the type json_schema, and for it only")
        return self

    @functools.cached_property
    def constraint(self) -> dict:
        """Fields of SamplingParams. A schema may be long: it is written once."""
        if self.type == "text":
            return {}
        schema = self.json_schema.schema_ if self.json_schema else {"type": "object"}
        return {"json_schema": json.dumps(schema)}


class StructuredOutputs(StrictModel):
    """The constraint on a text in vLLM's words: one of its fields says it."""

    no_op_values = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (True, False),  # there never is any
        "disable_fallback": (True, False),  # there is none
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
        must_be(f"a list of 1 to {MAX_CHOICES} texts"),
    ] = None
    grammar: Annotated[str | None, Field(min_length=1)] = None

    @model_validator(mode="after")
    def check_single_constraint(self) -> "StructuredOutputs":
        if len(self.constraint) != 1:
            raise ValueError("it must have one of json, json_object, regex, choice and grammar")
        return self

    @functools.cached_property
    def constraint(self) -> dict:
        """Fields of SamplingParams. A schema may be long: it is written once."""
        schema = self.json_ if isinstance(self.json_, str | None) else json.dumps(self.json_)
        values = {"json_schema": schema, "regex": self.regex, "grammar": self.grammar}
        values["choices"] = None if self.choice is None else tuple(self.choice)
        values = {name: value for name, value in values.items() if value is not None}
        if self.json_object:
            values["json_schema" if schema is None else "json_object"] = '{"type": "object"}'
        return values


MaxTokens = Annotated[int | None, Field(ge=-1)]  # -1: no limit of its own, as in llama.cpp


class GenerationRequest(with_untyped_fields(RequestBody, IGNORED_FIELDS)):
    """What all requests for texts have in common."""

    no_op_values = UNSUPPORTED_FIELDS
    silently_ignored = SILENTLY_IGNORED_FIELDS

    model: str | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None  # texts for each prompt
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    # How many tokens of a prompt to keep, its last ones; -1: what leaves room for max_tokens.
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
    skip_special_tokens: bool | None = None  # null: as true, in OpenAI's API and vLLM's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    # Ours alone: how many of the tokens that the constraint allows to list with each
    # log-probability.
    show_allowed: Annotated[int | None, Field(ge=0, le=20)] = None

    @field_validator("stop", mode="before")
    @classmethod
    def drop_empty_strings(cls, value: Any) -> Any:
        """Leave out empty stop strings, with which clients say that there is none."""
        if isinstance(value, list):
            return [text for text in value if text != ""]
        return None if value == "" else value

    @field_validator("top_k")
    @classmethod
    def disable_top_k(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value  # vLLM's way to say it

    @field_validator(*SAMPLING_FIELDS)
    @classmethod
    def check_range(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check_limits(LIMITS, **{info.field_name: value})
        return value

    @model_validator(mode="after")
    def check_best_of(self) -> "GenerationRequest":
        if self.best_of not in (None, self.n or 1):
            raise field_error("best_of", "is supported only where it equals n")
        return self

    @model_validator(mode="after")
    def one_constraint(self) -> "GenerationRequest":
        if self.structured_outputs and self.response_format and self.response_format.constraint:
            raise field_error("structured_outputs", "is not for a request with a response_format")
        return self

    @model_validator(mode="after")
    def check_show_allowed(self) -> "GenerationRequest":
        if self.show_allowed is not None and not self.constraint[1]:
            raise field_error("show_allowed", "is for response_format and structured_outputs only")
        if self.show_allowed is not None and (self.logprobs is None or self.logprobs is False):
            raise field_error("show_allowed", "is for a request with logprobs only")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields that ask for what is not done here, and change no text."""
        names = [
            name
            for name, no_op in IGNORED_FIELDS.items()
            if getattr(self, name) not in (None, *no_op)
        ]
        if self.stream_options and self.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
        return names

    @property
    def constraint(self) -> tuple[str, dict]:
        """The field that constrains each text, and the fields of SamplingParams."""
        if self.structured_outputs:
            return "structured_outputs", self.structured_outputs.constraint
        return "response_format", self.response_format.constraint if self.response_format else {}

    @property
    def num_choices(self) -> int:
        """How many the answer has."""
        return self.n or 1

    def max_tokens_limit(self, logprobs: int | None) -> int:
        """The largest max_tokens for which all texts together are not too long."""
        entries = 0 if logprobs is None else 1 + logprobs
        if self.show_allowed is not None:  # also of the next place, in each event
            entries += (1 + self.show_allowed) * (2 if self.stream else 1)
        return MAX_RESPONSE_BYTES // (self.num_choices * (TOKEN_BYTES + entries * LOGPROB_BYTES))

    def to_sampling_params(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        tool_grammar: str | None = None,
        skip_token_ids: tuple[int, ...] = (),
        defaults: Mapping[str, float] | None = None,
    ) -> list[SamplingParams]:
        """The parameters of each of the n texts that follow a prompt: text i has the seed + i.

        tool_grammar: the grammar of a reply that may call tools. skip_token_ids: what texts leave
        out. defaults: fields of SamplingParams for what the request leaves open. Raises APIError if
        all texts together could be too long, or min_tokens is more than that, and for a constraint
        that is too large or does not go with other fields.
        """
        limit = self.max_tokens_limit(logprobs)
        if max_new_tokens > limit:
            what = f"{self.num_choices} texts with {logprobs or 0} log-probabilities for each token"
            if self.show_allowed is not None:
                what += f", and {self.show_allowed} allowed ones,"
            message = f"max_tokens is {max_new_tokens}; for {what} it may be {limit}"
            raise APIError(400, message, "max_tokens")
        if (self.min_tokens or 0) > max_new_tokens:
            message = f"min_tokens is {self.min_tokens}; max_tokens is {max_new_tokens}"
            raise APIError(400, message, "min_tokens")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        given = {"temperature": 1.0} | dict(defaults or {}) | given
        given["logit_bias"] = self.logit_bias or {}
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given |= self.constraint[1] | {
            "tool_grammar": tool_grammar,
            "skip_token_ids": skip_token_ids,
        }
        try:
            params = SamplingParams(
                max_new_tokens, stop=self.stop_strings, logprobs=logprobs, **given
            )
        except UserError as error:
            name = str(error).partition(" ")[0]
            constraint = "tools" if tool_grammar else self.constraint[0]
            field = name if name in type(self).model_fields else constraint
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

    @model_validator(mode="after")
    def check_combination(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise field_error("logprobs", "is not supported with echo: a prompt has none")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each for itself; without any there is an empty one."""
        given = self.prompt or ""
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * (self.n or 1)

    def check_echo(self, prompts: list[str]) -> None:
        """Raise APIError if the answer would repeat too much: each of its prompts n times."""
        size = sum(len(text.encode(errors="replace")) for text in prompts) * (self.n or 1)
        if size > MAX_ECHO:
            message = f"echo would repeat {size} bytes of prompts; it may repeat {MAX_ECHO}"
            raise APIError(400, message, "echo")


FunctionName = Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9_-]+$")]


# What clients note in messages and their parts: hints for a cache, and what they show themselves.
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
        "parsed",  # what .parse() of the official client has made of the content
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
    """A part of a message; text is the only kind that is known here."""

    no_op_values = {"file": (), "image_url": (), "input_audio": (), "refusal": ()}
    silently_ignored = METADATA_FIELDS
    type: Literal["text"]
    text: str


class Arguments(str):
    """The JSON of a call's arguments. given: what it says, read once."""

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
            read = Arguments(value or "{}")
            read.given = json.loads(read)
            if isinstance(read.given, dict):
                if "\\u" in value:  # no halves of characters
                    json.dumps(read.given, ensure_ascii=False).encode()
                return read
        except UnicodeEncodeError:
            raise ValueError(LONE_SURROGATE) from None
        except (ValueError, RecursionError):
            pass
        raise ValueError("it must be the JSON of an object")


class ToolCall(StrictModel):
    """A call that a reply made."""

    silently_ignored = METADATA_FIELDS  # also the index that it had in a stream
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
    """The one tool that a reply calls."""

    type: Literal["function"]
    function: NamedFunction


class Message(StrictModel):
    # What an answer's message has, which a client may send back as it is; litellm's has most.
    no_op_values = {"audio": (), "function_call": (), "images": ([],), "refusal": ("",)}
    silently_ignored = METADATA_FIELDS

    # A template writes it as it is, so it must not be able to close a message and begin another.
    role: Annotated[str, Field(pattern="^[a-z_]+$", max_length=64)]
    name: Annotated[str | None, Field(pattern="^[A-Za-z0-9_-]+$", max_length=64)] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    # The reasoning before a reply, as a template may write it again; and vLLM's name for it.
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)],
        must_be(f"a string or a list of up to {MAX_ITEMS} parts of the type text"),
    ] = Field(default=None, validate_default=True)

    @field_validator("content", mode="before")
    @classmethod
    def allow_null_content(cls, value: Any, info: ValidationInfo) -> Any:
        """Take null for no text, where a reply or a result may have none."""
        return "" if value is None and info.data.get("role") in ("assistant", "tool") else value

    @model_validator(mode="after")
    def check_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise field_error("tool_calls", "is for the role assistant only")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise field_error("tool_call_id", "is needed for the role tool, and for it only")
        return self

    @property
    def text_fields(self) -> list[str]:
        """Its content, and the arguments of its calls as a template writes them."""
        made = [call.as_dict["function"]["arguments"] for call in self.tool_calls or ()]
        calls = [json.dumps(arguments, ensure_ascii=False) for arguments in made]
        return [self.text, *filter(None, [self.reasoning_text]), *calls]

    @property
    def reasoning_text(self) -> str:
        """The reasoning before a reply."""
        return self.reasoning_content or self.reasoning or "" if self.role == "assistant" else ""

    @property
    def as_dict(self) -> dict[str, Any]:
        """What a template gets of it."""
        fields = {"role": self.role, "content": self.text}
        if self.name:  # most templates leave it out
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
    """Return the template variables of an effort; none for a word that is not in REASONING_EFFORTS.

    A template would write such a word as it is, control tokens too.
    """
    variables = {"reasoning_effort": effort} if effort in REASONING_EFFORTS else {}
    return variables | ({"enable_thinking": False} if effort == "none" else {})


class ChatRequest(GenerationRequest):
    no_op_values = UNSUPPORTED_FIELDS | {
        "add_special_tokens": (True, False)
    }  # templates add their own

    messages: Annotated[list[Message], ListLimits]
    # No strings: a template would write them as they are, control tokens too.
    chat_template_kwargs: Annotated[
        Annotated[dict[str, bool], Field(max_length=16)] | None,
        must_be("an object of up to 16 fields, each true or false"),
    ] = None
    max_completion_tokens: MaxTokens = None
    # Variables of a template that looks at them.
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, Field(max_length=64)] = None
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
                raise ValueError(f"{name} is not for a request to set")
        return value

    @model_validator(mode="after")
    def check_combination(self) -> "ChatRequest":
        if self.echo:
            raise field_error("echo", "is not supported for messages")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "is for logprobs: true only")
        return self

    @field_validator("tools")
    @classmethod
    def drop_cache_control(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Leave out hints for a cache, which a template would write into the prompt."""
        return value and [
            {name: part for name, part in tool.items() if name != "cache_control"} for tool in value
        ]

    @field_validator("messages")
    @classmethod
    def check_tool_call_ids(cls, value: list[Message]) -> list[Message]:
        made = set()
        for index, message in enumerate(value):
            if message.tool_call_id is not None and message.tool_call_id not in made:
                raise field_error(f"{index}.tool_call_id", "is the id of no call before it")
            made |= {call.id for call in message.tool_calls or ()}
        return value

    @model_validator(mode="after")
    def check_tool_choice(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise field_error("tool_choice", "is for a request with tools")
        if self.tools and self.tool_mode != "none" and self.constraint[1]:
            raise field_error(self.constraint[0], "is not for a request whose reply may call tools")
        return self

    @property
    def ignored(self) -> list[str]:
        return [name for name in super().ignored if name not in self.reasoning_variables]

    @property
    def reasoning_variables(self) -> dict[str, dict[str, bool | str]]:
        """Return the template variables that each field on reasoning asks for.

        `enable_thinking` turns it off or on, as in Qwen3; `reasoning_effort` says how much.
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
    def tool_mode(self) -> str:
        """Whether a reply may call tools, as `build_tool_grammar` has it."""
        if not self.tools:
            return "none"
        return "required" if self.named_tool else self.tool_choice or "auto"

    @property
    def named_tool(self) -> str | None:
        """The one tool that a reply calls, if the request names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

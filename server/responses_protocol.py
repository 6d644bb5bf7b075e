"""Request models of /v1/responses, and their translation to chat requests."""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import to_json

from server.protocol import (
    CONFLICTS_WITH_TOOLS,
    IGNORED_FIELDS,
    MAX_ITEMS,
    METADATA_FIELDS,
    SILENTLY_IGNORED_FIELDS,
    APIError,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionName,
    MaxTokens,
    Message,
    RequestBody,
    StrictModel,
    field_error,
    first_error,
    must_be,
    with_untyped_fields,
)
from text.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
NOTHING_STORED = "is not supported: the server stores no responses, so send earlier items in input"
ITEM_REFERENCE = "item_reference"
NOT_KEPT = (
    "is not the id of an item that this server still keeps; set store: false, so that the client"
    " sends the items themselves (AI SDK: providerOptions: {openai: {store: false}})"
)
MAX_REFERENCED_BYTES = 2**20  # bytes of all referenced items; the limit of a body

# Fields with the same name in ChatRequest, which validates them.
CHAT_FIELDS = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    # vLLM's and llama.cpp's extensions
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    *sorted(IGNORED_FIELDS.keys() - {"reasoning_effort", "verbosity"}),  # renamed here
)

# Further fields that do not change the output, as in IGNORED_FIELDS, with their no-op values.
MORE_IGNORED_FIELDS = {
    "access_programs": (),
    "max_tool_calls": (),  # of hosted tools
    "reasoning.context": ("auto",),
    "reasoning.generate_summary": (),
    "reasoning.mode": ("standard",),
    "reasoning.summary": (),
    "stream_options.continuous_usage_stats": (False,),
    "stream_options.include_obfuscation": (False,),
}

# Reasons for rejecting fields that clients of this API, or of chat completions, commonly send.
REFUSAL_REASONS = {
    "background": "is not supported: a response ends with its connection",
    "conversation": NOTHING_STORED,
    "messages": "is not a field of this request; did you mean input?",
    "previous_response_id": NOTHING_STORED,
    "prompt": "is not supported: the server stores no prompts, so send the text in input",
    "reasoning_effort": "is not a field of this request; did you mean reasoning.effort?",
    "response_format": "is not a field of this request; did you mean text.format?",
    "verbosity": "is not a field of this request; did you mean text.verbosity?",
}

# Patterns of a chat request's paths in errors, and the response request's field for each.
RESPONSES_NAMES = {
    r"messages[.\w]*": "input",
    r"max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"response_format[.\w]*": "text.format",
    r"verbosity": "text.verbosity",
    r"set truncate_prompt_tokens to keep": 'set truncation "auto" to keep',
}


class TypedModel(StrictModel):
    """An object whose `type` determines its other fields."""

    types: ClassVar[tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, data: Any) -> Any:
        """Raise PydanticCustomError for an unsupported type, before its fields are checked."""
        item_type = data.get("type") if isinstance(data, dict) else None
        if isinstance(item_type, str) and item_type not in cls.types:
            allowed = ", ".join(cls.types)
            raise field_error(
                "type", f"is {ascii(item_type[:100])[1:-1]}; this server supports {allowed} only"
            )
        # Drop another model's reasoning: templates cannot render it.
        return {"type": item_type} if item_type == "reasoning" else data


class InputContentPart(TypedModel):
    """A text part of a message's content or of a function's output."""

    types = ("input_text", "output_text", "text")
    no_op_values = ContentPart.no_op_values
    silently_ignored = METADATA_FIELDS | {"logprobs"}  # present in output text

    type: Literal[types]
    text: str


def to_parts(value: Any) -> Any:
    """Convert a string to a list of one part; return a list as it is, for validation.

    Raises ValueError if the value is neither.
    """
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if isinstance(value, list | None):
        return value
    allowed = "input_text, output_text or text"
    raise ValueError(f"must be a string or a list of parts of the type {allowed}")


def to_items(value: Any) -> Any:
    """Convert a string to a list of one user message; return a list as it is, for validation.

    Raises ValueError if the value is neither.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise ValueError("must be a string or a list of items")


def check_size(value: Any) -> Any:
    """Raise ValueError for an object of more than 16 fields, before validating each."""
    if isinstance(value, dict) and len(value) > 16:
        raise ValueError(f"{len(value)} fields: at most 16 are allowed")
    return value


Content = Annotated[
    Annotated[list[InputContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None,
    BeforeValidator(to_parts),
]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class InputItem(TypedModel):
    """An input item: a message, a function call, its output, reasoning, or a reference.

    id: the referenced item's id. Other items may have any id.
    """

    types = ("message", "function_call", "function_call_output", "reasoning", ITEM_REFERENCE)
    required: ClassVar[dict[str, tuple[str, ...]]] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
        ITEM_REFERENCE: (),
    }
    no_op_values = Message.no_op_values | {
        "async": (False,),
        "async_": (False,),  # the official client's model_dump() writes it so
        "caller": ({"type": "direct"},),
        "namespace": (),
    }
    silently_ignored = METADATA_FIELDS - {"id"} | {"parsed_arguments", "phase"}

    type: Literal[types] | None = None
    id: Any = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: Annotated[str, AfterValidator(FunctionCall.is_object)] | None = None
    output: Content = None

    @model_validator(mode="after")
    def check_complete(self) -> "InputItem":
        required = self.required[self.item_type]
        # A message may name its author, and an output its function.
        may_have = ("name",) if self.item_type in ("message", "function_call_output") else ()
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            given = getattr(self, name) is not None
            if given and name not in (*required, *may_have):
                raise field_error(name, f"is not a field of the type {self.item_type}")
            if not given and name in required:
                raise field_error(name, f"is required for the type {self.item_type}")
        if self.item_type == ITEM_REFERENCE and not isinstance(self.id, str):
            raise field_error("id", f"is required for the type {ITEM_REFERENCE}: a string")
        return self

    @property
    def item_type(self) -> str:
        if self.type:
            return self.type
        is_id = self.id is not None and self.model_fields_set <= {"type", "id"}
        return ITEM_REFERENCE if is_id else "message"


class FunctionTool(TypedModel):
    """A function tool that a reply may call."""

    types = ("function",)
    no_op_values = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def as_dict(self) -> dict[str, Any]:
        """Return the tool as chat completions define it."""
        function = {"name": self.name, "description": self.description}
        function |= {"parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": drop_none(function)}


class ToolName(TypedModel):
    """The function that a reply must call."""

    types = ("function",)

    type: Literal["function"]
    name: FunctionName


class TextFormat(TypedModel):
    """The format of the output text."""

    types = ("text", "json_object", "json_schema")

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check_complete(self) -> "TextFormat":
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                raise field_error(name, "must be set for the type json_schema, and only for it")
        return self

    @property
    def as_dict(self) -> dict[str, Any]:
        """Return the format as chat completions define it."""
        if self.type != "json_schema":
            return {"type": self.type}
        text_format = {"name": self.name, "description": self.description}
        text_format |= {"schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": drop_none(text_format)}

    @property
    def echo(self) -> dict[str, Any]:
        """Return the format as the response repeats it."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Any = None


class Reasoning(StrictModel):
    """Options for reasoning before the reply. ChatRequest validates the effort."""

    effort: Any = None
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


class ResponseStreamOptions(StrictModel):
    """Options for the events of a streamed response."""

    silently_ignored = frozenset({"include_usage"})  # the last event always has usage

    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


ResponseIncludable = Literal[
    "message.output_text.logprobs",
    # Accepted, but no response here has these.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(with_untyped_fields(RequestBody, CHAT_FIELDS)):
    """A request for a response. ChatRequest validates the fields that both have."""

    no_op_values = ChatRequest.no_op_values | {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "previous_response_id": (),
        "prompt": (),
    }
    silently_ignored = SILENTLY_IGNORED_FIELDS

    input: Annotated[
        list[InputItem],
        Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS),
        BeforeValidator(to_items),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolName | None,
        must_be('none, auto, required or {"type": "function", "name": ...}'),
    ] = None
    include: Annotated[list[ResponseIncludable], Field(fail_fast=True, max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[
        dict[str, Annotated[str, Field(max_length=512)]] | None, BeforeValidator(check_size)
    ] = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None  # whether to keep items; responses are never stored

    # Top-level fields of MORE_IGNORED_FIELDS; the base class has CHAT_FIELDS.
    access_programs: Any = None
    max_tool_calls: Any = None

    @model_validator(mode="before")
    @classmethod
    def check_refused_fields(cls, data: Any) -> Any:
        """Raise PydanticCustomError for a field in REFUSAL_REASONS."""
        for name in data if isinstance(data, dict) else ():
            if name in REFUSAL_REASONS and data[name] is not None and data[name] is not False:
                raise field_error(name, REFUSAL_REASONS[name])
        return data

    @model_validator(mode="after")
    def check_combination(self) -> "ResponsesRequest":
        for name, value in self.echo.items():
            try:
                to_json([[[value]]])  # as deeply nested as in a response
            except ValueError:
                raise field_error(name, "may be nested up to 250 levels deep") from None
        if not self.instructions and all(item.item_type == "reasoning" for item in self.input):
            raise field_error("input", "has no message: all its items are of the type reasoning")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", f'requires include: ["{LOGPROBS}"]')
        if self.logprobs and self.tools and self.tool_choice != "none":
            raise field_error("include", f"{LOGPROBS} {CONFLICTS_WITH_TOOLS}")
        return self

    @property
    def logprobs(self) -> bool:
        """Return whether the request includes log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields in MORE_IGNORED_FIELDS that are set to other than a no-op."""
        names = []
        for name, no_op in MORE_IGNORED_FIELDS.items():
            value = self
            for part in name.split("."):
                value = value and getattr(value, part)
            if value is not None and value not in no_op:
                names.append(name)
        return names

    @property
    def echo(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        text_format = self.text and self.text.format
        choice = self.tool_choice or "auto"
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "text": {"format": text_format.echo if text_format else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "truncation": self.truncation or "disabled",
        }

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the chat messages of instructions and input.

        Consecutive function calls, and a reply's text before them, become one message.
        """
        messages = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.item_type == "message":
                message = {"role": item.role, "name": item.name, "content": join_text(item.content)}
                messages.append(drop_none(message))
            elif item.item_type == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.item_type == "function_call_output":
                output = join_text(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        return messages

    def resolve_references(self, find: Callable[[str], bytes | None]) -> "ResponsesRequest":
        """Return the request with each reference replaced by its item.

        find: returns the JSON of the item with an id, or None.
        Raises APIError for a reference to an unknown item, for items that exceed
        MAX_REFERENCED_BYTES in total, and for an output without its call. Raises
        RequestValidationError for a truncated call.
        """
        items = []
        size = 0
        call_ids = set()
        for index, item in enumerate(self.input):
            if item.item_type == ITEM_REFERENCE:
                data = find(item.id)
                if data is None:
                    name = ascii(item.id[:100])[1:-1]
                    raise APIError(400, f"input.{index}.id: {name} {NOT_KEPT}", "input")
                size += len(data)
                if size > MAX_REFERENCED_BYTES:
                    what = f"the items that it refers to exceed {MAX_REFERENCED_BYTES} bytes"
                    raise APIError(400, f"input: {what}", "input")
                try:
                    item = InputItem.model_validate_json(data)
                except ValidationError as error:
                    first = first_error(error)
                    first["loc"] = ("body", "input", index, *first["loc"])
                    raise RequestValidationError([first]) from None
            if item.item_type == "function_call":
                call_ids.add(item.call_id)
            elif item.item_type == "function_call_output" and item.call_id not in call_ids:
                what = "is not the call_id of an earlier function_call"
                raise APIError(400, f"input.{index}.call_id {what}", "input")
            items.append(item)
        return self.model_copy(update={"input": items})

    def to_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Call `resolve_references` first.

        Raises RequestValidationError, with this request's field names, if ChatRequest rejects it.
        """
        choice = self.tool_choice
        if isinstance(choice, ToolName):
            choice = {"type": "function", "function": {"name": choice.name}}
        given = {name: getattr(self, name) for name in CHAT_FIELDS} | {
            "messages": self.messages,
            "max_tokens": self.max_output_tokens,
            "tools": [tool.as_dict for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "response_format": self.text.format.as_dict if self.text and self.text.format else None,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "verbosity": self.text.verbosity if self.text else None,
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }
        try:
            return ChatRequest.model_validate(drop_none(given))
        except ValidationError as error:
            first = first_error(error)
            top, *rest = first["loc"] or ("",)
            where = to_responses_names(str(top)).split(".") if top else []
            loc = ("body", *where, *(rest if top in CHAT_FIELDS else ()))
            first |= {"loc": loc, "msg": to_responses_names(first["msg"])}
            if first["type"] == "field":
                first["ctx"] = {
                    "field": to_responses_names(first["ctx"]["field"]).partition(".")[0]
                }
            raise RequestValidationError([first]) from None


def join_text(parts: list[InputContentPart]) -> str:
    """Concatenate the text of parts, as chat completions do."""
    return "".join(part.text for part in parts)


def drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop fields whose value is None."""
    return {name: value for name, value in fields.items() if value is not None}


def to_responses_names(message: str) -> str:
    """Rename the chat request's fields in an error to the fields of the response request.

    A field name is expected at the start, and after "; ", "or ", "with " or "most ".
    """
    for chat_name, responses_name in RESPONSES_NAMES.items():
        message = re.sub(
            rf"(^|; |\bor |\bwith |\bmost ){chat_name}(?![\w.])", rf"\g<1>{responses_name}", message
        )
    return re.sub(r"^(tools\.\d+|tool_choice)\.function\.", r"\1.", message)

"""What a client may ask of /v1/responses, and the chat request that it stands for."""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import to_json

from loading.tools import MAX_TOOLS
from server.protocol import (
    IGNORED,
    INERT,
    MAX_ITEMS,
    NOTES,
    APIError,
    Body,
    ChatRequest,
    Fields,
    FunctionCall,
    FunctionName,
    MaxTokens,
    Message,
    Part,
    one_of,
    with_any,
    wrong,
)

LOGPROBS = "message.output_text.logprobs"
STORED = "is not supported: no response is stored here, so send the earlier items in input"
REFERENCE = "item_reference"
NOT_KEPT = (
    "is the id of no item that this server still keeps; set store: false, so that the client sends"
    " the items themselves (AI SDK: providerOptions: {openai: {store: false}})"
)
MAX_REFERENCED = 2**20  # bytes of the items that an input refers to: what a body may have

# Fields of ChatRequest by the same name, which checks them.
SHARED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    # vLLM's and llama.cpp's additions
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
    "top_k",
    *sorted(IGNORED.keys() - {"reasoning_effort", "verbosity"}),  # they have other names here
)

# Fields beside those of IGNORED that change no text, and values of them that ask for nothing.
UNDONE = {
    "access_programs": (),
    "max_tool_calls": (),  # of hosted tools
    "reasoning.context": ("auto",),
    "reasoning.generate_summary": (),
    "reasoning.mode": ("standard",),
    "reasoning.summary": (),
    "stream_options.continuous_usage_stats": (False,),
    "stream_options.include_obfuscation": (False,),
}

# Why a field is refused that a client of this API, or of chat completions, may well send.
REASONS = {
    "background": "is not supported: a response ends with its connection",
    "conversation": STORED,
    "messages": "is not a field of this request; did you mean input?",
    "previous_response_id": STORED,
    "prompt": "is not supported: no prompts are stored here, so send its text in input",
    "reasoning_effort": "is not a field of this request; did you mean reasoning.effort?",
    "response_format": "is not a field of this request; did you mean text.format?",
    "verbosity": "is not a field of this request; did you mean text.verbosity?",
}

# A path in a message about the chat request, and the field of the response request it came from.
TERMS = {
    r"messages[.\w]*": "input",
    r"max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"response_format[.\w]*": "text.format",
    r"verbosity": "text.verbosity",
    r"truncate_prompt_tokens to keep": 'truncation "auto" to keep',
}


class Typed(Fields):
    """An object whose type says what else it has."""

    types: ClassVar[tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def of_a_type(cls, data: Any) -> Any:
        """Raise PydanticCustomError for another type, before fields of it are looked at."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in cls.types:
            allowed = ", ".join(cls.types)
            raise wrong(
                "type", f"is {ascii(kind[:100])[1:-1]}; this server supports {allowed} only"
            )
        # The reasoning of another model: templates have no place for it.
        return {"type": kind} if kind == "reasoning" else data


class InputPart(Typed):
    """A part of a message's content, or of a function's output: text."""

    types = ("input_text", "output_text", "text")
    neutral = Part.neutral
    inert = NOTES | {"logprobs"}  # which the text of an answer has

    type: Literal[types]
    text: str


def to_parts(value: Any) -> Any:
    """Return the parts that a string stands for; a list is left to be validated.

    Raises ValueError for neither a string nor a list.
    """
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if isinstance(value, list | None):
        return value
    allowed = "input_text, output_text or text"
    raise ValueError(f"it must be a string or a list of parts of the type {allowed}")


def to_items(value: Any) -> Any:
    """Return the items that a string stands for; a list is left to be validated.

    Raises ValueError for neither a string nor a list.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise ValueError("it must be a string or a list of items")


def few(value: Any) -> Any:
    """Raise ValueError for an object of more than 16 fields, before each is looked at."""
    if isinstance(value, dict) and len(value) > 16:
        raise ValueError(f"it has {len(value)} fields; it may have 16")
    return value


Content = Annotated[
    Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None,
    BeforeValidator(to_parts),
]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Item(Typed):
    """An item of the input: a message, a function's call, its output, reasoning, or a reference.

    id: of the item that a reference stands for. Other items may have any.
    """

    types = ("message", "function_call", "function_call_output", "reasoning", REFERENCE)
    needed: ClassVar[dict[str, tuple[str, ...]]] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
        REFERENCE: (),
    }
    neutral = Message.neutral | {
        "async": (False,),
        "async_": (False,),  # as the official client's model_dump() has it
        "caller": ({"type": "direct"},),
        "namespace": (),
    }
    inert = NOTES - {"id"} | {"parsed_arguments", "phase"}

    type: Literal[types] | None = None
    id: Any = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: Annotated[str, AfterValidator(FunctionCall.is_object)] | None = None
    output: Content = None

    @model_validator(mode="after")
    def complete(self) -> "Item":
        needed = self.needed[self.kind]
        # A message may name who wrote it, and an output its function.
        may_have = ("name",) if self.kind in ("message", "function_call_output") else ()
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            given = getattr(self, name) is not None
            if given and name not in (*needed, *may_have):
                raise wrong(name, f"is not a field of the type {self.kind}")
            if not given and name in needed:
                raise wrong(name, f"is needed for the type {self.kind}")
        if self.kind == REFERENCE and not isinstance(self.id, str):
            raise wrong("id", f"is needed for the type {REFERENCE}: a string")
        return self

    @property
    def kind(self) -> str:
        if self.type:
            return self.type
        is_id = self.id is not None and self.model_fields_set <= {"type", "id"}
        return REFERENCE if is_id else "message"


class FunctionTool(Typed):
    """A function that a reply may call."""

    types = ("function",)
    neutral = {
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
    def plain(self) -> dict[str, Any]:
        """Return it in the form that chat completions have."""
        function = {"name": self.name, "description": self.description}
        function |= {"parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": without_none(function)}


class ToolName(Typed):
    """The one function that a reply calls."""

    types = ("function",)

    type: Literal["function"]
    name: FunctionName


class TextFormat(Typed):
    """The form of a text."""

    types = ("text", "json_object", "json_schema")

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def complete(self) -> "TextFormat":
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                raise wrong(name, "is needed for the type json_schema, and for it only")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """Return it in the form that chat completions have."""
        if self.type != "json_schema":
            return {"type": self.type}
        form = {"name": self.name, "description": self.description}
        form |= {"schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": without_none(form)}

    @property
    def echo(self) -> dict[str, Any]:
        """Return it as an answer repeats it."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Any = None


class Reasoning(Fields):
    """Wishes about what a model thinks before its reply. A chat request checks the effort."""

    effort: Any = None
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


class EventOptions(Fields):
    """What a response in events tells of its tokens."""

    inert = frozenset({"include_usage"})  # the last event always has it

    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


Included = Literal[
    "message.output_text.logprobs",
    # Nothing here has these.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(with_any(Body, SHARED)):
    """A request for a response. What it has in common with a chat request, that one checks."""

    neutral = ChatRequest.neutral | {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "previous_response_id": (),
        "prompt": (),
    }
    inert = INERT

    input: Annotated[
        list[Item],
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
        one_of('none, auto, required or {"type": "function", "name": ...}'),
    ] = None
    include: Annotated[list[Included], Field(fail_fast=True, max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[
        dict[str, Annotated[str, Field(max_length=512)]] | None, BeforeValidator(few)
    ] = None
    stream_options: EventOptions | None = None
    store: bool | None = None  # whether items are kept; a response never is

    # Those of UNDONE. Those of SHARED come from the base.
    access_programs: Any = None
    max_tool_calls: Any = None

    @model_validator(mode="before")
    @classmethod
    def with_reasons(cls, data: Any) -> Any:
        """Raise PydanticCustomError for a field that is refused for a reason."""
        for name in data if isinstance(data, dict) else ():
            if name in REASONS and data[name] is not None and data[name] is not False:
                raise wrong(name, REASONS[name])
        return data

    @model_validator(mode="after")
    def possible(self) -> "ResponsesRequest":
        for name, value in self.echo.items():
            try:
                to_json([[[value]]])  # as deep as a response has it
            except ValueError:
                raise wrong(name, "may have up to 250 objects inside each other") from None
        if not self.instructions and all(item.kind == "reasoning" for item in self.input):
            raise wrong("input", "has no message: its items are of the type reasoning only")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", f'is for include: ["{LOGPROBS}"] only')
        if self.logprobs and self.tools and self.tool_choice != "none":
            raise wrong("include", f"{LOGPROBS} is not for a request whose reply may call tools")
        return self

    @property
    def logprobs(self) -> bool:
        """Return whether the client asks for log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields that are in UNDONE, and ask for something."""
        names = []
        for name, met in UNDONE.items():
            value = self
            for part in name.split("."):
                value = value and getattr(value, part)
            if value is not None and value not in met:
                names.append(name)
        return names

    @property
    def echo(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        form = self.text and self.text.format
        choice = self.tool_choice or "auto"
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "text": {"format": form.echo if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "truncation": self.truncation or "disabled",
        }

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that instructions and input stand for.

        Function calls in a row, and a reply's text before them, are one message.
        """
        messages = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.kind == "message":
                said = {"role": item.role, "name": item.name, "content": text_of(item.content)}
                messages.append(without_none(said))
            elif item.kind == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.kind == "function_call_output":
                output = text_of(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        return messages

    def with_items(self, find: Callable[[str], bytes | None]) -> "ResponsesRequest":
        """Return the request with items in the place of references to them.

        find: returns the JSON of the item with an id, None if there is none.
        Raises APIError for a reference to no item, for items that are together larger than a body,
        and for the output of no call; RequestValidationError for a call that was cut.
        """
        items = []
        size = 0
        called = set()
        for place, item in enumerate(self.input):
            if item.kind == REFERENCE:
                data = find(item.id)
                if data is None:
                    name = ascii(item.id[:100])[1:-1]
                    raise APIError(400, f"input.{place}.id: {name} {NOT_KEPT}", "input")
                size += len(data)
                if size > MAX_REFERENCED:
                    what = f"it refers to items of more than {MAX_REFERENCED} bytes together"
                    raise APIError(400, f"input: {what}", "input")
                try:
                    item = Item.model_validate_json(data)
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False)[0]
                    first["loc"] = ("body", "input", place, *first["loc"])
                    raise RequestValidationError([first]) from None
            if item.kind == "function_call":
                called.add(item.call_id)
            elif item.kind == "function_call_output" and item.call_id not in called:
                what = "is the call_id of no function_call before it"
                raise APIError(400, f"input.{place}.call_id {what}", "input")
            items.append(item)
        return self.model_copy(update={"input": items})

    def to_chat(self) -> ChatRequest:
        """Return the chat request that asks for the same text. `with_items` comes before.

        Raises RequestValidationError, in this request's terms, for what a chat request refuses.
        """
        choice = self.tool_choice
        if isinstance(choice, ToolName):
            choice = {"type": "function", "function": {"name": choice.name}}
        given = {name: getattr(self, name) for name in SHARED} | {
            "messages": self.messages,
            "max_tokens": self.max_output_tokens,
            "tools": [tool.plain for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "response_format": self.text.format.plain if self.text and self.text.format else None,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "verbosity": self.text.verbosity if self.text else None,
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }
        try:
            return ChatRequest.model_validate(without_none(given))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            top, *rest = first["loc"] or ("",)
            where = in_own_terms(str(top)).split(".") if top else []
            loc = ("body", *where, *(rest if top in SHARED else ()))
            first |= {"loc": loc, "msg": in_own_terms(first["msg"])}
            if first["type"] == "field":
                first["ctx"] = {"field": in_own_terms(first["ctx"]["field"]).partition(".")[0]}
            raise RequestValidationError([first]) from None


def text_of(parts: list[InputPart]) -> str:
    """Join the texts of parts, as chat completions do."""
    return "".join(part.text for part in parts)


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out fields without a value."""
    return {name: value for name, value in fields.items() if value is not None}


def in_own_terms(message: str) -> str:
    """Rewrite what is said of a chat request for the response request that it comes from.

    Only where a message names a field: at its beginning, and after "; ", "or" or "with a".
    """
    for theirs, own in TERMS.items():
        message = re.sub(rf"(^|; |\bor |\bwith a ){theirs}(?![\w.])", rf"\g<1>{own}", message)
    return re.sub(r"^(tools\.\d+|tool_choice)\.function\.", r"\1.", message)

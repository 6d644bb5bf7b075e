"""Tool calls: validation of tools, detection of call formats, grammars and a streaming parser."""

import itertools
import json
import os
import re
from typing import Any, NamedTuple

from constraints.grammar import JSON_OPTIONS
from constraints.schema import IN_PLACE_APPLICATORS, check_schemas, strip_ignored_keywords
from constraints.vocabulary import Vocabulary
from errors import UserError
from text.chat import Chat, split_special_tokens
from text.detokenizer import partial_stop_length
from text.tokenizer import Encoding

MAX_TOOLS = 128
MAX_GRAMMAR = 2**18  # bytes
FUNCTION_FIELDS = {  # field of a function: type, description
    "name": (str, "a string"),
    "description": (str | None, "a string"),
    "parameters": (dict | None, "an object, a JSON schema"),
    "strict": (bool | None, "true or false"),
}


def read_tools(text: str) -> list[dict]:
    """Parse tools from JSON. Raises UserError as `check_tools` does, and for invalid JSON."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"tools: not JSON: {error}") from None
    check_tools(tools)
    return tools


def check_tools(tools: Any) -> None:
    """Raise UserError unless these are tools in the format of OpenAI's API.

    The format is a list of {"type": "function", "function": {"name", "description", "parameters",
    "strict"}}. Only the name is required. parameters: the JSON schema of an object.
    """
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise UserError(f"tools: must be a list of 1 to {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and tool.keys() == {"type", "function"}
        if not is_tool or tool["type"] != "function" or not isinstance(tool["function"], dict):
            shape = '{"type": "function", "function": {"name": ...}}'
            raise UserError(f"tools.{index}: must be {shape}")
        function = tool["function"]
        where = f"tools.{index}.function"
        for name in function:
            if name not in FUNCTION_FIELDS:
                known = ", ".join(FUNCTION_FIELDS)
                raise UserError(f"{where}: unknown field {name[:100]!a}; known are {known}")
        for name, (expected_type, allowed) in FUNCTION_FIELDS.items():
            if not isinstance(function.get(name), expected_type):
                raise UserError(f"{where}.{name}: must be {allowed}")
        name = function["name"]
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
            allowed = "1 to 64 letters, digits, _ and -"
            raise UserError(f"{where}.name {name[:100]!a}: must be {allowed}")
        if name in names:
            raise UserError(f"{where}.name: duplicate name {name}")
        names.add(name)


PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "first_function",
        "description": "a",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "a"}},
            "required": ["key"],
        },
    },
}
PROBE_ID = "call00000"
CALL_ID_LENGTH = len(PROBE_ID)  # letters and digits, as many as Mistral's templates require
PROBE_ARGUMENTS = {"key": 1, "other": [2, "a"]}
PROBE_RESULT = "what_a_tool_has_found"
PROBE_CONTENT = "what_a_reply_says_first"


class ToolFormat(NamedTuple):
    """Syntax in which a chat template writes tool calls.

    begin NAME middle ARGUMENTS [between NAME middle ARGUMENTS ...] end, where "\\0" stands for each
    character of a call id. trigger: prefix of begin that never occurs in content. between: None for
    templates that write at most one call. separators: item and key separators of the arguments.
    """

    trigger: str
    begin: str
    middle: str
    between: str | None
    end: str
    separators: tuple[str, str]


class UnknownToolFormat(UserError):
    """Error for a template that writes tool calls in an unsupported format."""


def detect_tool_format(
    chat: Chat, encoding: Encoding, eos_token_ids: tuple[int, ...]
) -> ToolFormat:
    """Detect the tool-call format of a chat template by rendering sample calls.

    chat: with the tools of the conversation, if it has any. A template may require a system
    message, refuse empty content, or read fields that PROBE_TOOL lacks, so several conversations
    are tried. Raises UserError for an unsupported format.
    """
    system = {"role": "system", "content": "a"}
    user = {"role": "user", "content": "a"}
    shapes = list(itertools.product(([], [system]), ("", PROBE_CONTENT)))
    errors = []
    for tools in [[PROBE_TOOL], chat.tools] if chat.tools else [None]:
        for before, content in shapes:
            try:
                probe = chat.with_unchecked_tools(tools)
                return probe_tool_format(probe, [*before, user], content, encoding, eos_token_ids)
            except UserError as error:
                errors.append(error)
        if all(isinstance(error, UnknownToolFormat) for error in errors):  # no rendering failed
            break
    raise next((error for error in errors if isinstance(error, UnknownToolFormat)), errors[0])


def probe_tool_format(
    chat: Chat, asked: list[dict], content: str, encoding: Encoding, eos_token_ids: tuple[int, ...]
) -> ToolFormat:
    """Detect the tool-call format from a rendered reply with this content and tool calls.

    asked: messages before the reply, the last one from the user. Raises UserError as
    `detect_tool_format`.
    """
    names = ["first_function", "second_function", "third_function"]
    calls = [
        {
            "id": PROBE_ID,
            "type": "function",
            "function": {"name": name, "arguments": PROBE_ARGUMENTS},
        }
        for name in names
    ]
    user = asked[-1]
    result = {"role": "tool", "tool_call_id": PROBE_ID, "name": names[0], "content": PROBE_RESULT}
    past_reply = {"role": "assistant", "content": PROBE_CONTENT}
    before_past_reply = chat.render([*asked, past_reply, user]).partition(PROBE_CONTENT)[0]
    # What stands before a reply. A template may omit the start of reasoning before a past one.
    starts = chat.render(asked), before_past_reply

    def render_calls(*calls: dict) -> str:
        """Render a reply with these calls; return the calls and all that follows them."""
        calling = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        # Later messages follow, because a template may add empty reasoning to the last reply.
        later = [result] * len(calls) + [{"role": "assistant", "content": "b"}, user]
        text = chat.render([*asked, calling, *later]).replace(PROBE_ID, "\0" * len(PROBE_ID))
        for start in starts:
            prefix = os.path.commonprefix([start, text])
            reply = text[len(prefix) :]
            if not start[len(prefix) :].strip():
                return reply.partition(content)[2] if content else reply
        return ""

    unknown = UnknownToolFormat(
        f"{chat.file}: this chat template writes tool calls in an unsupported format"
    )
    one = render_calls(calls[0])
    ends = [
        encoding.added_token_texts[token]
        for token in eos_token_ids
        if token in encoding.added_token_texts
    ]
    for separators in ((", ", ": "), (",", ":")):
        arguments = json.dumps(PROBE_ARGUMENTS, separators=separators)
        begin, _, rest = one.partition(names[0])
        middle, found, rest = rest.partition(arguments)
        # The tool result must appear, because a template may drop messages it does not know.
        is_known = found and begin.strip() and middle.startswith('"') and PROBE_RESULT in rest
        following = [rest.partition(token)[0] for token in ends if token in rest]
        if is_known and following and PROBE_RESULT not in min(following, key=len):
            break
    else:
        raise unknown
    end = min(following, key=len)
    try:
        all_calls = render_calls(*calls)
    except UserError:
        all_calls = ""
    first = begin + names[0] + middle + arguments
    between = all_calls.removeprefix(first).partition(names[1])[0]
    others = [between + name + middle + arguments for name in names[1:]]
    if not all_calls.startswith(first + "".join(others) + end):
        between = None
    _, *added = split_special_tokens(encoding.special_tokens_set, begin)
    trigger = begin.split()[0]
    if added and begin.lstrip().startswith(added[0]):
        trigger = added[0]
    return ToolFormat(trigger, begin, middle, between, end, separators)


def build_tool_grammar(
    tool_format: ToolFormat,
    tools: list[dict],
    vocabulary: Vocabulary,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
) -> str:
    """Return the grammar of a reply that may call tools, for `SamplingParams.tool_grammar`.

    tool_choice: "auto": content, then optional calls; "none": content; "required": calls without
    content. parallel_tool_calls: allow several calls. Arguments follow the tool's schema, without
    additional properties unless it allows them. Raises UserError for unsupported parameters.
    """

    def lark(text: str) -> str:
        """Translate a piece of the tool format to Lark: added tokens, call ids and literals."""
        parts = []
        for index, piece in enumerate(split_special_tokens(set(vocabulary.added_tokens), text)):
            if index % 2:
                parts.append(f"<[{vocabulary.added_tokens[piece]}]>")
                continue
            for part in re.findall("\0+|[^\0]+", piece):
                call_id = f"/[a-zA-Z0-9]{{{len(part)}}}/"
                parts.append(call_id if part[0] == "\0" else json.dumps(part, ensure_ascii=False))
        return " ".join(parts)

    schemas = {tool["function"]["name"]: arguments_schema(tool["function"]) for tool in tools}
    check_schemas({f"{name}.parameters": schema for name, schema in schemas.items()})
    item_separator, key_separator = tool_format.separators
    options = JSON_OPTIONS | {"item_separator": item_separator, "key_separator": key_separator}
    call_rules = []
    for name, schema in schemas.items():
        source = json.dumps(strip_ignored_keywords(schema) | {"x-guidance": options})
        rule = f"call{len(call_rules)}: {lark(name + tool_format.middle)} %json {source}"
        call_rules.append(rule)
    more_calls = (
        f" ({lark(tool_format.between)} call)*"
        if parallel_tool_calls and tool_format.between is not None
        else ""
    )
    calls = f"call{more_calls} {lark(tool_format.end)}"
    trigger = tool_format.trigger
    spelled = re.escape(trigger).replace("/", r"\/")
    others = ",".join(
        str(token) for name, token in sorted(vocabulary.added_tokens.items()) if name != trigger
    )
    content = "TEXT?" + (f" (<[{others}]> TEXT?)*" if others else "")  # no two adjacent TEXTs
    begin = tool_format.begin.lstrip()
    rest = f"{lark(begin.removeprefix(trigger))} {calls}"
    if trigger in vocabulary.added_tokens:
        tail = f"({lark(trigger)} {rest})?"
    else:
        tail = f"(trigger {rest})?"
    starts = {
        "none": content,
        "auto": f"{content} {tail}",
        "required": f"{lark(tool_format.begin)} {calls}",
    }
    rules = [f"start: {starts[tool_choice]}", rf"TEXT: /(?s:.+)/ & ~/(?s:.*){spelled}(?s:.*)/"]
    choices = " | ".join(f"call{number}" for number in range(len(call_rules)))
    rules += [rf"trigger[lazy]: /(?s:.*){spelled}/", f"call: {choices}", *call_rules]
    grammar = "\n".join(rules) + "\n"
    size = len(grammar.encode())
    if size > MAX_GRAMMAR:
        raise UserError(
            f"tools: their grammar has {size:,} bytes; at most {MAX_GRAMMAR:,} are allowed"
        )
    return grammar


def arguments_schema(function: dict) -> dict:
    """Return the JSON schema of a function's arguments, closed unless it says otherwise."""
    schema = {"type": "object"} | (function.get("parameters") or {"properties": {}})
    if schema["type"] != "object":
        where = f"{function['name']}.parameters.type"
        raise UserError(f"{where} {schema['type']!r:.40}: must be object")
    if "properties" in schema and not schema.keys() & {"patternProperties", *IN_PLACE_APPLICATORS}:
        schema = {"additionalProperties": False} | schema
    return schema


class ToolCallDelta(NamedTuple):
    """Streamed part of a tool call: its name at the start, or more of its arguments."""

    index: int  # of the call within its reply
    name: str | None
    arguments: str


class ToolCallParser:
    """Streaming parser for the tool calls of a reply, which a grammar constrains to the format.

    count: calls started so far.
    """

    def __init__(self, tool_format: ToolFormat):
        self.tool_format = tool_format
        self.count = 0
        self.state = "text"
        self.buffer = ""  # unparsed text
        self.literal = ""  # expected next, and skipped
        self.depth = 0  # nesting of objects and lists in the arguments
        self.in_string = False
        self.escaped = False

    @property
    def is_complete(self) -> bool:
        """Return whether the reply has calls and is complete."""
        return self.state == "rest" and matches_literal(self.tool_format.end, self.buffer)

    def add(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Parse more text of the reply; return its new content and the deltas of its calls."""
        self.buffer += text
        content = ""
        parts = []
        while True:
            if self.state == "text":
                content, found, after = self.buffer.partition(self.tool_format.trigger)
                if not found:
                    certain = len(content) - partial_stop_length(content, self.tool_format.trigger)
                    self.buffer = content[certain:]
                    return content[:certain], parts
                self.buffer = after
                self.literal = self.tool_format.begin.lstrip().removeprefix(
                    self.tool_format.trigger
                )
                self.state = "literal"
            elif self.state == "literal":
                if len(self.buffer) < len(self.literal):
                    break
                self.buffer = self.buffer[len(self.literal) :]
                self.state = "name"
            elif self.state == "name":
                name, found, after = self.buffer.partition(self.tool_format.middle)
                if not found:
                    break
                parts.append(ToolCallDelta(self.count, name, ""))
                self.count += 1
                self.buffer = after
                self.state = "arguments"
            elif self.state == "arguments":
                size = self.scan_arguments()
                if size:
                    parts.append(ToolCallDelta(self.count - 1, None, self.buffer[:size]))
                self.buffer = self.buffer[size:]
                if self.depth or not size:
                    break
                self.state = "rest"
            else:
                between = self.tool_format.between
                if between is None or not matches_literal(between, self.buffer[: len(between)]):
                    break
                self.literal = between
                self.state = "literal"
        return content, parts

    def end(self) -> str:
        """Return the remaining content: a partial trigger at the end of the reply, or nothing."""
        return self.buffer if self.state == "text" else ""

    def scan_arguments(self) -> int:
        """Return how many buffered characters belong to the arguments, a JSON object."""
        for index, character in enumerate(self.buffer):
            if self.escaped:
                self.escaped = False
            elif character == "\\":
                self.escaped = True
            elif character == '"':
                self.in_string = not self.in_string
            elif not self.in_string and character in "{[":
                self.depth += 1
            elif not self.in_string and character in "}]":
                self.depth -= 1
                if not self.depth:
                    return index + 1
        return len(self.buffer)


def matches_literal(literal: str, text: str) -> bool:
    """Return whether a text matches a format's literal; "\\0" is any character of a call id."""
    pairs = zip(literal, text)
    return len(literal) == len(text) and all(known in ("\0", found) for known, found in pairs)

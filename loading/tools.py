"""Tool calls: which tools there are, and how a reply calls them."""

import itertools
import json
import os
import re
from typing import Any, NamedTuple

from constraints import (
    IN_PLACE_APPLICATORS,
    JSON_OPTIONS,
    Vocabulary,
    check_schemas,
    strip_ignored_keywords,
)
from errors import UserError
from loading.chat import Chat, split_special_tokens
from loading.tokenizer import Encoding, partial_stop_length

MAX_TOOLS = 128
MAX_GRAMMAR = 2**18  # bytes
FUNCTION_FIELDS = {  # of a function: its type, and how to say that
    "name": (str, "a string"),
    "description": (str | None, "a string"),
    "parameters": (dict | None, "an object, a JSON schema"),
    "strict": (bool | None, "true or false"),
}


def read_tools(text: str) -> list[dict]:
    """The tools in a text of JSON. Raises UserError as `check_tools`, and if it is no JSON."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"tools: not JSON: {error}") from None
    check_tools(tools)
    return tools


def check_tools(tools: Any) -> None:
    """Raise UserError unless these are tools in the form of OpenAI's API.

    A list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
    Of a function all but the name may be left out. parameters: the JSON schema of an object.
    """
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise UserError(f"tools: it must be a list of 1 to {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and tool.keys() == {"type", "function"}
        if not is_tool or tool["type"] != "function" or not isinstance(tool["function"], dict):
            shape = '{"type": "function", "function": {"name": ...}}'
            raise UserError(f"tools.{index}: it must have the form {shape}")
        function = tool["function"]
        where = f"tools.{index}.function"
        for name in function:
            if name not in FUNCTION_FIELDS:
                known = ", ".join(FUNCTION_FIELDS)
                raise UserError(
                    f"{where}: {name[:100]!a} is no field of a function; it has {known}"
                )
        for name, (expected_type, allowed) in FUNCTION_FIELDS.items():
            if not isinstance(function.get(name), expected_type):
                raise UserError(f"{where}.{name}: it must be {allowed}")
        name = function["name"]
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
            allowed = "1 to 64 letters, digits, _ and -"
            raise UserError(f"{where}.name is {name[:100]!a}; it must be {allowed}")
        if name in names:
            raise UserError(f"{where}.name: an earlier tool has the name {name}")
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
PROBE_ID = "call00000"  # nine letters and digits, as Mistral's templates want them
PROBE_ARGUMENTS = {"key": 1, "other": [2, "a"]}
PROBE_RESULT = "what_a_tool_has_found"
PROBE_CONTENT = "what_a_reply_says_first"


class ToolFormat(NamedTuple):
    """How a template writes a reply's calls.

    begin NAME middle ARGUMENTS [between NAME middle ARGUMENTS ...] end, where "\\0" stands for each
    letter of an id. trigger: what begin begins with, and no text has. between: None for templates
    that write one call at most. separators: between items of the arguments, and after their names.
    """

    trigger: str
    begin: str
    middle: str
    between: str | None
    end: str
    separators: tuple[str, str]


class UnknownToolFormat(UserError):
    """Raised for a template that writes calls, but in a format that is not known here."""


def detect_tool_format(
    chat: Chat, encoding: Encoding, eos_token_ids: tuple[int, ...]
) -> ToolFormat:
    """Find how the template of a chat writes calls: it is given some, and its text is taken apart.

    chat: with the tools of the conversation, if it has any. A template may want a system message,
    refuse a message without text, or want more of a tool than PROBE_TOOL has, so several
    conversations are tried. Raises UserError for a template that writes calls in a way that is not
    known here.
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
        if all(isinstance(error, UnknownToolFormat) for error in errors):  # it has refused nothing
            break
    raise next((error for error in errors if isinstance(error, UnknownToolFormat)), errors[0])


def probe_tool_format(
    chat: Chat, asked: list[dict], content: str, encoding: Encoding, eos_token_ids: tuple[int, ...]
) -> ToolFormat:
    """Read the format of calls from a reply to these messages that says something and calls.

    Raises UserError as `detect_tool_format`.
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
    said = chat.render([*asked, {"role": "assistant", "content": PROBE_RESULT}, user]).partition(
        PROBE_RESULT
    )
    # Where a reply begins: for a new one, and for an old one, which may have no reasoning.
    starts = chat.render(asked), said[0]

    def render_calls(*calls: dict) -> str:
        """A reply with these calls, and what follows it."""
        calling = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        # It is an old one, because the last one may get an empty reasoning.
        later = [result] * len(calls) + [{"role": "assistant", "content": "b"}, user]
        text = chat.render([*asked, calling, *later]).replace(PROBE_ID, "\0" * len(PROBE_ID))
        for start in starts:
            known = os.path.commonprefix([start, text])
            reply = text[len(known) :]
            if not start[len(known) :].strip():
                return reply.partition(content)[2] if content else reply
        return ""

    unknown = UnknownToolFormat(
        f"{chat.file}: this chat template writes calls in a way not known here"
    )
    one = render_calls(calls[0])
    ends = [
        encoding.added_token_texts[token]
        for token in eos_token_ids
        if token in encoding.added_token_texts
    ]
    for separators in ((", ", ": "), (",", ":")):
        known = json.dumps(PROBE_ARGUMENTS, separators=separators)
        begin, _, rest = one.partition(names[0])
        middle, found, rest = rest.partition(known)
        # A result, too, because a template may leave out what it does not know.
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
    first = begin + names[0] + middle + known
    between = all_calls.removeprefix(first).partition(names[1])[0]
    others = [between + name + middle + known for name in names[1:]]
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
    """The grammar of a reply that may call tools, for `SamplingParams.calls`.

    tool_choice: "auto": a text, and after it calls, if any; "none": a text; "required": calls and
    no text. parallel_tool_calls: there may be several. Arguments are held to the parameters of
    their tool, which are those that it names, unless its schema allows more. Raises UserError for
    parameters that are not supported.
    """

    def lark(text: str) -> str:
        """A text in the grammar: added tokens, ids, and what lies between them."""
        parts = []
        for index, piece in enumerate(split_special_tokens(set(vocabulary.added_tokens), text)):
            if index % 2:
                parts.append(f"<[{vocabulary.added_tokens[piece]}]>")
                continue
            for part in re.findall("\0+|[^\0]+", piece):
                id = f"/[a-zA-Z0-9]{{{len(part)}}}/"
                parts.append(id if part[0] == "\0" else json.dumps(part, ensure_ascii=False))
        return " ".join(parts)

    schemas = {tool["function"]["name"]: arguments_schema(tool["function"]) for tool in tools}
    check_schemas({f"{name}.parameters": schema for name, schema in schemas.items()})
    items, names = tool_format.separators
    options = JSON_OPTIONS | {"item_separator": items, "key_separator": names}
    called = []
    for name, schema in schemas.items():
        schema = json.dumps(strip_ignored_keywords(schema) | {"x-guidance": options})
        called.append(f"call{len(called)}: {lark(name + tool_format.middle)} %json {schema}")
    more = (
        f" ({lark(tool_format.between)} call)*"
        if parallel_tool_calls and tool_format.between is not None
        else ""
    )
    calls = f"call{more} {lark(tool_format.end)}"
    trigger = tool_format.trigger
    spelled = re.escape(trigger).replace("/", r"\/")
    others = ",".join(
        str(id) for name, id in sorted(vocabulary.added_tokens.items()) if name != trigger
    )
    free = "TEXT?" + (f" (<[{others}]> TEXT?)*" if others else "")  # no TEXT after another
    begin = tool_format.begin.lstrip()
    rest = f"{lark(begin.removeprefix(trigger))} {calls}"
    if trigger in vocabulary.added_tokens:
        tail = f"({lark(trigger)} {rest})?"
    else:
        tail = f"(trigger {rest})?"
    starts = {
        "none": free,
        "auto": f"{free} {tail}",
        "required": f"{lark(tool_format.begin)} {calls}",
    }
    rules = [f"start: {starts[tool_choice]}", rf"TEXT: /(?s:.+)/ & ~/(?s:.*){spelled}(?s:.*)/"]
    choices = " | ".join(f"call{number}" for number in range(len(called)))
    rules += [rf"trigger[lazy]: /(?s:.*){spelled}/", f"call: {choices}", *called]
    grammar = "\n".join(rules) + "\n"
    size = len(grammar.encode())
    if size > MAX_GRAMMAR:
        raise UserError(
            f"as a grammar the tools have {size:,} bytes; they may have {MAX_GRAMMAR:,}"
        )
    return grammar


def arguments_schema(function: dict) -> dict:
    """The JSON schema of a function's arguments: an object with what it names."""
    schema = {"type": "object"} | (function.get("parameters") or {"properties": {}})
    if schema["type"] != "object":
        where = f"{function['name']}.parameters.type"
        raise UserError(f"{where} is {schema['type']!r:.40}; it must be object")
    if "properties" in schema and not schema.keys() & {"patternProperties", *IN_PLACE_APPLICATORS}:
        schema = {"additionalProperties": False} | schema
    return schema


class ToolCallDelta(NamedTuple):
    """What is new of a call: its name, where it begins, or more of its arguments."""

    index: int  # among the calls of its reply
    name: str | None
    arguments: str


class ToolCallParser:
    """Takes the calls out of a reply while it is written; a grammar held it to this format.

    count: calls that have begun.
    """

    def __init__(self, tool_format: ToolFormat):
        self.tool_format = tool_format
        self.count = 0
        self.state = "text"
        self.buffer = ""  # what is not read yet
        self.literal = ""  # what comes next, and says nothing
        self.depth = 0  # of objects and lists in the arguments
        self.in_string = False
        self.escaped = False

    @property
    def is_complete(self) -> bool:
        """Whether the reply has calls, and ends here."""
        return self.state == "rest" and matches_literal(self.tool_format.end, self.buffer)

    def add(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """What is new of the text before the calls, and of the calls, where the reply goes on."""
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
        """What is left of the text: the beginning of a trigger, where the reply ends in one."""
        return self.buffer if self.state == "text" else ""

    def scan_arguments(self) -> int:
        """How many of the characters that are held belong to the arguments: an object of JSON."""
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
    """Whether a text is this literal of a format, in which "\\0" stands for any letter of an id."""
    pairs = zip(literal, text)
    return len(literal) == len(text) and all(known in ("\0", found) for known, found in pairs)

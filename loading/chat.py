"""Messages to token ids, by the chat template in the model's own checkpoint."""

import contextlib
import copy
import json
import re
from datetime import datetime
from pathlib import Path

from errors import UserError
from loading.checkpoint import read_json
from loading.config import NAMES, read_special_tokens
from loading.gguf_tokenizer import read_chat
from loading.load import Source, parse_name
from loading.tokenizer import Encoding

SYSTEM = {"system", "developer"}  # roles of those who say how to reply
MARK = "31415926"  # hardly in a template
HINT = "put its text at the start of the first user message"
# Fields of a message that no control token is written in, or that `encode` looks at by itself.
PLAIN = {"role", "name", "content"}
# A tool that shows whether a template writes tools.
TOOL = {
    "type": "function",
    "function": {
        "name": "a_tool_of_no_one",
        "description": "",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
# Variables that `render` sets, and no request.
OWN = {"messages", "tools", "documents", "add_generation_prompt"} | {f"{n}_token" for n in NAMES}


class Chat:
    """A chat template: a program that writes messages as the one text a model was trained on.

    It is stored with the weights. name: as for `load_model`. file: of a template to use instead.
    Raises UserError if there is no template, or it is broken.
    """

    def __init__(self, name, file: Path | None = None):
        source = parse_name(name)
        found = read_template(source, file)
        if found is None:
            files = "chat_template.jinja nor a default chat_template in tokenizer_config.json"
            if source.kind == "gguf":
                files = f"tokenizer.chat_template nor, beside it, {files}"
            raise UserError(
                f"{source.label}: this model was not made for chat: it has neither {files}"
            )
        self.file, self.text, self.tokens = found
        self.variables: dict[str, bool] = {}
        self.tools: list[dict] | None = None
        with self.failing():
            self.template = environment().from_string(self.text)
            self.for_tools = self.text, self.template
            if self.file.name == "tokenizer_config.json":  # which may have several
                # transformers, too, takes another one for tools if there is one of this name.
                text = (read_template(source, file, "tool_use") or found)[1]
                self.for_tools = text, environment().from_string(text)

    def with_variables(self, variables: dict[str, bool]) -> "Chat":
        """A copy that gives its template these variables, such as enable_thinking."""
        chat = copy.copy(self)
        chat.variables = variables
        return chat

    def with_tools(self, tools: list[dict] | None) -> "Chat":
        """A copy that gives its template these tools, as `check_tools` wants them.

        Raises UserError if the template does not write them.
        """
        chat = copy.copy(self)
        if tools:
            chat.text, chat.template = self.for_tools
        chat.tools = [TOOL]
        if tools and TOOL["function"]["name"] not in chat.render([{"role": "user", "content": ""}]):
            raise UserError(f"{self.file}: this chat template has no place for tools")
        chat.tools = tools
        return chat

    @contextlib.contextmanager
    def failing(self):
        """Raise what fails in the template as a UserError."""
        try:
            yield
        except Exception as error:  # a program fails in any way
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.file}: chat template: {reason}") from None

    def render(self, messages: list[dict]) -> str:
        """The text of a conversation up to where the reply begins.

        It equals transformers' `apply_chat_template`. messages: each {"role": "system", "user"
        or "assistant", "content": its text}, oldest first. A reply may have "tool_calls", each
        {"id", "type": "function", "function": {"name", "arguments": an object}}; what a call came
        to is a message of the role "tool" with the "tool_call_id". Raises UserError if the template
        refuses them.
        """
        with self.failing():
            try:
                return self.write(messages)
            except Exception as error:  # a program fails in any way
                others = [message for message in messages if message["role"] not in SYSTEM]
                if len(others) == len(messages) or self.written(others) is None:
                    raise
                raise ValueError(f"{error}; {HINT}") from None

    def write(self, messages: list[dict]) -> str:
        """What the template makes of messages; anything may be raised."""
        given = self.tokens | self.variables
        given |= {"messages": messages, "tools": self.tools, "documents": None}
        return self.template.render(given, add_generation_prompt=True)

    def written(self, messages: list[dict]) -> str | None:
        """What the template makes of messages; None if it refuses them."""
        try:
            return self.write(messages)
        except Exception:
            return None

    def check_said(self, messages: list[dict]) -> None:
        """Raise UserError for a template that leaves out what is said in a role of SYSTEM.

        A number at both ends of each message shows which ones are written. A message may be just
        what the template says without it, as the system prompt that a model has by default.
        """
        marked = list(messages)
        said = {}
        for index, message in enumerate(messages):
            if message["role"] in SYSTEM and message["content"].strip():
                said[f"{index:05}"] = message["role"]
                mark = f"{MARK}{index:05}"
                marked[index] = message | {"content": f"{mark}{message['content']}{mark}"}
        text = self.written(marked) if said else None
        if text is None:  # `render` says why
            return
        for index in re.findall(f"(?={MARK}(.{{5}}))", text, re.DOTALL):
            said.pop(index, None)
        for role in said.values():
            what = f"it leaves out messages of the role {role}"
            raise UserError(f"{self.file}: chat template: {what}; {HINT}")

    def encode(self, messages: list[dict], encoding: Encoding) -> list[int]:
        """The ids of that text, in which no text of a user or a system message is a control token.

        Nor is any text of a tool, of a call or of its result.

        An added token in a message would let its author speak in any role. So in messages
        stand-ins, used nowhere else, take the place of the characters that added tokens begin and
        end with: whatever the template cuts out and joins, none begins or ends in a message.

        Replies stay as they are, because templates look for the end of a reasoning in them.
        Therefore all is written a second time, with stand-ins in all messages for all characters of
        added tokens. If it has other control tokens, a message added some, and this text counts. (A
        reply's token can still count if the template leaves out one of its own for it.) A template
        that escapes a message meets the stand-ins.
        """
        self.check_said(messages)
        control = encoding.special_tokens_set
        given = json.dumps([messages, self.tools], ensure_ascii=False)
        used = set().union(self.text, *self.tokens.values(), *control, given)
        hide = stand_ins(set().union(*control), used)
        edges = {ord(token[end]) for token in control for end in (0, -1)}
        hide_edges = {code: hide[code] for code in edges}
        chat = copy.copy(self)
        chat.tools = translated(self.tools, hide_edges)
        partly = []
        fully = []
        for message in messages:
            text = message["content"]
            shown = text if message["role"] == "assistant" else text.translate(hide_edges)
            others = {name: value for name, value in message.items() if name not in PLAIN}
            message = message | translated(others, hide_edges)
            partly.append(message | {"content": shown})
            fully.append(message | {"content": text.translate(hide)})
        pieces = split_at(control, chat.render(partly))
        checked = split_at(control, chat.render(fully))
        if pieces[1::2] != checked[1::2]:
            pieces = checked
        show = {stand_in: code for code, stand_in in hide.items()}
        ids = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(encoding.encode_single_token(piece))
            else:
                ids += encoding.encode_ordinary(piece.translate(show), begins=not ids)
        return ids


def stand_ins(characters: set[str], used: set[str]) -> dict[int, int]:
    """For each character, by its code, the code of one that is not used, the last ones first."""
    unused = (code for code in range(0x10FFFD, 0, -1) if chr(code) not in used)
    return {ord(character): next(unused) for character in characters}


def translated(value, table: dict[int, int]):
    """A copy of what JSON can say, with other characters in its strings and names."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, list):
        return [translated(each, table) for each in value]
    if isinstance(value, dict):
        return {name.translate(table): translated(each, table) for name, each in value.items()}
    return value


def split_at(tokens: set[str], text: str) -> list[str]:
    """A text in pieces: text, token, text, ..., text. Of two tokens the longer one is taken."""
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    return re.split(f"({'|'.join(longest_first) or '(?!)'})", text)


def read_template(
    source: Source, file: Path | None = None, name: str = "default"
) -> tuple[Path, str, dict[str, str]] | None:
    """A model's chat template, None without one: its file, its text, the tokens it may name.

    file: of a template to use instead. name: of the one to take, where there are several.
    Raises UserError for a file that cannot be read.
    """
    given = (file, read_text(file)) if file else None
    if source.kind == "random":
        return (*given, {}) if given else None
    if source.kind == "gguf" and (found := read_chat(source.gguf, given)):
        return found
    of_tokenizer = source.find("tokenizer_config.json")
    config = read_json(of_tokenizer) if of_tokenizer else {}
    file = file or source.find("chat_template.jinja")
    if file:
        text = read_text(file)
    else:
        file = of_tokenizer
        text = config.get("chat_template")
        if isinstance(text, list):  # several, each with a name
            named = [entry for entry in text if isinstance(entry, dict)]
            chosen = [entry for entry in named if entry.get("name") == name]
            text = chosen[0].get("template") if chosen else None
    return (file, text, read_special_tokens(source)) if isinstance(text, str) else None


def read_text(file: Path) -> str:
    """The text in a file. Raises UserError if it cannot be read."""
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None


def environment():
    """What chat templates are written for: jinja2 in a sandbox, set up as in transformers.

    Except the `generation` tag. The sandbox keeps a template from files, modules and the insides of
    Python, not from using up time and memory.
    """
    # Here, because importing it takes 17 ms, and few runs chat.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise ValueError(message)

    def strftime_now(form):
        return datetime.now().strftime(form)

    def tojson(value, ensure_ascii=False, **options):  # jinja2's own is for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made

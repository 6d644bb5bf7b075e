"""Chat messages to token ids, with the chat template in the model's checkpoint."""

import contextlib
import copy
import json
import re
from datetime import datetime
from pathlib import Path

from errors import UserError
from loading.chat_template import read_chat_template
from loading.config import SPECIAL_TOKEN_NAMES
from loading.load import resolve_source
from text.tokenizer import Encoding

SYSTEM_ROLES = {"system", "developer"}  # roles whose messages say how to reply
SENTINEL = "31415926"  # unlikely in a template
SYSTEM_ROLE_HINT = "put its text at the start of the first user message"
# Variables that only `render` sets; requests may not.
RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"} | {
    f"{n}_token" for n in SPECIAL_TOKEN_NAMES
}


class Chat:
    """A chat template: a program that writes messages as the text format of a model's training.

    It is stored with the weights. name: as for `load_model`. file: a template to use instead.
    Raises UserError if the template is missing or broken.
    """

    def __init__(self, name, file: Path | None = None):
        source = resolve_source(name)
        found = read_chat_template(source, file)
        if found is None:
            files = "chat_template.jinja nor a default chat_template in tokenizer_config.json"
            if source.type == "gguf":
                files = f"tokenizer.chat_template nor, beside it, {files}"
            raise UserError(f"{source.label}: not a chat model: it has neither {files}")
        self.file, self.template_text, self.special_tokens = found
        self.template_kwargs: dict[str, bool] = {}
        self.tools: list[dict] | None = None
        with self.template_errors():
            self.template = environment().from_string(self.template_text)
            self.tool_template = self.template_text, self.template
            if self.file.name == "tokenizer_config.json":  # which may hold several templates
                # As in transformers, a template with the name tool_use takes precedence.
                text = (read_chat_template(source, file, "tool_use") or found)[1]
                self.tool_template = text, environment().from_string(text)

    def with_template_kwargs(self, template_kwargs: dict[str, bool]) -> "Chat":
        """Return a copy that passes its template these variables, such as enable_thinking."""
        chat = copy.copy(self)
        chat.template_kwargs = template_kwargs
        return chat

    def with_tools(self, tools: list[dict] | None) -> "Chat":
        """Return a copy that passes its template these tools, as `check_tools` accepts them.

        Raises UserError if the template does not write them.
        """
        from text.tools import PROBE_TOOL  # a late import, because text.tools imports this module

        chat = copy.copy(self)
        if tools:
            chat.template_text, chat.template = self.tool_template
        chat.tools = [PROBE_TOOL]
        name = PROBE_TOOL["function"]["name"]
        if tools and name not in chat.render([{"role": "user", "content": ""}]):
            raise UserError(f"{self.file}: this chat template does not support tools")
        chat.tools = tools
        return chat

    @contextlib.contextmanager
    def template_errors(self):
        """Turn any error of the template into a UserError."""
        try:
            yield
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.file}: chat template: {reason}") from None

    def render(self, messages: list[dict]) -> str:
        """Render a conversation up to the beginning of the reply.

        The result equals transformers' `apply_chat_template`. messages: each {"role": "system",
        "user" or "assistant", "content": its text}, oldest first. A reply may have "tool_calls",
        each {"id", "type": "function", "function": {"name", "arguments": an object}}. A call's
        result is a message of the role "tool" with the "tool_call_id". Raises UserError if the
        template refuses the messages.
        """
        with self.template_errors():
            try:
                return self.render_unchecked(messages)
            except Exception as error:  # a template may raise anything
                others = [message for message in messages if message["role"] not in SYSTEM_ROLES]
                if len(others) == len(messages) or self.try_render(others) is None:
                    raise
                raise ValueError(f"{error}; {SYSTEM_ROLE_HINT}") from None

    def render_unchecked(self, messages: list[dict]) -> str:
        """Render the template. Anything may be raised."""
        context = self.special_tokens | self.template_kwargs
        context |= {"messages": messages, "tools": self.tools, "documents": None}
        return self.template.render(context, add_generation_prompt=True)

    def try_render(self, messages: list[dict]) -> str | None:
        """Return the rendered messages; None if the template refuses them."""
        try:
            return self.render_unchecked(messages)
        except Exception:
            return None

    def check_system_messages(self, messages: list[dict]) -> None:
        """Raise UserError if the template leaves out a message with a role in SYSTEM_ROLES.

        A number at both ends of each message shows which messages are written. Without it, a
        message that equals the model's default system prompt would always seem to be.
        """
        tagged = list(messages)
        unseen_roles = {}
        for index, message in enumerate(messages):
            if message["role"] in SYSTEM_ROLES and message["content"].strip():
                unseen_roles[f"{index:05}"] = message["role"]
                sentinel = f"{SENTINEL}{index:05}"
                tagged[index] = message | {"content": f"{sentinel}{message['content']}{sentinel}"}
        text = self.try_render(tagged) if unseen_roles else None
        if text is None:  # `render` reports the reason
            return
        for index in re.findall(f"(?={SENTINEL}(.{{5}}))", text, re.DOTALL):
            unseen_roles.pop(index, None)
        for role in unseen_roles.values():
            what = f"it ignores messages of the role {role}"
            raise UserError(f"{self.file}: chat template: {what}; {SYSTEM_ROLE_HINT}")

    def encode(self, messages: list[dict], encoding: Encoding) -> list[int]:
        """Return the token ids of the rendered messages.

        An added token in a message would let its author speak in any role. So in messages
        stand-ins, used nowhere else, replace the characters that added tokens begin and end with:
        whatever the template cuts out and joins, no added token begins or ends in a message. The
        same holds for tools, calls and results.

        Replies stay as they are, because templates look for the end of reasoning in them. So all
        messages are rendered a second time, with stand-ins for all characters of added tokens. If
        this text has other control tokens, a message added some, and this text counts. (A reply's
        token can still count if the template leaves out one of its own for it.) A template that
        escapes a message sees the stand-ins.
        """
        self.check_system_messages(messages)
        control_tokens = encoding.special_tokens_set
        given = json.dumps([messages, self.tools], ensure_ascii=False)
        used = set().union(self.template_text, *self.special_tokens.values(), given)
        used = used.union(*control_tokens)
        hide = stand_ins(set().union(*control_tokens), used)
        edges = {ord(token[end]) for token in control_tokens for end in (0, -1)}
        hide_edges = {code: hide[code] for code in edges}

        def translated(value):
            """Return a copy of a JSON value with stand-ins in its strings and names."""
            if isinstance(value, str):
                return value.translate(hide_edges)
            if isinstance(value, list):
                return [translated(each) for each in value]
            if isinstance(value, dict):
                return {translated(name): translated(each) for name, each in value.items()}
            return value

        chat = copy.copy(self)
        chat.tools = translated(self.tools)
        partly = []
        fully = []
        for message in messages:
            text = message["content"]
            shown = text if message["role"] == "assistant" else text.translate(hide_edges)
            # No control token comes of a role or a name.
            others = {
                name: value
                for name, value in message.items()
                if name not in ("role", "name", "content")
            }
            message = message | translated(others)
            partly.append(message | {"content": shown})
            fully.append(message | {"content": text.translate(hide)})
        pieces = split_special_tokens(control_tokens, chat.render(partly))
        checked = split_special_tokens(control_tokens, chat.render(fully))
        if pieces[1::2] != checked[1::2]:
            pieces = checked
        show = {stand_in: code for code, stand_in in hide.items()}
        ids = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(encoding.encode_single_token(piece))
            else:
                ids += encoding.encode_ordinary(piece.translate(show), at_start=not ids)
        return ids


def stand_ins(characters: set[str], used: set[str]) -> dict[int, int]:
    """Map the code of each character to the code of an unused one, from the highest code down."""
    unused = (code for code in range(0x10FFFD, 0, -1) if chr(code) not in used)
    return {ord(character): next(unused) for character in characters}


def split_special_tokens(tokens: set[str], text: str) -> list[str]:
    """Split a text at added tokens: text, token, text, ..., text. The longest match wins."""
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    return re.split(f"({'|'.join(longest_first) or '(?!)'})", text)


def environment():
    """Return a jinja2 sandbox for chat templates, set up as in transformers.

    Only the `generation` tag is missing. The sandbox keeps a template from files, modules and the
    internals of Python, but does not limit its time and memory.
    """
    # Import here: it takes 17 ms, and few runs chat.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise ValueError(message)

    def strftime_now(format):
        return datetime.now().strftime(format)

    def tojson(value, ensure_ascii=False, **options):  # jinja2's own escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox

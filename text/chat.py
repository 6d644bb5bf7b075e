"""Chat messages to token ids, with the chat template in the model's checkpoint."""

import contextlib
import copy
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from errors import UserError
from loading.chat_template import read_chat_template
from loading.config import SPECIAL_TOKEN_NAMES
from loading.load import Source, resolve_source
from text.tokenizer import Encoding

if TYPE_CHECKING:
    from text.taint import TaintedStr

SYSTEM_ROLES = {"system", "developer"}  # roles whose messages say how to reply
KNOWN_ROLES = SYSTEM_ROLES | {"user", "assistant", "tool"}  # may become control tokens
SENTINEL = "31415926"  # unlikely in a template
SYSTEM_ROLE_HINT = "put its text at the start of the first user message"
# Conversations to try, besides the request's, when testing whether a template writes tools.
PROBE_CONVERSATIONS = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}],
]
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
            self.template = compile_template(self.template_text)
        # Loaded only for tools, because looking for a file on the hub takes time.
        self.load_tool_template = functools.cache(lambda: self.read_tool_template(source, file))

    def read_tool_template(self, source: Source, file: Path | None):
        """Return the text of the template for conversations with tools, and the compiled template.

        As in transformers, a template with the name tool_use takes precedence.
        """
        found = None if file else read_chat_template(source, name="tool_use")
        if found is None:
            return self.template_text, self.template
        chat = copy.copy(self)
        chat.file, text, _ = found
        with chat.template_errors():
            return text, compile_template(text)

    def with_template_kwargs(self, template_kwargs: dict[str, bool]) -> "Chat":
        """Return a copy that passes its template these variables, such as enable_thinking."""
        chat = copy.copy(self)
        chat.template_kwargs = template_kwargs
        return chat

    def with_tools(self, tools: list[dict] | None, messages: list[dict] | None = None) -> "Chat":
        """Return a copy that passes its template these tools, as `check_tools` accepts them.

        messages: the conversation, if it has begun. A template may write tools in some
        conversations only, so PROBE_CONVERSATIONS are tried too. Raises UserError if the template
        writes the tools in none of them, or refuses them all.
        """
        chat = self.with_unchecked_tools(tools)
        if not tools:
            return chat
        names = [f"a_tool_of_no_one_{index}" for index in range(len(tools))]
        renamed = [tool["function"] | {"name": name} for tool, name in zip(tools, names)]
        probe_chat = self.with_unchecked_tools(
            [{"type": "function", "function": function} for function in renamed]
        )
        conversations = [messages, *PROBE_CONVERSATIONS] if messages else PROBE_CONVERSATIONS
        is_refused = True
        for conversation in conversations:
            text = probe_chat.try_render(conversation)
            if text is not None and all(name in text for name in names):
                return chat
            is_refused = is_refused and text is None
        if is_refused:
            probe_chat.render(conversations[0])  # raises the template's error
        raise UserError(f"{self.file}: this chat template does not support tools")

    def with_unchecked_tools(self, tools: list[dict] | None) -> "Chat":
        """Return a copy that passes its template these tools, whether it writes them or not."""
        chat = copy.copy(self)
        chat.tools = tools
        if tools:
            chat.template_text, chat.template = self.load_tool_template()
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
        return str.__str__(self.render_tainted(messages))

    def render_tainted(self, messages: list[dict]) -> "TaintedStr":
        """Render as `render`, with the template's own characters marked. Raises UserError."""
        with self.template_errors():
            try:
                return self.render_unchecked(messages)
            except Exception as error:  # a template may raise anything
                others = [message for message in messages if message["role"] not in SYSTEM_ROLES]
                if len(others) == len(messages) or self.try_render(others) is None:
                    raise
                raise ValueError(f"{error}; {SYSTEM_ROLE_HINT}") from None

    def render_unchecked(self, messages: list[dict]) -> "TaintedStr":
        """Render the template, with its own characters marked. Anything may be raised.

        A role in KNOWN_ROLES counts as the template's own, because some templates make a control
        token of it. Other roles do not: a client may give a role any name.
        """
        from text.templates import render_sandboxed, trusted

        context = {
            name: trusted(token) for name, token in self.special_tokens.items()
        } | self.template_kwargs
        context["messages"] = [
            message | {"role": trusted(message["role"])}
            if message["role"] in KNOWN_ROLES
            else message
            for message in messages
        ]
        context |= {"tools": self.tools, "documents": None, "add_generation_prompt": True}
        return render_sandboxed(self.template, context)

    def try_render(self, messages: list[dict]) -> str | None:
        """Return the rendered messages; None if the template refuses them."""
        try:
            return str.__str__(self.render_unchecked(messages))
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

        An added token in a message would let its author speak in any role. So a control token is
        recognised only if all its characters are the template's own, or a role in KNOWN_ROLES. No
        message, tool, call or result can make one, whatever the template cuts out and joins. All
        other text is encoded as plain text.
        """
        from text.taint import trust_mask

        self.check_system_messages(messages)
        tainted = self.render_tainted(messages)
        pieces = split_special_tokens(
            encoding.special_tokens_set, str.__str__(tainted), trust_mask(tainted)
        )
        ids = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(encoding.encode_single_token(piece))
            else:
                ids += encoding.encode_ordinary(piece, at_start=not ids)
        return ids


def split_special_tokens(tokens: set[str], text: str, mask: str | None = None) -> list[str]:
    """Split a text at added tokens: text, token, text, ..., text. The longest match wins.

    mask: "1" for each character that may be part of a token; None: all may be.
    """
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    pattern = re.compile("|".join(longest_first) or "(?!)")
    runs = [(0, len(text))] if mask is None else [run.span() for run in re.finditer("1+", mask)]
    pieces = []
    start = 0
    for run in runs:
        for found in pattern.finditer(text, *run):
            pieces += [text[start : found.start()], found[0]]
            start = found.end()
    return [*pieces, text[start:]]


def compile_template(text: str):
    """Compile a chat template. Anything may be raised."""
    # A late import: jinja2 takes 17 ms, and few runs chat.
    from text.templates import compile_sandboxed

    return compile_sandboxed(text)

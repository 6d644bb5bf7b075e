"""Messages to token ids, by the chat template in the model's own checkpoint."""

import contextlib
import json
import re
from datetime import datetime
from pathlib import Path

import tiktoken

from checkpoint import Source, UserError, parse_name, read_json


class Chat:
    """A chat template: a program, stored with the weights, that writes messages as the one text they were trained on.

    name: as for `Model.from_pretrained`. Raises UserError if that model has no template, or one that is broken.
    """

    def __init__(self, name):
        source = parse_name(name)
        found = None if source.kind == "random" else read_template(source)
        if found is None:
            files = "neither chat_template.jinja nor a default chat_template in tokenizer_config.json"
            raise UserError(f"{source.label}: this model was not made for chat: it has {files}")
        self.file, self.text, self.tokens = found
        with self.failing():
            self.template = environment().from_string(self.text)

    @contextlib.contextmanager
    def failing(self):
        """Raise what fails in the template as a UserError."""
        try:
            yield
        except Exception as error:  # a program fails in any way
            reason = "".join(character if character.isprintable() else " " for character in str(error))
            raise UserError(f"{self.file}: chat template: {reason or type(error).__name__}") from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation up to where the reply begins, as transformers' `apply_chat_template` writes it.

        messages: each {"role": "system", "user" or "assistant", "content": its text}, oldest first. Raises UserError
        if the template refuses them.
        """
        given = self.tokens | {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        with self.failing():
            return self.template.render(given)

    def encode(self, messages: list[dict[str, str]], encoding: tiktoken.Encoding) -> list[int]:
        """The ids of that text, in which no text of a user or of the system message is a control token.

        An added token in a message would let its author speak in any role. So in messages stand-ins, used nowhere else,
        take the place of the characters that added tokens begin and end with: whatever the template cuts out and joins,
        none begins or ends in a message. Replies stay as they are, because templates look for the end of a reasoning in
        them. Therefore all is written a second time, with stand-ins in all messages for all characters of added tokens.
        If it has other control tokens, a message added some, and this text counts. (A template can be answered with a
        reply's token if it leaves out one of its own for it.) A template that escapes a message meets the stand-ins.
        """
        control = encoding.special_tokens_set  # none of which begins with another one, as tokenizer.py checks
        used = set().union(self.text, *self.tokens.values(), *control, *(message["content"] for message in messages))
        unused = (code for code in range(0x10FFFD, 0, -1) if chr(code) not in used)  # from the private ones downwards
        hide = {ord(character): next(unused) for character in set().union(*control)}
        edges = {ord(token[end]): hide[ord(token[end])] for token in control for end in (0, -1)}
        show = {stand_in: character for character, stand_in in hide.items()}
        partly = [message if message["role"] == "assistant" else translated(message, edges) for message in messages]
        fully = [translated(message, hide) for message in messages]
        pattern = f"({'|'.join(map(re.escape, control)) or '(?!)'})"
        first, second = (re.split(pattern, self.render(each)) for each in (partly, fully))  # text, token, ..., text
        pieces = first if first[1::2] == second[1::2] else second
        ids = encoding.encode_ordinary(pieces[0].translate(show))
        for token, text in zip(pieces[1::2], pieces[2::2]):
            ids += [encoding.encode_single_token(token), *encoding.encode_ordinary(text.translate(show))]
        return ids


def translated(message: dict[str, str], table: dict[int, int]) -> dict[str, str]:
    """A copy of a message with other characters in its content."""
    return message | {"content": message["content"].translate(table)}


TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_template(source: Source) -> tuple[Path, str, dict[str, str]] | None:
    """A model's chat template, None without one: its file, its text, and the special tokens that it may name.

    Raises UserError for a file that cannot be read.
    """
    file, of_tokenizer = source.find("chat_template.jinja"), source.find("tokenizer_config.json")
    config = read_json(of_tokenizer) if of_tokenizer else {}
    if file:
        try:
            text = file.read_text("utf-8")
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{file}: not UTF-8 text") from None
    else:
        file, text = of_tokenizer, config.get("chat_template")
        if isinstance(text, list):  # several, each with a name
            entries = (entry for entry in text if isinstance(entry, dict))
            text = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    tokens = {name: token.get("content") if isinstance(token := config.get(name), dict) else token for name in TOKENS}
    tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}
    return (file, text, tokens) if isinstance(text, str) else None


def environment():
    """What chat templates are written for: jinja2 in a sandbox, set up as in transformers but for the tag generation.

    The sandbox keeps a template from files, modules and the insides of Python, not from using up time and memory.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # here: importing it takes 17 ms, and few runs chat

    def raise_exception(message):
        raise ValueError(message)

    def strftime_now(form):
        return datetime.now().strftime(form)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja2's own is for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made

"""Chat messages to token ids, with the chat template in the model's checkpoint."""

import contextlib
import json
from datetime import datetime

from errors import UserError
from loading.chat_template import read_chat_template
from loading.load import resolve_source
from text.tokenizer import Encoding


class Chat:
    """A chat template: a program that writes messages as the text format of a model's training.

    It is stored with the weights. name: as for `load_model`. Raises UserError if the template is
    missing or broken.
    """

    def __init__(self, name):
        source = resolve_source(name)
        found = None if source.type == "random" else read_chat_template(source)
        if found is None:
            files = "chat_template.jinja nor a default chat_template in tokenizer_config.json"
            raise UserError(f"{source.label}: not a chat model: it has neither {files}")
        self.file, self.template_text, self.special_tokens = found
        with self.template_errors():
            self.template = environment().from_string(self.template_text)

    @contextlib.contextmanager
    def template_errors(self):
        """Turn any error of the template into a UserError."""
        try:
            yield
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.file}: chat template: {reason}") from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation up to the beginning of the reply.

        The result equals transformers' `apply_chat_template`. messages: each {"role": "system",
        "user" or "assistant", "content": its text}, oldest first. Raises UserError if the template
        refuses the messages.
        """
        context = self.special_tokens | {"messages": messages, "tools": None, "documents": None}
        with self.template_errors():
            return self.template.render(context, add_generation_prompt=True)

    def encode(self, messages: list[dict[str, str]], encoding: Encoding) -> list[int]:
        """Return the token ids of the rendered messages."""
        return encoding.encode(self.render(messages), allowed_special="all")


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

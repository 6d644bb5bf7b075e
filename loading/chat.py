"""The chat template in a model's own checkpoint."""

import json
from datetime import datetime
from pathlib import Path

from errors import UserError
from loading.checkpoint import read_json
from loading.load import Source

# Special tokens that tokenizer_config.json may name, each as NAME_token. A template may use them.
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_template(source: Source) -> tuple[Path, str, dict[str, str]] | None:
    """A model's chat template, None without one: its file, its text, the tokens it may name.

    Raises UserError for a file that cannot be read.
    """
    of_tokenizer = source.find("tokenizer_config.json")
    config = read_json(of_tokenizer) if of_tokenizer else {}
    file = source.find("chat_template.jinja")
    if file:
        text = read_text(file)
    else:
        file = of_tokenizer
        text = config.get("chat_template")
        if isinstance(text, list):  # several, each with a name
            named = [entry for entry in text if isinstance(entry, dict)]
            default = [entry for entry in named if entry.get("name") == "default"]
            text = default[0].get("template") if default else None
    tokens = {}
    for name in NAMES:
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[f"{name}_token"] = token
    return (file, text, tokens) if isinstance(text, str) else None


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

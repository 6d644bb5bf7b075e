"""The chat template in a model's files."""

from pathlib import Path

from errors import UserError
from loading.checkpoint import read_json
from loading.config import read_special_tokens
from loading.gguf_tokenizer import read_gguf_template
from loading.load import Source


def read_chat_template(
    source: Source, file: Path | None = None, name: str = "default"
) -> tuple[Path, str, dict[str, str]] | None:
    """Return a chat template's file, text and special tokens; None if there is no template.

    file: a template to use instead. name: selects one of several templates.
    Raises UserError for a file that cannot be read.
    """
    override = (file, read_text(file)) if file else None
    if source.type == "random":
        return (*override, {}) if override else None
    if source.type == "gguf" and read_gguf_template(source.gguf, override):  # named ones too
        return read_gguf_template(source.gguf, override, name)
    config_file = source.find("tokenizer_config.json")
    config = read_json(config_file) if config_file else {}
    default = file or source.find("chat_template.jinja")
    named = name != "default" and source.find(f"additional_chat_templates/{name}.jinja")
    if file := named or default:
        text = read_text(file) if named or name == "default" else None
    else:
        file = config_file
        text = config.get("chat_template")
        if isinstance(text, list):  # several named templates
            entries = [entry for entry in text if isinstance(entry, dict)]
            chosen = [entry for entry in entries if entry.get("name") == name]
            text = chosen[0].get("template") if chosen else None
        elif name != "default":
            text = None
    return (file, text, read_special_tokens(source)) if isinstance(text, str) else None


def read_text(file: Path) -> str:
    """Return a file's text without its byte order mark. Raises UserError if it is unreadable."""
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None

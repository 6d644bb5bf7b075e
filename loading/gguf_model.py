"""The names of a model's tensors in GGUF files."""

import re

from model import Model


def gguf_name(model: Model, key: str) -> str:
    """Return the GGUF name of a model's tensor."""
    layer, _, suffix = key.rpartition(".")
    numbers = iter(re.findall(r"(?<=\.)\d+(?=\.|$)", layer))
    name = re.sub(r"\*", lambda star: next(numbers), model.ROLES[model.role(key)][1])
    return f"{name}.{suffix}"

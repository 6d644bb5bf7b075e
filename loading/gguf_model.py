"""A model in a GGUF file: what it calls the tensors of ours."""

import re

from model import Model


def gguf_name(model: Model, key: str) -> str:
    """What a GGUF file calls one of a model's tensors."""
    layer, _, kind = key.rpartition(".")
    numbers = iter(re.findall(r"(?<=\.)\d+(?=\.|$)", layer))
    name = re.sub(r"\*", lambda star: next(numbers), model.ROLES[model.role(key)][1])
    return f"{name}.{kind}"

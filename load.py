"""A model from its name: which class computes it is said by the `model_type` of its config.json."""

import torch

from checkpoint import Source, check_values, parse_name, read_json
from llama import Llama
from model import GPT, Model

ARCHITECTURES = {"gpt2": GPT, "llama": Llama, "qwen2": Llama}


def architecture(source: Source) -> type[Model]:
    """The class that computes a model. Raises UserError if its architecture is another one."""
    if source.kind == "random":
        return next(kind for kind in ARCHITECTURES.values() if source.name in kind.PRESETS)
    file = source.file("config.json")
    raw = read_json(file)
    check_values(file, raw, {"model_type": tuple(ARCHITECTURES)})
    return ARCHITECTURES[raw.get("model_type", "gpt2")]


def load_config(name):
    """The configuration of a model, without its weights. name and errors: as of `Model.from_pretrained`."""
    source = parse_name(name)
    kind = architecture(source)
    return kind.PRESETS[source.name] if source.kind == "random" else kind.read_config(source)


def load_model(name, dtype: torch.dtype = torch.float32, device="cpu") -> Model:
    """As `Model.from_pretrained`, for a model of any architecture here."""
    return architecture(parse_name(name)).from_pretrained(name, dtype, device)

"""Adapters in peft's form: two thin matrices for each linear layer that was trained further.

Hu et al. 2021, "LoRA: Low-rank adaptation of large language models" (2106.09685).
"""

import math
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn

from blocks import QuantizedBlocks
from errors import UserError
from loading.checkpoint import check_values, read_header, read_json, read_tensors
from loading.config import read_number, read_sizes
from model import Model

# name of a weight -> A, (r, in_features), and B, (out_features, r), which has the scale
LoRAWeights = dict[str, tuple[torch.Tensor, torch.Tensor]]

SUPPORTED_VALUES = {  # the first is what a missing key means
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "use_rslora": (False, True),
    # The others (pissa, olora, corda, loftq, ...) change the weights of the model as well.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Other fields of any value: read below, or of no consequence here.
# fan_in_fan_out: that a weight is stored as (in, out); A and B are not.
IGNORED_FIELDS = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_version", "qalora_group_size", "r", "revision", "target_modules"),
)
PICKLE_HINT = "adapter_model.bin is a pickle, which can run any code, and is not read"
LORA_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def read_adapter(directory, model: Model) -> LoRAWeights:
    """What an adapter adds to the weights of a model: B @ A, by the name of each weight.

    directory: with adapter_config.json and adapter_model.safetensors; None: nothing is added.
    model: one that is whole; its weights need no numbers.
    Raises UserError if a file is missing or damaged, for tensors that do not fit the model, and for
    whatever else peft would do with this configuration.
    """
    if directory is None:
        return {}
    directory = Path(directory)
    config = directory / "adapter_config.json"
    rank, scale, raw = read_adapter_config(config)
    file = directory / "adapter_model.safetensors"
    if not file.exists() and (directory / "adapter_model.bin").exists():
        raise UserError(f"{directory}: no {file.name}; {PICKLE_HINT}")
    layers = find_lora_layers(file, model)
    check_target_modules(config, raw, file, layers, model)
    shapes = {}
    for path, stem in layers.items():
        outputs, inputs = model.get_submodule(path).weight.shape
        shapes |= {f"{stem}.lora_A.weight": (rank, inputs)}
        shapes |= {f"{stem}.lora_B.weight": (outputs, rank)}
    tensors = {}
    shape_source = f"{config.name} and the model say"
    for name, rows, chunk in read_tensors([file], shapes, shape_source=shape_source):
        whole = tensors.setdefault(
            name, torch.empty(shapes[name], dtype=compute_dtype(chunk.dtype))
        )
        whole[rows] = chunk
    lora_weights = {}
    for path, stem in layers.items():
        a, b = (tensors[f"{stem}.lora_{side}.weight"] for side in "AB")
        lora_weights[f"{path}.weight"] = a, scale * b
    return lora_weights


def read_adapter_config(file: Path) -> tuple[int, float, dict]:
    """The rank and the scale of an adapter, and all of its configuration.

    Raises UserError for values that change what is computed in another way.
    """
    raw = read_json(file)
    check_values(file, raw, SUPPORTED_VALUES)
    for key, value in raw.items():
        if (
            key not in SUPPORTED_VALUES
            and key not in IGNORED_FIELDS
            and value not in (None, False, {}, [])
        ):
            raise UserError(f"{file}: {key!r} is {reprlib.repr(value)}, which is not supported")
    rank = read_sizes(file, raw, {"r": ("r", 10**5)}, {"r": 8})["r"]
    alpha = read_number(file, raw, "lora_alpha", 8, 10**6)
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank), raw


def check_target_modules(
    config: Path, raw: dict, file: Path, layers: dict[str, str], model: Model
) -> None:
    """Raise UserError unless the layers with tensors are those that the configuration names.

    peft adds only to those that it names, and passes over what the model lacks.
    """
    for stem in layers.values():
        if field := excluding_field(raw, stem.removeprefix("base_model.model.")):
            where = f"{field} of {config.name}"
            raise UserError(f"{file}: {stem} has tensors, but {where} leaves it out")
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or isinstance(raw.get("exclude_modules"), str):
        return
    for target in targets:
        for path, _ in model.named_modules():
            if (
                matches_module(path, target)
                and path not in layers
                and not excluding_field(raw, path)
            ):
                lacks = f"{file.name} lacks {path}"
                raise UserError(f"{config}: target_modules names {target!r}, but {lacks}")


def excluding_field(raw: dict, name: str) -> str | None:
    """The field of a configuration by which peft gives a layer no adapter; None: there is none.

    name: of the layer, in transformers. A regular expression is not tried: with a hostile one that
    takes hours. There the tensors alone say which layers have an adapter.
    """
    targets = raw.get("target_modules")
    if isinstance(targets, list) and not any(matches_module(name, target) for target in targets):
        return "target_modules"
    excluded = raw.get("exclude_modules")
    if isinstance(excluded, list) and any(matches_module(name, each) for each in excluded):
        return "exclude_modules"
    numbers = raw.get("layers_to_transform")
    number = re.search(r"\.(\d+)\.", name)
    if numbers in (None, []) or not number:
        return None
    numbers = numbers if isinstance(numbers, list) else [numbers]
    return None if int(number[1]) in numbers else "layers_to_transform"


def matches_module(name: str, ending: str) -> bool:
    """Whether the last parts of a layer's name are these."""
    return f".{name}".endswith(f".{ending}")


def find_lora_layers(file: Path, model: Model) -> dict[str, str]:
    """The linear layers with an adapter: path in the model -> what their tensors' names begin with.

    Raises UserError for tensors that are not A or B of such a layer.
    """
    weights = {name for name, _ in model.named_parameters()}  # not those of a tied head
    modules = dict(model.named_modules())
    layers = {}
    for key in sorted(read_header(file)):
        match = LORA_KEY.fullmatch(key)
        mapped = model.map_key(match[1]) if match else None
        path = mapped.removeprefix(model.BASE_MODEL_PREFIX) if mapped else key
        if not isinstance(modules.get(path), nn.Linear) or f"{path}.weight" not in weights:
            raise UserError(f"{file}: tensor {key!r} is not A or B of a linear layer of this model")
        stem = key.rpartition(".lora_")[0]
        if layers.setdefault(path, stem) != stem:
            raise UserError(
                f"{file}: {path} is there twice, with and without {model.BASE_MODEL_PREFIX!r}"
            )
    if not layers:
        raise UserError(f"{file}: it has no tensors")
    return layers


def merge_lora(chunks: Iterator[tuple], lora_weights: LoRAWeights) -> Iterator[tuple]:
    """The blocks of `read_tensors` with an adapter added to them: weight + B @ A, by rows."""
    for name, rows, chunk in chunks:
        if name in lora_weights:
            chunk = chunk.dequantize() if isinstance(chunk, QuantizedBlocks) else chunk
            chunk = chunk.to(compute_dtype(chunk.dtype))
            a, b = (each.to(chunk) for each in lora_weights[name])
            chunk = chunk + b[rows] @ a
        yield name, rows, chunk


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in. Not torch.promote_types, which refuses floats of 8 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32

"""LoRA adapters in peft's format: two low-rank matrices for each adapted linear layer.

Hu et al. 2021, "LoRA: Low-rank adaptation of large language models" (2106.09685).
"""

import math
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn

from errors import UserError
from loading.checkpoint import check_values, read_header, read_json, read_tensors
from loading.config import read_number, read_sizes
from model import Model
from quantisation.blocks import QuantizedBlocks

# name of a weight -> A, (r, in_features), and B, (out_features, r), multiplied by the scale
LoRAWeights = dict[str, tuple[torch.Tensor, torch.Tensor]]

SUPPORTED_VALUES = {  # a missing key means the first value
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "use_rslora": (False, True),
    # The others (pissa, olora, corda, loftq, ...) change the weights of the model as well.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Fields that may have any value: they are read below, or have no effect here.
# fan_in_fan_out: the weight is stored as (in, out), but A and B are not.
IGNORED_FIELDS = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_version", "qalora_group_size", "r", "revision", "target_modules"),
)
PICKLE_HINT = "adapter_model.bin is a pickle, which can run any code, and is not read"
LORA_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def read_adapter(directory, model: Model) -> LoRAWeights:
    """Return an adapter's matrices A and B by weight name; it adds B @ A to each weight.

    directory: holds adapter_config.json and adapter_model.safetensors; None: no adapter.
    model: not sharded yet; it may be on the meta device.
    Raises UserError if a file is missing or damaged, for tensors that do not fit the model, and for
    a configuration with which peft would compute something else.
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
    heights = {}
    for path, stem in layers.items():
        weights = [model.get_parameter(name) for name in model.split_key(f"{path}.weight")]
        heights[path] = [len(weight) for weight in weights]
        shapes |= {f"{stem}.lora_A.weight": (rank, weights[0].shape[1])}
        shapes |= {f"{stem}.lora_B.weight": (sum(heights[path]), rank)}
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
        names = model.split_key(f"{path}.weight")  # of fused layers, which share A
        if not lora_weights.keys().isdisjoint(names):
            raise UserError(f"{file}: duplicate {path}, fused and not")
        for name, rows in zip(names, (scale * b).split(heights[path])):
            lora_weights[name] = a, rows
    return lora_weights


def read_adapter_config(file: Path) -> tuple[int, float, dict]:
    """Return the rank and the scale of an adapter, and its whole configuration.

    Raises UserError for values that change the computation in unsupported ways.
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
    """Raise UserError unless exactly the layers that the configuration names have tensors.

    peft adapts only layers that the configuration names, and skips names that the model lacks.
    """
    for stem in layers.values():
        if field := excluding_field(raw, stem.removeprefix("base_model.model.")):
            where = f"{field} of {config.name}"
            raise UserError(f"{file}: {stem} has tensors, but {where} excludes it")
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or isinstance(raw.get("exclude_modules"), str):
        return
    paths = [path for path, _ in model.named_modules()]
    for fused, (part, *_) in model.FUSED_LAYERS.items():
        if any(matches_module(path, fused) for path in layers):
            stems = [path.removesuffix(part) for path in paths if matches_module(path, part)]
            paths += [stem + fused for stem in stems]
    for target in targets:
        for path in paths:
            if (
                matches_module(path, target)
                and path not in layers
                and not excluding_field(raw, path)
            ):
                lacks = f"{file.name} lacks {path}"
                raise UserError(f"{config}: target_modules names {target!r}, but {lacks}")


def excluding_field(raw: dict, name: str) -> str | None:
    """Return the field of a configuration that excludes a layer; None if none does.

    name: of the layer, in transformers. Regular expressions are not evaluated, because a hostile
    one can take hours. The tensors alone then decide which layers have an adapter.
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
    """Return whether a layer's dotted name ends with these components."""
    return f".{name}".endswith(f".{ending}")


def find_lora_layers(file: Path, model: Model) -> dict[str, str]:
    """Return the adapted linear layers: path in the model -> prefix of their tensors' names.

    Raises UserError for tensors that are not A or B of a linear layer.
    """
    weights = {name for name, _ in model.named_parameters()}  # without a tied head
    modules = dict(model.named_modules())
    layers = {}
    for key in sorted(read_header(file)):
        match = LORA_KEY.fullmatch(key)
        mapped = model.map_key(match[1]) if match else None
        path = mapped.removeprefix(model.BASE_MODEL_PREFIX) if mapped else key
        names = model.split_key(f"{path}.weight")
        adapted = [modules.get(name.removesuffix(".weight")) for name in names]
        is_linear = all(isinstance(layer, nn.Linear) for layer in adapted)
        if not is_linear or not weights >= {*names}:
            raise UserError(
                f"{file}: tensor {key!r} is not lora_A or lora_B of a linear layer of this model"
            )
        stem = key.rpartition(".lora_")[0]
        if layers.setdefault(path, stem) != stem:
            raise UserError(
                f"{file}: duplicate {path}, with and without {model.BASE_MODEL_PREFIX!r}"
            )
    if not layers:
        raise UserError(f"{file}: no tensors")
    return layers


def merge_lora(chunks: Iterator[tuple], lora_weights: LoRAWeights) -> Iterator[tuple]:
    """Yield the chunks of `read_tensors` with the adapter merged: rows of weight + B @ A."""
    for name, rows, chunk in chunks:
        if name in lora_weights:
            chunk = chunk.dequantize() if isinstance(chunk, QuantizedBlocks) else chunk
            chunk = chunk.to(compute_dtype(chunk.dtype))
            a, b = (each.to(chunk) for each in lora_weights[name])
            chunk = chunk + b[rows] @ a
        yield name, rows, chunk


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations. torch.promote_types would refuse 8-bit floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32

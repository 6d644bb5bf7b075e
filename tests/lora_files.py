"""Adapters for tests, in peft's form."""

import json
from pathlib import Path

import torch
from conftest import difference, random_tokens
from engines import finish, step
from safetensors.torch import save_file

from adapters import Adapters
from infer import generate
from loading.load import empty_model, load_model
from sampling import SamplingParams

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# All layers of which adapters need not be merged.
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "c_attn", "c_proj", "c_fc")
NAMES = ("", "a", "b")


def random_tensors(model, targets: tuple[str, ...], rank: int = 3, seed: int = 0) -> dict:
    """Return random A and B of the target layers by their names in a file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, layer in empty_model(model.config).named_modules():  # the model's may be rounded
        if path.rpartition(".")[2] in targets:
            outputs, inputs = layer.weight.shape
            stem = f"base_model.model.{'' if path == 'lm_head' else model.BASE_MODEL_PREFIX}{path}"
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
                tensors[f"{stem}.lora_{side}.weight"] = numbers
    return tensors


def save_adapter(directory, tensors: dict, rank: int = 3, **config) -> Path:
    """Write an adapter. config: other fields of its configuration, such as lora_alpha."""
    directory.mkdir(exist_ok=True)
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "bias": "none"} | config
    raw.setdefault("target_modules", sorted({name.split(".")[-3] for name in tensors}))
    (directory / "adapter_config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def random_pairs(model, targets: tuple[str, ...], seed: int = 0) -> dict:
    """Return `random_tensors` as `read_adapter` would, with a scale of 1."""
    tensors = random_tensors(model, targets, 3, seed)
    lora_weights = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            path = stem.removeprefix("base_model.model.").removeprefix(model.BASE_MODEL_PREFIX)
            lora_weights[f"{path}.weight"] = a, tensors[f"{stem}.lora_B.weight"]
    return lora_weights


def with_adapters(model, targets: tuple[str, ...] = LINEAR, names: str = "ab"):
    """Attach random adapters with these letters as names to a model, and return it."""
    lora_weights = {name: random_pairs(model, targets, seed) for seed, name in enumerate(names)}
    model.adapters = Adapters(model, lora_weights)
    return model


def params_of(count: int, seed: int) -> SamplingParams:
    return SamplingParams(count, ignore_eos=True, temperature=0.8, seed=seed)


def add_at_random(engine, chance, names, salts=("",), count: int = 14) -> list:
    """Add requests with random adapters and salts between steps, some with equal prefixes.

    chance: a random.Random. Returns the finished requests.
    """
    starts = [random_tokens(8, seed=number) for number in range(2)]
    requests = []
    for number in range(count):
        prompt = chance.choice(starts) + random_tokens(chance.randrange(1, 5), seed=number)
        params = params_of(chance.randrange(1, 20), number)
        requests.append(engine.add(prompt, params, chance.choice(salts), chance.choice(names)))
        for _ in range(chance.randrange(3)):
            step(engine)
    finish(engine)
    return requests


def own_text(model, request, **options) -> list[int]:
    """Return the output of `generate` for a request with its adapter."""
    prompt = request.tokens[: request.prompt_length]
    steps = generate(model, [prompt], request.params, adapter=request.adapter, **options)
    return [token for (token,) in steps]


def check_own(model, requests, **options) -> None:
    for request in requests:
        assert request.output == own_text(model, request, **options)


def peft_adapter(theirs, directory, **options):
    """Add a random peft adapter to a transformers model, and save it in a directory."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | options
    model = get_peft_model(theirs, LoraConfig(**options, init_lora_weights=False))
    model = model.to(theirs.dtype)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(directory, save_embedding_layers=False)
    return model.eval()


def check_adapter_as_in_peft(theirs, base, directory, **options) -> None:
    """A random peft adapter changes logits, and ours as much as transformers'."""
    theirs = peft_adapter(theirs, directory, **options)
    assert difference(load_model(base, torch.float64), theirs) > 0.1
    assert difference(load_model(base, torch.float64, "cpu", directory), theirs) < 1e-9

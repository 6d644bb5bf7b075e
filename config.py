"""The configuration of a model, as it stands in the `config.json` of Hugging Face's form."""

import reprlib
from pathlib import Path

from checkpoint import check_values
from errors import UserError
from model import GPTConfig


def read_sizes(
    file: Path, raw: dict, sizes: dict[str, tuple[str, int]], missing: dict[str, int]
) -> dict[str, int]:
    """The sizes in a config.json: of each field, an integer from 1 to its largest value.

    sizes: field -> its key, and the largest value. missing: field -> what a missing key means.
    Raises UserError if one is anything else.
    """
    fields = {}
    for field, (key, limit) in sizes.items():
        value = raw.get(key, missing.get(field))
        if type(value) is not int or not 1 <= value <= limit:
            raise UserError(
                f"{file}: {key} is {reprlib.repr(value)}; it must be an integer from 1 to {limit}"
            )
        fields[field] = value
    return fields


def read_token_ids(
    file: Path, raw: dict, key: str, vocab_size: int, missing: int | None
) -> tuple[int, ...]:
    """The different ids in a field of a config.json, an id or a list of ids, in their order.

    missing: what a missing key means. Raises UserError if it holds neither.
    """
    value = raw.get(key, missing)
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        allowed = f"an id below {vocab_size}, or a list of them"
        raise UserError(f"{file}: {key} is {reprlib.repr(value)}; it must be {allowed}")
    return tuple(dict.fromkeys(ids))


def read_number(file: Path, raw: dict, key: str, missing: float | None, limit: float) -> float:
    """A number in a config.json, above 0 and up to limit. Raises UserError if it is no such."""
    value = raw.get(key, missing)
    if type(value) not in (int, float) or not 0 < value <= limit:
        raise UserError(
            f"{file}: {key} is {reprlib.repr(value)}; it must be above 0 and at most {limit}"
        )
    return value


# Field of GPTConfig -> its key in config.json, and the largest value read: 10**9 layers would take
# hours.
GPT_SIZES = {
    "vocab_size": ("vocab_size", 10**6),
    "block_size": ("n_positions", 10**6),
    "n_layer": ("n_layer", 1000),
    "n_head": ("n_head", 1000),
    "n_embd": ("n_embd", 10**5),
}


def read_gpt_config(file: Path, raw: dict) -> GPTConfig:
    """The configuration of a GPT-2. Raises UserError if it describes another architecture.

    file: the config.json, for errors. raw: the object in it.
    """
    fields = read_sizes(file, raw, GPT_SIZES, vars(GPTConfig()))
    supported = {  # what the forward pass computes
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * fields["n_embd"]),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    check_values(file, raw, supported)
    if fields["n_embd"] % fields["n_head"]:
        raise UserError(
            f"{file}: n_embd {fields['n_embd']} is not a multiple of n_head {fields['n_head']}"
        )
    eos = read_token_ids(
        file, raw, "eos_token_id", fields["vocab_size"], GPTConfig.eos_token_ids[0]
    )
    epsilon = read_number(file, raw, "layer_norm_epsilon", GPTConfig.layer_norm_epsilon, 1)
    return GPTConfig(**fields, eos_token_ids=eos, layer_norm_epsilon=epsilon)


def gpt_fields(config: GPTConfig) -> dict:
    """What a config.json says of this GPT-2, but for the dtype of its weights."""
    eos = config.eos_token_ids
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(config, field) for field, (key, _) in GPT_SIZES.items()},
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "activation_function": "gelu_new",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
    }

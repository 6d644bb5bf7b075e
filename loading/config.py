"""Model configurations in Hugging Face's `config.json`."""

import reprlib
from pathlib import Path

from errors import UserError
from loading.checkpoint import check_values
from model import GPTConfig


def read_sizes(
    file: Path, raw: dict, sizes: dict[str, tuple[str, int]], defaults: dict[str, int]
) -> dict[str, int]:
    """Return the sizes in a config.json: per field, an integer from 1 to its largest value.

    sizes: field -> its key and largest value. defaults: field -> its value if the key is missing.
    Raises UserError for any other value.
    """
    fields = {}
    for field, (key, limit) in sizes.items():
        value = raw.get(key, defaults.get(field))
        if type(value) is not int or not 1 <= value <= limit:
            raise UserError(
                f"{file}: {key} {reprlib.repr(value)}: must be an integer from 1 to {limit}"
            )
        fields[field] = value
    return fields


def read_token_ids(
    file: Path, raw: dict, key: str, vocab_size: int, default: int | None
) -> tuple[int, ...]:
    """Return the ids in a field of a config.json, an id or a list of ids, without duplicates.

    default: the value of a missing key. Raises UserError if the field holds neither.
    """
    value = raw.get(key, default)
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        allowed = f"an id below {vocab_size}, or a list of them"
        raise UserError(f"{file}: {key} {reprlib.repr(value)}: must be {allowed}")
    return tuple(dict.fromkeys(ids))


def read_number(file: Path, raw: dict, key: str, default: float | None, limit: float) -> float:
    """Return a number in a config.json. Raises UserError unless it is above 0 and up to limit."""
    value = raw.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= limit:
        raise UserError(f"{file}: {key} {reprlib.repr(value)}: must be above 0 and at most {limit}")
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
    """Return the configuration of a GPT-2. Raises UserError for another architecture.

    file: the config.json, for errors. raw: the object in it.
    """
    fields = read_sizes(file, raw, GPT_SIZES, vars(GPTConfig()))
    supported = {  # values that the forward pass supports
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
            f"{file}: n_embd {fields['n_embd']}: must be a multiple of n_head ({fields['n_head']})"
        )
    eos = read_token_ids(
        file, raw, "eos_token_id", fields["vocab_size"], GPTConfig.eos_token_ids[0]
    )
    epsilon = read_number(file, raw, "layer_norm_epsilon", GPTConfig.layer_norm_epsilon, 1)
    return GPTConfig(**fields, eos_token_ids=eos, layer_norm_epsilon=epsilon)


def gpt_to_dict(config: GPTConfig) -> dict:
    """Return the config.json of this GPT-2, except the dtype of its weights."""
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

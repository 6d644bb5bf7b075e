"""Model configurations in Hugging Face's JSON files."""

import dataclasses
import math
import reprlib
from pathlib import Path

from cache import layer_sliding_windows
from errors import UserError, warn_once
from gemma import Gemma2Config, GemmaConfig
from llama import (
    ExpertsConfig,
    LlamaConfig,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from loading.checkpoint import check_values, read_json
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


def read_attention_sizes(
    file: Path, raw: dict, sizes: dict[str, tuple[str, int]]
) -> dict[str, int]:
    """Call `read_sizes`. By default n_kv_head is n_head, and head_dim n_embd // n_head."""
    defaults = {"n_kv_head": raw.get(sizes["n_head"][0]), "head_dim": 1}
    fields = read_sizes(file, raw, sizes, defaults)
    if sizes["head_dim"][0] not in raw:
        fields["head_dim"] = fields["n_embd"] // fields["n_head"]
    return fields


def check_heads(file: Path, fields: dict[str, int], sizes: dict[str, tuple[str, int]]) -> None:
    """Raise UserError unless query heads can share key-value heads, and RoPE can pair elements."""
    n_head, n_kv_head, head_dim = (sizes[name][0] for name in ("n_head", "n_kv_head", "head_dim"))
    if fields["n_head"] % fields["n_kv_head"]:
        multiple = f"a multiple of {n_kv_head} ({fields['n_kv_head']})"
        raise UserError(f"{file}: {n_head} {fields['n_head']}: must be {multiple}")
    if fields["head_dim"] % 2 or not fields["head_dim"]:
        raise UserError(f"{file}: {head_dim} {fields['head_dim']}: must be even and above 0")


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


LLAMA_SIZES = {  # field of LlamaConfig -> its key in config.json, and the largest value read
    "vocab_size": ("vocab_size", 10**6),
    "block_size": ("max_position_embeddings", 10**7),
    "n_layer": ("num_hidden_layers", 1000),
    "n_head": ("num_attention_heads", 1000),
    "n_kv_head": ("num_key_value_heads", 1000),
    "n_embd": ("hidden_size", 10**5),
    "n_inner": ("intermediate_size", 10**6),
    "head_dim": ("head_dim", 1000),
}
LLAMA_DEFAULTS = {  # by model_type, for missing or null keys whose default is not a Llama's
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000},
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
LLAMA_SUPPORTED_VALUES = {  # values that the forward pass supports
    "model_type": (
        *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3", "smollm3"),
    ),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False, True),
    "tie_word_embeddings": (False, True),
    "is_causal": (True,),
}


ROPE_TYPES = ("default", "llama3", "yarn")


def read_rope_scaling(file: Path, rope: dict) -> RopeScaling:
    """Return the RopeScaling of a config.json. Raises UserError for invalid values."""
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    scaling = RopeScaling(*(read_number(file, rope, name, None, 1e9) for name in names))
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    if low >= high:
        raise UserError(f"{file}: low_freq_factor {low}: must be below high_freq_factor ({high})")
    return scaling


YARN_KEYS = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast")
YARN_KEYS += ("beta_slow", "mscale", "mscale_all_dim", "rope_theta")


def read_yarn_scaling(
    file: Path, rope: dict, theta: float, block_size: int, names: dict[str, str] | None = None
) -> YarnScaling:
    """Return the YarnScaling of a config.json or a GGUF file, with transformers' defaults.

    rope: rope_parameters. theta: rope_theta. block_size: the original window, if rope has none.
    names: keys of a GGUF file. Raises UserError for invalid values.
    """
    keys = dict(zip(YARN_KEYS, YARN_KEYS)) | (names or {})
    limit = LLAMA_SIZES["block_size"][1]
    sizes = {"window": (keys["original_max_position_embeddings"], limit)}
    original = read_sizes(file, rope, sizes, {"window": block_size})["window"]
    if rope.get(keys["factor"], 1) is None:
        rope = rope | {keys["factor"]: block_size / original}
    check_values(file, rope, {"truncate": (True, False)})
    rope = {key: value for key, value in rope.items() if value is not None}
    factor = read_number(file, rope, keys["factor"], None, limit / original)
    mscales = [name for name in ("mscale", "mscale_all_dim") if rope.get(keys[name], 0) != 0]
    mscales = {name: read_number(file, rope, keys[name], None, 1e3) for name in mscales}
    default = yarn_attention_factor(factor, **mscales)
    attention_factor = read_number(file, rope, keys["attention_factor"], default, 1e3)
    fast = read_number(file, rope, keys["beta_fast"], 32, 1e9)
    slow = read_number(file, rope, keys["beta_slow"], 1, 1e9)
    if fast < slow:
        least = f"at least {keys['beta_slow']} ({slow})"
        raise UserError(f"{file}: {keys['beta_fast']} {fast}: must be {least}")
    if theta <= 1:
        raise UserError(f"{file}: {keys['rope_theta']} {theta}: must be above 1 for YaRN")
    return YarnScaling(factor, original, attention_factor, fast, slow, rope.get("truncate", True))


GEMMA_SLIDING_WINDOW_PATTERN = 6  # every sixth layer is global, as hard-coded in llama.cpp
GEMMA2_SLIDING_WINDOW_PATTERN = 2
SLIDING_WINDOW_PATTERNS = {  # by model_type
    "gemma2": GEMMA2_SLIDING_WINDOW_PATTERN,
    **dict.fromkeys(("gemma3_text", "gemma3"), GEMMA_SLIDING_WINDOW_PATTERN),
}


def swa_layers(pattern: int, n_layer: int) -> list[bool]:
    """Return whether each layer has a sliding window: all but every `pattern`-th; 0: all."""
    return [not pattern or (layer + 1) % pattern > 0 for layer in range(n_layer)]


FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
UNIFORM_SLIDING = ("Mistral", "Phi3", "Qwen3Moe")  # with the same window in all layers, or in none


def read_sliding_windows(file: Path, raw: dict, n_layer: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in a config.json, () if no layer has one.

    A Mistral, Mixtral or Phi-3 has it in each layer, a Qwen3-MoE too if use_sliding_window is true.
    Another Qwen then has it in the layers that layer_types names, or from layer max_window_layers
    on. A Gemma has it in the layers that layer_types names, or in all but every sixth, a Gemma 2 in
    all but every second. Raises UserError for other layer types.
    """
    model_type = raw.get("model_type")
    use_sliding_window = raw.get("use_sliding_window")  # Qwen only
    is_uniform = model_type in ("mistral", "mixtral", "phi3") or (
        model_type == "qwen3_moe" and use_sliding_window
    )
    allowed = (FULL_ATTENTION,)  # layer types that are supported
    defaults = [FULL_ATTENTION] * n_layer
    # transformers gives these no sliding window if the key is missing.
    if raw.get("sliding_window", None if model_type in ("mixtral", "phi3") else 4096) is not None:
        if is_uniform:
            allowed = (SLIDING_ATTENTION,)
            defaults = [SLIDING_ATTENTION] * n_layer
        elif model_type in ("qwen2", "qwen3") and use_sliding_window:
            allowed = (FULL_ATTENTION, SLIDING_ATTENTION)
            max_window_layers = raw.get("max_window_layers", 28)
            if type(max_window_layers) is not int:
                raise UserError(
                    f"{file}: max_window_layers {max_window_layers!r}: must be an integer"
                )
            defaults = [
                FULL_ATTENTION if layer < max_window_layers else SLIDING_ATTENTION
                for layer in range(n_layer)
            ]
        elif model_type in SLIDING_WINDOW_PATTERNS:
            allowed = (FULL_ATTENTION, SLIDING_ATTENTION)
            pattern = {"pattern": ("sliding_window_pattern", 1000)}
            default = {"pattern": SLIDING_WINDOW_PATTERNS[model_type]}
            pattern = read_sizes(file, raw, pattern, default)
            defaults = [
                SLIDING_ATTENTION if slides else FULL_ATTENTION
                for slides in swa_layers(pattern["pattern"], n_layer)
            ]
    layers = raw.get("layer_types")
    layers = defaults if layers is None else layers
    layers = layers if isinstance(layers, list) else [layers] * n_layer
    for layer in layers:
        check_values(file, {"layer_types": layer}, {"layer_types": allowed})
    if len(layers) != n_layer:
        raise UserError(f"{file}: layer_types of length {len(layers)}: must have length {n_layer}")
    if SLIDING_ATTENTION not in layers:
        return ()
    window = read_sizes(file, raw, {"size": ("sliding_window", 10**7)}, {"size": 4096})["size"]
    return tuple(window if layer == SLIDING_ATTENTION else None for layer in layers)


def read_llama_config(file: Path, raw: dict) -> LlamaConfig:
    """Return the configuration of a Llama. Raises UserError for another architecture.

    file: the config.json, for errors. raw: the object in it.
    """
    original = raw
    raw = {key: value for key, value in raw.items() if value is not None}  # null means missing
    check_values(file, raw, LLAMA_SUPPORTED_VALUES)
    model_type = raw.get("model_type")
    has_qk_norm = model_type in ("qwen3", "qwen3_moe")
    raw = LLAMA_DEFAULTS.get(model_type, {}) | raw
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # older files; newer
    rope = raw.get(key, {})
    if not isinstance(rope, dict):
        rope = {"rope_type": rope}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope_types = ROPE_TYPES
    if model_type == "phi3":
        rope_types = ("default", "longrope")
        rope_type = "longrope" if rope_type in ("su", "yarn") else rope_type  # as in transformers
    check_values(f"{file}: {key}", {"rope_type": rope_type}, {"rope_type": rope_types})
    if model_type != "phi3":
        check_values(file, raw | rope, {"partial_rotary_factor": (1,)})
    fields = read_attention_sizes(file, raw, LLAMA_SIZES)
    check_heads(file, fields, LLAMA_SIZES)
    rotary_dim = read_rotary_dim(file, raw | rope, fields["head_dim"])
    theta = read_number(file, raw | rope, "rope_theta", 10000.0, 1e12)
    scaling = None
    if rope_type == "llama3":
        scaling = read_rope_scaling(file, rope)
    elif rope_type == "yarn":
        key = "original_max_position_embeddings"
        rope = rope | ({key: raw[key]} if key in raw else {})  # transformers prefers it
        scaling = read_yarn_scaling(file, rope, theta, fields["block_size"])
        extended = int(scaling.factor * scaling.original_max_position_embeddings)
        fields["block_size"] = max(fields["block_size"], extended)
    elif rope_type == "longrope":
        pairs = (rotary_dim or fields["head_dim"]) // 2
        scaling = read_longrope_scaling(file, raw, rope, fields["block_size"], pairs)
        fields["block_size"] = limit_window(file, fields["block_size"], scaling)
    vocabulary = fields["vocab_size"]
    is_qwen = has_qk_norm or model_type == "qwen2"
    eos = read_token_ids(file, raw, "eos_token_id", vocabulary, None if is_qwen else 2)
    return LlamaConfig(
        **fields,
        bos_token_id=read_token_ids(file, raw, "bos_token_id", vocabulary, eos[0])[0],
        eos_token_ids=eos,
        norm_eps=read_number(file, raw, "rms_norm_eps", 1e-6, 1),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=model_type == "qwen2",
        qk_norm=has_qk_norm,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        experts=read_experts(file, raw, fields) if model_type in MOE_MODEL_TYPES else None,
        sliding_windows=read_sliding_windows(file, original, fields["n_layer"]),
        nope_layers=read_nope_layers(file, raw, fields["n_layer"])
        if model_type == "smollm3"
        else (),
    )


def read_rotary_dim(file: Path, raw: dict, head_dim: int) -> int | None:
    """Return `LlamaConfig.rotary_dim`. Raises UserError unless it is even."""
    factor = read_number(file, raw, "partial_rotary_factor", 1, 1)
    dim = int(head_dim * factor)  # rounded down, as in transformers
    if dim % 2 or not dim:
        rotated = f"{dim} of {head_dim} elements of a head"
        allowed = "must rotate an even number of them, above 0"
        raise UserError(f"{file}: partial_rotary_factor {factor} rotates {rotated}: {allowed}")
    return dim if dim < head_dim else None


def read_longrope_scaling(
    file: Path, raw: dict, rope: dict, block_size: int, pairs: int
) -> LongRopeScaling:
    """Return the LongRopeScaling of a Phi-3's config.json, with transformers' defaults.

    rope: its rope_parameters or rope_scaling. block_size: max_position_embeddings. pairs: the
    number of rotated pairs. Raises UserError for invalid values.
    """
    key = "original_max_position_embeddings"  # Phi-3 has it beside rope_parameters
    original = read_sizes(file, raw, {key: (key, LLAMA_SIZES["block_size"][1])}, {key: 4096})[key]
    rope = {key: value for key, value in rope.items() if value is not None}
    factor = read_number(file, rope, "factor", block_size / original, 1e9)
    default = 1.0
    if factor > 1 and original > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {}
    for key in ("short_factor", "long_factor"):
        numbers = rope.get(key)
        if not isinstance(numbers, list) or len(numbers) != pairs:
            found = reprlib.repr(numbers)
            raise UserError(f"{file}: {key} {found}: must be a list of {pairs} numbers above 0")
        named = {f"{key}[{pair}]": number for pair, number in enumerate(numbers)}
        factors[key] = tuple(read_number(file, named, name, None, 1e9) for name in named)
    attention_factor = read_number(file, rope, "attention_factor", default, 1e3)
    return LongRopeScaling(
        **factors, original_max_position_embeddings=original, attention_factor=attention_factor
    )


def limit_window(file: Path, block_size: int, scaling: LongRopeScaling) -> int:
    """Return the context window with LongRoPE, and warn if it is less than block_size."""
    original = scaling.original_max_position_embeddings
    if original < block_size:
        warn_once(
            f"{file}: LongRoPE is supported only in the original context window:"
            f" using {original} tokens, not {block_size}"
        )
    return min(original, block_size)


NOPE_INTERVAL = 4  # every fourth layer is without RoPE, as hard-coded in llama.cpp


def every_nth_layer(interval: int, n_layer: int) -> tuple[int, ...]:
    """Return the last of each `interval` layers, from 0."""
    return tuple(range(interval - 1, n_layer, interval))


def read_nope_layers(file: Path, raw: dict, n_layer: int) -> tuple[int, ...]:
    """Return the layers without RoPE of a SmolLM3. Raises UserError for invalid values."""
    check_values(file, raw, {"use_sliding_window": (False,)})
    flags = raw.get("no_rope_layers")  # despite the name, true where there is RoPE
    if flags is None:
        size = {"interval": ("no_rope_layer_interval", 1000)}
        interval = read_sizes(file, raw, size, {"interval": NOPE_INTERVAL})["interval"]
        return every_nth_layer(interval, n_layer)
    is_list = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
    if not is_list or len(flags) < n_layer:
        allowed = f"a list of at least {n_layer} zeros and ones"
        raise UserError(f"{file}: no_rope_layers {reprlib.repr(flags)}: must be {allowed}")
    return tuple(layer for layer in range(n_layer) if not flags[layer])


MOE_MODEL_TYPES = ("qwen3_moe", "mixtral")
EXPERTS_SIZES = {  # field of ExpertsConfig -> its key, and the largest value read
    "num_experts": ("num_experts", 1000),
    "num_experts_per_tok": ("num_experts_per_tok", 1000),
    "n_inner": ("moe_intermediate_size", 10**6),
}


def read_expert_sizes(
    file: Path, raw: dict, sizes: dict[str, tuple[str, int]], defaults: dict[str, int]
) -> dict[str, int]:
    """Call `read_sizes`. Also raises UserError for more experts per token than there are."""
    fields = read_sizes(file, raw, sizes, defaults)
    top, count = fields["num_experts_per_tok"], fields["num_experts"]
    if top > count:
        most = f"at most {sizes['num_experts'][0]} ({count})"
        raise UserError(f"{file}: {sizes['num_experts_per_tok'][0]} {top}: must be {most}")
    return fields


def read_experts(file: Path, raw: dict, sizes: dict) -> ExpertsConfig:
    """Return the ExpertsConfig of a Qwen3-MoE or a Mixtral. Raises UserError for invalid values.

    sizes: fields of the LlamaConfig.
    """
    if raw["model_type"] == "mixtral":  # experts in all layers, each as wide as a dense MLP
        names = {
            "num_experts": ("num_local_experts", 1000),
            "num_experts_per_tok": EXPERTS_SIZES["num_experts_per_tok"],
        }
        fields = read_expert_sizes(file, raw, names, {"num_experts": 8, "num_experts_per_tok": 2})
        return ExpertsConfig(**fields, n_inner=sizes["n_inner"], norm_topk_prob=True)
    n_layer = sizes["n_layer"]
    check_values(file, raw, {"norm_topk_prob": (False, True)})
    if "num_experts" not in raw and "num_local_experts" in raw:  # as transformers 5 writes it
        raw = raw | {"num_experts": raw["num_local_experts"]}
    defaults = {"num_experts": 128, "num_experts_per_tok": 8, "n_inner": 768}
    fields = read_expert_sizes(file, raw, EXPERTS_SIZES, defaults)
    step = read_sizes(file, raw, {"step": ("decoder_sparse_step", 1000)}, {"step": 1})["step"]
    dense = raw.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UserError(
            f"{file}: mlp_only_layers {reprlib.repr(dense)}: must be a list of integers"
        )
    layers = (layer for layer in range(n_layer) if layer in dense or (layer + 1) % step)
    normalized = raw.get("norm_topk_prob", False)
    return ExpertsConfig(**fields, norm_topk_prob=normalized, mlp_only_layers=tuple(layers))


def llama_to_dict(config: LlamaConfig) -> dict:
    """Return the config.json of this Llama, except the dtype of its weights.

    Raises UserError for a configuration that transformers refuses.
    """
    name = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    if isinstance(config, GemmaConfig):
        name = "Gemma2" if isinstance(config, Gemma2Config) else "Gemma3"
    elif config.sliding_windows and name == "Llama":
        name = "Mistral"
    own = {}  # keys of one family
    if config.nope_layers:
        if name != "Llama":
            raise UserError(f"the model cannot be saved: transformers has no {name} without RoPE")
        name = "SmolLM3"
        own = {
            "no_rope_layers": [int(n not in config.nope_layers) for n in range(config.n_layer)],
            "pad_token_id": None,  # transformers' default may be beyond the vocabulary
        }
    longrope = isinstance(config.rope_scaling, LongRopeScaling)
    if config.rotary_dim or longrope:
        if name not in ("Llama", "Mistral") or (config.rope_scaling and not longrope):
            only = "only in a Phi-3 without other RoPE scaling"
            raise UserError(f"the model cannot be saved: transformers supports rotary_dim {only}")
        name = "Phi3"
        rotary_dim = config.rotary_dim or config.head_dim
        factor = rotary_dim / config.head_dim
        if int(config.head_dim * factor) < rotary_dim:  # as `read_rotary_dim` rounds
            factor = math.nextafter(factor, 1)
        own = {"partial_rotary_factor": factor, "pad_token_id": None}
        if longrope:
            key = "original_max_position_embeddings"
            own[key] = getattr(config.rope_scaling, key)
    if config.n_embd % config.n_head and name in ("Llama", "Qwen2", "Gemma2", "Gemma3"):
        raise UserError(
            f"the model cannot be saved: n_embd is {config.n_embd}; transformers needs a multiple"
            f" of n_head ({config.n_head})"
        )
    if config.rope_freq_factors:
        raise UserError(
            "the model cannot be saved: config.json has no key for the rope_freqs of a GGUF file"
        )
    if config.experts and not config.qk_norm:
        raise UserError("the model cannot be saved: writing a Mixtral is not supported")
    scaling = config.rope_scaling
    model_type = name.lower()
    experts = {}
    if config.experts:
        name = "Qwen3Moe"
        model_type = "qwen3_moe"
        experts = {key: getattr(config.experts, field) for field, (key, _) in EXPERTS_SIZES.items()}
        experts["norm_topk_prob"] = config.experts.norm_topk_prob
        experts["mlp_only_layers"] = list(config.experts.mlp_only_layers)
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **{key: getattr(config, field) for field, (key, _) in LLAMA_SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": scaling.rope_type, **vars(scaling)},
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        **experts,
        **own,
        **sliding_window_fields(config, name),
    }


def sliding_window_fields(config: LlamaConfig, name: str) -> dict:
    """Return the sliding-window fields. Raises UserError for windows that transformers refuses."""
    if not any(config.sliding_windows):
        return {}
    sizes = set(config.sliding_windows)
    if len(sizes - {None}) > 1 or (name in UNIFORM_SLIDING and None in sizes):
        raise UserError(
            f"the model cannot be saved: sliding_windows are {config.sliding_windows};"
            f" transformers supports no such {name}"
        )
    fields = {"sliding_window": max(sizes - {None})}
    if name.startswith("Qwen"):
        fields["use_sliding_window"] = True
    if name not in UNIFORM_SLIDING:
        fields["layer_types"] = [
            SLIDING_ATTENTION if window else FULL_ATTENTION for window in config.sliding_windows
        ]
    return fields


GEMMA_SUPPORTED_VALUES = {  # values that the forward pass supports
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "tie_word_embeddings": (True, False),
}
GEMMA_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "eos_token_id": 1, "bos_token_id": 2}
# Defaults of a text_config: transformers writes only values that differ.
GEMMA_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def read_text_config(file: Path, raw: dict) -> dict:
    """Return the config.json of a multimodal model's language model.

    BOS and EOS ids, weight tying and quantisation are taken from the top level. Raises UserError if
    the language model is missing.
    """
    if raw.get("model_type") != "gemma3":
        return raw
    text_config = raw.get("text_config")
    if not isinstance(text_config, dict):
        raise UserError(f"{file}: text_config {reprlib.repr(text_config)}: must be an object")
    keys = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
    top_level = {key: raw[key] for key in keys if raw.get(key) is not None}
    return GEMMA_TEXT_DEFAULTS | text_config | top_level | {"model_type": "gemma3"}


def read_object(file: Path, raw: dict, key: str) -> dict:
    """Return an object in a config.json; {} if missing. Raises UserError for any other value."""
    value = raw.get(key)
    if not isinstance(value, (dict, type(None))):
        raise UserError(f"{file}: {key} {reprlib.repr(value)}: must be an object")
    return value or {}


def read_gemma_config(file: Path, raw: dict) -> GemmaConfig:
    """Return the configuration of a Gemma 3. Arguments and errors as in `read_llama_config`."""
    original = raw
    raw = GEMMA_DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    check_values(file, raw, GEMMA_SUPPORTED_VALUES)
    rope_parameters = read_object(file, raw, "rope_parameters")  # older files have other keys
    global_rope = {"rope_theta": raw.get("rope_theta", 1e6)} | read_object(
        file, rope_parameters, FULL_ATTENTION
    )
    global_rope |= read_object(file, raw, "rope_scaling")
    local_rope = {"rope_theta": raw.get("rope_local_base_freq", 1e4)} | read_object(
        file, rope_parameters, SLIDING_ATTENTION
    )
    rope_type = global_rope.get("rope_type", global_rope.get("type", "default"))
    check_values(
        f"{file}: full_attention", {"rope_type": rope_type}, {"rope_type": ("default", "linear")}
    )
    check_values(f"{file}: sliding_attention", local_rope, {"rope_type": ("default",)})
    # Sizes and ids have the keys of a Llama.
    llama = {key: raw[key] for key in raw.keys() - {"layer_types", "rope_scaling", "hidden_act"}}
    llama |= {"model_type": "llama", "rope_parameters": {"rope_theta": global_rope["rope_theta"]}}
    config = read_llama_config(file, {"tie_word_embeddings": True} | llama)
    return GemmaConfig(
        **vars(config)
        | {
            "qk_norm": True,
            "sliding_windows": read_sliding_windows(file, original, config.n_layer),
            "rope_local_base_freq": read_number(file, local_rope, "rope_theta", None, 1e12),
            "rope_linear_factor": read_number(file, global_rope, "factor", None, 1e6)
            if rope_type == "linear"
            else 1.0,
            "query_pre_attn_scalar": read_number(file, raw, "query_pre_attn_scalar", 256, 1e6),
        }
    )


def gemma_to_dict(config: GemmaConfig) -> dict:
    """Return the config.json of this Gemma 3. Errors as in `llama_to_dict`."""
    factor = config.rope_linear_factor
    return llama_to_dict(config) | {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "rope_local_base_freq": config.rope_local_base_freq,
        "rope_scaling": None if factor == 1 else {"rope_type": "linear", "factor": factor},
        "layer_types": [
            SLIDING_ATTENTION if window else FULL_ATTENTION
            for window in layer_sliding_windows(config)
        ],
    }


GEMMA2_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # defaults


def read_gemma2_config(file: Path, raw: dict) -> Gemma2Config:
    """Return the configuration of a Gemma 2. Arguments and errors as in `read_llama_config`."""
    theta = raw.get("rope_theta")
    rope = {"rope_theta": 1e4 if theta is None else theta}
    rope |= read_object(file, raw, "rope_parameters") | read_object(file, raw, "rope_scaling")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_values(file, {"rope_type": rope_type}, {"rope_type": ("default", "linear")})
    rope_keys = {"rope_parameters": {FULL_ATTENTION: rope}, "rope_scaling": None}  # a Gemma 3's
    config = read_gemma_config(file, raw | rope_keys | dict.fromkeys(GEMMA2_SOFTCAPS))
    own = {"qk_norm": False, "rope_local_base_freq": None}
    for key, default in GEMMA2_SOFTCAPS.items():
        cap = raw.get(key, default)
        # null means no cap, unlike a missing key.
        own[key] = None if cap is None else read_number(file, raw, key, default, 1e6)
    return Gemma2Config(**vars(config) | own)


def gemma2_to_dict(config: Gemma2Config) -> dict:
    """Return the config.json of this Gemma 2. Errors as in `llama_to_dict`."""
    fields = gemma_to_dict(config) | {"model_type": "gemma2"}
    del fields["rope_local_base_freq"]
    return fields | {key: getattr(config, key) for key in GEMMA2_SOFTCAPS}


# Special tokens that a file may name, each as NAME_token. A chat template may use them.
SPECIAL_TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_special_tokens(source) -> dict[str, str]:
    """Return the special tokens that a model's files name, such as "eos_token": "</s>".

    As in transformers, tokenizer_config.json names them. special_tokens_map.json overrides it,
    unless tokenizer_config.json lists added tokens, as newer files do. source: a `Source`.
    Raises UserError for a file that cannot be read.
    """
    config = read_model_json(source, "tokenizer_config.json")
    files = [config]
    if "added_tokens_decoder" not in config:
        files.append(read_model_json(source, "special_tokens_map.json"))
    tokens = {}
    for raw in files:
        for name in SPECIAL_TOKEN_NAMES:
            token = raw.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[f"{name}_token"] = token
    return tokens


def read_model_json(source, name: str) -> dict:
    """Return the object in one of a model's JSON files, {} if the file is missing."""
    file = source.find(name)
    return read_json(file) if file else {}


def find_eos_token_id(source) -> int | None:
    """Return the id of the EOS token that the tokenizer's files name; None if they name none.

    vLLM stops at it too, because some models name it nowhere else. Raises UserError as
    `read_special_tokens`.
    """
    eos_token = read_special_tokens(source).get("eos_token")
    if eos_token is None:
        return None
    listed = read_model_json(source, "tokenizer_config.json").get("added_tokens_decoder")
    for id, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == eos_token and id.isdecimal():
            return int(id)
    raw = read_model_json(source, "tokenizer.json")
    for token in raw.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == eos_token:
            return token.get("id")
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary.get(eos_token) if isinstance(vocabulary, dict) else None

"""A GGUF file's configuration, and its tensors with our names and in our order."""

import array
import dataclasses
import functools
import math
import re
import reprlib
from collections.abc import Iterator

import torch

from errors import UserError, warn_once
from gemma import Gemma2Config, GemmaConfig
from llama import ExpertsConfig, LlamaConfig, LongRopeScaling, YarnScaling
from loading.checkpoint import check_values, read_bytes, split_rows
from loading.config import (
    GEMMA2_SLIDING_WINDOW_PATTERN,
    GEMMA2_SOFTCAPS,
    GEMMA_SLIDING_WINDOW_PATTERN,
    NOPE_INTERVAL,
    check_heads,
    every_nth_layer,
    limit_window,
    read_attention_sizes,
    read_expert_sizes,
    read_number,
    read_sizes,
    read_token_ids,
    read_yarn_scaling,
    swa_layers,
)
from loading.gguf import GGUF, TensorInfo
from loading.gguf_blocks import UNPACKERS, dequantize, unpack_blocks
from loading.gguf_tokenizer import named_eog_ids
from model import GPTConfig, Model
from quantisation.blocks import BLOCK_FORMATS, Q8_0, BlockFormat, QuantizedBlocks

CHUNK_BYTES = 2**20  # bytes of a chunk in float32; dequantising is fastest in the CPU's cache
GEMMAS = ("gemma2", "gemma3")
ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3", "qwen3moe", "phi3", "smollm3", *GEMMAS)
# Roles of a Phi-3's weights that share a tensor.
PHI3_FUSED = dict.fromkeys(("query", "key", "value"), "attn_qkv")
PHI3_FUSED |= dict.fromkeys(("gate", "up"), "ffn_up")
INTERLEAVED_ROPE = ("llama", "smollm3")  # architectures with pairs of neighbours
SIZES = {  # field of a config -> its key after the architecture's name, and the largest value read
    "block_size": ("context_length", 10**7),
    "n_layer": ("block_count", 1000),
    "n_head": ("attention.head_count", 1000),
    "n_kv_head": ("attention.head_count_kv", 1000),
    "n_embd": ("embedding_length", 10**5),
    "n_inner": ("feed_forward_length", 10**6),
    "head_dim": ("attention.key_length", 1000),
}
EXPERTS_SIZES = {  # the same for ExpertsConfig
    "num_experts": ("expert_count", 1000),
    "num_experts_per_tok": ("expert_used_count", 1000),
    "n_inner": ("expert_feed_forward_length", 10**6),
}
EOS_KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
ROPE_FREQS = "rope_freqs.weight"
# Types that are stored as torch stores them.
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_gguf_config(gguf: GGUF) -> GPTConfig | LlamaConfig:
    """Return the configuration of a file's model. Raises UserError for other architectures."""
    file = gguf.file
    raw = gguf.metadata
    architecture = raw.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{file}: general.architecture is {reprlib.repr(architecture)}; supported are {known}"
        )
    fields = read_attention_sizes(file, raw, prefixed(SIZES, architecture))
    fields["vocab_size"] = get_tensor(gguf, "token_embd.weight").shape[0]
    eos_ids = [raw[key] for key in EOS_KEYS if key in raw] + named_eog_ids(gguf)
    eos_ids = read_token_ids(file, {EOS_KEYS[0]: eos_ids}, EOS_KEYS[0], fields["vocab_size"], None)
    fields["eos_token_ids"] = eos_ids
    builders = {"gpt2": gpt_config, "gemma2": gemma2_config, "gemma3": gemma_config}
    build_config = builders.get(architecture, llama_config)
    return build_config(gguf, architecture, fields)


def prefixed(sizes: dict[str, tuple[str, int]], architecture: str) -> dict[str, tuple[str, int]]:
    """Return sizes for `read_sizes` with the architecture's name before each key."""
    return {field: (f"{architecture}.{key}", limit) for field, (key, limit) in sizes.items()}


def gpt_config(gguf: GGUF, architecture: str, fields: dict) -> GPTConfig:
    epsilon = f"{architecture}.attention.layer_norm_epsilon"
    fields["layer_norm_epsilon"] = read_number(gguf.file, gguf.metadata, epsilon, None, 1)
    n_head = fields["n_head"]
    width = fields["n_embd"]
    sizes = fields.pop("n_kv_head"), fields.pop("head_dim"), fields.pop("n_inner")
    expected = n_head, width / n_head, 4 * width
    if sizes != expected:
        keys = "attention.head_count_kv, attention.key_length and feed_forward_length"
        raise UserError(f"{gguf.file}: {keys} {sizes}: must be {expected} in a GPT-2")
    return GPTConfig(**fields)


def llama_config(gguf: GGUF, architecture: str, fields: dict) -> LlamaConfig:
    file = gguf.file
    raw = gguf.metadata
    check_heads(file, fields, prefixed(SIZES, architecture))
    head_dim = fields["head_dim"]
    supported = {"attention.value_length": (head_dim,), "rope.scale_linear": (1,)}
    sliding_windows = ()
    rotary_dim = None
    scaling = None
    if architecture == "phi3":
        rotary_dim = read_rotary_dim(gguf, head_dim)
        scaling = read_gguf_longrope_scaling(gguf, fields["block_size"], rotary_dim or head_dim)
        if scaling:
            fields["block_size"] = limit_window(file, fields["block_size"], scaling)
        sliding_windows = read_uniform_windows(gguf, architecture, fields["n_layer"])
    else:
        supported["rope.dimension_count"] = (head_dim,)
    theta = read_number(file, raw, f"{architecture}.rope.freq_base", 10000.0, 1e12)
    if scaling:
        supported |= {"rope.scaling.type": ("longrope", "none"), "rope.scaling.factor": (1,)}
    elif architecture not in GEMMAS:
        if raw.get(f"{architecture}.rope.scaling.type") == "yarn":
            scaling = read_gguf_yarn_scaling(gguf, architecture, theta, fields["block_size"])
        else:
            supported |= {"rope.scaling.type": ("none", "yarn"), "rope.scaling.factor": (1,)}
            supported["rope.scaling.attn_factor"] = (1,)
        if architecture != "phi3":
            supported["attention.sliding_window"] = (0,)  # llama.cpp omits a Mistral's
    experts = None
    is_mixtral = architecture == "llama" and raw.get("llama.expert_count", 0) != 0
    if architecture == "qwen3moe" or is_mixtral:
        experts = read_experts(gguf, architecture, fields)
    else:
        supported["expert_count"] = (0,)
    check_values(file, raw, {f"{architecture}.{key}": each for key, each in supported.items()})
    warn_assumed(gguf, architecture)
    eos_id = fields["eos_token_ids"][0]
    bos = read_token_ids(file, raw, "tokenizer.ggml.bos_token_id", fields["vocab_size"], eos_id)
    epsilon = f"{architecture}.attention.layer_norm_rms_epsilon"
    return LlamaConfig(
        **fields,
        bos_token_id=bos[0],
        norm_eps=read_number(file, raw, epsilon, None, 1),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_freq_factors=read_rope_freq_factors(gguf, head_dim // 2)
        if architecture == "llama"
        else None,
        nope_layers=every_nth_layer(NOPE_INTERVAL, fields["n_layer"])
        if architecture == "smollm3"
        else (),
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in gguf.tensors,
        qk_norm=architecture in ("qwen3", "qwen3moe", "gemma3"),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        experts=experts,
        sliding_windows=sliding_windows,
    )


def read_rotary_dim(gguf: GGUF, head_dim: int) -> int | None:
    """Return `LlamaConfig.rotary_dim` of a Phi-3. Raises UserError unless it is even."""
    key = "phi3.rope.dimension_count"
    dim = read_sizes(gguf.file, gguf.metadata, {"dim": (key, head_dim)}, {"dim": head_dim})["dim"]
    if dim % 2:
        raise UserError(f"{gguf.file}: {key} {dim}: must be even")
    return dim if dim < head_dim else None


LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def read_gguf_longrope_scaling(gguf: GGUF, block_size: int, dim: int) -> LongRopeScaling | None:
    """Return the LongRopeScaling of a Phi-3. block_size: context_length. dim: rotated elements."""
    if gguf.tensors.keys().isdisjoint(LONGROPE_FACTORS):
        return None
    prefix = "phi3.rope.scaling."
    size = {"window": (f"{prefix}original_context_length", 10**7)}
    original = read_sizes(gguf.file, gguf.metadata, size, {"window": block_size})["window"]
    attention_factor = read_number(gguf.file, gguf.metadata, f"{prefix}attn_factor", 1.0, 1e3)
    factors = (read_factors(gguf, name, dim // 2) for name in LONGROPE_FACTORS)
    return LongRopeScaling(*factors, original, attention_factor)


def read_uniform_windows(gguf: GGUF, architecture: str, n_layer: int) -> tuple[int | None, ...]:
    """Return the sliding windows of layers that have the same one, which llama.cpp ignores."""
    key = f"{architecture}.attention.sliding_window"
    if gguf.metadata.get(key, 0) == 0:
        return ()
    size = read_sizes(gguf.file, gguf.metadata, {"size": (key, 10**7)}, {})["size"]
    return (size,) * n_layer


YARN_KEYS = {  # field of a config.json's rope_parameters -> its key in a GGUF file
    "rope_theta": "freq_base",
    "factor": "scaling.factor",
    "original_max_position_embeddings": "scaling.original_context_length",
    "attention_factor": "scaling.yarn_attn_factor",
    "beta_fast": "scaling.yarn_beta_fast",
    "beta_slow": "scaling.yarn_beta_slow",
    "mscale_all_dim": "scaling.yarn_log_multiplier",
}


def read_gguf_yarn_scaling(
    gguf: GGUF, architecture: str, theta: float, block_size: int
) -> YarnScaling:
    """Return the YarnScaling of a file; arguments and errors as in `read_yarn_scaling`.

    Keys that begin with yarn_ mean what they mean in the config.json from which llama.cpp's
    converter copied them, though llama.cpp itself ignores them in these architectures.
    """
    file = gguf.file
    prefix = f"{architecture}.rope."
    check_values(file, gguf.metadata, {f"{prefix}scaling.yarn_ext_factor": (1,)})
    names = {field: prefix + key for field, key in YARN_KEYS.items()}
    raw = gguf.metadata | {"mscale": 1}  # as llama.cpp assumes
    scaling = read_yarn_scaling(file, raw, theta, block_size, names)
    multiplier = read_number(file, raw, f"{prefix}scaling.attn_factor", 1, 1e3)
    return dataclasses.replace(scaling, attention_factor=scaling.attention_factor * multiplier)


def warn_assumed(gguf: GGUF, architecture: str) -> None:
    """Warn of assumptions where converters write no key: sliding windows and RoPE scaling.

    A Qwen2 may have a sliding window in its config.json. So may a Mistral, whose GGUF architecture
    is llama, so only its name tells. llama.cpp assumes the same.
    """
    names = [str(gguf.metadata.get(f"general.{key}", "")) for key in ("name", "basename")]
    is_mistral = architecture == "llama" and any("mistral" in name.lower() for name in names)
    keys = [f"{architecture}.attention.sliding_window", f"{architecture}.rope.scaling.type"]
    lacking = [key for key in keys if key not in gguf.metadata]
    if lacking and (architecture == "qwen2" or is_mistral):
        keys = " and ".join(lacking)
        warn_once(f"{gguf.file}: no {keys}: assuming no sliding window and no RoPE scaling")


def gemma_config(gguf: GGUF, architecture: str, fields: dict) -> GemmaConfig:
    file = gguf.file
    raw = gguf.metadata
    check_values(file, raw, {"gemma3.final_logit_softcapping": (0,)})
    local_base = read_number(file, raw, "gemma3.rope.freq_base_swa", 10000.0, 1e12)
    fields = gemma_fields(gguf, architecture, fields)
    return GemmaConfig(**fields | {"rope_local_base_freq": local_base})


def gemma2_config(gguf: GGUF, architecture: str, fields: dict) -> Gemma2Config:
    fields = gemma_fields(gguf, architecture, fields)
    for key, default in GEMMA2_SOFTCAPS.items():
        fields[key] = read_number(gguf.file, gguf.metadata, f"gemma2.{key}", default, 1e6)
    return Gemma2Config(**fields)


def gemma_fields(gguf: GGUF, architecture: str, fields: dict) -> dict:
    """Return the fields that Gemma 2 and 3 share."""
    config = llama_config(gguf, architecture, fields)
    scaling = f"{architecture}.rope.scaling"
    check_values(gguf.file, gguf.metadata, {f"{scaling}.type": ("linear", "none")})
    factor = 1.0
    if gguf.metadata.get(f"{scaling}.type") != "none":
        factor = read_number(gguf.file, gguf.metadata, f"{scaling}.factor", 1.0, 1e6)
    return vars(config) | {
        "sliding_windows": read_sliding_windows(gguf, architecture, config.n_layer),
        "rope_linear_factor": factor,
        "query_pre_attn_scalar": query_pre_attn_scalar(config, architecture),
    }


def query_pre_attn_scalar(config: LlamaConfig, architecture: str) -> int:
    """Return the number by whose root a Gemma's scores are divided.

    No key holds it. As in llama.cpp, the number of layers identifies the 27B model.
    """
    is_27b = config.n_layer == (46 if architecture == "gemma2" else 62)
    return config.n_embd // config.n_head if is_27b else config.head_dim


def read_sliding_windows(gguf: GGUF, architecture: str, n_layer: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a Gemma, as `LlamaConfig.sliding_windows`.

    The defaults are llama.cpp's.
    """
    key = f"{architecture}.attention.sliding_window"
    default, period = 0, GEMMA_SLIDING_WINDOW_PATTERN
    if architecture == "gemma2":
        default, period = 4096, GEMMA2_SLIDING_WINDOW_PATTERN
    if gguf.metadata.get(key, default) == 0:
        return ()
    size = {"size": (key, 10**7)}
    window = read_sizes(gguf.file, gguf.metadata, size, {"size": default})["size"]
    pattern = gguf.metadata.get(f"{key}_pattern", period)
    if type(pattern) is int and pattern >= 0:
        layers = swa_layers(pattern, n_layer)
    elif isinstance(pattern, array.array) and len(pattern) == n_layer:
        layers = pattern
    else:
        allowed = f"must be an integer from 0, or {n_layer} booleans"
        raise UserError(f"{gguf.file}: {key}_pattern {reprlib.repr(pattern)}: {allowed}")
    return tuple(window if slides else None for slides in layers) if any(layers) else ()


def read_experts(gguf: GGUF, architecture: str, sizes: dict) -> ExpertsConfig:
    """Return the experts of all layers. No key says norm_topk_prob: llama.cpp sets it.

    sizes: fields of the LlamaConfig. Raises UserError if a layer's tensors have other shapes,
    because building a model of the size that false metadata claims would take minutes.
    """
    # A Mixtral's file has no key for the width of experts, which is a dense MLP's.
    defaults = {"n_inner": sizes["n_inner"]} if architecture == "llama" else {}
    names = prefixed(EXPERTS_SIZES, architecture)
    fields = read_expert_sizes(gguf.file, gguf.metadata, names, defaults)
    router = fields["num_experts"], sizes["n_embd"]
    expert = fields["num_experts"], fields["n_inner"], sizes["n_embd"]
    for layer in range(sizes["n_layer"]):
        check_tensor(gguf, f"blk.{layer}.ffn_gate_inp.weight", router)
        check_tensor(gguf, f"blk.{layer}.ffn_gate_exps.weight", expert)
    return ExpertsConfig(**fields, norm_topk_prob=True)


def has_interleaved_rope(gguf: GGUF) -> bool:
    """Return whether RoPE pairs are interleaved in queries and keys, as in Meta's files."""
    return gguf.metadata["general.architecture"] in INTERLEAVED_ROPE


def get_tensor(gguf: GGUF, name: str) -> TensorInfo:
    """Return a tensor by its name. Raises UserError if it is missing."""
    if name not in gguf.tensors:
        raise UserError(f"{gguf.file}: tensor {name} is missing")
    return gguf.tensors[name]


def read_rope_freq_factors(gguf: GGUF, count: int) -> tuple[float, ...] | None:
    """Return the divisors of RoPE frequencies, as `LlamaConfig.rope_freq_factors`."""
    if ROPE_FREQS not in gguf.tensors:
        return None
    factors = read_factors(gguf, ROPE_FREQS, count)
    return None if set(factors) == {1.0} else factors


def read_factors(gguf: GGUF, name: str, count: int) -> tuple[float, ...]:
    """Return a tensor's numbers. Raises UserError unless all are above 0 and finite."""
    check_tensor(gguf, name, (count,))
    factors = tuple(read_rows(gguf, gguf.tensors[name], 0, count).tolist())
    if not all(0 < factor < math.inf for factor in factors):
        raise UserError(f"{gguf.file}: tensor {name}: all numbers must be above 0 and finite")
    return factors


def is_stacked(model: Model, key: str) -> bool:
    """Return whether a GGUF file stacks this tensor over the experts of its layer."""
    return model.role(key).startswith("expert_")


def norm_weight_offset(architecture: str, role: str) -> int:
    """Return the offset in a file's weights: a Gemma's norms are stored as 1 + weight."""
    return int(architecture in GEMMAS and role.endswith("norm"))


def gguf_name(model: Model, key: str) -> str:
    """Return the GGUF name of a model's tensor; the experts of a layer share a name."""
    layer, _, suffix = key.rpartition(".")
    numbers = iter(re.findall(r"(?<=\.)\d+(?=\.|$)", layer))
    name = re.sub(r"\*", lambda star: next(numbers), model.ROLES[model.role(key)][1])
    return f"{name}.{suffix}"


def fused_gguf_name(model: Model, key: str) -> str:
    """Return the GGUF name of the tensor that holds a weight of a Phi-3."""
    *block, name, suffix = gguf_name(model, key).split(".")
    return ".".join([*block, PHI3_FUSED.get(model.role(key), name), suffix])


def split_fused(gguf: GGUF, model: Model) -> GGUF:
    """Return a header with a Phi-3's fused tensors as parts; other headers as they are."""
    if gguf.metadata["general.architecture"] != "phi3":
        return gguf
    groups = {}
    for key, weight in model.named_parameters():
        groups.setdefault(fused_gguf_name(model, key), {})[gguf_name(model, key)] = weight.shape
    tensors = dict(gguf.tensors)
    for name, parts in groups.items():
        if len(parts) > 1 and name in tensors:
            if also := tensors.keys() & (parts.keys() - {name}):
                raise UserError(f"{gguf.file}: tensor {min(also)} is also a part of {name}")
            heights, widths = zip(*parts.values())
            check_tensor(gguf, name, (sum(heights), widths[0]))
            tensors |= zip(parts, split_rows(tensors.pop(name), heights))
    return dataclasses.replace(gguf, tensors=tensors)


def read_block_formats(gguf: GGUF, model: Model) -> dict[str, BlockFormat]:
    """Return the block format of each weight; Q8_0 if its type has no block format here."""
    gguf = split_fused(gguf, model)
    names = {key: gguf_name(model, key) for key, _ in model.named_parameters()}
    return {key: BLOCK_FORMATS.get(gguf.tensors[name].type, Q8_0) for key, name in names.items()}


def read_gguf_tensors(
    gguf: GGUF, model: Model, keep_quantized: bool = False
) -> Iterator[tuple[str, slice, torch.Tensor | QuantizedBlocks]]:
    """Iterate over the tensors of a model in chunks: (name, slice of rows, these rows).

    As `read_tensors`. keep_quantized: matrices of a type in BLOCK_FORMATS are not dequantised.
    Raises UserError, before any tensor is read, if one is missing, unexpected, of another shape or
    of a type that is not supported.
    """
    gguf = split_fused(gguf, model)
    names = {}
    for key, _ in model.named_parameters():
        names.setdefault(gguf_name(model, key), []).append(key)
    read_before = {"llama": [ROPE_FREQS], "phi3": LONGROPE_FACTORS}
    ignored = {*read_before.get(gguf.metadata["general.architecture"], ())}
    if model.config.tie_word_embeddings:
        check_head(gguf)
        ignored.add("output.weight")
    for name in gguf.tensors:
        if name not in names and name not in ignored:
            raise UserError(f"{gguf.file}: unexpected tensor {name}")
    for name, keys in names.items():
        count = (len(keys),) if is_stacked(model, keys[0]) else ()
        check_tensor(gguf, name, (*count, *model.get_parameter(keys[0]).shape))
    return iterate_tensors(gguf, model, names, keep_quantized)


def check_head(gguf: GGUF) -> None:
    """Raise UserError if a file's head is not a copy of the embedding.

    Only a GPT-2, whose head is always tied, can fail. Older files have a copy of the embedding,
    which may be of another type. Then a difference within rounding is accepted.
    """
    names = ["output.weight", "token_embd.weight"]
    if names[0] not in gguf.tensors:
        return
    head, embedding = (get_tensor(gguf, name) for name in names)
    check_tensor(gguf, names[0], embedding.shape)
    check_tensor(gguf, names[1], embedding.shape)
    rounding = 0 if head.type == embedding.type else 0.3
    rows, width = embedding.shape
    height = max(1, CHUNK_BYTES // (4 * width))
    for start in range(0, rows, height):
        stop = min(start + height, rows)
        one, other = (read_rows(gguf, tensor, start, stop).float() for tensor in (head, embedding))
        if (one - other).norm() > rounding * other.norm():
            reason = f"{names[0]} differs from {names[1]}; a GPT-2 has one matrix for both"
            raise UserError(f"{gguf.file}: {reason}")


def check_tensor(gguf: GGUF, name: str, shape: tuple[int, ...]) -> None:
    """Raise UserError unless a tensor has this name and shape, and a supported type."""
    tensor = get_tensor(gguf, name)
    if tensor.shape != shape:
        raise UserError(
            f"{gguf.file}: tensor {name} has shape {tensor.shape}; the metadata says {shape}"
        )
    if tensor.type not in (*UNQUANTIZED, *UNPACKERS):
        known = ", ".join((*UNQUANTIZED, *UNPACKERS))
        raise UserError(
            f"{gguf.file}: tensor {name} has the type {tensor.type}; supported are {known}"
        )


def iterate_tensors(
    gguf: GGUF, model: Model, names: dict[str, list[str]], keep_quantized: bool
) -> Iterator[tuple]:
    """Yield the chunks of `read_gguf_tensors`. names: GGUF name -> our names."""
    entries = [
        (name, number, key) for name, keys in names.items() for number, key in enumerate(keys)
    ]
    for name, number, key in entries:
        tensor = gguf.tensors[name]
        if is_stacked(model, key):  # the experts' rows are contiguous
            count, rows, *width = tensor.shape
            tensor = dataclasses.replace(tensor, shape=(count * rows, *width))
        rows = tensor.shape[0] // len(names[name])
        interleaved = has_interleaved_rope(gguf) and model.role(key) in ("query", "key")
        weight_offset = norm_weight_offset(gguf.metadata["general.architecture"], model.role(key))
        row_multiple = model.config.head_dim if interleaved else 1
        height = -(-CHUNK_BYTES // (4 * math.prod(tensor.shape[1:])) // row_multiple) * row_multiple
        if len(tensor.shape) == 1:  # one chunk, because numbers of a vector may share scales
            height = rows
        keep_blocks = keep_quantized and len(tensor.shape) == 2 and tensor.type in BLOCK_FORMATS
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            block = read_rows(
                gguf, tensor, number * rows + start, number * rows + stop, keep_blocks
            )
            if interleaved and keep_blocks:
                block = block.map(functools.partial(reverse_permute_weights, head_dim=row_multiple))
            elif interleaved:
                block = reverse_permute_weights(block, row_multiple)
            if weight_offset:
                block = block.float() - weight_offset  # 16 bits would round it
            yield key, slice(start, stop), block


def read_rows(
    gguf: GGUF, tensor: TensorInfo, start: int, stop: int, keep_quantized: bool = False
) -> torch.Tensor | QuantizedBlocks:
    """Read rows of a tensor, in its dtype; quantised ones as blocks or in float32."""
    rows = tensor.shape[0]
    size = tensor.nbytes * (stop - start) // rows
    data = read_bytes(tensor.file, tensor.offset + tensor.nbytes * start // rows, size)
    numbers = torch.frombuffer(data, dtype=UNQUANTIZED.get(tensor.type, torch.uint8))
    if keep_quantized:
        blocks = QuantizedBlocks(*unpack_blocks(tensor.type, numbers))
        return blocks.map(lambda part: part.reshape(stop - start, -1))
    if tensor.type in UNPACKERS:
        numbers = dequantize(tensor.type, numbers)
    return numbers.view(-1, *tensor.shape[1:])


def reverse_permute_weights(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder a query or key projection's rows from llama.cpp's order, which is Meta's, to ours.

    There RoPE pairs are neighbours. `llama.apply_rotary_emb` expects their elements in a head's two
    halves. rows: (heads * head_dim, ...).
    """
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

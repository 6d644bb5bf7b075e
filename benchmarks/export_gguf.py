"""Export of a model to GGUF, llama.cpp's file format, with the package `gguf`.

Format: docs/gguf.md in github.com/ggml-org/ggml.
"""

import dataclasses
from pathlib import Path

import torch

from errors import UserError
from gemma import Gemma2Config, GemmaConfig
from llama import (
    LlamaConfig,
    LongRopeScaling,
    RopeScaling,
    RotaryEmbedding,
    YarnScaling,
    yarn_attention_factor,
)
from loading.byte_level import PATTERNS
from loading.chat_template import read_chat_template
from loading.checkpoint import check_nested_values, read_json
from loading.config import (
    GEMMA2_SLIDING_WINDOW_PATTERN,
    GEMMA2_SOFTCAPS,
    GEMMA_SLIDING_WINDOW_PATTERN,
    NOPE_INTERVAL,
    every_nth_layer,
    swa_layers,
)
from loading.gguf_model import (
    EOS_KEYS,
    GEMMAS,
    INTERLEAVED_ROPE,
    fused_gguf_name,
    gguf_name,
    norm_weight_offset,
    query_pre_attn_scalar,
)
from loading.load import resolve_source
from model import Model
from text.tokenizer import read_tokenizer_json

PRE_TOKENIZERS = {  # our name -> llama.cpp's name
    "GPT-2": "gpt-2",
    "Llama 3": "llama-bpe",
    "Qwen2": "qwen2",
    "Tekken": "tekken",
}


def write_gguf(model: Model, path: Path, dtype: str, tokenizer: Path | None = None) -> None:
    """Write a float32 model on the CPU to a GGUF file.

    dtype: "float32", or "int8" for Q8_0, which stores each block of 32 weights of a row as int8
    with one scale. Rows not a multiple of 32 long, vectors, routers and learned positions stay
    float32.
    tokenizer: a tokenizer.json. With None the file has no vocabulary and works only with token ids.
    Only a Gemma is written with its sliding windows. Other models get the smallest one as their
    block_size. Raises UserError for a model that llama.cpp would read wrongly.
    """
    import gguf

    config = model.config
    architecture = gguf_architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    if tokenizer:
        add_vocabulary(writer, tokenizer, config)
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    for name, token in zip(EOS_KEYS, config.eos_token_ids):
        writer.add_uint32(name, token)
    # llama.cpp reads only Gemma's sliding windows. Sequences within the window need none.
    limits = () if architecture in GEMMAS else filter(None, config.sliding_windows)
    writer.add_context_length(min([config.block_size, *limits]))
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner)
    if architecture != "gpt2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        if architecture == "llama":  # llama.cpp refuses it in other architectures
            writer.add_tensor("rope_freqs.weight", rope_freq_factors(config).numpy())
        if isinstance(config.rope_scaling, YarnScaling):
            add_yarn(writer, config.rope_scaling)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if architecture in GEMMAS:
        add_gemma(writer, config)
    if architecture != "gpt2" and config.experts:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.experts.n_inner)
    interleaved = architecture in INTERLEAVED_ROPE
    heads = {"query": config.n_head, "key": config.n_kv_head} if interleaved else {}
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    stacks = {}
    name_of = fused_gguf_name if architecture == "phi3" else gguf_name
    for key, weight in model.named_parameters():
        role, weights = stacks.setdefault(name_of(model, key), (model.role(key), []))
        weights.append(weight.detach())
    for name, (role, weights) in stacks.items():
        # Experts: (count, out, in).
        weight = torch.stack(weights) if role.startswith("expert_") else torch.cat(weights)
        if role in heads:
            weight = permute(weight, heads[role])
        if base := norm_weight_offset(architecture, role):
            weight = weight + base
        values = weight.contiguous().numpy()
        has_blocks = weight.dim() > 1 and weight.shape[-1] % 32 == 0
        if dtype == "int8" and has_blocks and role not in ("positions", "router"):
            writer.add_tensor(name, gguf.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_architecture(config) -> str:
    """Return llama.cpp's architecture name. Raises UserError for a model that it reads wrongly."""
    if not isinstance(config, LlamaConfig):
        return "gpt2"
    scaling = config.rope_scaling
    if config.qk_norm and (isinstance(scaling, RopeScaling) or config.rope_freq_factors):
        raise UserError(
            "the model cannot be exported: llama.cpp supports no RoPE scaling of a Qwen3 but YaRN"
        )
    if isinstance(scaling, LongRopeScaling):
        raise UserError("the model cannot be exported: the export supports no LongRoPE")
    if isinstance(scaling, YarnScaling):
        for name in ("beta_fast", "beta_slow", "truncate"):
            found, theirs = getattr(scaling, name), getattr(YarnScaling, name)
            if found != theirs:
                reason = f"{name} is {found}; llama.cpp supports only {theirs}"
                raise UserError(f"the model cannot be exported: {reason}")
    if config.nope_layers:
        check_nope(config)
    if config.nope_layers or config.rotary_dim:
        check_plain(config)
        return "smollm3" if config.nope_layers else "phi3"
    experts = config.experts
    if experts and (experts.mlp_only_layers or not experts.norm_topk_prob):
        only = "experts in all layers, with norm_topk_prob true"
        raise UserError(f"the model cannot be exported: llama.cpp supports only {only}")
    if isinstance(config, GemmaConfig):
        return check_gemma(config)
    if experts:
        if not config.qk_norm and experts.n_inner != config.n_inner:
            width = f"the experts' n_inner is {experts.n_inner}"
            raise UserError(
                f"the model cannot be exported: {width}; llama.cpp needs {config.n_inner}"
            )
        return "qwen3moe" if config.qk_norm else "llama"
    return "qwen3" if config.qk_norm else "llama"


def check_nope(config: LlamaConfig) -> None:
    """Raise UserError for NoPE layers that llama.cpp does not know from the architecture."""
    theirs = every_nth_layer(NOPE_INTERVAL, config.n_layer)
    if config.nope_layers != theirs:
        raise UserError(
            f"the model cannot be exported: nope_layers are {config.nope_layers}; llama.cpp"
            f" supports only {theirs}"
        )


def check_plain(config: LlamaConfig) -> None:
    """Raise UserError for features that llama.cpp's SmolLM3 and Phi-3 do not have."""
    both = config.nope_layers and config.rotary_dim
    narrow = config.rotary_dim and config.n_head * config.head_dim != config.n_embd
    scaled = isinstance(config.rope_scaling, RopeScaling) or config.rope_freq_factors
    if config.qkv_bias or config.qk_norm or config.experts or scaled or both or narrow:
        name = "SmolLM3" if config.nope_layers else "Phi-3"
        features = "no biases, QK-norm, experts or RoPE scaling but YaRN"
        if name == "Phi-3":
            features += f", and needs n_embd {config.n_head * config.head_dim}"
        raise UserError(f"the model cannot be exported: llama.cpp's {name} supports {features}")


def check_gemma(config: GemmaConfig) -> str:
    """Return the architecture. Raises UserError for a Gemma that a GGUF file cannot describe."""
    architecture = "gemma2" if isinstance(config, Gemma2Config) else "gemma3"
    theirs = query_pre_attn_scalar(config, architecture)
    if config.query_pre_attn_scalar != theirs:
        scalar = f"query_pre_attn_scalar is {config.query_pre_attn_scalar}"
        raise UserError(f"the model cannot be exported: {scalar}; llama.cpp assumes {theirs}")
    if len({*config.sliding_windows} - {None}) > 1:
        windows = f"sliding_windows are {config.sliding_windows}"
        raise UserError(f"the model cannot be exported: {windows}; llama.cpp supports one size")
    if architecture == "gemma2":
        slides = [size is not None for size in config.sliding_windows]
        caps = all(getattr(config, key) for key in GEMMA2_SOFTCAPS)
        alternating = slides == swa_layers(GEMMA2_SLIDING_WINDOW_PATTERN, config.n_layer)
        if not (caps and alternating and config.tie_word_embeddings):
            only = "both soft caps, a sliding window in every other layer and tied embeddings"
            raise UserError(f"the model cannot be exported: llama.cpp's Gemma 2 needs {only}")
    return architecture


def add_yarn(writer, scaling: YarnScaling) -> None:
    """Add the keys of YaRN. llama.cpp multiplies its own attention factor by attn_factor."""
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    multiplier = scaling.attention_factor / yarn_attention_factor(scaling.factor)
    if multiplier != 1:
        writer.add_rope_scaling_attn_factors(multiplier)


def add_gemma(writer, config: GemmaConfig) -> None:
    """Add the keys that only a Gemma file has."""
    import gguf

    if config.rope_linear_factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_linear_factor)
    slides = [size is not None for size in config.sliding_windows]
    if any(slides):
        writer.add_sliding_window(max(filter(None, config.sliding_windows)))
    if isinstance(config, Gemma2Config):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif any(slides):
        writer.add_rope_freq_base_swa(config.rope_local_base_freq)
        if slides != swa_layers(GEMMA_SLIDING_WINDOW_PATTERN, config.n_layer):
            writer.add_sliding_window_pattern(slides)


def add_vocabulary(writer, tokenizer: Path, config) -> None:
    """Add tokens and merges of a tokenizer.json. Raises UserError like `read_tokenizer_json`."""
    import gguf

    encoding = read_tokenizer_json(tokenizer)
    raw = read_json(tokenizer)
    supported = {"model.byte_fallback": (None, False), "normalizer": (None, {"type": "NFC"})}
    check_nested_values(tokenizer, raw, supported)
    listed = raw.get("added_tokens") or []
    added = {token["content"]: token["id"] for token in listed}
    special = {token["content"] for token in listed if token.get("special")}
    ids = raw["model"]["vocab"] | added
    tokens = [f"<unused {token}>" for token in range(config.vocab_size)]
    token_types = [gguf.TokenType.UNUSED] * config.vocab_size
    for text, token in ids.items():
        tokens[token] = text
        if text in special:
            token_types[token] = gguf.TokenType.CONTROL
        elif text in added:
            token_types[token] = gguf.TokenType.USER_DEFINED
        else:
            token_types[token] = gguf.TokenType.NORMAL
    merges = raw["model"]["merges"]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer, raw["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_add_bos_token(bool(encoding.prefix_ids))
    named = {}
    for name in ("default", "tool_use"):
        if template := read_chat_template(resolve_source(tokenizer.parent), name=name):
            named[name] = template[1]
    if named:
        templates = [{"name": name, "template": text} for name, text in named.items()]
        writer.add_chat_template(templates if len(named) > 1 else named["default"])


def pre_tokenizer_name(file: Path, step: dict) -> str:
    """Return llama.cpp's name of a pre_tokenizer. Raises UserError if it has none."""
    level = {"type": "ByteLevel", "add_prefix_space": False}
    steps = [part.copy() for part in step.get("pretokenizers", [step])]
    for part in steps:
        part.pop("trim_offsets", None)
    if steps in ([level], [level | {"use_regex": True}]):
        return PRE_TOKENIZERS["GPT-2"]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    for name, pattern in PATTERNS.items():
        if steps == [split | {"pattern": {"Regex": pattern}}, level | {"use_regex": False}]:
            return PRE_TOKENIZERS[name]
    raise UserError(f"{file}: GGUF has no name for this pre_tokenizer")


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return query or key rows in llama.cpp's order, the order of Meta's checkpoints.

    There the two rows that RoPE rotates together are adjacent. `llama.apply_rotary_emb` expects
    them in the two halves of a head. weight: (heads * head_dim, ...).
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rope_freq_factors(config: LlamaConfig) -> torch.Tensor:
    """Return llama.cpp's divisor of each RoPE frequency, (head_dim / 2): 1 except in Llama 3."""
    if config.rope_freq_factors:
        return torch.tensor(config.rope_freq_factors)
    plain = dataclasses.replace(config, rope_scaling=None)
    scaled = config if isinstance(config.rope_scaling, RopeScaling) else plain
    unslowed = RotaryEmbedding(plain, torch.float32, "cpu").inv_freq
    return unslowed / RotaryEmbedding(scaled, torch.float32, "cpu").inv_freq

"""Llama's forward pass, and Qwen2's, written out: what changed in the architecture since GPT-2.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (2302.13971), with the grouped-query
attention of Llama 2 (2307.09288). Parameters are named as in transformers' Llama, so its files load unchanged.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import Source, UserError, check_values, read_eos, read_json, read_number, read_sizes, read_token_ids
from model import Attend, Linear, Model


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later slow rotations down, for texts longer than those of their first training."""

    factor: float  # how much slower at most
    low_freq_factor: float  # turns in the original window; a rotation of fewer is slowed by the whole factor
    high_freq_factor: float  # one of more turns than that is left as it is
    original_max_position_embeddings: float  # the original window


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are those of the embedded model, checkpoints/stories-llama."""

    vocab_size: int = 4096
    block_size: int = 256
    n_layer: int = 8
    n_head: int = 6
    n_kv_head: int = 2  # heads with keys and values, each for n_head / n_kv_head neighbouring query heads
    head_dim: int = 32
    n_embd: int = 192
    n_inner: int = 512  # the width inside the MLP
    bos_token_id: int = 4095  # what an empty prompt starts from
    eos_token_ids: tuple[int, ...] = (4095,)
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0  # the slowest rotation makes about a radian in so many positions
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # queries, keys and values have biases: Qwen2
    tied_head: bool = True


class RMSNorm(nn.Module):
    """Division by the root of the mean square (Zhang & Sennrich 2019, 1910.07467): no mean taken off, no bias added."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.empty(config.n_embd)), config.norm_epsilon

    def forward(self, x):
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.epsilon)  # squares in float32: 256 ** 2 is no float16


@functools.lru_cache(maxsize=2)  # a target's and its draft's
def rotations(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For `rotate`: the cosine and the sine of each position's angles, each (block_size, 1, head_dim).

    A table and not computed in each pass: how a cosine rounds may depend on how many are computed at once. Not a buffer
    of the model, because loading fills weights only. A window of 131,072 and heads of 128 make it 134 MB in float32.
    """
    with torch.inference_mode(False):  # a table made in inference mode could not be used in training
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1 / config.rope_theta**powers  # radians a position, of each pair of numbers
        if config.rope_scaling:
            frequencies = slowed(frequencies, config.rope_scaling)
        angles = torch.arange(config.block_size)[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)


def slowed(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """The frequencies for a longer window, as in Llama 3.1: the slow ones slower, the fast ones as they were.

    Between both limits the factor is blended. frequencies: (n), in radians a position.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)  # in the original window
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, 2104.09864): turn queries or keys by their position's angles.

    x: (..., heads, head_dim). cos, sin: (..., 1, head_dim). Number i of a head's first half and number i of its second
    half are the coordinates of one point, as in transformers; Meta's own files have them side by side.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, queries, keys = config.head_dim, config.n_head, config.n_kv_head
        self.q_proj = Linear(config.n_embd, queries * config.head_dim, bias=config.qkv_bias)
        self.k_proj = Linear(config.n_embd, keys * config.head_dim, bias=config.qkv_bias)
        self.v_proj = Linear(config.n_embd, keys * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(queries * config.head_dim, config.n_embd, bias=False)

    def forward(self, x, cos, sin, attend):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, 2002.05202): one product of x gates another."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(config), Attention(config)
        self.post_attention_layernorm, self.mlp = RMSNorm(config), MLP(config)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


SIZES = {  # field of LlamaConfig -> its key in config.json, and the largest value read
    "vocab_size": ("vocab_size", 10**6),
    "block_size": ("max_position_embeddings", 10**7),
    "n_layer": ("num_hidden_layers", 1000),
    "n_head": ("num_attention_heads", 1000),
    "n_kv_head": ("num_key_value_heads", 1000),
    "n_embd": ("hidden_size", 10**5),
    "n_inner": ("intermediate_size", 10**6),
    "head_dim": ("head_dim", 1000),
}
SUPPORTED = {  # what this forward pass computes
    "model_type": ("llama", "qwen2"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "tie_word_embeddings": (False, True),
    "is_causal": (True,),
}
ROPE_TYPES = ("default", "llama3")


def read_scaling(file: Path, rope: dict) -> RopeScaling:
    """The RopeScaling in a part of a config.json. Raises UserError for numbers that make no sense."""
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    scaling = RopeScaling(*(read_number(file, rope, name, None, 1e9) for name in names))
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise UserError(f"{file}: low_freq_factor is {low}; it must be below high_freq_factor, which is {high}")
    return scaling


class Llama(Model):
    PRESETS = {  # the shape of a small Llama that people use; its tokenizer is of a form that is not read here
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            block_size=8192,
            n_layer=30,
            n_head=9,
            n_kv_head=3,
            head_dim=64,
            n_embd=576,
            n_inner=1536,
            bos_token_id=49151,
            eos_token_ids=(49151,),
            norm_epsilon=1e-5,
            rope_theta=100000.0,
        )
    }
    EMBEDDING, PREFIX, RESIDUAL = "embed_tokens", "model.", ("o_proj.weight", "down_proj.weight")
    SKIPPED = ("lm_head.weight", "rotary_emb.inv_freq")  # a tied head again (config.json decides), or old buffers

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the last block gives at each position, (..., C); arguments as of `GPT.hidden`."""
        cos, sin = (table[positions] for table in rotations(self.config, self.dtype, self.device))
        x = self.embed_tokens(tokens)
        for layer, block in enumerate(self.layers):
            x = block(x, cos, sin, functools.partial(attend, layer))
        return x

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits for the token after each position: (..., C) to (..., vocab_size), in the weights' dtype."""
        return self.lm_head(self.norm(hidden))

    def config_fields(self) -> dict:
        config, scaling = vars(self.config), self.config.rope_scaling
        return {
            "architectures": ["Qwen2ForCausalLM" if self.config.qkv_bias else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.config.qkv_bias else "llama",
            **{key: config[field] for field, (key, _) in SIZES.items()},
            "hidden_act": "silu",
            "rms_norm_eps": self.config.norm_epsilon,
            "rope_theta": self.config.rope_theta,
            "rope_scaling": scaling and {"rope_type": "llama3", **vars(scaling)},
            "tie_word_embeddings": self.config.tied_head,
            "bos_token_id": self.config.bos_token_id,
            "eos_token_id": list(self.config.eos_token_ids),
        }

    @staticmethod
    def read_config(source: Source) -> LlamaConfig:
        file = source.file("config.json")
        raw = {key: value for key, value in read_json(file).items() if value is not None}  # null: as if it were missing
        check_values(file, raw, SUPPORTED)
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # older files; newer ones
        rope = raw.get(key, {})
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        check_values(f"{file}: {key}", {"rope_type": kind}, {"rope_type": ROPE_TYPES})
        fields = read_sizes(file, raw, SIZES, {"n_kv_head": raw.get("num_attention_heads"), "head_dim": 1})
        if "head_dim" not in raw:
            fields["head_dim"] = fields["n_embd"] // fields["n_head"]
        heads, shared, size = fields["n_head"], fields["n_kv_head"], fields["head_dim"]
        if heads % shared or size % 2 or not size:
            allowed = "num_attention_heads must be a multiple of num_key_value_heads, head_dim even"
            raise UserError(f"{file}: {heads} heads, {shared} of them with keys, of {size} numbers each; {allowed}")
        eos = read_eos(source, raw, fields["vocab_size"], 2 if raw["model_type"] == "llama" else None)
        return LlamaConfig(
            **fields,
            bos_token_id=read_token_ids(file, raw, "bos_token_id", fields["vocab_size"], eos[0])[0],
            eos_token_ids=eos,
            norm_epsilon=read_number(file, raw, "rms_norm_eps", 1e-6, 1),
            rope_theta=read_number(file, raw | rope, "rope_theta", 10000.0, 1e12),
            rope_scaling=read_scaling(file, rope) if kind == "llama3" else None,
            qkv_bias=raw["model_type"] == "qwen2",
            tied_head=raw.get("tie_word_embeddings", False),
        )

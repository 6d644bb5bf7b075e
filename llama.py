"""The forward pass of Llama, Mistral, Phi-3, Qwen and SmolLM3, with their changes to GPT-2.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (2302.13971), with the
grouped-query attention of Llama 2 (2307.09288). Parameters are named as in transformers' Llama, so
its files load unchanged.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from cache import layer_sliding_windows
from model import Attend, Model


@dataclass(frozen=True)
class RopeScaling:
    """The RoPE scaling of Llama 3.1 and later, which extends the original context window."""

    rope_type = "llama3"
    factor: float  # by which low frequencies are divided
    low_freq_factor: float  # fewer rotations in the original window: scaled fully
    high_freq_factor: float  # more rotations in the original window: unchanged
    original_max_position_embeddings: float  # the original context window, in tokens


@dataclass(frozen=True)
class YarnScaling:
    """The RoPE scaling YaRN (Peng et al. 2023, 2309.00071), as in transformers."""

    rope_type = "yarn"
    factor: float  # by which low frequencies are divided
    original_max_position_embeddings: int  # the original context window, in tokens
    attention_factor: float  # factor of cosines and sines, so its square of attention scores
    beta_fast: float = 32  # more rotations in the original window: unchanged
    beta_slow: float = 1  # fewer rotations in the original window: scaled fully
    truncate: bool = True  # both limits are rounded outwards to whole pairs


@dataclass(frozen=True)
class LongRopeScaling:
    """The RoPE scaling LongRoPE (Ding et al. 2024, 2402.13753), within the original window.

    In longer sequences `long_factor` would divide all frequencies, also for earlier keys.
    """

    rope_type = "longrope"
    short_factor: tuple[float, ...]  # divisor of each frequency
    long_factor: tuple[float, ...]  # only for saving
    original_max_position_embeddings: int  # the original context window, in tokens
    attention_factor: float  # as in YarnScaling


@dataclass(frozen=True)
class ExpertsConfig:
    """The configuration of a mixture of experts: Qwen3-MoE and Mixtral."""

    num_experts: int
    num_experts_per_tok: int
    n_inner: int  # the width inside one expert
    norm_topk_prob: bool = False  # the chosen experts' weights are normalised to sum 1
    mlp_only_layers: tuple[int, ...] = ()  # layers with a dense MLP instead of experts


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama; the defaults describe checkpoints/stories-llama."""

    vocab_size: int = 4096
    block_size: int = 256
    n_layer: int = 8
    n_head: int = 6
    n_kv_head: int = 2  # key-value heads, each shared by n_head / n_kv_head query heads
    head_dim: int = 32
    n_embd: int = 192
    n_inner: int = 512  # the width inside the MLP
    bos_token_id: int = 4095  # an empty prompt starts from it
    eos_token_ids: tuple[int, ...] = (4095,)
    norm_eps: float = 1e-6
    rotary_dim: int | None = None  # leading elements of a head that RoPE rotates; None: all
    rope_theta: float = 10000.0  # about the positions per radian of the slowest rotation
    rope_scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = None  # one per pair, from GGUF files
    qkv_bias: bool = False  # biases on queries, keys and values: Qwen2
    qk_norm: bool = False  # RMSNorm on each head's query and key before RoPE: Qwen3
    tie_word_embeddings: bool = True
    experts: ExpertsConfig | None = None
    # Sliding window of each layer in positions, the token included; None: full. (): full in all.
    sliding_windows: tuple[int | None, ...] = ()
    nope_layers: tuple[int, ...] = ()  # layers that do not rotate queries and keys: SmolLM3
    # Gemma 3: sliding-window layers have their own rope_theta, and the others divide positions.
    rope_local_base_freq: float | None = None
    rope_linear_factor: float = 1.0
    attn_logit_softcapping: ClassVar[None] = None  # as in Gemma2Config


class RMSNorm(nn.Module):
    """RMS normalisation: division by the root mean square, without mean or bias.

    Zhang & Sennrich 2019, 1910.07467. size: width of the input, n_embd by default.
    """

    def __init__(self, config: LlamaConfig, size: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size or config.n_embd))
        self.eps = config.norm_eps

    def forward(self, x):
        # rms_norm squares in float32: 256 ** 2 overflows float16.
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)


TABLE_CHUNK = 64  # positions by which the cosine and sine tables grow


class RotaryEmbedding:
    """Tables of the cosines and sines of RoPE angles, up to the longest sequence so far.

    local: use the base frequency of sliding-window layers.

    The tables grow by 64 positions, because a cosine's rounding may depend on how many are computed
    in one call. They are not buffers of the model, because loading fills only weights. They do not
    cover the context window from the start: 131,072 positions of 128 numbers are 134 MB in float32.
    """

    def __init__(
        self, config: LlamaConfig, dtype: torch.dtype, device: torch.device, local: bool = False
    ):
        dim = config.rotary_dim or config.head_dim
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        theta = config.rope_local_base_freq if local else config.rope_theta
        self.inv_freq = 1 / theta**powers  # radians per position, one per pair
        self.scale = 1.0
        if not local:
            self.inv_freq /= config.rope_linear_factor
        if isinstance(config.rope_scaling, RopeScaling):
            self.inv_freq = scale_llama3_frequencies(self.inv_freq, config.rope_scaling)
        elif isinstance(config.rope_scaling, YarnScaling):
            self.inv_freq = scale_yarn_frequencies(theta, powers, config.rope_scaling)
            self.scale = config.rope_scaling.attention_factor
        elif isinstance(config.rope_scaling, LongRopeScaling):
            self.inv_freq = 1 / (torch.tensor(config.rope_scaling.short_factor) * theta**powers)
            self.scale = config.rope_scaling.attention_factor
        if config.rope_freq_factors:
            self.inv_freq = self.inv_freq / torch.tensor(config.rope_freq_factors)
        self.cos = torch.empty(0, 1, dim, dtype=dtype, device=device)
        self.sin = torch.empty(0, 1, dim, dtype=dtype, device=device)

    def cos_sin(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of the first positions, each (length, 1, rotary_dim)."""
        if len(self.cos) < length:
            cosines = [self.cos]
            sines = [self.sin]
            for start in range(len(self.cos), max(length, 2 * len(self.cos)), TABLE_CHUNK):
                positions = torch.arange(start, start + TABLE_CHUNK)
                angles = positions[:, None, None] * self.inv_freq
                cos = angles.cos() * self.scale
                sin = angles.sin() * self.scale
                cosines.append(torch.cat([cos, cos], -1).to(self.cos))
                sines.append(torch.cat([-sin, sin], -1).to(self.sin))
            self.cos = torch.cat(cosines)
            self.sin = torch.cat(sines)
        return self.cos[:length], self.sin[:length]


rotary_embedding = functools.lru_cache(maxsize=4)(RotaryEmbedding)  # for a target and its draft


def local_rope_layers(config: LlamaConfig) -> list[bool]:
    """Return whether each layer uses `rope_local_base_freq`."""
    return [
        bool(config.rope_local_base_freq and window) for window in layer_sliding_windows(config)
    ]


def scale_llama3_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale RoPE frequencies for a longer context window as in Llama 3.1: only the low ones.

    Between both limits the factor is interpolated. inv_freq: (n), in radians per position.
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    # Rotations in the original context window.
    periods = scaling.original_max_position_embeddings / (2 * math.pi / inv_freq)
    smooth_factor = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_factor) * inv_freq / scaling.factor + smooth_factor * inv_freq


def scale_yarn_frequencies(
    theta: float, powers: torch.Tensor, scaling: YarnScaling
) -> torch.Tensor:
    """Return RoPE frequencies scaled by YaRN, (n), in radians per position.

    Between the pairs that rotate `beta_fast` and `beta_slow` times in the original window, old and
    new frequency are interpolated linearly. powers: (n), exponents of theta.
    """
    head_dim = 2 * len(powers)

    def find_pair(rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        wavelength = min(wavelength, 1e308)  # finite, however small the rotations
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = find_pair(scaling.beta_fast)
    high = find_pair(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    high += 0.001 * (low == high)
    kept = 1 - ((torch.arange(len(powers)).float() - low) / (high - low)).clamp(0, 1)
    # The order of operations is transformers', because a rounding error grows with the position.
    return 1 / (scaling.factor * theta**powers) * (1 - kept) + 1 / theta**powers * kept


def yarn_attention_factor(factor: float, mscale: float = 0, mscale_all_dim: float = 0) -> float:
    """Return the default of `YarnScaling.attention_factor`. mscale: as in config.json; 0: unset."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1)


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by the angles of their positions (RoPE, Su et al. 2021, 2104.09864).

    x: (..., heads, head_dim). cos, sin: (..., 1, rotary_dim). Element i of the first half of these
    elements and element i of their second half are one rotated pair, as in transformers. Meta's own
    files interleave them. Elements from rotary_dim on stay.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([apply_rotary_emb(x[..., :dim], cos, sin), x[..., dim:]], -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, norm: type = RMSNorm):
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.n_head * config.head_dim
        keys = config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(config.n_embd, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.n_embd, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.n_embd, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.n_embd, bias=False)
        self.q_norm = norm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config, config.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, attend):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., n_head, head_dim)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., n_kv_head, head_dim)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = self.q_norm(q)  # statistics per head
        k = self.k_norm(k)
        if cos is not None:  # else a NoPE layer
            q = apply_rotary_emb(q, cos, sin)
            k = apply_rotary_emb(k, cos, sin)
        return self.o_proj(attend(q, k, v).flatten(-2))


class MLP(nn.Module):
    """A SwiGLU MLP (Shazeer 2020, 2002.05202).

    n_inner: the inner width, by default the config's.
    """

    def __init__(self, config: LlamaConfig, n_inner: int | None = None):
        super().__init__()
        n_inner = n_inner or config.n_inner
        self.gate_proj = nn.Linear(config.n_embd, n_inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, n_inner, bias=False)
        self.down_proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a router sends each token to its top_k MLPs.

    Shazeer et al. 2017, 1701.06538. Each expert's matrices are read once for all its tokens.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        sizes = config.experts
        self.top_k = sizes.num_experts_per_tok
        self.norm_topk_prob = sizes.norm_topk_prob
        self.gate = nn.Linear(config.n_embd, sizes.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config, sizes.n_inner) for _ in range(sizes.num_experts))

    def route(self, x):
        """Return the weights and indices of each token's experts, both (N, top_k). x: (N, C)."""
        routing_weights = self.gate(x).softmax(-1, dtype=torch.float32)  # for any weight dtype
        # torch.topk breaks ties arbitrarily; a stable sort prefers the lower index.
        routing_weights, experts = routing_weights.sort(dim=-1, descending=True, stable=True)
        routing_weights = routing_weights[:, : self.top_k]
        if self.norm_topk_prob:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        return routing_weights.to(x.dtype), experts[:, : self.top_k]

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (N, C)
        weights, experts = self.route(tokens)
        y = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():  # sorted: the order of a sum is fixed
            rows, slots = torch.where(experts == expert)
            y[rows] += weights[rows, slots, None] * self.experts[expert](tokens[rows])
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        has_experts = config.experts and layer not in config.experts.mlp_only_layers
        self.mlp = MixtureOfExperts(config) if has_experts else MLP(config)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(Model):
    ROLES = {
        "embedding": ("embed_tokens", "token_embd"),
        "attn_norm": ("layers.*.input_layernorm", "blk.*.attn_norm"),
        "query": ("layers.*.self_attn.q_proj", "blk.*.attn_q"),
        "key": ("layers.*.self_attn.k_proj", "blk.*.attn_k"),
        "value": ("layers.*.self_attn.v_proj", "blk.*.attn_v"),
        "query_norm": ("layers.*.self_attn.q_norm", "blk.*.attn_q_norm"),
        "key_norm": ("layers.*.self_attn.k_norm", "blk.*.attn_k_norm"),
        "attn_out": ("layers.*.self_attn.o_proj", "blk.*.attn_output"),
        "mlp_norm": ("layers.*.post_attention_layernorm", "blk.*.ffn_norm"),
        "gate": ("layers.*.mlp.gate_proj", "blk.*.ffn_gate"),
        "up": ("layers.*.mlp.up_proj", "blk.*.ffn_up"),
        "down": ("layers.*.mlp.down_proj", "blk.*.ffn_down"),
        "router": ("layers.*.mlp.gate", "blk.*.ffn_gate_inp"),
        "expert_gate": ("layers.*.mlp.experts.*.gate_proj", "blk.*.ffn_gate_exps"),
        "expert_up": ("layers.*.mlp.experts.*.up_proj", "blk.*.ffn_up_exps"),
        "expert_down": ("layers.*.mlp.experts.*.down_proj", "blk.*.ffn_down_exps"),
        "norm": ("norm", "output_norm"),
        "head": ("lm_head", "output"),
    }
    BASE_MODEL_PREFIX = "model."
    IGNORED_SUFFIXES = ("lm_head.weight", "rotary_emb.inv_freq")  # tied head, old buffers
    KEY_MAPPING = (  # Mixtral's
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.mlp\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.mlp\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.mlp\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    )
    FUSED_LAYERS = {  # Phi-3's
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    BLOCK = Block
    NORM = RMSNorm

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        tokens = torch.empty(config.vocab_size, config.n_embd)
        self.embed_tokens = nn.Embedding.from_pretrained(tokens, freeze=False)
        blocks = (self.BLOCK(config, layer) for layer in range(config.n_layer))
        self.layers = nn.ModuleList(blocks)
        self.norm = self.NORM(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        tables: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the last block's output, (..., C); arguments as in `GPT.hidden`."""
        tables = self.rope_tables(int(positions.max()) + 1) if tables is None else tables
        angles = [table[positions] for table in tables]
        x = self.embed(tokens)
        for layer, (block, is_local) in enumerate(zip(self.layers, local_rope_layers(self.config))):
            cos_sin = angles[2:] if is_local else angles[:2]
            if layer in self.config.nope_layers:
                cos_sin = None, None
            x = block(x, *cos_sin, functools.partial(attend, layer))
        return x

    def rope_tables(self, length: int) -> list[torch.Tensor]:
        """Return cosines and sines, (length, 1, rotary_dim) each, then for local layers."""
        kinds = [False, True] if any(local_rope_layers(self.config)) else [False]
        arguments = self.config, self.dtype, self.device
        return [
            table
            for is_local in kinds
            for table in rotary_embedding(*arguments, is_local).cos_sin(length)
        ]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first block's input: (...) to (..., C)."""
        return self.embed_tokens(tokens)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits for the token after each position: (..., C) to (..., vocab_size)."""
        return self.lm_head(self.norm(hidden))

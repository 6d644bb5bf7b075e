"""The forward pass of Gemma 2 and 3, as changes to a Llama with sliding windows.

Gemma Team 2024 (2408.00118), "Gemma 2: Improving open language models at a practical size", and
2025 (2503.19786), "Gemma 3 technical report". Parameters are named as in transformers'
Gemma3ForCausalLM, so its files load unchanged.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from cache import soft_cap
from llama import MLP, Attention, Llama, LlamaConfig, RMSNorm


@dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """The configuration of a Gemma 3; sliding-window layers have their own RoPE base."""

    qk_norm: bool = True
    rope_local_base_freq: float | None = 10000.0
    query_pre_attn_scalar: float = 256  # attention scores are divided by its root
    final_logit_softcapping: ClassVar[None] = None  # as in Gemma2Config


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """The configuration of a Gemma 2, which has soft caps instead of QK-norm."""

    qk_norm: bool = False
    rope_local_base_freq: float | None = None
    attn_logit_softcapping: float | None = 50.0  # soft cap of attention scores
    final_logit_softcapping: float | None = 30.0  # soft cap of logits


class GemmaNorm(RMSNorm):
    """An RMSNorm that stores weight - 1 and rounds once, at the end."""

    weight_offset = 1.0  # added to the weights
    output_scale = 1.0  # factor of the result

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), x.shape[-1:], eps=self.eps)
        return (y * self.output_scale * (self.weight_offset + self.weight.to(wide))).to(x.dtype)


class GemmaMLP(MLP):
    """A GEGLU MLP (Shazeer 2020, 2002.05202): the gate's activation is GELU instead of SiLU."""

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class QueryScale(nn.Module):
    """The factor of a query without a norm."""

    def forward(self, x):
        return x * self.output_scale


class GemmaBlock(nn.Module):
    """A block that also normalises the outputs of attention and MLP before the residual sum."""

    def __init__(self, config: GemmaConfig, layer: int):
        super().__init__()
        self.input_layernorm = GemmaNorm(config)
        self.self_attn = Attention(config, GemmaNorm)
        if not config.qk_norm:
            self.self_attn.q_norm = QueryScale()
        # Attention divides scores by sqrt(head_dim), so the query norm makes up the difference.
        self.self_attn.q_norm.output_scale = math.sqrt(
            config.head_dim / config.query_pre_attn_scalar
        )
        self.post_attention_layernorm = GemmaNorm(config)
        self.pre_feedforward_layernorm = GemmaNorm(config)
        self.mlp = GemmaMLP(config)
        self.post_feedforward_layernorm = GemmaNorm(config)

    def forward(self, x, cos, sin, attend):
        attended = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma(Llama):
    ROLES = Llama.ROLES | {
        "attn_out_norm": ("layers.*.post_attention_layernorm", "blk.*.post_attention_norm"),
        "mlp_norm": ("layers.*.pre_feedforward_layernorm", "blk.*.ffn_norm"),
        "down_norm": ("layers.*.post_feedforward_layernorm", "blk.*.post_ffw_norm"),
    }
    # Names of the image-text model, Gemma3ForConditionalGeneration.
    KEY_MAPPING = ((r"^(model\.)?language_model\.(model\.)?", "model."),)
    SKIP_PREFIXES = ("vision_tower", "multi_modal_projector")
    BLOCK = GemmaBlock
    NORM = GemmaNorm

    @property
    def embedding_scale(self) -> float:
        """Return the factor of embeddings, rounded as in transformers: first to float32."""
        root = torch.tensor(math.sqrt(self.config.n_embd), dtype=torch.float32)
        return root.to(self.dtype).item()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens) * self.embedding_scale

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().head(hidden)
        cap = self.config.final_logit_softcapping
        return soft_cap(logits, cap) if cap else logits

"""Llama's forward pass, written out: what changed in the architecture since GPT-2.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (2302.13971).
Parameters are named as in transformers' Llama, so its files load unchanged.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import Linear


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are those of checkpoints/stories-llama (lesson 30)."""

    n_embd: int = 192
    n_inner: int = 512  # the width inside the MLP
    norm_epsilon: float = 1e-6


class RMSNorm(nn.Module):
    """Division by the root of the mean square: no mean taken off, no bias added.

    Zhang & Sennrich 2019, 1910.07467.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.epsilon = config.norm_epsilon

    def forward(self, x):
        # Its squares are float32: 256 ** 2 is no float16.
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.epsilon)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, 2002.05202): one product of x gates another."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

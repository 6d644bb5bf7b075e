"""The forward pass of a Llama, with its changes to GPT-2.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (2302.13971).
Parameters are named as in transformers' Llama, so its files load unchanged.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama; the defaults describe checkpoints/stories-llama (lesson 30)."""

    n_embd: int = 192
    n_inner: int = 512  # the width inside the MLP
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """RMS normalisation: division by the root mean square, without mean or bias.

    Zhang & Sennrich 2019, 1910.07467.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.eps = config.norm_eps

    def forward(self, x):
        # rms_norm squares in float32: 256 ** 2 overflows float16.
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)


class MLP(nn.Module):
    """A SwiGLU MLP (Shazeer 2020, 2002.05202)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

"""From logits to tokens."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens; the defaults are greedy decoding."""

    max_new_tokens: int = 220
    ignore_eos: bool = False  # go on after an EOS token
    temperature: float = 0.0  # 0: the most likely token; 1: a draw from the softmax


def sample(
    logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Choose a token from each row of logits.

    logits: (B, vocab_size), float32. Returns (B,) ids: the most likely ones at temperature 0, else
    one draw a row.
    """
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(sampling_probs(logits, params), 1, generator=generator)[:, 0]


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What `sample` draws from: (..., vocab_size) logits to probabilities of the same shape."""
    return torch.softmax(logits, dim=-1)

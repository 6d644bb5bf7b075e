"""How counts are held against probabilities."""

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(state: int, index: int) -> int:
    """SplitMix64 in Python's integers."""
    number = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How far counts are from what these probabilities let expect."""
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()

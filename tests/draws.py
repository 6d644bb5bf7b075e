"""How counts are held against probabilities."""

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How far counts are from what these probabilities let expect."""
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()

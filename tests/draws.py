"""Logits for tests of draws, and how counts are held against probabilities."""

import math

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(state: int, index: int) -> int:
    number = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How far counts are from what these probabilities let expect."""
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()


def random_logits(kind: str, rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """(rows, size), of a kind that makes draws hard in its own way."""
    generator = seeded(seed)
    logits = 4 * torch.randn(rows, size, generator=generator)
    if kind == "ties":
        return logits.round()
    if kind == "bfloat16":
        return logits.bfloat16().float()
    if kind == "infinite":
        logits[torch.rand(rows, size, generator=generator) < 0.85] = -math.inf
        logits[:, size // 2] = 0
        return logits
    return logits * {"random": 1, "flat": 0.01, "equal": 0, "peaked": 10}[kind]

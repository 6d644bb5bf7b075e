"""Speculative decoding, one model drafts and another verifies: python infer_speculative.py --prompt "One day"."""

import torch


def verify(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Accept drafts from the left as long as chance allows, and draw one token to follow: (accepted, token).

    p: (n + 1, vocab_size), the target's distributions at the n drafts and after the last of them. q: (n, vocab_size),
    those that the drafts were drawn from. The tokens that result, n + 1 at most, are distributed as draws from p.
    Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318).
    """
    chosen = torch.tensor(drafts, dtype=torch.int64, device=p.device)[:, None]  # (n, 1)
    chance = acceptance(p[: len(drafts)].gather(1, chosen), q.gather(1, chosen))
    uniform = torch.rand(len(drafts), 1, generator=generator, device=p.device)
    accepted = first_false((uniform < chance)[:, 0].tolist())
    last = p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted])
    return accepted, torch.multinomial(last, 1, generator=generator).item()


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chance min(1, p / q) to accept a token that has probability p in the target and q > 0 in the draft model."""
    return (p / q).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What to draw from after a refusal: max(p - q, 0), normalised. p, q: (..., vocab_size) distributions.

    It is p itself where nothing is left. Then p = q, and a refusal can only come from rounding.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def first_false(flags: list[bool]) -> int:
    """The index of the first False, or the length."""
    return flags.index(False) if False in flags else len(flags)

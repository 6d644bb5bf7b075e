"""Speculative decoding: rejection sampling of draft tokens."""

import torch


def verify(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Accept a prefix of the drafts by rejection sampling, and sample the token after it.

    p: (n + 1, vocab_size), the target's distributions at the n drafts and after the last one.
    q: (n, vocab_size), the draft distributions. Returns the number of accepted drafts, and the
    token. Together, at most n + 1 tokens, they are distributed as samples from p.
    Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318).
    """
    draft_ids = torch.tensor(drafts, dtype=torch.int64, device=p.device)[:, None]  # (n, 1)
    chance = acceptance(p[: len(drafts)].gather(1, draft_ids), q.gather(1, draft_ids))
    uniform = torch.rand(len(drafts), 1, generator=generator, device=p.device)
    accepted = first_false((uniform < chance)[:, 0].tolist())
    last = p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted])
    return accepted, torch.multinomial(last, 1, generator=generator).item()


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the probability of accepting a draft token, min(1, p / q) with q > 0."""
    return (p / q).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the distribution after a rejection, max(p - q, 0) normalised, (..., vocab_size).

    Where that is zero, the result is p: then p = q, and only rounding can cause a rejection.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def first_false(flags: list[bool]) -> int:
    """Return the index of the first False, or the length if there is none."""
    return flags.index(False) if False in flags else len(flags)

"""Requests."""

from dataclasses import dataclass, field

from sampling import Sequence


@dataclass(eq=False)  # compare and hash by identity
class Request(Sequence):
    """A prompt, its output and its state in the engine; read-only for callers."""

    finish_reason: str | None = None  # "stop", "length", "abort" or "error" when finished
    start: int = 0  # of the context window in tokens
    num_computed_tokens: int = 0  # positions of the context window in the KV cache
    pages: list[int] = field(default_factory=list)  # page table

    @property
    def context_window(self) -> list[int]:
        """Return the tokens of the context window."""
        return self.tokens[self.start :]

    @property
    def length(self) -> int:
        """Return the number of tokens in the context window."""
        return len(self.tokens) - self.start

    @property
    def uncomputed_tokens(self) -> list[int]:
        """Return the tokens of the context window that are not computed yet."""
        return self.tokens[self.start + self.num_computed_tokens :]

"""Matchers: which tokens may follow the output so far."""

import numpy
import torch

from constraints.vocabulary import Vocabulary
from errors import UserError


class Matcher:
    """Constraint state of one sequence, and the token masks that follow from it.

    grammar: compiled constraint, for errors and time limits; None: masks take little time.
    """

    grammar = None

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.tokens: list[int] = []  # output tokens that the state has consumed

    def token_mask(self, output: list[int]) -> torch.Tensor:
        """Return (vocab_size,) bools: true for tokens that may follow this output.

        The output may be unrelated to the last call's; only tokens after their common prefix are
        consumed. All tokens are allowed after EOS, and after a draft token that violates the
        constraint and will be rejected. No token is allowed if this vocabulary cannot complete
        the constraint.
        """
        raise NotImplementedError

    def reason(self) -> str:
        """Return why no token is allowed."""
        return "no output satisfies the constraint, or none can be tokenised with this vocabulary"

    def checked_token_mask(self, output: list[int]) -> torch.Tensor:
        """Return `token_mask`. Raises UserError if it allows no token."""
        token_mask = self.token_mask(output)
        if not token_mask.numpy().any():  # numpy stops at the first true, torch does not
            count = f"{len(output)} output token{'s' * (len(output) != 1)}"
            raise UserError(f"no token is allowed after {count}: {self.reason()}")
        return token_mask

    def is_accepting(self, output: list[int]) -> bool:
        """Return whether an output ends with EOS, or EOS may follow it."""
        eos_token_ids = self.vocabulary.eos_token_ids
        return (
            output[-1:] in [[end] for end in eos_token_ids]
            or self.token_mask(output)[eos_token_ids[0]].item()
        )


def single_allowed_token(token_mask: torch.Tensor | None) -> int | None:
    """Return the token if the mask allows exactly one; None for other masks or no mask."""
    if token_mask is None or numpy.count_nonzero(token_mask.numpy()) != 1:
        return None
    return int(token_mask.numpy().argmax())

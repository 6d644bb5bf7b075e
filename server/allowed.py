"""Tokens that a constraint allows at each position, for requests with show_allowed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy

from constraints.matcher import Matcher
from server.backend import Update


class AllowedTokens(NamedTuple):
    """Tokens that a constraint allows at a position."""

    count: int  # of all allowed tokens
    tokens: list[int]  # up to the limit of the request


class SequenceTracker:
    """Allowed tokens of one sequence, recomputed position by position with its own matcher."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.output: list[int] = []
        self.token_mask = matcher.token_mask([]).numpy()  # at the next position
        self.positions: list[AllowedTokens] = []  # not sent to the client yet
        self.next: AllowedTokens | None = None

    def read(self, update: Update, limit: int) -> None:
        """Advance by the new tokens of an update."""
        for token, (_, top) in zip(update.tokens, update.logprobs):
            self.positions.append(
                list_allowed_tokens(self.token_mask, [other for other, _ in top], limit)
            )
            self.output.append(token)
            self.token_mask = self.matcher.token_mask(self.output).numpy()
        self.next = (
            None if update.finish_reason else list_allowed_tokens(self.token_mask, [], limit)
        )


def list_allowed_tokens(token_mask: numpy.ndarray, top: list[int], limit: int) -> AllowedTokens:
    """Return the count and up to `limit` tokens of a mask, (vocab_size,) bools.

    Allowed tokens of `top` come first, in its order of probability, then others by id.
    """
    allowed = numpy.flatnonzero(token_mask)
    others = [token for token in allowed[: limit + len(top)].tolist() if token not in top]
    tokens = [token for token in top if token_mask[token]] + others
    return AllowedTokens(len(allowed), tokens[:limit])


class AllowedTokensTracker:
    """Allowed tokens of all sequences of a response.

    The engine drops its masks before a client receives a token, and replicas run in other
    processes, so the masks are computed again, outside the engine's thread.
    make_matcher: returns a matcher for a sequence. limit: maximum number of tokens per position.
    """

    def __init__(self, make_matcher: Callable[[], Matcher], limit: int):
        self.make_matcher = make_matcher
        self.limit = limit
        self.trackers: dict[int, SequenceTracker] = {}

    def read(self, updates: dict[int, Update]) -> None:
        """Advance each sequence by its update. May be slow."""
        for index, update in updates.items():
            if index not in self.trackers:
                self.trackers[index] = SequenceTracker(self.make_matcher())
            self.trackers[index].read(update, self.limit)

    def pop_positions(self, index: int) -> tuple[list[AllowedTokens], AllowedTokens | None]:
        """Pop the unsent positions of a sequence; also return the next one, None at its end."""
        tracker = self.trackers[index] if self.trackers[index].next else self.trackers.pop(index)
        positions = tracker.positions
        tracker.positions = []
        return positions, tracker.next

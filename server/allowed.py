"""What its constraint allows at each position of a text, for clients that ask with show_allowed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy

from constraints import Matcher
from server.engine_thread import Update


class AllowedTokens(NamedTuple):
    """The tokens that a constraint allows at a position."""

    count: int  # of the tokens that its constraint allows there
    tokens: list[int]  # some of them


class SequenceTracker:
    """Follows a text from position to position, as the engine's own matcher did."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.output: list[int] = []
        self.token_mask = matcher.token_mask([]).numpy()  # of the next position
        self.positions: list[AllowedTokens] = []  # of tokens of which the client has not heard
        self.next: AllowedTokens | None = None

    def read(self, update: Update, limit: int) -> None:
        """Go on behind what is new."""
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
    """The position that has this mask, (vocab_size,) bools, with up to `limit` of its tokens.

    First those of `top` that are allowed, which is the order of their probability; then by id.
    """
    found = numpy.flatnonzero(token_mask)
    others = [token for token in found[: limit + len(top)].tolist() if token not in top]
    tokens = [token for token in top if token_mask[token]] + others
    return AllowedTokens(len(found), tokens[:limit])


class AllowedTokensTracker:
    """The positions of all texts of an answer.

    The engine's masks are gone when a client hears of a token, and in replicas they are in other
    processes. So they are computed again, in another thread than the engine's.
    make_matcher: returns a matcher for a text. limit: how many tokens of a position are listed.
    """

    def __init__(self, make_matcher: Callable[[], Matcher], limit: int):
        self.make_matcher = make_matcher
        self.limit = limit
        self.trackers: dict[int, SequenceTracker] = {}

    def read(self, updates: dict[int, Update]) -> None:
        """Go on behind what is new of each text. It may take long."""
        for index, update in updates.items():
            if index not in self.trackers:
                self.trackers[index] = SequenceTracker(self.make_matcher())
            self.trackers[index].read(update, self.limit)

    def pop_positions(self, index: int) -> tuple[list[AllowedTokens], AllowedTokens | None]:
        """The positions of a text that were not taken yet, and the next one; None: it is over."""
        tracker = self.trackers[index] if self.trackers[index].next else self.trackers.pop(index)
        positions = tracker.positions
        tracker.positions = []
        return positions, tracker.next

"""What its constraint allows at each place of a text, for a client that asks with show_allowed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy

from constraints import Matcher
from server.engine_thread import Update


class Place(NamedTuple):
    """A place of a text."""

    count: int  # of the tokens that its constraint allows there
    tokens: list[int]  # some of them


class Text:
    """Follows a text from place to place, as the engine's own matcher did."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.output: list[int] = []
        self.mask = matcher.token_mask([]).numpy()  # of the next place
        self.places: list[Place] = []  # of tokens of which the client has not heard
        self.next: Place | None = None

    def read(self, update: Update, most: int) -> None:
        """Go on behind what is new."""
        for token, (_, top) in zip(update.tokens, update.logprobs):
            self.places.append(to_place(self.mask, [other for other, _ in top], most))
            self.output.append(token)
            self.mask = self.matcher.token_mask(self.output).numpy()
        self.next = None if update.finish_reason else to_place(self.mask, [], most)


def to_place(mask: numpy.ndarray, top: list[int], most: int) -> Place:
    """The place that has this mask, (vocab_size,) bools, with up to `most` of its tokens.

    First those of `top` that are allowed, which is the order of their probability; then by id.
    """
    found = numpy.flatnonzero(mask)
    others = [token for token in found[: most + len(top)].tolist() if token not in top]
    tokens = [token for token in top if mask[token]] + others
    return Place(len(found), tokens[:most])


class Allowed:
    """The places of all texts of an answer.

    The engine's masks are gone when a client hears of a token, and in replicas they are in other
    processes. So they are computed again, in another thread than the engine's.
    make: a matcher for a text. most: how many tokens of a place are listed.
    """

    def __init__(self, make: Callable[[], Matcher], most: int):
        self.make = make
        self.most = most
        self.texts: dict[int, Text] = {}

    def read(self, updates: dict[int, Update]) -> None:
        """Go on behind what is new of each text. It may take long."""
        for index, update in updates.items():
            if index not in self.texts:
                self.texts[index] = Text(self.make())
            self.texts[index].read(update, self.most)

    def take(self, index: int) -> tuple[list[Place], Place | None]:
        """The places of a text that were not taken yet, and the next one; None: it is over."""
        text = self.texts[index] if self.texts[index].next else self.texts.pop(index)
        places = text.places
        text.places = []
        return places, text.next

"""Whether drafts pay, measured while the engine runs."""

import statistics
from collections import deque

TRIAL = 16  # steps of each way; after as many more it is decided again
TERM = 256  # steps of the faster one, before both are tried again
KEPT = 64  # steps of each way that count, the newest


class Trial:
    """Steps with drafts, then as many without, then those of the way that makes more tokens/s.

    What was measured before counts in the next trial, too, and steps of the term count: a few of
    one text say little.
    """

    def __init__(self):
        self.steps = 0  # of a trial and the term after it
        self.pays = True
        self.tokens = {drafts: deque(maxlen=KEPT) for drafts in (True, False)}  # of each step
        self.seconds = {drafts: deque(maxlen=KEPT) for drafts in (True, False)}

    @property
    def drafts(self) -> bool:
        """Whether the next step has drafts."""
        return self.pays if self.steps >= 2 * TRIAL else self.steps < TRIAL

    def note(self, drafts: bool, tokens: int, seconds: float) -> None:
        """A step has made so many tokens."""
        self.tokens[drafts].append(tokens)
        self.seconds[drafts].append(seconds)
        self.steps = (self.steps + 1) % (2 * TRIAL + TERM)
        if self.steps >= 2 * TRIAL and self.steps % TRIAL == 0:
            self.pays = self.rate(True) > self.rate(False)

    def rate(self, drafts: bool) -> float:
        """Tokens/s: the mean of tokens by the median of seconds, which no single pause moves."""
        return statistics.mean(self.tokens[drafts]) / statistics.median(self.seconds[drafts])


class Trials:
    """For an engine: in which of its steps drafts pay.

    A pass over more tokens takes little longer for one row and much longer for many, so each number
    of rows has a trial of its own; in powers of two: 1, 2 to 3, 4 to 7, ...
    """

    def __init__(self):
        self.trials: dict[int, Trial] = {}
        self.drafted = False  # in the step before

    def drafts(self, rows: int) -> bool:
        """Whether to ask for drafts for so many rows."""
        return self.trials.setdefault(rows.bit_length(), Trial()).drafts

    def note(self, rows: int, drafted: bool, tokens: int, seconds: float) -> None:
        """A step of so many rows has made so many tokens.

        The first step with drafts does not count: in it a draft model reads all that was written
        without it.
        """
        if not drafted or self.drafted:
            self.trials[rows.bit_length()].note(drafted, tokens, seconds)
        self.drafted = drafted

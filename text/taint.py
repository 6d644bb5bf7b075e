"""Taint tracking for the strings of chat templates, and bounds on their work."""

import threading

from jinja2.utils import Namespace
from markupsafe import Markup

MAX_RENDERED_SIZE = 2**24  # characters or items that one operation may make
MAX_RENDER_STEPS = 2**21  # per render; a step takes about a microsecond
CHARACTERS_PER_STEP = 256  # characters copied or compared; each up to 5 bytes with its mark
SCAN_COST = 4  # cost of scanning a character, relative to copying it
ITEM_COST = 16  # cost of a list item, in characters
DICT_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS = (list, tuple, dict, set, frozenset, *DICT_VIEWS)

budget = threading.local()  # steps_left: steps left to this thread's template


class BudgetExceeded(ValueError):
    """The error for a template that writes too much or runs too long."""


def reset_budget() -> None:
    """Give this thread's template a new budget of MAX_RENDER_STEPS steps."""
    budget.steps_left = MAX_RENDER_STEPS


def charge(steps: int, characters: int = 0) -> None:
    """Charge steps, and the cost of writing characters, to the budget. Raises BudgetExceeded."""
    budget.steps_left -= steps + characters / CHARACTERS_PER_STEP
    if budget.steps_left < 0:
        raise BudgetExceeded(f"the template takes more than {MAX_RENDER_STEPS:,} steps")


def check_size(size: int) -> None:
    """Raise BudgetExceeded if an operation makes more than MAX_RENDERED_SIZE characters."""
    if size > MAX_RENDERED_SIZE:
        raise BudgetExceeded(
            f"the template writes {size:.3g} characters; at most {MAX_RENDERED_SIZE:,} are allowed"
        )


def size_of(value) -> int:
    """Return the size of a value in characters; an item of a list counts as ITEM_COST."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return ITEM_COST * len(value) if isinstance(value, CONTAINERS) else 0


def charge_nested(value) -> None:
    """Charge a step for each nested item: lists may share items, but their text does not."""
    left = [value]  # recursion takes ten times as long at some depths
    while left:
        value = left.pop()
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, dict):
            value = value.items()
        if isinstance(value, CONTAINERS):
            charge(1 + len(value))
            left.extend(value)
        else:
            charge(0, SCAN_COST * size_of(value))


class TaintedStr(str):
    """A string with a mark for each character that the template wrote.

    All other characters come from outside, as from messages and tools. An operation that is not
    overridden returns a plain str, which counts as outside text: marks may be lost, never gained.
    _mask: "1" for each character of the template, "0" for the others. The sandbox hides it.
    """

    __slots__ = ("_mask",)

    def __new__(cls, text: str, mask: str | None = None):
        result = super().__new__(cls, text)
        result._mask = "0" * len(result) if mask is None else mask
        return result

    def __str__(self):
        return self

    def __getitem__(self, key):
        return TaintedStr(super().__getitem__(key), self._mask[key])

    def __iter__(self):
        charge(len(self))
        return map(self.__getitem__, range(len(self)))

    def slices(self, parts: list[str], gap: int | None) -> list["TaintedStr"]:
        """Return parts of this string as slices of it.

        gap: number of characters between two parts; None: white space, with which no part begins.
        """
        found = []
        start = 0
        for part in parts:
            if gap is None:
                start = self.find(part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + (gap or 0)
        return found

    def lstrip(self, chars=None):
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars=None):
        return self[: len(super().rstrip(chars))]

    def strip(self, chars=None):
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix):
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix):
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep=None, maxsplit=-1):
        charge(self.count(sep) if sep else len(self) // 2)
        return self.slices(super().split(sep, maxsplit), sep and len(sep))

    def rsplit(self, sep=None, maxsplit=-1):
        charge(self.count(sep) if sep else len(self) // 2)
        return self.slices(super().rsplit(sep, maxsplit), sep and len(sep))

    def splitlines(self, keepends=False):
        charge(self.count("\n") + self.count("\r"))
        lines = super().splitlines(keepends)
        charge(len(lines))
        return self.slices(lines, 0 if keepends else None)

    def partition(self, sep):
        return tuple(self.slices(super().partition(sep), 0))

    def rpartition(self, sep):
        return tuple(self.slices(super().rpartition(sep), 0))

    def join(self, items):
        items = list(items)
        size = len(self) * len(items) + sum(len(item) for item in items if isinstance(item, str))
        check_size(size)
        charge(len(items), size)
        return TaintedStr(super().join(items), self._mask.join(map(trust_mask, items)))

    def replace(self, old, new, count=-1):
        found = self.count(old)
        check_size(len(self) + len(new) * (found if count < 0 else min(found, count)))
        if not old:  # it would insert between any two characters
            return super().replace(old, new, count)
        return as_tainted(new).join(self.split(old, count))


# Errors in templates name the type of a value, so it must look like str.
TaintedStr.__name__ = str.__name__
TaintedStr.__module__ = str.__module__


class SafeMarkup(Markup):
    """Markup from the filter `safe`, with the marks of its string."""

    _mask = None


def trust_mask(text: str) -> str:
    """Return the mask of a string; a plain str comes entirely from outside."""
    return getattr(text, "_mask", None) or "0" * len(text)


def as_tainted(text: str) -> TaintedStr:
    """Return a string as a TaintedStr, with its marks if it has any."""
    return text if isinstance(text, TaintedStr) else TaintedStr(str.__str__(text), trust_mask(text))


def trusted(text: str) -> TaintedStr:
    """Mark a string as the template's own."""
    return TaintedStr(text, "1" * len(text))


def is_trusted(value) -> bool:
    """Return whether the template wrote all characters of a string."""
    return isinstance(value, TaintedStr) and "0" not in value._mask


def join_pieces(pieces) -> TaintedStr:
    """Join pieces of text as the template writes them. Raises BudgetExceeded."""
    texts = []
    size = 0
    for piece in pieces:
        size += len(piece)
        check_size(size)
        charge(1, len(piece))
        texts.append(piece)
    return TaintedStr("".join(texts), "".join(map(trust_mask, texts)))


def stringify(value) -> str:
    """Return a value as text, as a template writes it."""
    if isinstance(value, SafeMarkup):
        return as_tainted(value)
    if not isinstance(value, str):
        charge_nested(value)
    return str(value)

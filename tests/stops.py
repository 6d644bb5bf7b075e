"""Texts that end before a stop string, by hand."""

import codecs
from types import SimpleNamespace


def cut(text, stops) -> tuple[str, bool]:
    """A whole text up to the first stop string that is complete, and whether there is one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def characters(data: bytes) -> str:
    """What bytes say for certain: all but an incomplete character at their end."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def beginning(text, stops) -> str:
    """The longest end of a text that a stop string begins with, and is longer than."""
    ends = [text[start:] for start in range(len(text))]
    return next(
        (end for end in ends if any(stop != end and stop.startswith(end) for stop in stops)), ""
    )


def encoding_of(pieces):
    """A vocabulary: what each id stands for; None for an id without text."""
    table = {token: piece for token, piece in enumerate(pieces) if piece is not None}
    return SimpleNamespace(decode_single_token_bytes=table.__getitem__)

"""Texts that end before a stop string, by hand."""

import codecs
from types import SimpleNamespace


def cut(text, stops, after: int = 0) -> tuple[str, bool]:
    """Cut a text before the first stop string that ends after so many characters, if any."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def characters(data: bytes) -> str:
    """Decode bytes, but for an incomplete character at their end."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def beginning(text, stops) -> str:
    """Return the longest end of a text that a stop string begins with, and is longer than."""
    ends = [text[start:] for start in range(len(text))]
    return next(
        (end for end in ends if any(stop != end and stop.startswith(end) for stop in stops)), ""
    )


def encoding_of(pieces):
    """Return an encoding with these token bytes; None for an id without text."""
    table = {token: piece for token, piece in enumerate(pieces) if piece is not None}
    return SimpleNamespace(decode_single_token_bytes=table.__getitem__)

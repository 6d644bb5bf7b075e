"""Token ids to text as they come: whole characters, up to a stop string."""

import codecs
import copy
from collections.abc import Mapping

from text.tokenizer import Encoding


class IncrementalDetokenizer:
    """A streaming detokenizer that emits whole characters.

    skip_ids: tokens without output. texts: other texts for some tokens, by id.
    """

    def __init__(
        self,
        encoding: Encoding,
        skip_ids: tuple[int, ...] = (),
        texts: Mapping[int, str] | None = None,
    ):
        self.encoding = encoding
        self.skip_ids = frozenset(skip_ids)
        self.texts = texts or {}
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that this token completes; bytes of an incomplete character wait."""
        if token in self.texts:
            return self.decoder.decode(b"", final=True) + self.texts[token]
        if token in self.skip_ids:
            return ""
        try:
            data = self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a padded vocabulary has ids without text
            data = b"\xff"  # invalid in UTF-8, so it prints as U+FFFD
        return self.decoder.decode(data)

    def end(self) -> str:
        """Return the rest of the text: U+FFFD for an incomplete character."""
        return self.decoder.decode(b"", final=True)


class StopStringDetokenizer(IncrementalDetokenizer):
    """A detokenizer that ends before the first stop string.

    The first stop string is the one completed first, and the longest of several. Text is held back
    only while it may begin a stop string. Strings are compared by characters, so token boundaries
    do not matter. stopped: whether one was found; later tokens print nothing. A stop string
    completed within the first min_tokens tokens does not count.
    """

    def __init__(
        self,
        encoding: Encoding,
        skip_ids: tuple[int, ...] = (),
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        texts: Mapping[int, str] | None = None,
    ):
        super().__init__(encoding, skip_ids, texts)
        self.stop = stop
        self.min_tokens_left = min_tokens  # number of coming tokens in which no string counts
        self.stop_buffer = ""
        self.stopped = False

    def copy(self) -> "StopStringDetokenizer":
        """Return an independent copy of the current state."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        return other

    def add(self, token: int) -> str:
        text = self.release_safe_text(super().add(token))
        self.min_tokens_left = max(self.min_tokens_left - 1, 0)
        return text

    def end(self) -> str:
        text = self.release_safe_text(super().end()) + self.stop_buffer
        self.stop_buffer = ""
        return text

    def release_safe_text(self, text: str) -> str:
        """Append text to the buffer, and release what cannot belong to a stop string."""
        for character in "" if self.stopped else text:
            self.stop_buffer += character
            found = max(
                (len(stop) for stop in self.stop if self.stop_buffer.endswith(stop)), default=0
            )
            if found and not self.min_tokens_left:
                safe = self.stop_buffer[:-found]
                self.stop_buffer = ""
                self.stopped = True
                return safe
        partial_length = max(
            (partial_stop_length(self.stop_buffer, stop) for stop in self.stop), default=0
        )
        safe = len(self.stop_buffer) - partial_length
        text = self.stop_buffer[:safe]
        self.stop_buffer = self.stop_buffer[safe:]
        return text


def partial_stop_length(text: str, string: str) -> int:
    """Return the length of the longest end of a text that begins, but is not, this string."""
    sizes = range(min(len(text), len(string) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)

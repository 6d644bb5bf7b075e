"""Token ids to text as they come: whole characters."""

import codecs

from text.tokenizer import Encoding


class IncrementalDetokenizer:
    """A streaming detokenizer that emits whole characters. skip_ids: tokens without output."""

    def __init__(self, encoding: Encoding, skip_ids: tuple[int, ...] = ()):
        self.encoding = encoding
        self.skip_ids = skip_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that this token completes; bytes of an incomplete character wait."""
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

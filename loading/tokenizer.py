"""Text to token ids and back: one `Encoding`, whichever model it belongs to."""

import codecs
from pathlib import Path

import tiktoken

from errors import UserError
from loading.checkpoint import read_json
from loading.load import HUB_NAMES, parse_name
from loading.tokenizer_checks import PATTERNS, byte_of_character, check_tokenizer

EOT = "<|endoftext|>"


class Encoding(tiktoken.Encoding):
    """tiktoken's, with an error that a user can put right."""

    def encode(self, text: str, **special) -> list[int]:
        """Call tiktoken's `encode`. Raises UserError for a million blanks in a row, its limit."""
        try:
            return super().encode(text, **special)
        except ValueError as error:
            if "regex" not in str(error).lower():
                raise
            raise UserError("the text has a million blanks in a row; fewer are supported") from None

    def encode_ordinary(self, text: str) -> list[int]:
        # Not tiktoken's own, which panics where its `encode` raises an error.
        return self.encode(text, disallowed_special=())


def load_encoding(name, vocab_size: int) -> Encoding:
    """The encoding of a model's text.

    `encode(text, allowed_special="all")` takes `<|endoftext|>` in it as the token it is.

    name: as for `load_model`. A directory needs a `tokenizer.json` (byte-level BPE, as GPT-2's);
    `gpt2` and its sizes use tiktoken's own; `random:` models speak no language, so their ids from
    256 on print as numbers. vocab_size: the model's; it may be larger than the tokenizer's, as in
    models whose vocabulary is padded to a round number. Raises UserError if it is smaller, or there
    is no tokenizer, or one of another kind.
    """
    source = parse_name(name)
    if source.kind == "random":
        encoding = numbers_encoding(source.label, vocab_size)
    elif source.kind == "hub" and source.name in HUB_NAMES:
        encoding = gpt2_encoding()
    else:
        encoding = read_tokenizer_json(source.file("tokenizer.json"))
    if encoding.n_vocab > vocab_size:
        raise UserError(
            f"{source.name}: the tokenizer has {encoding.n_vocab} tokens,"
            f" the model's vocab_size is {vocab_size}"
        )
    return encoding


def numbers_encoding(name: str, vocab_size: int) -> Encoding:
    """Bytes, then numbers, and `<|endoftext|>` last."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b" %d" % i: i for i in range(256, vocab_size - 1)}
    pattern = PATTERNS["GPT-2"]
    special = {EOT: vocab_size - 1}
    return Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def gpt2_encoding() -> Encoding:
    """GPT-2's, which tiktoken downloads on first use. Raises UserError if it cannot."""
    try:
        found = tiktoken.get_encoding("gpt2")
    except Exception as error:  # offline, it is one of the HTTP library
        raise UserError(
            f"GPT-2's vocabulary could not be fetched: {type(error).__name__}"
        ) from None
    return Encoding(
        found.name,
        pat_str=found._pat_str,
        mergeable_ranks=found._mergeable_ranks,
        special_tokens=found._special_tokens,
    )


def read_tokenizer_json(file: Path) -> Encoding:
    """An Encoding from Hugging Face's `tokenizer.json`.

    In a byte-level BPE a token's id grows with the rank of the merge that makes it, and tiktoken
    merges by the rank of the result: so the vocabulary, decoded to bytes, is tiktoken's rank table.
    Raises UserError for other tokenizers.
    """
    raw = read_json(file)
    check_tokenizer(file, raw)
    vocabulary = raw["model"]["vocab"]
    special = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    to_byte = byte_of_character()
    ranks = {
        bytes(to_byte[c] for c in token): rank
        for token, rank in vocabulary.items()
        if token not in special
    }
    return Encoding(
        str(file.parent), pat_str=PATTERNS["GPT-2"], mergeable_ranks=ranks, special_tokens=special
    )


class TextStream:
    """Tokens in, text out, as soon as whole characters are there. skip: what prints nothing."""

    def __init__(self, encoding: tiktoken.Encoding, skip: tuple[int, ...] = ()):
        self.encoding = encoding
        self.skip = skip
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that is complete with this token; bytes of an incomplete character wait."""
        if token in self.skip:
            return ""
        try:
            data = self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a padded vocabulary has ids without text
            data = b"\xff"  # in no UTF-8 text, so it prints as U+FFFD
        return self.decoder.decode(data)

    def end(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        return self.decoder.decode(b"", final=True)

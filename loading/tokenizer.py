"""Text to token ids and back: one `Encoding`, whichever model it belongs to."""

import codecs
import copy
import unicodedata
from itertools import groupby
from pathlib import Path

import tiktoken

from errors import UserError
from loading.byte_level import PATTERNS, byte_of_character
from loading.checkpoint import read_json
from loading.load import HUB_NAMES, parse_name
from loading.tokenizer_checks import check_tokenizer, has_template

EOT = "<|endoftext|>"


class Encoding(tiktoken.Encoding):
    """tiktoken's, whose texts begin with a prefix, such as Llama 3's `<|begin_of_text|>`.

    nfc: texts get normal form C first: e and U+0301 become the one letter é. (The tokenizers
    library knows the characters of Unicode 9, Python those of its newer `unidata_version`.)
    """

    def __init__(self, *args, prefix: tuple[int, ...] = (), nfc: bool = False, **arguments):
        super().__init__(*args, **arguments)
        self.prefix = prefix
        self.nfc = nfc

    def encode(self, text: str, **special) -> list[int]:
        """Encode the prefix and a text. A text that begins with the prefix gets no second one.

        Such a text comes from a chat template. Raises UserError as `encode_plain`.
        """
        if self.nfc and not unicodedata.is_normalized("NFC", text):
            tokens = self.encode_normalized(text, **special)
        else:
            tokens = self.encode_plain(text, **special)
        prefix = list(self.prefix)
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    def encode_ordinary(self, text: str) -> list[int]:
        # Not tiktoken's own, which panics where its `encode` raises an error.
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        return self.encode_plain(text, disallowed_special=())

    def encode_plain(self, text: str, **special) -> list[int]:
        """Call tiktoken's `encode`. Raises UserError for a million blanks in a row, its limit."""
        try:
            return super().encode(text, **special)
        except ValueError as error:
            if "regex" not in str(error).lower():
                raise
            raise UserError("the text has a million blanks in a row; fewer are supported") from None

    def encode_normalized(self, text: str, **special) -> list[int]:
        """Added tokens are found in the text as it is; what is between gets its normal form."""
        tokens = []
        for added, group in groupby(self.encode_plain(text, **special), self.is_special_token):
            piece = list(group)
            tokens += piece if added else self.encode_ordinary(self.decode(piece))
        return tokens


def load_encoding(name, vocab_size: int) -> Encoding:
    """The encoding of a model's text.

    `encode(text, allowed_special="all")` takes `<|endoftext|>` in it as the token it is.

    name: as for `load_model`. A directory needs a `tokenizer.json` (as GPT-2, Llama 3 or Qwen2);
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
    raw["pre_tokenizer"] = one_step(raw.get("pre_tokenizer"), "pretokenizers")
    raw["post_processor"] = one_step(raw.get("post_processor"), "processors")
    check_tokenizer(file, raw)
    vocabulary = raw["model"]["vocab"]
    special = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    to_byte = byte_of_character()
    ranks = {
        bytes(to_byte[c] for c in token): rank
        for token, rank in vocabulary.items()
        if token not in special
    }
    pattern = raw["pre_tokenizer"].get("pattern", {"Regex": PATTERNS["GPT-2"]})
    step = raw["post_processor"]
    first = step["single"][:-1] if has_template(step) else []
    return Encoding(
        str(file.parent),
        pat_str=pattern["Regex"],
        mergeable_ranks=ranks,
        special_tokens=special,
        prefix=tuple(special[piece["SpecialToken"]["id"]] for piece in first),
        nfc=raw.get("normalizer") is not None,
    )


def one_step(part, key: str):
    """A part of a `tokenizer.json`, in which a Sequence of steps is one step with all their fields.

    key: where a Sequence has its steps. The type of the one names theirs: "Split, ByteLevel".
    """
    steps = part.get(key) if isinstance(part, dict) and part.get("type") == "Sequence" else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return part
    fields = {name: value for step in steps for name, value in step.items()}
    return fields | {"type": ", ".join(str(step.get("type")) for step in steps)}


class TextStream:
    """Tokens in, text out, as soon as whole characters are there. skip: what prints nothing."""

    def __init__(self, encoding: Encoding, skip: tuple[int, ...] = ()):
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


class StopStream(TextStream):
    """A TextStream that ends before the first stop string.

    That is the one that is complete first, the longest of several. Text is held back only while it
    may be the beginning of one. It is compared as characters, so it does not matter how tokens cut
    it. stopped: whether one was found; all after it prints nothing.
    """

    def __init__(self, encoding: Encoding, skip: tuple[int, ...] = (), stop: tuple[str, ...] = ()):
        super().__init__(encoding, skip)
        self.stop = stop
        self.held = ""
        self.stopped = False

    def copy(self) -> "StopStream":
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        return other

    def add(self, token: int) -> str:
        return self.release(super().add(token))

    def end(self) -> str:
        text = self.release(super().end()) + self.held
        self.held = ""
        return text

    def release(self, text: str) -> str:
        """What is certain to be printed, of the text that is held and this."""
        for character in "" if self.stopped else text:
            self.held += character
            found = max((len(stop) for stop in self.stop if self.held.endswith(stop)), default=0)
            if found:
                certain = self.held[:-found]
                self.held = ""
                self.stopped = True
                return certain
        waiting = 0  # characters at the end that may begin a stop string
        for stop in self.stop:
            for size in range(1, min(len(stop), len(self.held) + 1)):
                if self.held.endswith(stop[:size]):
                    waiting = max(waiting, size)
        certain = len(self.held) - waiting
        text = self.held[:certain]
        self.held = self.held[certain:]
        return text

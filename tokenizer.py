"""Text to token ids and back: one `Encoding`, whichever model it belongs to."""

import codecs
from itertools import pairwise, product
from pathlib import Path

import tiktoken

from checkpoint import check_values, read_json
from errors import UserError
from load import HUB_NAMES, parse_name

EOT = "<|endoftext|>"
# GPT-2 splits text by this pattern before it merges bytes (openai/gpt-2, encoder.py).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

SUPPORTED = {  # of a tokenizer.json: what keeps our ids equal to those of the tokenizers library
    "normalizer": (None,),
    "pre_tokenizer.type": ("ByteLevel",),
    "pre_tokenizer.add_prefix_space": (False,),
    "pre_tokenizer.use_regex": (True,),
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
    "model.ignore_merges": (False,),
    "post_processor.type": (None, "ByteLevel", "TemplateProcessing"),
    # A template that adds no token.
    "post_processor.single": (None, [{"Sequence": {"id": "A", "type_id": 0}}]),
    "decoder.type": ("ByteLevel",),
}


class Encoding(tiktoken.Encoding):
    """tiktoken's, with one error for what its pattern does not take."""

    def encode(self, text: str, **special) -> list[int]:
        """As tiktoken's. Raises UserError for a million blanks in a row, its limit."""
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
    pattern = PATTERN
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
    check_values(file, raw, SUPPORTED)
    try:
        vocabulary = raw["model"]["vocab"]
        added = raw.get("added_tokens") or []
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge
            for merge in raw["model"]["merges"]
        ]
        made = [a + b for a, b in merges]
        special = {token["content"]: token["id"] for token in added}
        new = [token["id"] for token in added if token["content"] not in vocabulary]
        ids = [*vocabulary.values(), *new]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{file}: not a Hugging Face tokenizer") from None
    is_whole = all(type(number) is int for number in ids)
    if not is_whole or sorted(vocabulary.values()) + new != list(range(len(ids))):
        raise UserError(
            f"{file}: the ids are not 0 to {len(ids) - 1}, once each,"
            " those of the added tokens last"
        )
    check_added(file, added, vocabulary)
    to_byte = byte_of_character()
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    if made != tokens[256:] or not all(is_last_merge(a, b, rank, merges) for a, b in merges):
        raise UserError(
            f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids"
        )
    ranks = {bytes(to_byte[c] for c in token): vocabulary[token] for token in tokens}
    name = str(file.parent)
    return Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def check_added(file: Path, added: list[dict], vocabulary: dict[str, int]) -> None:
    """Raise UserError if tiktoken would not find the added tokens where the library finds them."""
    plain = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
    for token in added:
        content = token["content"]
        check_values(f"{file}: added token {content!r}", token, plain)
        if not is_text(content) or vocabulary.get(content, token["id"]) != token["id"]:
            raise UserError(
                f"{file}: added token {content!r} is empty, no text,"
                " or has another id in the vocabulary"
            )
    contents = {token["content"] for token in added}
    if len(contents) < len(added):
        raise UserError(f"{file}: an added token is there twice")
    for a, b in pairwise(sorted(contents)):
        if b.startswith(a):  # the library takes the longer one, tiktoken any
            raise UserError(
                f"{file}: added token {b!r} begins with another one, {a!r}; that is not supported"
            )
    # The library looks for the others first; tiktoken takes the left one of two that overlap.
    late = {token["content"] for token in added if token.get("normalized")}
    for a, b in product(sorted(late), sorted(contents - late)):
        if any(a.startswith(b, i) or b.startswith(a[i:]) for i in range(1, len(a))):
            raise UserError(
                f"{file}: added token {a!r} is normalized and overlaps {b!r}; that is not supported"
            )


def is_text(content) -> bool:
    """Whether it is text that UTF-8 can write, which a lone surrogate is not, and not empty."""
    return isinstance(content, str) and content.encode("utf-8", "ignore").decode() == content != ""


def is_last_merge(a: str, b: str, rank: dict[str, int], merges: list) -> bool:
    """Whether `a` and `b` are what the merges before theirs leave of the text a + b.

    Hugging Face merges only the pairs listed, tiktoken any two parts that make a token. Both give
    the same if no earlier merge crosses the boundary between `a` and `b`. So go back in time until
    bytes meet there: take the newer of the two parts apart, and see whether those that meet now had
    a merge of their own before it was made. rank: of each token; that of a merge's result is 256
    and more.
    """
    before = rank[a + b]
    if max(rank.get(a, before), rank.get(b, before)) >= before:
        return False  # a part that does not exist yet
    while max(rank[a], rank[b]) >= 256:
        if rank[a] > rank[b]:
            before = rank[a]
            a = merges[rank[a] - 256][1]
        else:
            # Of two equal parts the left one is made first, and so is the boundary's merge if it
            # has this rank.
            before = rank[b] + 1
            b = merges[rank[b] - 256][0]
        if rank.get(a + b, before) < before:
            return False
    return True


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2 writes a printable byte as itself and the others, in order, as the characters from U+0100
    on, so that no token contains white space (openai/gpt-2, encoder.py).
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


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

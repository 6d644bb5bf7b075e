"""Text to token ids and back: one `tiktoken.Encoding`, whichever model it belongs to."""

import codecs
from itertools import pairwise
from pathlib import Path

import tiktoken

from checkpoint import HUB_NAMES, UserError, check_values, parse_name, read_json

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
    "post_processor.single": (None, [{"Sequence": {"id": "A", "type_id": 0}}]),  # a template that adds no token
    "decoder.type": ("ByteLevel",),
}


def load_encoding(name, vocab_size: int) -> tiktoken.Encoding:
    """The encoding of a model's text; `encode(text, allowed_special="all")` takes `<|endoftext|>` as the token it is.

    name: as for `Model.from_pretrained`. A directory needs a `tokenizer.json` (byte-level BPE, as GPT-2's); `gpt2` and
    its sizes use tiktoken's own; `random:` models speak no language, so their ids from 256 on print as numbers.
    vocab_size: the model's; it may be larger than the tokenizer's, as in models whose vocabulary is padded to a round
    number. Raises UserError if it is smaller, or there is no tokenizer, or one of another kind.
    """
    source = parse_name(name)
    if source.kind == "random":
        ranks = {bytes([i]): i for i in range(256)} | {b" %d" % i: i for i in range(256, vocab_size - 1)}
        encoding = tiktoken.Encoding(
            source.label, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={EOT: vocab_size - 1}
        )
    elif source.kind == "hub" and name in HUB_NAMES:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # it is downloaded on first use; offline, the error is that of the HTTP library
            raise UserError(f"GPT-2's vocabulary could not be fetched: {type(error).__name__}") from None
    else:
        encoding = read_tokenizer_json(source.file("tokenizer.json"))
    if encoding.n_vocab > vocab_size:
        raise UserError(f"{name}: the tokenizer has {encoding.n_vocab} tokens, the model's vocab_size is {vocab_size}")
    return encoding


def read_tokenizer_json(file: Path) -> tiktoken.Encoding:
    """An Encoding from Hugging Face's `tokenizer.json`.

    In a byte-level BPE a token's id grows with the rank of the merge that makes it, and tiktoken merges by the rank of
    the result: so the vocabulary, decoded to bytes, is tiktoken's rank table. Raises UserError for other tokenizers.
    """
    raw = read_json(file)
    check_values(file, raw, SUPPORTED)
    try:
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or []
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in raw["model"]["merges"]]
        made = [a + b for a, b in merges]
        special = {token["content"]: token["id"] for token in added}
        new = [token["id"] for token in added if token["content"] not in vocabulary]
        ids = [*vocabulary.values(), *new]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{file}: not a Hugging Face tokenizer") from None
    if not all(type(number) is int for number in ids) or sorted(vocabulary.values()) + new != list(range(len(ids))):
        raise UserError(f"{file}: the ids are not 0 to {len(ids) - 1}, once each, those of the added tokens last")
    for token in added:
        content, plain = token["content"], {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
        check_values(f"{file}: added token {content!r}", token, plain)
        if content == "" or not isinstance(content, str) or vocabulary.get(content, token["id"]) != token["id"]:
            raise UserError(f"{file}: added token {content!r} is empty, no text, or has another id in the vocabulary")
    for a, b in pairwise(sorted(special)):
        if b.startswith(a):  # the library takes the longer one, tiktoken any
            raise UserError(f"{file}: added token {b!r} begins with another one, {a!r}; that is not supported")
    to_byte = byte_of_character()
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    if made != tokens[256:] or not all(is_last_merge(a, b, rank, merges) for a, b in merges):
        raise UserError(f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids")
    ranks = {bytes(to_byte[c] for c in token): vocabulary[token] for token in tokens}
    return tiktoken.Encoding(str(file.parent), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def is_last_merge(a: str, b: str, rank: dict[str, int], merges: list) -> bool:
    """Whether `a` and `b` are what the merges before theirs leave of the text a + b.

    Hugging Face merges only the pairs listed, tiktoken any two parts that make a token. Both give the same if no
    earlier merge crosses the boundary between `a` and `b`. So go back in time until bytes meet there: take the newer of
    the two parts apart, and see whether those that meet now had a merge of their own before it was made.
    rank: of each token; that of a merge's result is 256 and more.
    """
    before = rank[a + b]
    if max(rank.get(a, before), rank.get(b, before)) >= before:
        return False  # a part that does not exist yet
    while max(rank[a], rank[b]) >= 256:
        if rank[a] > rank[b]:
            before, a = rank[a], merges[rank[a] - 256][1]
        else:  # of two equal parts the left one is made first, and so is the boundary's merge if it has this rank
            before, b = rank[b] + 1, merges[rank[b] - 256][0]
        if rank.get(a + b, before) < before:
            return False
    return True


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2 writes a printable byte as itself and the others, in order, as the characters from U+0100 on, so that no
    token contains white space (openai/gpt-2, encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TextStream:
    """Tokens in, text out, as soon as whole characters are there. skip: tokens that print nothing."""

    def __init__(self, encoding: tiktoken.Encoding, skip: tuple[int, ...] = ()):
        self.encoding = encoding
        self.skip = skip
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that is complete with this token; bytes of an incomplete character wait for the next one."""
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

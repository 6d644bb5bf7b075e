"""Text to token ids and back: one `tiktoken.Encoding`, whichever model it belongs to."""

import codecs
import reprlib
import unicodedata
from itertools import chain, groupby, pairwise, product
from pathlib import Path

import tiktoken

from checkpoint import HUB_NAMES, UserError, check_values, parse_name, read_json

EOT = "<|endoftext|>"
PATTERNS = {  # what a text is split by before bytes are merged
    "GPT-2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",  # openai/gpt-2, encoder.py
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

SUPPORTED = {  # of a tokenizer.json: what keeps our ids equal to those of the tokenizers library
    "normalizer": (None, {"type": "NFC"}),
    "pre_tokenizer.type": ("ByteLevel", "Split, ByteLevel"),
    "pre_tokenizer.behavior": ("Isolated",),
    "pre_tokenizer.invert": (False,),
    "pre_tokenizer.add_prefix_space": (False,),
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
    "model.ignore_merges": (False, True),
    "post_processor.type": (None, "ByteLevel", "TemplateProcessing", "ByteLevel, TemplateProcessing"),
    "decoder.type": ("ByteLevel",),
}


def load_encoding(name, vocab_size: int) -> tiktoken.Encoding:
    """The encoding of a model's text; `encode(text, allowed_special="all")` takes `<|endoftext|>` as the token it is.

    name: as for `Model.from_pretrained`. A directory needs a `tokenizer.json` (as GPT-2, Llama 3 or Qwen2); `gpt2` and
    its sizes use tiktoken's own; `random:` models speak no language, so their ids from 256 on print as numbers.
    vocab_size: the model's; it may be larger than the tokenizer's, as in models whose vocabulary is padded to a round
    number. Raises UserError if it is smaller, or there is no tokenizer, or one of another kind.
    """
    source = parse_name(name)
    if source.kind == "random":
        ranks = {bytes([i]): i for i in range(256)} | {b" %d" % i: i for i in range(256, vocab_size - 1)}
        encoding = tiktoken.Encoding(
            source.label, pat_str=PATTERNS["GPT-2"], mergeable_ranks=ranks, special_tokens={EOT: vocab_size - 1}
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


class Encoding(tiktoken.Encoding):
    """An Encoding whose texts begin with a prefix, such as Llama 3's `<|begin_of_text|>`, or are in normal form C."""

    def __init__(self, *args, prefix: tuple[int, ...], nfc: bool, **arguments):
        super().__init__(*args, **arguments)
        self.prefix, self.nfc = prefix, nfc

    def encode_ordinary(self, text: str) -> list[int]:
        """As tiktoken's, of the normal form if there is one: e and U+0301 become the one letter é.

        The tokenizers library knows the characters of Unicode 9, Python those of its newer `unidata_version`.
        """
        return super().encode_ordinary(unicodedata.normalize("NFC", text) if self.nfc else text)

    def encode(self, text: str, **special) -> list[int]:
        """As tiktoken's, after the prefix. A text that begins with it, as one from a chat template, gets no second."""
        tokens, prefix = super().encode(text, **special), list(self.prefix)
        if self.nfc and not unicodedata.is_normalized("NFC", text):
            # Added tokens are found in the text as it is. Only then, what is between them gets its normal form.
            pieces = [(added, [*piece]) for added, piece in groupby(tokens, self.is_special_token)]
            pieces = [piece if added else self.encode_ordinary(self.decode(piece)) for added, piece in pieces]
            tokens = [*chain.from_iterable(pieces)]
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens


def read_tokenizer_json(file: Path) -> Encoding:
    """An Encoding from Hugging Face's `tokenizer.json`.

    In a byte-level BPE a token's id grows with the rank of the merge that makes it, and tiktoken merges by the rank of
    the result: so the vocabulary, decoded to bytes, is tiktoken's rank table. Raises UserError for other tokenizers.
    """
    raw = read_json(file)
    for key, steps in ("pre_tokenizer", "pretokenizers"), ("post_processor", "processors"):
        raw[key] = one_step(raw.get(key), steps)
    check_values(file, raw, SUPPORTED)
    pattern = read_pattern(file, raw["pre_tokenizer"])
    try:
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or []
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in raw["model"]["merges"]]
        made = [a + b for a, b in merges]
        special = {token["content"]: token["id"] for token in added}
        new = [token["id"] for token in added if token["content"] not in vocabulary]
        ids = [*vocabulary.values(), *new]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{file}: not a Hugging Face tokenizer") from None
    if len(special) < len(added):
        raise UserError(f"{file}: an added token is there twice")
    if not all(type(number) is int for number in ids) or sorted(vocabulary.values()) + new != list(range(len(ids))):
        raise UserError(f"{file}: the ids are not 0 to {len(ids) - 1}, once each, those of the added tokens last")
    nfc = raw.get("normalizer") is not None
    for token in added:
        content, plain = token["content"], {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
        plain["normalized"] = (False,) if nfc else (False, True)  # a normalized one is found in the normal form
        check_values(f"{file}: added token {content!r}", token, plain)
        if content == "" or not isinstance(content, str) or vocabulary.get(content, token["id"]) != token["id"]:
            raise UserError(f"{file}: added token {content!r} is empty, no text, or has another id in the vocabulary")
    for a, b in pairwise(sorted(special)):
        if b.startswith(a):  # the library takes the longer one, tiktoken any
            raise UserError(f"{file}: added token {b!r} begins with another one, {a!r}; that is not supported")
    late = [token["content"] for token in added if token.get("normalized")]  # the library looks for the others first
    for a, b in product(late, special.keys() - late):
        if any(a.startswith(b, i) or b.startswith(a[i:]) for i in range(1, len(a))):  # tiktoken takes the left one
            raise UserError(f"{file}: added token {a!r} is normalized and overlaps {b!r}; that is not supported")
    to_byte = byte_of_character()
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    one_each = made == tokens[256:] and all(is_last_merge(a, b, rank, merges) for a, b in merges)
    if not one_each and not (raw["model"].get("ignore_merges") and are_all_merges(merges, tokens, rank)):
        raise UserError(f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids")
    ranks = {bytes(to_byte[c] for c in token): vocabulary[token] for token in tokens}
    prefix = read_prefix(file, raw["post_processor"], special)
    return Encoding(
        str(file.parent), pat_str=pattern, mergeable_ranks=ranks, special_tokens=special, prefix=prefix, nfc=nfc
    )


def one_step(part, key: str):
    """A part of a `tokenizer.json`. A Sequence, whose steps are under the key, becomes one step that has all of theirs.

    Its type names theirs, such as "Split, ByteLevel".
    """
    steps = part.get(key) if isinstance(part, dict) and part.get("type") == "Sequence" else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return part
    fields = {name: value for step in steps for name, value in step.items()}
    return fields | {"type": ", ".join(str(step.get("type")) for step in steps)}


def read_pattern(file: Path, step: dict) -> str:
    """The pattern that a pre_tokenizer splits texts by: that of its Split, or GPT-2's for a ByteLevel alone.

    Raises UserError for one that is not in PATTERNS, and if ByteLevel would split once more.
    """
    alone = step.get("type", "ByteLevel") == "ByteLevel"
    check_values(file, {"pre_tokenizer": {"use_regex": True} | step}, {"pre_tokenizer.use_regex": (alone,)})
    found = step.get("pattern", {"Regex": PATTERNS["GPT-2"]})
    for pattern in PATTERNS.values():
        if found == {"Regex": pattern}:
            return pattern
    names = " or ".join(PATTERNS)
    raise UserError(f"{file}: pre_tokenizer.pattern is {repr(found):.200}; supported is that of {names}")


def read_prefix(file: Path, step, special: dict[str, int]) -> tuple[int, ...]:
    """The tokens that a post_processor puts before a text. Raises UserError for a template that does anything else."""
    if not isinstance(step, dict) or step.get("type") in (None, "ByteLevel"):
        return ()
    single, text = step.get("single"), {"Sequence": {"id": "A", "type_id": 0}}
    try:
        names = [piece["SpecialToken"]["id"] for piece in single[:-1]]
        prefix = tuple(special[name] for name in names)
        if single[-1] == text and all(step["special_tokens"][name]["ids"] == [special[name]] for name in names):
            return prefix
    except (LookupError, TypeError):
        pass
    raise UserError(f"{file}: post_processor.single is {reprlib.repr(single)}; supported is added tokens, then A")


def are_all_merges(merges: list, tokens: list[str], rank: dict[str, int]) -> bool:
    """Whether the merges are all pairs of tokens that make a token, in the order of the tokens made, as for Llama 3.

    Then Hugging Face, as tiktoken, merges any two parts that make a token, those of the lowest rank first. The order of
    several pairs that make one token does not matter, because texts only ever have one of them: nothing was merged
    across the ends of the two parts, so they are what the token's own text, merged by itself, is when two are left.
    Tokens that no merges reach are found as whole pieces, which is what ignore_merges means.
    """
    pairs = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    pairs = [(a, b) for a, b in pairs if a in rank and b in rank]
    return [a + b for a, b in merges] == [a + b for a, b in pairs] and set(merges) == set(pairs)


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


class StopStream(TextStream):
    """A TextStream that ends before the first stop string: the one that is complete first, the longest of several.

    Text is held back only while it may be the beginning of one. It is compared as characters, so it does not matter how
    tokens cut it. stopped: whether one was found; all after it prints nothing.
    """

    def __init__(self, encoding: tiktoken.Encoding, skip: tuple[int, ...] = (), stop: tuple[str, ...] = ()):
        super().__init__(encoding, skip)
        self.stop, self.held, self.stopped = stop, "", False

    def add(self, token: int) -> str:
        return self.release(super().add(token))

    def end(self) -> str:
        text, held, self.held = self.release(super().end()), self.held, ""
        return text + held

    def release(self, text: str) -> str:
        """What is certain to be printed, of the text that is held and this."""
        for character in "" if self.stopped else text:
            self.held += character
            found = max((len(stop) for stop in self.stop if self.held.endswith(stop)), default=0)
            if found:
                certain, self.held, self.stopped = self.held[:-found], "", True
                return certain
        sizes = ((stop, size) for stop in self.stop for size in range(1, min(len(stop), len(self.held) + 1)))
        certain = len(self.held) - max((size for stop, size in sizes if self.held.endswith(stop[:size])), default=0)
        text, self.held = self.held[:certain], self.held[certain:]
        return text

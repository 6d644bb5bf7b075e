"""Text to token ids and back: one `Encoding`, whichever model it belongs to."""

import codecs
import copy
import reprlib
import unicodedata
from itertools import groupby, pairwise, product
from pathlib import Path

import tiktoken

from errors import UserError
from loading.checkpoint import check_values, read_json
from loading.load import HUB_NAMES, parse_name

EOT = "<|endoftext|>"
PATTERNS = {  # what a text is split by before bytes are merged
    # openai/gpt-2, encoder.py
    "GPT-2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
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
    "post_processor.type": (
        None,
        "ByteLevel",
        "TemplateProcessing",
        "ByteLevel, TemplateProcessing",
    ),
    "decoder.type": ("ByteLevel",),
}


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
        """As tiktoken's, after the prefix. A text that begins with it gets no second one.

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
        """As tiktoken's `encode`. Raises UserError for a million blanks in a row, its limit."""
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
    check_values(file, raw, SUPPORTED)
    pattern = read_pattern(file, raw["pre_tokenizer"])
    try:
        vocabulary = raw["model"]["vocab"]
        added = raw.get("added_tokens") or []
        merges = [
            tuple(merge.split(" ") if isinstance(merge, str) else merge)
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
    nfc = raw.get("normalizer") is not None
    check_added(file, added, vocabulary, nfc)
    to_byte = byte_of_character()
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    one_each = made == tokens[256:] and all(is_last_merge(a, b, rank, merges) for a, b in merges)
    is_ranks = raw["model"].get("ignore_merges") and are_all_merges(merges, tokens, rank)
    if not one_each and not is_ranks:
        raise UserError(
            f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids"
        )
    for token in tokens:
        if not set(token) <= set(to_byte):
            raise UserError(f"{file}: token {token!r} has characters that stand for no byte")
    ranks = {bytes(to_byte[c] for c in token): vocabulary[token] for token in tokens}
    return Encoding(
        str(file.parent),
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens=special,
        prefix=read_prefix(file, raw["post_processor"], special),
        nfc=nfc,
    )


def check_added(file: Path, added: list[dict], vocabulary: dict[str, int], nfc: bool) -> None:
    """Raise UserError if tiktoken would not find the added tokens where the library finds them.

    nfc: whether texts get a normal form, in which the library looks for normalized tokens.
    """
    plain = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
    plain["normalized"] = (False,) if nfc else (False, True)
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


def one_step(part, key: str):
    """A part of a `tokenizer.json`, in which a Sequence of steps is one step with all their fields.

    key: where a Sequence has its steps. The type of the one names theirs: "Split, ByteLevel".
    """
    steps = part.get(key) if isinstance(part, dict) and part.get("type") == "Sequence" else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return part
    fields = {name: value for step in steps for name, value in step.items()}
    return fields | {"type": ", ".join(str(step.get("type")) for step in steps)}


def read_pattern(file: Path, step: dict) -> str:
    """The pattern that a pre_tokenizer splits by: its Split's, or GPT-2's for a ByteLevel alone.

    Raises UserError for one that is not in PATTERNS, and if ByteLevel would split once more.
    """
    alone = step.get("type", "ByteLevel") == "ByteLevel"
    step = {"use_regex": True} | step
    check_values(file, {"pre_tokenizer": step}, {"pre_tokenizer.use_regex": (alone,)})
    found = step.get("pattern", {"Regex": PATTERNS["GPT-2"]})
    for pattern in PATTERNS.values():
        if found == {"Regex": pattern}:
            return pattern
    names = " or ".join(PATTERNS)
    raise UserError(
        f"{file}: pre_tokenizer.pattern is {repr(found):.200}; supported is that of {names}"
    )


def read_prefix(file: Path, step, special: dict[str, int]) -> tuple[int, ...]:
    """The tokens that a post_processor puts before a text.

    Raises UserError for a template that does anything else.
    """
    if not isinstance(step, dict) or step.get("type") in (None, "ByteLevel"):
        return ()
    single = step.get("single")
    try:
        names = [piece["SpecialToken"]["id"] for piece in single[:-1]]
        known = [step["special_tokens"][name]["ids"] for name in names]
        prefix = tuple(special[name] for name in names)
        if single[-1] == {"Sequence": {"id": "A", "type_id": 0}}:
            if known == [[token] for token in prefix]:
                return prefix
    except (LookupError, TypeError):
        pass
    raise UserError(
        f"{file}: post_processor.single is {reprlib.repr(single)};"
        " supported is added tokens, then A"
    )


def are_all_merges(merges: list, tokens: list[str], rank: dict[str, int]) -> bool:
    """Whether the merges are all pairs of tokens that make one, in the order of the tokens made.

    So they are for Llama 3. Then Hugging Face, as tiktoken, merges any two parts that make a token,
    those of the lowest rank first. The order of several pairs that make one token does not matter,
    because texts only ever have one of them: nothing was merged across the ends of the two parts,
    so they are what the token's own text, merged by itself, is when two are left. Tokens that no
    merges reach are found as whole pieces, which is what ignore_merges means.
    """
    pairs = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    pairs = [(a, b) for a, b in pairs if a in rank and b in rank]
    return [a + b for a, b in merges] == [a + b for a, b in pairs] and set(merges) == set(pairs)


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


class StopStream(TextStream):
    """A TextStream that ends before the first stop string.

    That is the one that is complete first, the longest of several. Text is held back only while it
    may be the beginning of one. It is compared as characters, so it does not matter how tokens cut
    it. stopped: whether one was found; all after it prints nothing.
    """

    def __init__(
        self, encoding: tiktoken.Encoding, skip: tuple[int, ...] = (), stop: tuple[str, ...] = ()
    ):
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

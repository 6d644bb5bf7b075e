"""Text to token ids and back: one `Encoding` for all models."""

import reprlib
import unicodedata
from itertools import groupby, pairwise, product
from pathlib import Path

import tiktoken

from errors import UserError
from loading.byte_level import PATTERNS, unicode_to_bytes
from loading.checkpoint import check_nested_values, check_values, read_json
from loading.load import HUB_NAMES, resolve_source

EOT = "<|endoftext|>"
SUPPORTED_VALUES = {  # tokenizer.json fields; others would change the ids of a text
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


def check_tokenizer(file: Path, raw: dict) -> None:
    """Raise UserError unless this is a byte-level BPE with the same ids in tiktoken.

    file: for errors. raw: the object in it, with one pre_tokenizer and one post_processor, as
    `one_step` makes them.
    """
    check_nested_values(file, raw, SUPPORTED_VALUES)
    check_pattern(file, raw["pre_tokenizer"])
    try:
        vocabulary = raw["model"]["vocab"]
        added = raw.get("added_tokens") or []
        merges = [
            tuple(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in raw["model"]["merges"]
        ]
        merged = [a + b for a, b in merges]
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
    check_added_tokens(file, added, vocabulary, nfc=raw.get("normalizer") is not None)
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    check_merges(file, tokens, merges, merged, raw["model"].get("ignore_merges"))
    check_prefix(file, raw["post_processor"], special)


def check_pattern(file: Path, step: dict) -> None:
    """Raise UserError unless a pre_tokenizer splits once, by one of PATTERNS.

    A Split has a pattern; a ByteLevel alone has GPT-2's.
    """
    alone = step.get("type", "ByteLevel") == "ByteLevel"
    step = {"use_regex": True} | step
    check_nested_values(file, {"pre_tokenizer": step}, {"pre_tokenizer.use_regex": (alone,)})
    found = step.get("pattern", {"Regex": PATTERNS["GPT-2"]})
    if found not in [{"Regex": pattern} for pattern in PATTERNS.values()]:
        names = " or ".join(f"{name}'s" for name in PATTERNS)
        raise UserError(
            f"{file}: pre_tokenizer.pattern is {repr(found):.200}; supported is {names}"
        )


class Encoding(tiktoken.Encoding):
    """tiktoken's Encoding, with a prefix before each text, such as Llama 3's `<|begin_of_text|>`.

    nfc: normalise texts to NFC first: e and U+0301 become the single letter é. (The tokenizers
    library has the characters of Unicode 9, Python those of its newer `unidata_version`.)
    """

    def __init__(self, *args, prefix_ids: tuple[int, ...] = (), nfc: bool = False, **arguments):
        super().__init__(*args, **arguments)
        self.prefix_ids = prefix_ids
        self.nfc = nfc

    def encode(self, text: str, **special) -> list[int]:
        """Encode a text after the prefix tokens, unless the text begins with them.

        Texts from a chat template may. Raises UserError as `encode_plain` does.
        """
        if self.nfc and not unicodedata.is_normalized("NFC", text):
            tokens = self.encode_normalized(text, **special)
        else:
            tokens = self.encode_plain(text, **special)
        prefix = list(self.prefix_ids)
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    def encode_ordinary(self, text: str) -> list[int]:
        # tiktoken's own panics where its `encode` raises an error.
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        return self.encode_plain(text, disallowed_special=())

    def encode_plain(self, text: str, **special) -> list[int]:
        """Encode as tiktoken does. Raises UserError for a million spaces in a row, its limit."""
        try:
            return super().encode(text, **special)
        except ValueError as error:
            if "regex" not in str(error).lower():
                raise
            raise UserError("the text has a million spaces in a row; fewer are supported") from None

    def encode_normalized(self, text: str, **special) -> list[int]:
        """Encode added tokens as they stand in the text, and what is between them normalised."""
        tokens = []
        for added, group in groupby(self.encode_plain(text, **special), self.is_special_token):
            piece = list(group)
            tokens += piece if added else self.encode_ordinary(self.decode(piece))
        return tokens


def check_merges(file: Path, tokens: list[str], merges: list, merged: list, any_pair: bool) -> None:
    """Raise UserError if tiktoken, which merges by the ranks of tokens, would merge others.

    tokens: in the order of their ids. merged: the result of each merge. any_pair: whether texts
    that are tokens need no merges.
    """
    to_byte = unicode_to_bytes()
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    one_each = merged == tokens[256:] and all(is_last_merge(a, b, rank, merges) for a, b in merges)
    is_ranks = any_pair and are_all_merges(merges, tokens, rank)
    if not one_each and not is_ranks:
        raise UserError(
            f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids"
        )
    for token in tokens:
        if not set(token) <= set(to_byte):
            raise UserError(f"{file}: token {token!r} has characters that stand for no byte")


def are_all_merges(merges: list, tokens: list[str], rank: dict[str, int]) -> bool:
    """Return whether the merges are all pairs that make a token, in the order of these tokens.

    True for Llama 3. Then Hugging Face, like tiktoken, merges any two parts that make a token, the
    lowest rank first. The order of several pairs that make one token does not matter, because a
    text only ever has one of them: nothing was merged across the ends of the two parts, so they
    are what merging the token's own text leaves when two parts remain. Tokens that no merges reach
    are found as whole pieces, which is what ignore_merges means.
    """
    pairs = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    pairs = [(a, b) for a, b in pairs if a in rank and b in rank]
    return [a + b for a, b in merges] == [a + b for a, b in pairs] and set(merges) == set(pairs)


def is_last_merge(a: str, b: str, rank: dict[str, int], merges: list) -> bool:
    """Return whether the merges before that of `a` and `b` turn the text a + b into these two.

    Hugging Face merges only the listed pairs, tiktoken any two parts that make a token. Both agree
    if no earlier merge crosses the boundary between `a` and `b`. So go back in time until bytes
    meet there: take the newer of the two parts apart, and see whether those that now meet had a
    merge of their own before it was made. rank: of each token; 256 or more for a merge's result.
    """
    before = rank[a + b]
    if max(rank.get(a, before), rank.get(b, before)) >= before:
        return False  # a part that does not exist yet
    while max(rank[a], rank[b]) >= 256:
        if rank[a] > rank[b]:
            before = rank[a]
            a = merges[rank[a] - 256][1]
        else:
            # If both parts are equal, the left one is made first. So is the boundary's merge if
            # it has this rank.
            before = rank[b] + 1
            b = merges[rank[b] - 256][0]
        if rank.get(a + b, before) < before:
            return False
    return True


def has_template(step) -> bool:
    """Return whether a post_processor adds tokens to a text."""
    return isinstance(step, dict) and step.get("type") not in (None, "ByteLevel")


def check_added_tokens(
    file: Path, added: list[dict], vocabulary: dict[str, int], nfc: bool
) -> None:
    """Raise UserError if tiktoken would not find the added tokens where the library finds them.

    nfc: whether texts are normalised, in which the library looks for normalized tokens.
    """
    flags = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
    flags["normalized"] = (False,) if nfc else (False, True)
    for token in added:
        content = token["content"]
        check_values(f"{file}: added token {content!r}", token, flags)
        if not is_text(content) or vocabulary.get(content, token["id"]) != token["id"]:
            raise UserError(
                f"{file}: added token {content!r} is empty, not text,"
                " or has another id in the vocabulary"
            )
    contents = {token["content"] for token in added}
    if len(contents) < len(added):
        raise UserError(f"{file}: duplicate added token")
    for a, b in pairwise(sorted(contents)):
        if b.startswith(a):  # the library finds the longer one, tiktoken either
            raise UserError(
                f"{file}: added token {b!r} begins with another one, {a!r}; that is not supported"
            )
    # The library looks for normalized tokens last; tiktoken finds the left one of two that overlap.
    last = {token["content"] for token in added if token.get("normalized")}
    for a, b in product(sorted(last), sorted(contents - last)):
        if any(a.startswith(b, i) or b.startswith(a[i:]) for i in range(1, len(a))):
            raise UserError(
                f"{file}: added token {a!r} is normalized and overlaps {b!r}; that is not supported"
            )


def is_text(content) -> bool:
    """Return whether this is a nonempty text that UTF-8 can encode, without lone surrogates."""
    return isinstance(content, str) and content.encode("utf-8", "ignore").decode() == content != ""


def check_prefix(file: Path, step, special: dict[str, int]) -> None:
    """Raise UserError unless a post_processor only puts added tokens before a text."""
    if not has_template(step):
        return
    single = step.get("single")
    try:
        names = [piece["SpecialToken"]["id"] for piece in single[:-1]]
        known = [step["special_tokens"][name]["ids"] for name in names]
        prefix = [[special[name]] for name in names]
        if known == prefix and single[-1] == {"Sequence": {"id": "A", "type_id": 0}}:
            return
    except (LookupError, TypeError):
        pass
    raise UserError(
        f"{file}: post_processor.single is {reprlib.repr(single)};"
        " supported is added tokens, then A"
    )


def load_encoding(name, vocab_size: int) -> Encoding:
    """Load the tokenizer of a model.

    `encode(text, allowed_special="all")` encodes `<|endoftext|>` in a text as that token.

    name: as for `load_model`. A directory needs a `tokenizer.json` (as GPT-2, Llama 3 or Qwen2).
    `gpt2` and its sizes use tiktoken's own. `random:` models get placeholder tokens: bytes, then
    ids from 256 on as numbers. vocab_size: the model's; it may exceed the tokenizer's, as in models
    that pad their vocabulary to a round number. Raises UserError if it is smaller, or if the
    tokenizer is missing or unsupported.
    """
    source = resolve_source(name)
    if source.type == "random":
        encoding = placeholder_encoding(source.label, vocab_size)
    elif source.type == "hub" and source.name in HUB_NAMES:
        encoding = gpt2_encoding()
    else:
        encoding = read_tokenizer_json(source.file("tokenizer.json"))
    if encoding.n_vocab > vocab_size:
        raise UserError(
            f"{source.name}: the tokenizer has {encoding.n_vocab} tokens,"
            f" more than the model's vocab_size ({vocab_size})"
        )
    return encoding


def placeholder_encoding(name: str, vocab_size: int) -> Encoding:
    """Build an encoding of byte tokens, then numbers, and `<|endoftext|>` last."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b" %d" % i: i for i in range(256, vocab_size - 1)}
    pattern = PATTERNS["GPT-2"]
    special = {EOT: vocab_size - 1}
    return Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def gpt2_encoding() -> Encoding:
    """Return GPT-2's Encoding, which tiktoken downloads once. Raises UserError if that fails."""
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
    """Return the Encoding of a `tokenizer.json`.

    In a byte-level BPE a token's id grows with the rank of the merge that makes it, and tiktoken
    merges by the rank of the result: so the vocabulary, decoded to bytes, is tiktoken's rank table.
    Raises UserError for unsupported tokenizers.
    """
    raw = read_json(file)
    raw["pre_tokenizer"] = one_step(raw.get("pre_tokenizer"), "pretokenizers")
    raw["post_processor"] = one_step(raw.get("post_processor"), "processors")
    check_tokenizer(file, raw)
    vocabulary = raw["model"]["vocab"]
    special = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    to_byte = unicode_to_bytes()
    ranks = {
        bytes(to_byte[c] for c in token): rank
        for token, rank in vocabulary.items()
        if token not in special
    }
    pattern = raw["pre_tokenizer"].get("pattern", {"Regex": PATTERNS["GPT-2"]})
    step = raw["post_processor"]
    prefix = step["single"][:-1] if has_template(step) else []
    return Encoding(
        str(file.parent),
        pat_str=pattern["Regex"],
        mergeable_ranks=ranks,
        special_tokens=special,
        prefix_ids=tuple(special[piece["SpecialToken"]["id"]] for piece in prefix),
        nfc=raw.get("normalizer") is not None,
    )


def one_step(part, key: str):
    """Return a part of a `tokenizer.json`, with a Sequence as one step that has all their fields.

    key: of the steps in a Sequence. The type of the result names theirs: "Split, ByteLevel".
    """
    is_sequence = isinstance(part, dict) and part.get("type") == "Sequence"
    steps = part.get(key) if is_sequence else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return part
    fields = {name: value for step in steps for name, value in step.items()}
    return fields | {"type": ", ".join(str(step.get("type")) for step in steps)}

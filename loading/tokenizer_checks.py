"""Checks that tiktoken gives the ids of Hugging Face's library for a tokenizer.json."""

import reprlib
from itertools import pairwise, product
from pathlib import Path

from errors import UserError
from loading.byte_level import PATTERNS, byte_of_character
from loading.checkpoint import check_values

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


def check_tokenizer(file: Path, raw: dict) -> None:
    """Raise UserError unless this is a byte-level BPE with the same ids in tiktoken.

    file: for errors. raw: the object in it, with one pre_tokenizer and one post_processor, as
    `tokenizer.one_step` makes them.
    """
    check_values(file, raw, SUPPORTED)
    check_pattern(file, raw["pre_tokenizer"])
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
    check_added(file, added, vocabulary, nfc=raw.get("normalizer") is not None)
    tokens = sorted(vocabulary.keys() - special.keys(), key=vocabulary.get)
    check_merges(file, tokens, merges, made, raw["model"].get("ignore_merges"))
    check_prefix(file, raw["post_processor"], special)


def check_pattern(file: Path, step: dict) -> None:
    """Raise UserError unless a pre_tokenizer splits once, by one of PATTERNS.

    A Split has a pattern, a ByteLevel alone has GPT-2's.
    """
    alone = step.get("type", "ByteLevel") == "ByteLevel"
    step = {"use_regex": True} | step
    check_values(file, {"pre_tokenizer": step}, {"pre_tokenizer.use_regex": (alone,)})
    found = step.get("pattern", {"Regex": PATTERNS["GPT-2"]})
    if found not in [{"Regex": pattern} for pattern in PATTERNS.values()]:
        names = " or ".join(f"{name}'s" for name in PATTERNS)
        raise UserError(
            f"{file}: pre_tokenizer.pattern is {repr(found):.200}; supported is {names}"
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


def check_merges(file: Path, tokens: list[str], merges: list, made: list, any_pair: bool) -> None:
    """Raise UserError if tiktoken, which merges by the ranks of tokens, would merge others.

    tokens: in the order of their ids. made: what each merge makes. any_pair: whether texts that are
    tokens need no merges.
    """
    to_byte = byte_of_character()
    rank = {token: i for i, token in enumerate(tokens)}
    if set(tokens[:256]) != set(to_byte):
        raise UserError(f"{file}: the first tokens of the vocabulary are not the 256 bytes")
    one_each = made == tokens[256:] and all(is_last_merge(a, b, rank, merges) for a, b in merges)
    is_ranks = any_pair and are_all_merges(merges, tokens, rank)
    if not one_each and not is_ranks:
        raise UserError(
            f"{file}: the merges do not make the tokens of the vocabulary in the order of their ids"
        )
    for token in tokens:
        if not set(token) <= set(to_byte):
            raise UserError(f"{file}: token {token!r} has characters that stand for no byte")


def are_all_merges(merges: list, tokens: list[str], rank: dict[str, int]) -> bool:
    """Whether the merges are all pairs of tokens that make one, in the order of the tokens made.

    True for Llama 3. Then Hugging Face, as tiktoken, merges any two parts that make a token,
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
            # If both parts are equal, the left one is made first. So is the boundary's merge if
            # it has this rank.
            before = rank[b] + 1
            b = merges[rank[b] - 256][0]
        if rank.get(a + b, before) < before:
            return False
    return True


def has_template(step) -> bool:
    """Whether a post_processor adds tokens to a text."""
    return isinstance(step, dict) and step.get("type") not in (None, "ByteLevel")


def check_prefix(file: Path, step, special: dict[str, int]) -> None:
    """Raise UserError if a post_processor does more than put added tokens before a text."""
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

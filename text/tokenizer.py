"""Text to token ids and back: one `Encoding` for all models."""

import json
import reprlib
from pathlib import Path

from tokenizers import Tokenizer

from errors import UserError
from loading.byte_level import BYTE_DECODER, BYTE_ENCODER, PATTERNS
from loading.checkpoint import check_nested_values, check_values, read_json
from loading.load import resolve_source

EOT = "<|endoftext|>"
SUPPORTED_VALUES = {  # tokenizer.json fields; others would change the ids of a text
    "normalizer": (None, {"type": "NFC"}),
    "pre_tokenizer.type": ("ByteLevel", "Split, ByteLevel"),
    "pre_tokenizer.behavior": ("Isolated",),
    "pre_tokenizer.invert": (False,),
    "pre_tokenizer.add_prefix_space": (False,),
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.byte_fallback": (None, False),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
    "post_processor.type": (
        None,
        "ByteLevel",
        "TemplateProcessing",
        "ByteLevel, TemplateProcessing",
    ),
    "decoder.type": ("ByteLevel",),
}


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


ADDED_TOKEN_FLAGS = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}


class Encoding:
    """A byte-level BPE tokenizer of the tokenizers library.

    where: prefix of errors. raw: the object in a `tokenizer.json`.
    special_tokens_set: the control tokens, which plain text never becomes: all added tokens.
    Raises UserError for other tokenizers.
    """

    def __init__(self, where, raw: dict):
        pre_tokenizer = one_step(raw.get("pre_tokenizer"), "pretokenizers")
        post_processor = one_step(raw.get("post_processor"), "processors")
        steps = {"pre_tokenizer": pre_tokenizer, "post_processor": post_processor}
        check_nested_values(where, raw | steps, SUPPORTED_VALUES)
        check_pattern(where, pre_tokenizer)
        # No truncation, no padding. A byte that the vocabulary lacks is dropped, because unk_token
        # may be a control token.
        model = raw["model"] | {"unk_token": None}
        added = raw.get("added_tokens") or []
        raw = raw | {"model": model, "added_tokens": added, "truncation": None, "padding": None}
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(raw | {"post_processor": None}))
            self.ordinary = ordinary_tokenizer(self.tokenizer)
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: not a Hugging Face tokenizer: {reason:.200}") from None
        check_added_tokens(where, added, self.tokenizer, model)
        self.added_token_ids = {token["content"]: token["id"] for token in added}
        self.added_token_texts = {token: name for name, token in self.added_token_ids.items()}
        self.n_vocab = max([*model["vocab"].values(), *self.added_token_texts], default=-1) + 1
        self.special_tokens_set = set(self.added_token_ids)
        check_prefix(where, post_processor, self.added_token_ids)
        prefix = post_processor["single"][:-1] if has_template(post_processor) else []
        self.prefix_ids = [self.added_token_ids[piece["SpecialToken"]["id"]] for piece in prefix]

    def encode(self, text: str, allowed_special="") -> list[int]:
        """Encode a text after the prefix tokens, unless the text begins with them.

        Texts from a chat template may. allowed_special: "all" encodes control tokens in the text
        as tokens; without it they raise ValueError.
        """
        if allowed_special != "all" and any(token in text for token in self.special_tokens_set):
            raise ValueError(f"disallowed special token in the text {text!r}")
        tokens = encode_ids(self.tokenizer, text)
        return (
            tokens
            if tokens[: len(self.prefix_ids)] == self.prefix_ids
            else self.prefix_ids + tokens
        )

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode plain text, without control tokens and without the prefix."""
        return encode_ids(self.ordinary, text)

    def encode_single_token(self, token: str | bytes) -> int:
        """Return the id of an added token, or of the token with these bytes. Raises KeyError."""
        if isinstance(token, bytes):
            token = "".join(map(BYTE_ENCODER.get, token))
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token spells. Raises KeyError for an id without text."""
        text = self.added_token_texts.get(token)
        if text is None:
            text = self.tokenizer.id_to_token(token)
            if text is None:
                raise KeyError(token)
            if BYTE_DECODER.keys() >= set(text):
                return bytes(map(BYTE_DECODER.get, text))
        return text.encode()

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode("utf-8", "replace")


def has_template(step) -> bool:
    """Return whether a post_processor adds tokens to a text."""
    return isinstance(step, dict) and step.get("type") not in (None, "ByteLevel")


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text."""
    # encode_batch_fast releases the GIL, and computes no offsets.
    (encoded,) = tokenizer.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)
    return encoded.ids


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def ordinary_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that finds no added tokens in a text."""
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def check_added_tokens(where, added: list[dict], tokenizer: Tokenizer, model: dict) -> None:
    """Raise UserError for added tokens with other ids in the library, or that plain text becomes.

    The library ignores the ids in the file: a token gets its id in the vocabulary, or the next id.
    Plain text becomes an added token of the vocabulary by a merge, or, with ignore_merges, as a
    piece that equals the token.
    """
    pairs = (pair if isinstance(pair, str) else "".join(pair) for pair in model["merges"])
    merged = {pair.replace(" ", "") for pair in pairs}
    for token in added:
        content = token["content"]
        name = f"{where}: added token {content!r}"
        check_values(name, token, ADDED_TOKEN_FLAGS)
        found = tokenizer.token_to_id(content)
        if found != token["id"]:
            raise UserError(
                f"{name} has the id {token['id']}, but {found} in the tokenizers library"
            )
        if not content:
            raise UserError(f"{name} is empty")
        whole = len(content) == 1 or model.get("ignore_merges") or content in merged
        if content in model["vocab"] and whole:
            raise UserError(f"{name}: plain text must not become it")


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

    name: as for `load_model`. The model needs a `tokenizer.json` with a byte-level BPE. `random:`
    models get placeholder tokens: bytes, then ids from 256 on as numbers. vocab_size: the model's;
    it may exceed the tokenizer's, as in models that pad their vocabulary to a round number. Raises
    UserError if it is smaller, or if the tokenizer is missing or unsupported.
    """
    source = resolve_source(name)
    if source.type == "random":
        encoding = placeholder_encoding(source.label, vocab_size)
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
    vocabulary = {BYTE_ENCODER[i]: i for i in range(256)}
    vocabulary |= {f"{BYTE_ENCODER[ord(' ')]}{i}": i for i in range(256, vocab_size - 1)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": len(vocabulary), "content": EOT, "special": True} | flags
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "ignore_merges": True}
    return Encoding(
        name, {"added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model}
    )


def read_tokenizer_json(file: Path) -> Encoding:
    """Return the Encoding of a `tokenizer.json`. Raises UserError for unsupported tokenizers."""
    return Encoding(file, read_json(file))


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

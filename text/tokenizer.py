"""Text to token ids and back: one `Encoding` for all models."""

import copy
import json
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace

from errors import UserError, warn_once
from loading import byte_level, sentencepiece
from loading.byte_level import BYTE_DECODER, BYTE_ENCODER
from loading.checkpoint import check_nested_values, check_values, read_json
from loading.gguf_tokenizer import KEY_PREFIX, tokenizer_json
from loading.load import resolve_source

EOT = "<|endoftext|>"
SUPPORTED_VALUES = {  # tokenizer.json fields; others would change the bytes of a token
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.byte_fallback": (None, False, True),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
}
ADDED_TOKEN_FLAGS = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}
# HTML tags that Gemma's vocabulary adds. They have no meaning in chat templates.
HTML_TAGS = set(
    "a b blockquote body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li s span"
    " strong sub sup table tbody td tfoot th thead tr u ul bbox".split()
)
# Contexts in which plain text must not become a control token.
SURROUNDINGS = [("", ""), (" ", " "), ("\n", "\n"), ("a", "a")]


class Encoding:
    """A BPE tokenizer of the tokenizers library: byte-level, or SentencePiece with byte_fallback.

    where: prefix of errors. raw: the object in a `tokenizer.json`. fault: the error if the library
    cannot read it.
    special_tokens_set: the control tokens, which plain text never becomes, by `is_control_token`.
    special_token_ids: name -> id of the added tokens that the file marks as special, which
    `skip_special_tokens` leaves out of a text. Raises UserError for other tokenizers.
    """

    def __init__(self, where, raw: dict, fault: str = "not a Hugging Face tokenizer"):
        check_nested_values(where, raw, SUPPORTED_VALUES)
        self.codec = sentencepiece if raw["model"].get("byte_fallback") else byte_level
        check_nested_values(where, raw, self.codec.SUPPORTED_VALUES)
        # No truncation, no padding. A byte that the vocabulary lacks is dropped, because unk_token
        # may be a control token.
        model = raw["model"] | {"unk_token": None}
        added = raw.get("added_tokens") or []
        raw = raw | {"model": model, "added_tokens": added, "truncation": None, "padding": None}
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(raw | {"post_processor": None}))
            control_tokens = {token["content"] for token in added if is_control_token(token)}
            self.ordinary = ordinary_tokenizer(self.tokenizer, control_tokens)
            encode_ids(self.ordinary, "a")
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: {fault}: {reason:.200}") from None
        check = check_byte_level if self.codec is byte_level else check_metaspace
        check(where, raw, self.tokenizer)
        check_added_tokens(where, added, self.tokenizer, self.ordinary, model)
        self.where = where
        self.added_token_ids = {token["content"]: token["id"] for token in added}
        # Other added tokens are spelled like the vocabulary: a run of U+2581 means spaces.
        names_with_text = (
            name
            for name in self.added_token_ids
            if name in control_tokens or name not in model["vocab"]
        )
        self.added_token_texts = {self.added_token_ids[name]: name for name in names_with_text}
        self.n_vocab = (
            max([*model["vocab"].values(), *self.added_token_ids.values()], default=-1) + 1
        )
        self.special_tokens_set = control_tokens
        self.special_token_ids = {
            token["content"]: token["id"] for token in added if token.get("special")
        }
        names = BYTE_DECODER.items() if self.codec is byte_level else ()
        self.missing_bytes = {byte for name, byte in names if name not in model["vocab"]}
        # Encoding adds a space before a text, so decoding strips it.
        is_sentencepiece = self.codec is sentencepiece
        self.strips_prefix_space = (
            is_sentencepiece and sentencepiece.STRIP in raw["decoder"]["decoders"]
        )
        self.continuation = continuation_tokenizer(self.ordinary)
        self.prefix_ids = find_prefix_ids(where, raw.get("post_processor"), self.added_token_ids)

    def drop_unembedded_tokens(self, vocab_size: int) -> "Encoding":
        """Return a copy without the added tokens beyond the model's embedding of vocab_size rows.

        Gemma 3's file has one token more than the model, `<image_soft_token>`, and many fine-tuned
        Llamas have a pad token after their vocabulary. Their texts become plain text, with a
        warning. All tokens stay if a token of the base vocabulary, a prefix token or every
        special token would be dropped.
        """
        left_out = [name for name, token in self.added_token_ids.items() if token >= vocab_size]
        kept = {name: token for name, token in self.added_token_ids.items() if token < vocab_size}
        cuts_vocabulary = vocab_size < self.tokenizer.get_vocab_size(with_added_tokens=False)
        keeps_prefix = max(self.prefix_ids, default=0) < vocab_size
        if (
            not left_out
            or cuts_vocabulary
            or not keeps_prefix
            or not self.special_token_ids.keys() & kept.keys()
        ):
            return self
        names = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
        warn_once(
            f"{self.where}: ids beyond the model's vocab_size ({vocab_size})"
            f" are read as plain text: {names}"
        )
        reduced = copy.copy(self)
        reduced.added_token_ids = kept
        reduced.n_vocab = vocab_size
        reduced.added_token_texts = {
            token: name for token, name in self.added_token_texts.items() if token < vocab_size
        }
        reduced.special_token_ids = {
            name: token for name, token in self.special_token_ids.items() if name in kept
        }
        reduced.special_tokens_set = self.special_tokens_set & kept.keys()
        added = [token for token in added_tokens(self.ordinary) if token.content in kept]
        reduced.ordinary = with_added(self.ordinary, added)
        reduced.continuation = continuation_tokenizer(reduced.ordinary)
        reduced.tokenizer = with_added(reduced.ordinary, added)
        reduced.tokenizer.encode_special_tokens = False
        return reduced

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

    def encode_ordinary(self, text: str, at_start: bool = True) -> list[int]:
        """Encode plain text, without control tokens and without the prefix.

        at_start: False after an added token, where some tokenizers add no leading space.
        """
        return encode_ids(self.ordinary if at_start else self.continuation, text)

    def encode_single_token(self, token: str | bytes) -> int:
        """Return the id of an added token, or of the token with these bytes. Raises KeyError."""
        names = self.codec.bytes_to_tokens(token) if isinstance(token, bytes) else [token]
        for name in names:
            found = self.tokenizer.token_to_id(name)
            if found is not None:
                return found
        raise KeyError(token)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token spells. Raises KeyError for an id without text."""
        text = self.added_token_texts.get(token)
        if text is None:
            text = self.tokenizer.id_to_token(token)
            if text is None:
                raise KeyError(token)
            return self.codec.token_to_bytes(text)
        return text.encode()

    def decode(self, tokens: list[int]) -> str:
        """Decode a sequence from its first token on. Invalid UTF-8 becomes U+FFFD."""
        data = b"".join(map(self.decode_single_token_bytes, tokens))
        return data.decode("utf-8", "replace").removeprefix(" " * self.strips_prefix_space)

    def dropped_bytes(self, *texts: str, plain: bool = False) -> str:
        """Return the bytes of texts that the vocabulary lacks, in hexadecimal; "" if none.

        The library drops them before merging, so their neighbours may become one token. (llama.cpp
        drops them afterwards.) plain: added tokens in the texts are encoded as plain text.
        """
        found = set()
        for text in texts if self.missing_bytes else ():
            for token in () if plain else self.added_token_ids:
                text = text.replace(token, " ")
            text = replace_surrogates(text)
            if self.tokenizer.normalizer:
                text = self.tokenizer.normalizer.normalize_str(text)
            found |= self.missing_bytes.intersection(text.encode())
        return bytes(sorted(found)).hex(" ")


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text. Raises UserError if a pattern of the tokenizer gives up on it."""
    try:
        # encode_batch_fast releases the GIL, and computes no offsets.
        (encoded,) = tokenizer.encode_batch_fast(
            [replace_surrogates(text)], add_special_tokens=False
        )
    except BaseException as error:  # the library's panics are not Exceptions
        if type(error).__name__ != "PanicException":
            raise
        raise UserError("the tokenizer's pattern cannot split this text") from None
    return encoded.ids


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_control_token(token: dict) -> bool:
    """Return whether an added token is a control token, which plain text never becomes.

    A special token is one, unless it is white space. Transformers finds other added tokens in any
    text. Of these, tokens that may have a meaning in a template are control tokens: `<tool_call>`
    and `<think>` of Qwen, `<|fim_prefix|>`, `<unused0>`. Plain text may become the rest: runs of
    spaces, words (no punctuation and no mathematical sign such as `<` or `|`), and HTML tags.
    """
    content = token["content"]
    if content.isspace():
        return False
    if token.get("special"):
        return True
    name = content.removeprefix("<").removeprefix("/").removesuffix(">")
    if name in HTML_TAGS and content in (f"<{name}>", f"</{name}>"):
        return False
    return not all(sign.isspace() or is_word_character(sign) for sign in content)


def is_word_character(sign: str) -> bool:
    """Return whether a character is a letter, mark, number or pictograph, such as U+2581."""
    return unicodedata.category(sign)[0] in "LMN" or unicodedata.category(sign) == "So"


def added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the added tokens of a tokenizer, in the order of their ids."""
    return [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]


def with_added(tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """Return a copy with the same model, normalizer and pre_tokenizer, and these added tokens."""
    result = Tokenizer(tokenizer.model)
    result.normalizer = tokenizer.normalizer
    result.pre_tokenizer = tokenizer.pre_tokenizer
    result.add_tokens(added)
    result.encode_special_tokens = tokenizer.encode_special_tokens
    return result


def ordinary_tokenizer(tokenizer: Tokenizer, control_tokens: set[str]) -> Tokenizer:
    """Return a copy that finds no control tokens in a text."""
    added = added_tokens(tokenizer)
    for token in added:
        token.special = token.content in control_tokens
    plain = with_added(tokenizer, added)
    plain.encode_special_tokens = True  # special tokens become plain text
    return plain


def continuation_tokenizer(plain: Tokenizer) -> Tokenizer:
    """Return the tokenizer for text after an added token, which may add no leading space."""
    step = plain.pre_tokenizer
    if not isinstance(step, Metaspace) or step.prepend_scheme != "first":
        return plain
    continuation = with_added(plain, added_tokens(plain))
    continuation.pre_tokenizer = Metaspace(prepend_scheme="never", split=step.split)
    return continuation


def pre_tokenized(tokenizer: Tokenizer, text: str) -> str:
    """Return a text after normalizer and pre_tokenizer, before any merge."""
    if tokenizer.normalizer:
        text = tokenizer.normalizer.normalize_str(text)
    step = tokenizer.pre_tokenizer
    return "".join(piece for piece, _ in step.pre_tokenize_str(text)) if step else text


def check_metaspace(where, raw: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError unless spaces become U+2581, and the decoder restores them."""
    for name in sentencepiece.BYTE_TOKENS:
        if name not in raw["model"]["vocab"]:
            raise UserError(
                f"{where}: model.byte_fallback is True, but the vocabulary has no token {name}"
            )
    text = " a  é\n"
    blanks = text.replace(" ", sentencepiece.METASPACE)
    if pre_tokenized(tokenizer, text) not in (blanks, sentencepiece.METASPACE + blanks):
        raise UserError(f"{where}: each space must become {sentencepiece.METASPACE}")
    steps = raw["decoder"].get("decoders")
    if steps not in (sentencepiece.DECODER, [*sentencepiece.DECODER, sentencepiece.STRIP]):
        raise UserError(f"{where}: decoder must only undo byte_fallback")


def check_byte_level(where, raw: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError unless only the pre_tokenizer maps a text to bytes."""
    if tokenizer.normalizer and "Ã" in tokenizer.normalizer.normalize_str("é"):
        raise UserError(
            f"{where}: normalizer has a step ByteLevel; only pre_tokenizer may have one"
        )
    if "Ã©" not in pre_tokenized(tokenizer, "é"):
        raise UserError(f"{where}: pre_tokenizer must have a step ByteLevel")


def check_added_tokens(
    where, added: list[dict], tokenizer: Tokenizer, plain: Tokenizer, model: dict
) -> None:
    """Raise UserError for added tokens with other ids in the library, or that plain text becomes.

    The library ignores the ids in the file: a token gets its id in the vocabulary, or the next id.
    A merge may make a control token of the vocabulary. With ignore_merges a piece of text that
    equals the token becomes it, so a trial checks whether the pre_tokenizer leaves such a piece
    whole. plain: from `ordinary_tokenizer`.
    """
    pairs = (pair if isinstance(pair, str) else "".join(pair) for pair in model["merges"])
    merged = {pair.replace(" ", "") for pair in pairs}
    candidates = []
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
        if content in model["vocab"] and is_control_token(token):
            if len(content) == 1 or content in merged:
                raise UserError(f"{name}: plain text must not become it")
            if model.get("ignore_merges"):
                candidates.append(token)
    texts = [
        before + token["content"] + after for token in candidates for before, after in SURROUNDINGS
    ]
    found = plain.encode_batch_fast(texts, add_special_tokens=False)
    for number, encoded in enumerate(found):
        token = candidates[number // len(SURROUNDINGS)]
        if token["id"] in encoded.ids:
            raise UserError(
                f"{where}: added token {token['content']!r}: plain text must not become it"
            )


def find_prefix_ids(where, processor, added: dict[str, int]) -> list[int]:
    """Return the ids of the added tokens that a post_processor puts before a text.

    Raises UserError if it does anything else.
    """
    try:
        steps = processor.get("processors", [processor]) if processor else []
        templates = [step for step in steps if step["type"] != "ByteLevel"]
        if not templates:
            return []
        (template,) = templates
        *pieces, text = template["single"]
        names = [piece["SpecialToken"]["id"] for piece in pieces]
        known = [template["special_tokens"][name]["ids"] for name in names]
        prefix = [added[name] for name in names]
        if known == [[token] for token in prefix] and text["Sequence"]["id"] == "A":
            return prefix
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    raise UserError(f"{where}: post_processor may only put added tokens before a text")


def load_encoding(name, vocab_size: int) -> Encoding:
    """Load the tokenizer of a model.

    `encode(text, allowed_special="all")` encodes `<|endoftext|>` in a text as that token.

    name: as for `load_model`. The model needs a `tokenizer.json` with a BPE; a GGUF file holds its
    own tokenizer, or has a `tokenizer.json` beside it. `random:` models, and GGUF files without
    either, get placeholder tokens: bytes, then ids from 256 on as numbers. vocab_size: the model's;
    it may exceed the tokenizer's, as in models that pad their vocabulary to a round number.
    Raises UserError if it is smaller (but see `Encoding.drop_unembedded_tokens`), or if the
    tokenizer is missing or unsupported.
    """
    source = resolve_source(name)
    if source.type == "gguf" and f"{KEY_PREFIX}.tokens" in source.gguf.metadata:
        fault = "invalid tokenizer"
        encoding = Encoding(source.name, tokenizer_json(source.gguf), fault)
    elif source.type == "random" or source.type == "gguf" and not source.find("tokenizer.json"):
        encoding = placeholder_encoding(source.label, vocab_size)
    else:
        encoding = read_tokenizer_json(source.file("tokenizer.json")).drop_unembedded_tokens(
            vocab_size
        )
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

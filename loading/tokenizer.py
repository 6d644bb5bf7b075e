"""Text to token ids and back: one `Encoding`, whichever model it belongs to."""

import codecs
import copy
import json
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace

from errors import UserError, note
from loading import byte_level, sentencepiece
from loading.byte_level import BYTES, CHARACTERS
from loading.checkpoint import check_values, read_json
from loading.gguf_tokenizer import OWNER, tokenizer_json
from loading.load import resolve_source

EOT = "<|endoftext|>"
SUPPORTED = {  # of a tokenizer.json: without these a token would not be the bytes that it spells
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.byte_fallback": (None, False, True),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
}
FLAGS = {"lstrip": (False,), "rstrip": (False,), "single_word": (False,)}  # of an added token
# Elements of HTML that Gemma's vocabulary adds. No chat template gives one a meaning.
HTML = set(
    "a b blockquote body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li s span"
    " strong sub sup table tbody td tfoot th thead tr u ul bbox".split()
)
# What may stand around the text of a control token where plain text is checked for making it.
AROUND = [("", ""), (" ", " "), ("\n", "\n"), ("a", "a")]


class Encoding:
    """A BPE, read by the tokenizers library: byte-level, or SentencePiece's with byte_fallback.

    where: what errors begin with. raw: the object in a `tokenizer.json`. fault: what is wrong if
    the library cannot read that.
    special_tokens_set: the control tokens, which plain text never becomes, as `controls` tells
    them from other added tokens. special: ids by name of those that the file calls special, which
    `skip_special_tokens` leaves out of a text. Raises UserError for other tokenizers.
    """

    def __init__(self, where, raw: dict, fault: str = "not a Hugging Face tokenizer"):
        check_values(where, raw, SUPPORTED)
        self.spelling = sentencepiece if raw["model"].get("byte_fallback") else byte_level
        check_values(where, raw, self.spelling.SUPPORTED)
        # Texts are never cut or padded. A byte that the vocabulary lacks is dropped: unk_token may
        # be a control token.
        model = raw["model"] | {"unk_token": None}
        added = raw.get("added_tokens") or []
        raw = raw | {"model": model, "added_tokens": added, "truncation": None, "padding": None}
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(raw | {"post_processor": None}))
            control = {token["content"] for token in added if controls(token)}
            self.plain = plain_tokenizer(self.tokenizer, control)
            ids(self.plain, "a")
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: {fault}: {reason:.200}") from None
        check = check_bytes if self.spelling is byte_level else check_blanks
        check(where, raw, self.tokenizer)
        check_added(where, added, self.tokenizer, self.plain, model)
        self.where = where
        self.added = {token["content"]: token["id"] for token in added}
        # Others are written as the vocabulary spells them: a run of U+2581 is one of blanks.
        own = (name for name in self.added if name in control or name not in model["vocab"])
        self.texts = {self.added[name]: name for name in own}
        self.n_vocab = max([*model["vocab"].values(), *self.added.values()], default=-1) + 1
        self.special_tokens_set = control
        self.special = {token["content"]: token["id"] for token in added if token.get("special")}
        names = BYTES.items() if self.spelling is byte_level else ()
        self.missing = {byte for name, byte in names if name not in model["vocab"]}
        # Whether a text is written with a blank before it, which is no part of what comes back.
        is_sentencepiece = self.spelling is sentencepiece
        self.strips = is_sentencepiece and sentencepiece.STRIP in raw["decoder"]["decoders"]
        self.inner = inner_tokenizer(self.plain)
        self.prefix = find_prefix(where, raw.get("post_processor"), self.added)

    def with_rows(self, vocab_size: int) -> "Encoding":
        """Return it without the added tokens for which a model of this size has no embedding.

        Gemma 3's file has one token more than the model, `<image_soft_token>`, and many fine-tuned
        Llamas have a pad token behind their vocabulary. Their texts are plain text, as a note says.
        Tokens of the vocabulary itself stay, and so do all if no special token would be left, or
        the one that a text begins with would not.
        """
        left_out = [name for name, token in self.added.items() if token >= vocab_size]
        kept = {name: token for name, token in self.added.items() if token < vocab_size}
        is_cut = vocab_size < self.tokenizer.get_vocab_size(with_added_tokens=False)
        begins = max(self.prefix, default=0) < vocab_size
        if not left_out or is_cut or not begins or not self.special.keys() & kept.keys():
            return self
        names = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
        size = f"whose vocab_size is {vocab_size}"
        note(
            f"{self.where}: the model, {size}, has no row for {names}, which is read as plain text"
        )
        cut = copy.copy(self)
        cut.added = kept
        cut.n_vocab = vocab_size
        cut.texts = {token: name for token, name in self.texts.items() if token < vocab_size}
        cut.special = {name: token for name, token in self.special.items() if name in kept}
        cut.special_tokens_set = self.special_tokens_set & kept.keys()
        added = [token for token in added_tokens(self.plain) if token.content in kept]
        cut.plain = with_added(self.plain, added)
        cut.inner = inner_tokenizer(cut.plain)
        cut.tokenizer = with_added(cut.plain, added)
        cut.tokenizer.encode_special_tokens = False
        return cut

    def encode(self, text: str, allowed_special="") -> list[int]:
        """Encode the prefix and a text. A text that begins with the prefix gets no second one.

        Such a text comes from a chat template. allowed_special: "all" takes added tokens in the
        text as tokens; without it they raise ValueError.
        """
        if allowed_special != "all" and any(token in text for token in self.special_tokens_set):
            raise ValueError(f"disallowed special token in the text {text!r}")
        tokens = ids(self.tokenizer, text)
        return tokens if tokens[: len(self.prefix)] == self.prefix else self.prefix + tokens

    def encode_ordinary(self, text: str, begins: bool = True) -> list[int]:
        """Encode plain text: none of it becomes a token of `special_tokens_set`, no prefix.

        begins: False after an added token, where some tokenizers write no first blank.
        """
        return ids(self.plain if begins else self.inner, text)

    def encode_single_token(self, token: str | bytes) -> int:
        """The id of an added token, or of the token with these bytes. Raises KeyError."""
        names = self.spelling.tokens_of(token) if isinstance(token, bytes) else [token]
        for name in names:
            found = self.tokenizer.token_to_id(name)
            if found is not None:
                return found
        raise KeyError(token)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes that a token spells. Raises KeyError for an id without text."""
        text = self.texts.get(token)
        if text is None:
            text = self.tokenizer.id_to_token(token)
            if text is None:
                raise KeyError(token)
            return self.spelling.bytes_of(text)
        return text.encode()

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens from its beginning. Bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(map(self.decode_single_token_bytes, tokens))
        return data.decode("utf-8", "replace").removeprefix(" " * self.strips)

    def dropped(self, *texts: str, plain: bool = False) -> str:
        """The bytes of texts that the vocabulary lacks, in hexadecimal; "" if it has them all.

        The library drops them before it merges, so their neighbours may become one token.
        (llama.cpp drops them after.) plain: added tokens in the texts are not encoded as tokens.
        """
        found = set()
        for text in texts if self.missing else ():
            for token in () if plain else self.added:
                text = text.replace(token, " ")
            text = valid(text)
            if self.tokenizer.normalizer:
                text = self.tokenizer.normalizer.normalize_str(text)
            found |= self.missing.intersection(text.encode())
        return bytes(sorted(found)).hex(" ")


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text. Raises UserError for one on which a pattern of the tokenizer gives up."""
    try:
        # A batch lets other threads run; without offsets it is faster too.
        (encoded,) = tokenizer.encode_batch_fast([valid(text)], add_special_tokens=False)
    except BaseException as error:  # a panic of the library is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            "the tokenizer gives up on this text, which its pattern cannot split"
        ) from None
    return encoded.ids


def valid(text: str) -> str:
    """A text in which U+FFFD stands for each surrogate, which UTF-8 cannot write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def controls(token: dict) -> bool:
    """Return whether an added token is a control token, which plain text never becomes.

    A special token is one, unless it is white space. Of the others, which transformers finds in any
    text, those are that may have a role in a template: `<tool_call>` and `<think>` of Qwen,
    `<|fim_prefix|>`, `<unused0>`. Plain text becomes the rest: runs of blanks, words (no
    punctuation and no mathematical sign such as `<` or `|`), and HTML tags.
    """
    content = token["content"]
    if content.isspace():
        return False
    if token.get("special"):
        return True
    name = content.removeprefix("<").removeprefix("/").removesuffix(">")
    if name in HTML and content in (f"<{name}>", f"</{name}>"):
        return False
    return not all(sign.isspace() or is_of_a_word(sign) for sign in content)


def is_of_a_word(sign: str) -> bool:
    """Return whether a character is a letter, mark, digit or pictograph: U+2581 is of the last."""
    return unicodedata.category(sign)[0] in "LMN" or unicodedata.category(sign) == "So"


def added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the added tokens of a tokenizer, in the order of their ids."""
    return [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]


def with_added(tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """Return one with the same model and steps before it, and with these added tokens."""
    made = Tokenizer(tokenizer.model)
    made.normalizer = tokenizer.normalizer
    made.pre_tokenizer = tokenizer.pre_tokenizer
    made.add_tokens(added)
    made.encode_special_tokens = tokenizer.encode_special_tokens
    return made


def plain_tokenizer(tokenizer: Tokenizer, control: set[str]) -> Tokenizer:
    """Return one with the same model that finds no control tokens in a text."""
    added = added_tokens(tokenizer)
    for token in added:
        token.special = token.content in control
    plain = with_added(tokenizer, added)
    plain.encode_special_tokens = True  # special ones are text
    return plain


def inner_tokenizer(plain: Tokenizer) -> Tokenizer:
    """One for what follows an added token, where only a text's beginning gets a blank."""
    step = plain.pre_tokenizer
    if not isinstance(step, Metaspace) or step.prepend_scheme != "first":
        return plain
    inner = with_added(plain, added_tokens(plain))
    inner.pre_tokenizer = Metaspace(prepend_scheme="never", split=step.split)
    return inner


def written(tokenizer: Tokenizer, text: str) -> str:
    """A text as the model finds it, before it merges anything."""
    if tokenizer.normalizer:
        text = tokenizer.normalizer.normalize_str(text)
    step = tokenizer.pre_tokenizer
    return "".join(piece for piece, _ in step.pre_tokenize_str(text)) if step else text


def check_blanks(where, raw: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError unless a text is written with SentencePiece's blanks, and read back."""
    for name in sentencepiece.BYTES:
        if name not in raw["model"]["vocab"]:
            raise UserError(f"{where}: model.byte_fallback is True, and there is no token {name}")
    text = " a  é\n"
    blanks = text.replace(" ", sentencepiece.BLANK)
    if written(tokenizer, text) not in (blanks, sentencepiece.BLANK + blanks):
        raise UserError(f"{where}: blanks are not written as {sentencepiece.BLANK}")
    steps = raw["decoder"].get("decoders")
    if steps not in (sentencepiece.DECODER, [*sentencepiece.DECODER, sentencepiece.STRIP]):
        raise UserError(f"{where}: decoder does not undo byte_fallback, and nothing else")


def check_bytes(where, raw: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError unless the pre_tokenizer, and nothing before it, writes a text as bytes."""
    if tokenizer.normalizer and "Ã" in tokenizer.normalizer.normalize_str("é"):
        raise UserError(
            f"{where}: normalizer has a step ByteLevel; only pre_tokenizer may have one"
        )
    if "Ã©" not in written(tokenizer, "é"):
        raise UserError(f"{where}: pre_tokenizer has no step ByteLevel, so a text has no bytes")


def check_added(
    where, added: list[dict], tokenizer: Tokenizer, plain: Tokenizer, model: dict
) -> None:
    """Raise UserError for added tokens with other ids in the library, or that plain text makes.

    The library ignores the ids in the file: a token has its id in the vocabulary, or the next one.
    A control token in the vocabulary may be made by a merge. Where merges are ignored, a piece of
    text that equals it is the token, so the library is asked whether its split leaves it whole.
    plain: the one of `plain_tokenizer`.
    """
    pairs = (pair if isinstance(pair, str) else "".join(pair) for pair in model["merges"])
    made = {pair.replace(" ", "") for pair in pairs}
    asked = []
    for token in added:
        content = token["content"]
        name = f"{where}: added token {content!r}"
        check_values(name, token, FLAGS)
        found = tokenizer.token_to_id(content)
        if found != token["id"]:
            raise UserError(f"{name} has the id {token['id']}, and {found} in the library")
        if not content:
            raise UserError(f"{name} is empty")
        if content in model["vocab"] and controls(token):
            if len(content) == 1 or content in made:
                raise UserError(f"{name}: plain text becomes it")
            if model.get("ignore_merges"):
                asked.append(token)
    texts = [before + token["content"] + after for token in asked for before, after in AROUND]
    found = plain.encode_batch_fast(texts, add_special_tokens=False)
    for number, encoded in enumerate(found):
        token = asked[number // len(AROUND)]
        if token["id"] in encoded.ids:
            raise UserError(f"{where}: added token {token['content']!r}: plain text becomes it")


def find_prefix(where, processor, added: dict[str, int]) -> list[int]:
    """The ids of the added tokens that a post_processor puts before a text.

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
    raise UserError(f"{where}: post_processor does more than put added tokens before a text")


def load_encoding(name, vocab_size: int) -> Encoding:
    """The encoding of a model's text.

    `encode(text, allowed_special="all")` takes `<|endoftext|>` in it as the token it is.

    name: as for `load_model`. The model needs a `tokenizer.json` with a BPE; a GGUF file
    holds its own, or has one beside it. `random:` models speak no language, so their ids from 256
    on print as numbers. So do those of a GGUF file without either. vocab_size: the model's; it may
    be larger than the tokenizer's, as in models whose vocabulary is padded to a round number.
    Raises UserError if it is smaller (but see `Encoding.with_rows`), or there is no tokenizer, or
    one of another kind.
    """
    source = resolve_source(name)
    if source.type == "gguf" and f"{OWNER}.tokens" in source.gguf.metadata:
        fault = "its tokenizer makes no sense"
        encoding = Encoding(source.name, tokenizer_json(source.gguf), fault)
    elif source.type == "random" or source.type == "gguf" and not source.find("tokenizer.json"):
        encoding = numbers_encoding(source.label, vocab_size)
    else:
        encoding = read_tokenizer_json(source.file("tokenizer.json")).with_rows(vocab_size)
    if encoding.n_vocab > vocab_size:
        raise UserError(
            f"{source.name}: the tokenizer has {encoding.n_vocab} tokens,"
            f" the model's vocab_size is {vocab_size}"
        )
    return encoding


def numbers_encoding(name: str, vocab_size: int) -> Encoding:
    """Bytes, then numbers, and `<|endoftext|>` last."""
    vocabulary = {CHARACTERS[i]: i for i in range(256)}
    vocabulary |= {f"{CHARACTERS[ord(' ')]}{i}": i for i in range(256, vocab_size - 1)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": len(vocabulary), "content": EOT, "special": True} | flags
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "ignore_merges": True}
    return Encoding(
        name, {"added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model}
    )


def read_tokenizer_json(file: Path) -> Encoding:
    """An Encoding from Hugging Face's `tokenizer.json`. Raises UserError for other tokenizers."""
    return Encoding(file, read_json(file))


class TextStream:
    """Tokens in, text out, as soon as whole characters are there. skip: what prints nothing."""

    def __init__(self, encoding: Encoding, skip: tuple[int, ...] = ()):
        self.encoding = encoding
        self.skip = frozenset(skip)
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
    it. stopped: whether one was found; all after it prints nothing. One that is complete within the
    first min_tokens tokens does not count.
    """

    def __init__(
        self,
        encoding: Encoding,
        skip: tuple[int, ...] = (),
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
    ):
        super().__init__(encoding, skip)
        self.stop = stop
        self.unheeded = min_tokens  # how many tokens are left in which no string counts
        self.held = ""
        self.stopped = False

    def copy(self) -> "StopStream":
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        return other

    def add(self, token: int) -> str:
        text = self.release(super().add(token))
        self.unheeded = max(self.unheeded - 1, 0)
        return text

    def end(self) -> str:
        text = self.release(super().end()) + self.held
        self.held = ""
        return text

    def release(self, text: str) -> str:
        """What is certain to be printed, of the text that is held and this."""
        for character in "" if self.stopped else text:
            self.held += character
            found = max((len(stop) for stop in self.stop if self.held.endswith(stop)), default=0)
            if found and not self.unheeded:
                certain = self.held[:-found]
                self.held = ""
                self.stopped = True
                return certain
        waiting = max((overlap(self.held, stop) for stop in self.stop), default=0)
        certain = len(self.held) - waiting
        text = self.held[:certain]
        self.held = self.held[certain:]
        return text


def overlap(text: str, string: str) -> int:
    """How many characters at the end of a text may begin a string that is not complete yet."""
    sizes = range(min(len(text), len(string) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)

"""Constrained decoding: masks of the tokens that keep a sequence within its constraint."""

import contextlib
import decimal
import functools
import itertools
import json
import math
import re
import signal
import threading
import weakref
from typing import Any

import numpy
import torch

from cache import common_prefix_length
from errors import UserError
from sampling import SamplingParams


class Vocabulary:
    """Token ids and their bytes, for constraints.

    pieces: bytes of each id; None for special tokens, EOS and ids without text, because constrained
    output never contains them, even if their names spell it. ids: token ids of each piece.
    eos_token_ids: ids that end a sequence. Raises UserError if there is none.
    """

    def __init__(self, encoding, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.encoding = encoding
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        if not self.eos_token_ids:
            raise UserError("the model has no EOS token, so constrained output could never end")
        special = {encoding.added_token_ids[name] for name in encoding.special_tokens_set} | set(
            self.eos_token_ids
        )
        self.pieces: list[bytes | None] = [None] * vocab_size
        self.ids: dict[bytes, list[int]] = {}
        for token in set(range(vocab_size)) - special:
            try:
                piece = encoding.decode_single_token_bytes(token)
            except KeyError:  # a padded vocabulary has ids without text
                continue
            if piece:  # an empty piece could repeat for ever
                self.pieces[token] = piece
                self.ids.setdefault(piece, []).append(token)
        self.longest = max(map(len, self.ids), default=0)  # bytes

    @functools.cached_property
    def usable_tokens(self) -> numpy.ndarray:
        """Return a bitmask, padded to int32, of EOS and all tokens with bytes."""
        texts = [token for token, piece in enumerate(self.pieces) if piece is not None]
        return self.bitmask(texts + self.eos_token_ids)

    @functools.cached_property
    def usable_tokens_in_tool_calls(self) -> numpy.ndarray:
        """Return `usable_tokens` plus the added tokens, which tool-call grammars name."""
        return self.usable_tokens | self.bitmask([*self.added_tokens.values()])

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Return the ids of added tokens by name, without EOS."""
        named = {
            name: self.encoding.added_token_ids[name] for name in self.encoding.special_tokens_set
        }
        return {name: token for name, token in named.items() if token not in self.eos_token_ids}

    @functools.cached_property
    def tokenizer(self):
        """Return this vocabulary as a tokenizer of llguidance."""
        from llguidance import LLTokenizer, TokenizerWrapper

        adapter = TokenizerAdapter(self, [piece or b"" for piece in self.pieces])
        for name, token in self.added_tokens.items():  # llguidance tells them apart by name
            adapter.tokens[token] = name.encode()
        return LLTokenizer(TokenizerWrapper(adapter), len(self.pieces), self.eos_token_ids)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without SentencePiece's leading blank.

        Falls back to the longest tokens first if the tokenizer does not reproduce the text, for
        example because it lacks a byte.
        """
        data = text.encode()
        try:
            tokens = self.encoding.encode_ordinary(text, at_start=False)
            pieces = [self.pieces[token] for token in tokens]
            if b"".join(pieces) == data:
                return tokens
            if b"".join(pieces) == b" " + data:
                return self.tokenize_longest_first(pieces[0][1:]) + tokens[1:]
        except (UserError, TypeError):  # the tokenizer fails, or emits a token without a piece
            pass
        return self.tokenize_longest_first(data)

    def tokenize_longest_first(self, data: bytes) -> list[int]:
        """Tokenize bytes greedily, the longest token first; stop at a byte the vocabulary lacks."""
        tokens = []
        while data:
            sizes = range(min(self.longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self.ids), None)
            if size is None:
                break
            tokens.append(self.ids[data[:size]][0])
            data = data[size:]
        return tokens

    def bitmask(self, ids: list[int]) -> numpy.ndarray:
        """Return a bitmask with the bits of these ids set, one bit per token, padded to int32."""
        token_mask = torch.nn.functional.pad(self.token_mask(ids), (0, -len(self.pieces) % 32))
        return numpy.packbits(token_mask.numpy(), bitorder="little")

    def token_mask(self, ids: list[int] | slice) -> torch.Tensor:
        """Return (vocab_size,) bools: true for these ids."""
        token_mask = torch.zeros(len(self.pieces), dtype=torch.bool)
        token_mask[ids] = True
        return token_mask


MAX_TOKENIZED = 2**9  # characters; a schema can force 65,536, a grammar more


class TokenizerAdapter:
    """Vocabulary under the attribute names that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, pieces: list[bytes]):
        self.tokenize = functools.lru_cache(2**10)(vocabulary.tokenize)  # sequences share texts
        self.tokens = pieces
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        # llguidance passes the whole forced text before each token, and needs only its first token.
        return self.tokenize(text[:MAX_TOKENIZED])


END_OF_CHOICE = None  # key in a trie node where a choice ends


class ChoiceTrie:
    """Byte trie of choices; a node maps each byte that may come next to the child node.

    Raises UserError if a byte of a choice is no token, because decoding could get stuck before it.
    """

    def __init__(self, texts: tuple[str, ...], vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.root = {}
        missing = {byte for text in texts for byte in text.encode()}
        missing = bytes(sorted(byte for byte in missing if bytes([byte]) not in vocabulary.ids))
        if missing:
            raise UserError(f"choices: the vocabulary lacks these bytes: {missing.hex(' ')}")
        for text in texts:
            node = self.root
            for byte in text.encode():
                node = node.setdefault(byte, {})
            node[END_OF_CHOICE] = {}

    def matcher(self) -> "ChoiceMatcher":
        return ChoiceMatcher(self)

    def advance(self, node: dict | None, token: int) -> dict | None:
        """Return the node after a token; None if no choice has this prefix."""
        piece = self.vocabulary.pieces[token]
        for byte in piece or ():
            node = node.get(byte) if node else None
        return node if piece else None

    def next_token_ids(self, node: dict) -> list[int]:
        """Return the allowed token ids by looking up each string that may follow.

        A scan of the vocabulary would read 50,000 tokens; the strings are usually far fewer.
        """
        ids = list(self.vocabulary.eos_token_ids) if END_OF_CHOICE in node else []
        stack = [(node, b"")]
        while stack:
            node, string = stack.pop()
            for byte, child in node.items():
                if byte is not END_OF_CHOICE and len(string) < self.vocabulary.longest:
                    longer = string + bytes([byte])
                    ids += self.vocabulary.ids.get(longer, ())
                    stack.append((child, longer))
        return ids


class Matcher:
    """Constraint state of one sequence, and the token masks it allows."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.tokens: list[int] = []  # output tokens that the state has consumed

    def token_mask(self, output: list[int]) -> torch.Tensor:
        """Return (vocab_size,) bools: true for tokens that may follow this output.

        The output may be any; the prefix shared with the last call is not read again. All tokens
        are allowed after an output that left the constraint, by EOS or by a draft token that will
        be rejected. No token is allowed if this vocabulary cannot complete the constraint.
        """
        raise NotImplementedError

    def reason(self) -> str:
        """Return why no token is allowed."""
        return "no output satisfies the constraint, or none that this vocabulary can write"

    def checked_token_mask(self, output: list[int]) -> torch.Tensor:
        """Return `token_mask`. Raises UserError if it allows no token."""
        token_mask = self.token_mask(output)
        if not token_mask.numpy().any():  # numpy stops at the first true, torch does not
            where = f"after {len(output)} token{'s' * (len(output) != 1)} of output"
            raise UserError(f"no token may follow {where}: {self.reason()}")
        return token_mask

    def is_accepting(self, output: list[int]) -> bool:
        """Return whether an output ends with EOS, or EOS may follow it."""
        eos_token_ids = self.vocabulary.eos_token_ids
        return (
            output[-1:] in [[end] for end in eos_token_ids]
            or self.token_mask(output)[eos_token_ids[0]].item()
        )


class ChoiceMatcher(Matcher):
    """Matcher of a ChoiceTrie; keeps the node after each token, so that it can roll back."""

    def __init__(self, choices: ChoiceTrie):
        super().__init__(choices.vocabulary)
        self.choices = choices
        self.nodes = [choices.root]  # before the first token, and after each

    def token_mask(self, output: list[int]) -> torch.Tensor:
        known = common_prefix_length(self.tokens, output)
        del self.tokens[known:]
        del self.nodes[known + 1 :]
        for token in output[known:]:
            self.nodes.append(self.choices.advance(self.nodes[-1], token))
            self.tokens.append(token)
        node = self.nodes[-1]
        if node is None:
            return self.vocabulary.token_mask(slice(None))
        return self.vocabulary.token_mask(self.choices.next_token_ids(node))


@contextlib.contextmanager
def interruptible():
    """Let Ctrl-C end a script in the block, where native calls delay Python's own handler."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Budgets of llguidance. Its Earley parser has a row for each lexeme, with an item for each
# continuation: 601 for 600 alternatives, 1,607 for an object with 400 optional properties.
# Ambiguous rows take time cubic in their items, up to 0.3 s, so a server limits time, too.
MAX_ITEMS = 2000
MAX_STATES = 2**16  # of the lexer, plus two per source byte; up to 14 MB
# Expressions of the lexer, plus two per source byte. They grow exponentially if each terminal uses
# another one twice: 65,536 take up to 12 MB, llguidance's own limit of a million 90 MB.
MAX_EXPRESSIONS = 2**16
MAX_MULTIPLES = 10**6  # expressions of a schema with multipleOf, including remainders
MAX_FORCED_PREFIX = 32  # forced tokens that are checked at compile time
# Flexible whitespace would let a model write blanks for ever. \u is off, because llguidance
# compares names as written, so "\u0061" and "a" would be different names.
JSON_OPTIONS = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}


class Grammar:
    """JSON schema, regular expression or grammar, compiled by llguidance.

    constraint_field: SamplingParams field of the source. Raises UserError if the source is invalid,
    or if no output satisfies it.
    """

    def __init__(self, constraint_field: str, source: str, vocabulary: Vocabulary):
        from llguidance import LLMatcher, LLParserLimits  # takes 0.04 s, and few requests need it

        self.vocabulary = vocabulary
        self.usable_tokens = vocabulary.usable_tokens
        self.field = "tools" if constraint_field == "tool_grammar" else constraint_field
        try:
            if constraint_field == "tool_grammar":
                text = source
                self.usable_tokens = vocabulary.usable_tokens_in_tool_calls
            elif constraint_field == "json_schema":
                schema = json.dumps(parse_schema(source))
                text = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
            elif constraint_field == "regex":
                text = LLMatcher.grammar_from_regex(source)
            else:
                check_lark(source)
                text = LLMatcher.grammar_from_lark(source)
            multiples = (
                constraint_field in ("json_schema", "tool_grammar") and '"multipleOf"' in text
            )
            limit = MAX_MULTIPLES if multiples else MAX_EXPRESSIONS
            limits = LLParserLimits(
                verbose_errors=False,
                max_items_in_row=MAX_ITEMS,
                initial_lexer_fuel=limit + 2 * len(source),
                max_lexer_states=MAX_STATES + 2 * len(source),
            )
            # Never mutated: each matcher has a copy, which shares the compiled grammar.
            with interruptible():
                self.initial_state = LLMatcher(
                    vocabulary.tokenizer, text, log_level=0, limits=limits
                )
            if self.initial_state.is_error():
                error = self.initial_state.get_error()
                raise UserError(
                    tool_error(text, error)
                    if constraint_field == "tool_grammar"
                    else short_error(error)
                )
            self.check_initial_state()
        except ValueError as error:  # a UserError is one
            raise UserError(f"{self.field}: {error}") from None

    def matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self)

    def check_initial_state(self) -> None:
        """Raise UserError if no token may come first, or none may follow the forced prefix.

        For example, a required property that requires itself allows "{" and then nothing.
        """
        matcher = self.matcher()
        output = []
        while len(output) < MAX_FORCED_PREFIX:
            token = single_allowed_token(matcher.checked_token_mask(output))
            if token is None or token in self.vocabulary.eos_token_ids:
                break
            output.append(token)


LLGUIDANCE_ADVICE = "consider making your grammar"  # in llguidance's errors, for authors of rules


class GrammarMatcher(Matcher):
    """Matcher of a Grammar; wraps the state of llguidance's parser."""

    def __init__(self, grammar: Grammar):
        super().__init__(grammar.vocabulary)
        self.grammar = grammar
        self.state = grammar.initial_state.deep_copy()
        self.error = ""
        self.bitmask = numpy.zeros(-(-len(self.vocabulary.pieces) // 32) * 4, numpy.uint8)

    def token_mask(self, output: list[int]) -> torch.Tensor:
        known = common_prefix_length(self.tokens, output)
        self.state.rollback(len(self.tokens) - known)
        del self.tokens[known:]
        eos_token_ids = self.vocabulary.eos_token_ids
        # Stop before EOS, after which all tokens are allowed.
        text = list(itertools.takewhile(lambda token: token not in eos_token_ids, output[known:]))
        with interruptible():
            self.tokens += text[: self.state.try_consume_tokens(text)]
            if len(self.tokens) < len(output) and not self.state.is_error():
                return self.vocabulary.token_mask(slice(None))
            self.state.unsafe_compute_mask_ptr(self.bitmask.ctypes.data, len(self.bitmask))
        self.error = self.state.get_error()
        if self.error:  # an error is final, so restart
            self.state = self.grammar.initial_state.deep_copy()
            self.tokens = []
            return self.vocabulary.token_mask([])
        # A user's grammar may name special tokens, which must not be generated.
        self.bitmask &= self.grammar.usable_tokens
        token_mask = numpy.unpackbits(
            self.bitmask, count=len(self.vocabulary.pieces), bitorder="little"
        )
        return torch.from_numpy(token_mask.view(bool))

    def reason(self) -> str:
        reason = short_error(self.error)
        if not reason or reason.startswith("NoExtension"):
            return super().reason()
        if LLGUIDANCE_ADVICE in reason and self.grammar.field != "grammar":
            return (
                reason.partition(LLGUIDANCE_ADVICE)[0]
                + "give it fewer alternatives and optional properties"
            )
        return reason


# Lexemes of llguidance's Lark. No two types begin with the same two characters.
LEXEME = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<comment>(?:\#|//)[^\n]*)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<special><[^<>\s]+>)
    |(?P<reference>@[\w-]*)
    |(?P<directive>%[a-zA-Z]+)
    |(?P<parameter>::)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
LARK_DIRECTIVES = {"%ignore", "%import"}
LARK_OPTIONS = {"lazy"}


def check_lark(source: str) -> None:
    """Raise UserError for features of llguidance's Lark other than rules, terminals and regexes.

    Parametric rules can recurse for ever, options change sampling or backtracking, and special
    tokens must not be generated. See docs/syntax.md and docs/parametric.md of llguidance.
    """
    code = ""
    for found in LEXEME.finditer(source):
        token_type = found.lastgroup
        lexeme = found[0]
        if token_type == "parameter":
            raise UserError("parametric rules (::) are not supported: they may never end")
        if token_type == "directive" and lexeme not in LARK_DIRECTIVES:
            allowed = " and ".join(sorted(LARK_DIRECTIVES))
            raise UserError(f"{lexeme:.40} is not supported in a grammar; {allowed} are")
        if token_type == "special":
            raise UserError(f"{lexeme:.40} is not supported: output cannot contain special tokens")
        if token_type == "reference":
            raise UserError(f"{lexeme:.40} is not supported: a grammar cannot refer to another one")
        code += {"comment": "", "string": '""', "regex": "//"}.get(token_type, lexeme)
    for options in re.findall(r"(?m)^[ \t]*[!?_]*[a-z][^\n:|\[]*\[([^\]]*)\]\s*:", code):
        for option in options.split(","):
            if option.strip() not in LARK_OPTIONS:
                name = option.partition("=")[0].strip()
                raise UserError(
                    f"the option {name!r:.40} is not supported in a grammar; only lazy is"
                )
    if "=" in code:
        raise UserError(
            "the sign = is not supported in a grammar: the only supported option is lazy"
        )


def single_allowed_token(token_mask: torch.Tensor | None) -> int | None:
    """Return the token if the mask allows exactly one; None for other masks or no mask."""
    if token_mask is None or numpy.count_nonzero(token_mask.numpy()) != 1:
        return None
    return int(token_mask.numpy().argmax())


def tool_error(grammar: str, error: str) -> str:
    """Return an llguidance error on a tool grammar by tool name; clients never see the grammar."""
    position, _, reason = re.split(r"\n +\d+ \| ", error)[0].partition(": ")
    line = re.match(r"at (\d+)", position)
    rule = grammar.splitlines()[int(line[1]) - 1] if line else ""
    name = re.match(r'call\d+: "([\w-]+)', rule)
    return f"{name[1]}: {short_error(reason)}" if name else short_error(error)


ONE_OF_ADVICE = (  # replaces llguidance's advice to set an option that clients cannot set
    "oneOf needs schemas of which no two allow the same value, told apart by type or by a required "
    "property with another const in each; anyOf needs neither"
)


def short_error(error: str) -> str:
    """Return an error of llguidance in one line of up to 300 characters, without parser state."""
    line = " ".join(re.split(r"<backtrace>|<non-verbose/>", error)[0].split())[:300]
    return ONE_OF_ADVICE if line.startswith("oneOf constraints are not supported") else line


# Keywords that constrain nothing: with any value, or with one of these values.
IGNORED_KEYWORDS = {"contentEncoding", "contentMediaType", "contentSchema"}
IGNORED_KEYWORDS |= {"example", "externalDocs", "xml"}  # OpenAPI's
NEUTRAL_VALUES = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "additionalItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
# Formats whose syntax llguidance enforces, and other formats of JSON Schema. Any further name is an
# annotation in JSON Schema, and is ignored.
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"}
FORMATS |= {"uri", "uuid"}
UNSUPPORTED_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference"}
UNSUPPORTED_FORMATS |= {"uri-template", "json-pointer", "relative-json-pointer", "regex"}
SCHEMA_KEYWORDS = {"items", "additionalProperties"}  # keywords that hold a schema
SCHEMA_LIST_KEYWORDS = {"anyOf", "oneOf", "allOf", "prefixItems"}  # a list of schemas
SCHEMA_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
SUPPORTED_KEYWORDS = {
    *("type", "enum", "const", "$ref", "required", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "discriminator"),
    *IGNORED_KEYWORDS,
}
MAX_SCHEMA_DEPTH = 32  # levels of nested schemas
MAX_SCHEMAS = 1000
MAX_VALUES = 5000  # total of all enums
MAX_PATTERN = 2**12  # total characters of all patterns
MAX_INTERSECTED = 8  # intersected schemas: 16 patterns take 1.4 s, each more doubles it
MAX_REMAINDERS = 5 * 10**4  # total of all multipleOf: llguidance has a state for each
ANNOTATION_KEYWORDS = {  # keywords that alone constrain no output
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "$comment", *IGNORED_KEYWORDS),
    "discriminator",  # OpenAPI: selects a schema of oneOf by a tag, which that schema requires, too
}
IN_PLACE_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref"}


def parse_schema(source: str) -> dict:
    """Parse a JSON schema and strip the keywords that constrain nothing.

    Raises UserError for invalid JSON, and as `check_schemas`.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        raise UserError(f"more than {MAX_SCHEMA_DEPTH} levels of nested schemas") from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError("it must be an object")
    check_schemas({"": schema})
    return strip_ignored_keywords(schema)


def strip_ignored_keywords(schema: Any) -> Any:
    """Return a schema, checked by `check_schemas`, without the keywords that constrain nothing."""
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for name, value in schema.items():
        if name in IGNORED_KEYWORDS or name in NEUTRAL_VALUES:
            continue
        if name == "format" and value not in FORMATS:
            continue
        if name in SCHEMA_KEYWORDS:
            value = strip_ignored_keywords(value)
        elif name in SCHEMA_LIST_KEYWORDS:
            value = [strip_ignored_keywords(each) for each in value]
        elif name in SCHEMA_MAP_KEYWORDS:
            value = {key: strip_ignored_keywords(each) for key, each in value.items()}
        plain[name] = value
    return plain


def check_schemas(schemas: dict[str, dict]) -> None:
    """Raise UserError for schemas, given by path, that are too large or use unknown keywords.

    llguidance ignores unknown keywords, so the output could violate them.
    """
    stack = [(path, schema, 1) for path, schema in schemas.items()]  # (path, schema, depth)
    count = values = pattern = intersected = 0
    multiples = []
    while stack:
        path, schema, depth = stack.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise UserError(f"{path:.100} is {schema!r:.40}; it must be an object or a boolean")
        count += 1
        for name, value in schema.items():
            child_path = f"{path}.{name}".lstrip(".")
            if name in SCHEMA_KEYWORDS:
                stack.append((child_path, value, depth + 1))
            elif name in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                stack += [(f"{child_path}[{i}]", each, depth + 1) for i, each in enumerate(value)]
            elif name in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
                stack += [(f"{child_path}.{key}", each, depth + 1) for key, each in value.items()]
                pattern += sum(map(len, value)) if name == "patternProperties" else 0
            elif name in SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS:
                expected = "an object" if name in SCHEMA_MAP_KEYWORDS else "a list"
                raise UserError(f"{child_path:.100} is {value!r:.40}; it must be {expected}")
            elif name in NEUTRAL_VALUES and any(
                json_equal(value, none) for none in NEUTRAL_VALUES[name]
            ):
                pass
            elif name not in SUPPORTED_KEYWORDS:
                raise UserError(f"the keyword {child_path!r:.100} is not supported")
            elif name == "format" and not isinstance(value, str):
                raise UserError(f"{child_path:.100} is {value!r:.40}; it must be a string")
            elif name == "format" and value in UNSUPPORTED_FORMATS:
                allowed = ", ".join(sorted(FORMATS))
                raise UserError(f"{child_path:.100} is {value!r}; it must be one of {allowed}")
            elif name == "minProperties":
                check_min_properties(child_path, schema)
            elif name == "discriminator" and "oneOf" not in schema:
                raise UserError(f"{child_path:.100} needs oneOf beside it")
            elif name == "$ref" and not str(value).startswith("#"):
                raise UserError(f"{child_path:.100} is {value!r:.100}; it must begin with #")
            elif name == "$ref" and not leads_to_schema(str(value)):
                raise UserError(f"{child_path:.100} is {value!r:.100}; it must lead to a schema")
            if name in ("const", "enum"):
                check_values(child_path, value)
            elif name == "pattern" or name == "patternProperties":
                check_patterns(child_path, [value] if name == "pattern" else value)
            values += len(value) if name == "enum" and isinstance(value, list) else 0
            pattern += len(str(value)) if name == "pattern" else 0
            intersected += len(value) - 1 if name == "allOf" and isinstance(value, list) else 0
            if name == "multipleOf" and type(value) in (int, float) and 0 != abs(value) < math.inf:
                multiples.append(decimal.Decimal(str(value)).normalize())
        intersected += bool(
            schema.keys() & IN_PLACE_APPLICATORS
            and schema.keys() - IN_PLACE_APPLICATORS - ANNOTATION_KEYWORDS
        )
        limits = (
            (depth, MAX_SCHEMA_DEPTH, "levels of nested schemas"),
            (count, MAX_SCHEMAS, "schemas"),
        )
        limits += (
            (values, MAX_VALUES, "enum values"),
            (pattern, MAX_PATTERN, "characters in patterns"),
        )
        limits += ((intersected, MAX_INTERSECTED, "schemas intersected with another"),)
        for found, limit, what in limits:
            if found > limit:
                raise UserError(f"more than {limit:,} {what}")
    if count_remainders(multiples) > MAX_REMAINDERS:
        raise UserError(f"more than {MAX_REMAINDERS:,} remainders of multipleOf")


# Characters that JSON can only write with \u, and their escapes in a regular expression.
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ESCAPED_CONTROL_CHARACTER = re.compile(
    r"\\(x(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|v)"
)
CONTROL_ADVICE = r"the only control characters allowed are \b, \f, \n, \r and \t"


def check_values(path: str, value: Any) -> None:
    """Raise UserError if a string anywhere in a value has a character of CONTROL_CHARACTER.

    llguidance omits such a character, so the output would have another value. Property names are
    not affected.
    """
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, str) and CONTROL_CHARACTER.search(value):
            raise UserError(f"{path:.100} has the string {value!r:.100}; {CONTROL_ADVICE}")


def check_patterns(path: str, patterns: Any) -> None:
    """Raise UserError as `check_values` does, for characters of a pattern outside [brackets]."""
    if sum(len(str(pattern)) for pattern in patterns) > MAX_PATTERN:  # refused later
        return
    for pattern in patterns:
        bare = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\\\", "", str(pattern), flags=re.DOTALL)
        if CONTROL_CHARACTER.search(bare) or ESCAPED_CONTROL_CHARACTER.search(bare):
            raise UserError(f"{path:.100} has the pattern {pattern!r:.100}; {CONTROL_ADVICE}")


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return type(value) is type(other) and value == other


def check_min_properties(path: str, schema: dict) -> None:
    """Raise UserError for a minProperties that an output could reach by repeating a name.

    llguidance counts additional properties, but does not compare their names.
    """
    least = schema["minProperties"]
    if isinstance(least, float) and not least.is_integer():
        raise UserError(f"{path:.100} is {least}; it must be an integer")
    required = schema.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names) + 1:
        reason = "other names may repeat, and JSON parsers count a repeated name once"
        allowed = f"with {len(names)} required properties it must be at most {len(names) + 1}"
        raise UserError(f"{path:.100} is {least}; {allowed}: {reason}")


def count_remainders(multiples: list[decimal.Decimal]) -> int:
    """Return an upper bound on the remainders that a parser tracks for these multipleOf values.

    One number may have to be a multiple of all of them, so their least common multiple counts.
    """
    if not multiples:
        return 0
    least = min(each.as_tuple().exponent for each in multiples)
    return len(multiples) * math.lcm(*(int(each.scaleb(-least)) for each in multiples))


def leads_to_schema(reference: str) -> bool:
    """Return whether a $ref leads to a schema that `check_schemas` visits, not to a default."""
    parts = iter(reference.split("/")[1:])
    return all(
        part in SCHEMA_KEYWORDS
        or (part in SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS and next(parts, None) is not None)
        for part in parts
    )


@functools.lru_cache(4)
def get_vocabulary(encoding, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Return the Vocabulary of an encoding, cached."""
    return Vocabulary(encoding, vocab_size, eos_token_ids)


compiled = weakref.WeakValueDictionary()  # constraints in use, for example by a matcher


@functools.lru_cache(8)  # keeps recent constraints, which clients often reuse
def compile_source(constraint_field: str, source, vocabulary: Vocabulary) -> ChoiceTrie | Grammar:
    """Compile the source of a SamplingParams field, or return its constraint if still in use."""
    key = constraint_field, source, vocabulary
    found = compiled.get(key)
    if found is None:
        found = ChoiceTrie(source, vocabulary) if constraint_field == "choices" else Grammar(*key)
        found = compiled.setdefault(key, found)  # another thread may have been faster
    return found


@functools.lru_cache(1)
def compile_large_source(*key) -> ChoiceTrie | Grammar:
    """Compile a constraint that is too large to keep eight of, as `compile_source` does."""
    return compile_source.__wrapped__(*key)


def clear_constraint_cache() -> None:
    """Drop the constraints that the cache keeps for later requests."""
    compile_source.cache_clear()
    compile_large_source.cache_clear()


CONSTRAINT_BYTES = 2**18  # minimum memory of a constraint
SOURCE_BYTES = 2**9  # additional memory per source byte; an enum of objects takes 300
LARGE_BYTES = 2**23  # above this, cache one constraint instead of eight


def constraint_bytes(source: str | tuple[str, ...]) -> int:
    """Estimate the bytes of a constraint from its source. Its sequences take additional memory."""
    texts = [source] if isinstance(source, str) else source
    return CONSTRAINT_BYTES + SOURCE_BYTES * sum(len(text.encode()) for text in texts)


def compiled_bytes() -> int:
    """Estimate the memory of all compiled constraints in use, in bytes."""
    return sum(constraint_bytes(source) for _, source, _ in compiled.copy())


def compile_constraint(
    params: SamplingParams, vocabulary: Vocabulary
) -> ChoiceTrie | Grammar | None:
    """Return the compiled constraint of these parameters; None if unconstrained.

    Raises UserError as `ChoiceTrie` and `Grammar`.
    """
    constraint = params.constraint
    if constraint is None:
        return None
    large = constraint_bytes(constraint.source) > LARGE_BYTES
    return (compile_large_source if large else compile_source)(*constraint, vocabulary)


def make_matcher(params: SamplingParams, encoding, config) -> Matcher | None:
    """Return a matcher for a sequence with these parameters; None if unconstrained.

    config: the model's configuration. Raises UserError as `compile_constraint`, and if encoding is
    None.
    """
    if params.constraint is None:
        return None
    if encoding is None:
        raise UserError(f"{params.constraint.field}: a constraint needs an encoding")
    vocabulary = get_vocabulary(encoding, config.vocab_size, tuple(config.eos_token_ids))
    return compile_constraint(params, vocabulary).matcher()

"""Constrained decoding: which tokens may come next, so that a text satisfies its constraint."""

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
    """What each token writes.

    pieces: the bytes of each id; None for special tokens, those that end a text, and ids without
    text, because no text is made of them, even where a name spells one. ids: of each piece.
    eos_token_ids: the ids that end a text. Raises UserError if there is none.
    """

    def __init__(self, encoding, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.encoding = encoding
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        if not self.eos_token_ids:
            raise UserError("this model has no token that ends a text, so no text is ever whole")
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
            if piece:  # an empty one could follow itself for ever
                self.pieces[token] = piece
                self.ids.setdefault(piece, []).append(token)
        self.longest = max(map(len, self.ids), default=0)  # bytes

    @functools.cached_property
    def usable_tokens(self) -> numpy.ndarray:
        """A bit for each token: whether a text may have it, or it ends one. Whole int32s."""
        texts = [token for token, piece in enumerate(self.pieces) if piece is not None]
        return self.bitmask(texts + self.eos_token_ids)

    @functools.cached_property
    def usable_tokens_in_tool_calls(self) -> numpy.ndarray:
        """The same with added tokens, which the grammar of a reply with calls names."""
        return self.usable_tokens | self.bitmask([*self.added_tokens.values()])

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Added tokens that end no text, by their names."""
        named = {
            name: self.encoding.added_token_ids[name] for name in self.encoding.special_tokens_set
        }
        return {name: token for name, token in named.items() if token not in self.eos_token_ids}

    @functools.cached_property
    def tokenizer(self):
        """What llguidance knows of this vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper

        adapter = TokenizerAdapter(self, [piece or b"" for piece in self.pieces])
        for name, token in self.added_tokens.items():  # without a name none is told from others
            adapter.tokens[token] = name.encode()
        return LLTokenizer(TokenizerWrapper(adapter), len(self.pieces), self.eos_token_ids)

    def tokenize(self, text: str) -> list[int]:
        """The tokens that the tokenizer writes for a text, without SentencePiece's first blank.

        Where it writes another text, as without a byte that it lacks: the longest tokens first.
        """
        data = text.encode()
        try:
            tokens = self.encoding.encode_ordinary(text, at_start=False)
            pieces = [self.pieces[token] for token in tokens]
            if b"".join(pieces) == data:
                return tokens
            if b"".join(pieces) == b" " + data:
                return self.tokenize_longest_first(pieces[0][1:]) + tokens[1:]
        except (UserError, TypeError):  # the tokenizer gives up, or an EOS is a piece of the text
            pass
        return self.tokenize_longest_first(data)

    def tokenize_longest_first(self, data: bytes) -> list[int]:
        """Tokens for these bytes, the longest first. It stops at one that the vocabulary lacks."""
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
        """A bit for each token: whether it is among these. Whole int32s."""
        token_mask = torch.nn.functional.pad(self.token_mask(ids), (0, -len(self.pieces) % 32))
        return numpy.packbits(token_mask.numpy(), bitorder="little")

    def token_mask(self, ids: list[int] | slice) -> torch.Tensor:
        """(vocab_size,) bools: which tokens are among these."""
        token_mask = torch.zeros(len(self.pieces), dtype=torch.bool)
        token_mask[ids] = True
        return token_mask


MAX_TOKENIZED = 2**9  # characters; a schema can force 65,536, a grammar more


class TokenizerAdapter:
    """A vocabulary with the names that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, pieces: list[bytes]):
        self.tokenize = functools.lru_cache(2**10)(vocabulary.tokenize)  # rows ask for the same
        self.tokens = pieces
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        # Asked for all that must follow, before each token. Only the first of these counts.
        return self.tokenize(text[:MAX_TOKENIZED])


END_OF_CHOICE = None  # the key in a node of the trie that says: a choice ends here


class ChoiceTrie:
    """Texts as a trie: a node maps each byte that may come next to the node after it.

    Raises UserError for a choice with bytes that no token is: a text could get stuck before one.
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
        """The node that a token leads to; None: no choice begins like this."""
        piece = self.vocabulary.pieces[token]
        for byte in piece or ():
            node = node.get(byte) if node else None
        return node if piece else None

    def next_token_ids(self, node: dict) -> list[int]:
        """The tokens that may come next: each string that follows is looked up in the vocabulary.

        A scan of the vocabulary would read 50,000 tokens; the strings are hardly ever as many.
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
    """Says which tokens may follow a text under a constraint."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.tokens: list[int] = []  # the output that the state stands behind

    def token_mask(self, output: list[int]) -> torch.Tensor:
        """Which tokens may follow this output of a text, (vocab_size,) bools.

        It may be any output: what it shares with that of the last call is not read again. After
        one that has left the constraint all are allowed: a draft that will be refused, or an EOS.
        No token is allowed where this vocabulary cannot complete the constraint.
        """
        raise NotImplementedError

    def reason(self) -> str:
        """Why no token is allowed."""
        return "the constraint allows nothing, or nothing that this vocabulary can write"

    def checked_token_mask(self, output: list[int]) -> torch.Tensor:
        """`token_mask`. Raises UserError if no token is."""
        token_mask = self.token_mask(output)
        if not token_mask.numpy().any():  # it ends at the first, where torch looks at all
            where = f"after {len(output)} token{'s' * (len(output) != 1)} of the text"
            raise UserError(f"no token may follow {where}: {self.reason()}")
        return token_mask

    def is_accepting(self, output: list[int]) -> bool:
        """Whether an output has ended, or may end where it is cut."""
        eos_token_ids = self.vocabulary.eos_token_ids
        return (
            output[-1:] in [[end] for end in eos_token_ids]
            or self.token_mask(output)[eos_token_ids[0]].item()
        )


class ChoiceMatcher(Matcher):
    """Keeps a node for each token of a text, so it can go back."""

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
    """Let Ctrl-C end a script inside the block, where Python's own handler would not be called."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Budgets of llguidance. Its parser has a row for each lexeme of a text, with an item for each way
# to go on. One of 600 alternatives has 601, an object with 400 optional properties 1,607. Ambiguous
# rows take time with the cube of their items, up to 0.3 s: a server has a budget of time, too.
MAX_ITEMS = 2000
MAX_STATES = 2**16  # of the lexer, beside two for each byte of the source; up to 14 MB
# Expressions of the lexer, beside two for each byte of the source. Terminals that each have another
# one twice double them: 65,536 take up to 12 MB, llguidance's own limit of a million 90 MB.
MAX_EXPRESSIONS = 2**16
MAX_MULTIPLES = 10**6  # of a schema with multipleOf, whose remainders are counted, too
MAX_FORCED_PREFIX = 32  # tokens that must come first
# How JSON is written. A model may write blanks for ever. Without \u a character has one spelling:
# llguidance compares names as they are written, and takes "\u0061" for another name than "a".
JSON_OPTIONS = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}


class Grammar:
    """A JSON schema, a regular expression or a grammar, which llguidance compiles.

    constraint_field: the field of SamplingParams that the source is from. Raises UserError for what
    is wrong with it, and if no text satisfies it.
    """

    def __init__(self, constraint_field: str, source: str, vocabulary: Vocabulary):
        from llguidance import LLMatcher, LLParserLimits  # takes 0.04 s, and few texts need it

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
            # Nothing is ever written to it: each matcher has a copy, which shares what is compiled.
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
        """Raise UserError if no token may come first, or follow the tokens that must come first.

        A required property that needs itself, for example, allows "{" and then nothing.
        """
        matcher = self.matcher()
        output = []
        while len(output) < MAX_FORCED_PREFIX:
            token = single_allowed_token(matcher.checked_token_mask(output))
            if token is None or token in self.vocabulary.eos_token_ids:
                break
            output.append(token)


LLGUIDANCE_ADVICE = "consider making your grammar"  # llguidance's, to whoever writes rules


class GrammarMatcher(Matcher):
    """A state of llguidance's parser."""

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
        # Not an EOS: after it everything is allowed.
        text = list(itertools.takewhile(lambda token: token not in eos_token_ids, output[known:]))
        with interruptible():
            self.tokens += text[: self.state.try_consume_tokens(text)]
            if len(self.tokens) < len(output) and not self.state.is_error():
                return self.vocabulary.token_mask(slice(None))
            self.state.unsafe_compute_mask_ptr(self.bitmask.ctypes.data, len(self.bitmask))
        self.error = self.state.get_error()
        if self.error:  # there is no way back from one
            self.state = self.grammar.initial_state.deep_copy()
            self.tokens = []
            return self.vocabulary.token_mask([])
        # A grammar from outside can name special tokens, which are no text.
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


# The lexemes of llguidance's Lark. No two of them begin with the same character and the next one.
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
    """Raise UserError for what llguidance's Lark has beside rules, terminals and regexes.

    Parametric rules can recurse for ever. Options change how a text is drawn or taken back, and
    special tokens are no text. See docs/syntax.md and docs/parametric.md of llguidance.
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
            raise UserError(f"{lexeme:.40} is not supported: a special token is no text")
        if token_type == "reference":
            raise UserError(f"{lexeme:.40} is not supported: there is no other grammar")
        code += {"comment": "", "string": '""', "regex": "//"}.get(token_type, lexeme)
    for options in re.findall(r"(?m)^[ \t]*[!?_]*[a-z][^\n:|\[]*\[([^\]]*)\]\s*:", code):
        for option in options.split(","):
            if option.strip() not in LARK_OPTIONS:
                name = option.partition("=")[0].strip()
                raise UserError(f"the option {name!r:.40} is not supported in a grammar; lazy is")
    if "=" in code:
        raise UserError("the sign = is not supported in a grammar: of all options only lazy is")


def single_allowed_token(token_mask: torch.Tensor | None) -> int | None:
    """The token of a mask that allows one; None for other masks, and without one."""
    if token_mask is None or numpy.count_nonzero(token_mask.numpy()) != 1:
        return None
    return int(token_mask.numpy().argmax())


def tool_error(grammar: str, error: str) -> str:
    """What an error of llguidance says of a grammar of calls, whose text no client has seen."""
    position, _, reason = re.split(r"\n +\d+ \| ", error)[0].partition(": ")
    line = re.match(r"at (\d+)", position)
    rule = grammar.splitlines()[int(line[1]) - 1] if line else ""
    name = re.match(r'call\d+: "([\w-]+)', rule)
    return f"{name[1]}: {short_error(reason)}" if name else short_error(error)


ONE_OF_ADVICE = (  # for llguidance's advice of an option that no client can set
    "oneOf needs schemas of which no two allow the same value, told apart by type or by a required "
    "property with another const in each; anyOf needs neither"
)


def short_error(error: str) -> str:
    """What an error of llguidance says, in one line, without the state of its parser."""
    line = " ".join(re.split(r"<backtrace>|<non-verbose/>", error)[0].split())[:300]
    return ONE_OF_ADVICE if line.startswith("oneOf constraints are not supported") else line


# Keywords that ask for nothing: with any value, or with one of these.
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
# Formats that llguidance knows, by their shape; and others that JSON Schema defines. Any further
# name is a note: JSON Schema leaves its meaning to whoever reads it.
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
MAX_SCHEMA_DEPTH = 32  # schemas inside each other
MAX_SCHEMAS = 1000
MAX_VALUES = 5000  # of all enums
MAX_PATTERN = 2**12  # characters of all patterns
MAX_INTERSECTED = 8  # that hold beside another: 16 patterns take 1.4 s, each more doubles it
MAX_REMAINDERS = 5 * 10**4  # of all multipleOf: llguidance has a state for each
ANNOTATION_KEYWORDS = {  # keywords that say nothing of a text by themselves
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "$comment", *IGNORED_KEYWORDS),
    "discriminator",  # OpenAPI's: which schema of oneOf holds, where its own tag says so, too
}
IN_PLACE_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref"}


def parse_schema(source: str) -> dict:
    """Return a schema without what asks for nothing.

    Raises UserError for one that is not JSON, and as `check_schemas`.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        raise UserError(f"schemas are nested more than {MAX_SCHEMA_DEPTH} deep") from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError("it must be an object")
    check_schemas({"": schema})
    return strip_ignored_keywords(schema)


def strip_ignored_keywords(schema: Any) -> Any:
    """Return a schema that `check_schemas` has passed, without what asks for nothing."""
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
    """Raise UserError for schemas, by their paths, that are too large, or with unknown keywords.

    llguidance ignores keywords that it has never heard of; a text would not be what they ask for.
    """
    stack = [(path, schema, 1) for path, schema in schemas.items()]  # and how deep
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
                raise UserError(f"{child_path:.100} is {value!r}; of these it may be {allowed}")
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
            (depth, MAX_SCHEMA_DEPTH, "schemas inside each other"),
            (count, MAX_SCHEMAS, "schemas"),
        )
        limits += (values, MAX_VALUES, "values"), (pattern, MAX_PATTERN, "characters in patterns")
        limits += ((intersected, MAX_INTERSECTED, "schemas that hold beside another"),)
        for found, limit, what in limits:
            if found > limit:
                raise UserError(f"more than {limit:,} {what}")
    if count_remainders(multiples) > MAX_REMAINDERS:
        raise UserError(f"more than {MAX_REMAINDERS:,} remainders of multipleOf")


# Characters that JSON writes with \u only, and what a regular expression writes for one.
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ESCAPED_CONTROL_CHARACTER = re.compile(
    r"\\(x(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|v)"
)
CONTROL_ADVICE = r"of control characters a string may have \b, \f, \n, \r and \t"


def check_values(path: str, value: Any) -> None:
    """Raise UserError for a string with a character of CONTROL_CHARACTER, anywhere in a value.

    llguidance leaves such a character out: a text would have another value. Names keep theirs.
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
    """Raise UserError as `check_values`, for a character of a pattern outside of [brackets]."""
    if sum(len(str(pattern)) for pattern in patterns) > MAX_PATTERN:  # refused for that
        return
    for pattern in patterns:
        bare = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\\\", "", str(pattern), flags=re.DOTALL)
        if CONTROL_CHARACTER.search(bare) or ESCAPED_CONTROL_CHARACTER.search(bare):
            raise UserError(f"{path:.100} has the pattern {pattern!r:.100}; {CONTROL_ADVICE}")


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two values are the same JSON, in which true is not 1."""
    return type(value) is type(other) and value == other


def check_min_properties(path: str, schema: dict) -> None:
    """Raise UserError for a minProperties that a text could reach with one name twice.

    llguidance counts additional properties, but does not compare their names.
    """
    least = schema["minProperties"]
    if isinstance(least, float) and not least.is_integer():
        raise UserError(f"{path:.100} is {least}; it must be an integer")
    required = schema.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names) + 1:
        reason = "names of other properties may repeat, and a reader of JSON counts them once"
        allowed = f"with {len(names)} required properties it may be up to {len(names) + 1}"
        raise UserError(f"{path:.100} is {least}; {allowed}: {reason}")


def count_remainders(multiples: list[decimal.Decimal]) -> int:
    """How many remainders a parser may have to tell apart for these values of multipleOf.

    One number may have to be a multiple of all of them: their least common multiple counts.
    """
    if not multiples:
        return 0
    least = min(each.as_tuple().exponent for each in multiples)
    return len(multiples) * math.lcm(*(int(each.scaleb(-least)) for each in multiples))


def leads_to_schema(reference: str) -> bool:
    """Whether it leads to where `parse_schema` looks, and not, say, into a default."""
    parts = iter(reference.split("/")[1:])
    return all(
        part in SCHEMA_KEYWORDS
        or (part in SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS and next(parts, None) is not None)
        for part in parts
    )


@functools.lru_cache(4)
def get_vocabulary(encoding, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The Vocabulary of an encoding, made once."""
    return Vocabulary(encoding, vocab_size, eos_token_ids)


compiled = weakref.WeakValueDictionary()  # constraints that something holds: a matcher does


@functools.lru_cache(8)  # holds the last ones: a client often has one constraint for all requests
def compile_source(constraint_field: str, source, vocabulary: Vocabulary) -> ChoiceTrie | Grammar:
    """What a field of SamplingParams asks for, compiled unless something still holds it."""
    key = constraint_field, source, vocabulary
    found = compiled.get(key)
    if found is None:
        found = ChoiceTrie(source, vocabulary) if constraint_field == "choices" else Grammar(*key)
        found = compiled.setdefault(key, found)  # another thread may have been first
    return found


@functools.lru_cache(1)
def compile_large_source(*key) -> ChoiceTrie | Grammar:
    """`compile_source`, for a constraint of which eight would take too much memory."""
    return compile_source.__wrapped__(*key)


def clear_constraint_cache() -> None:
    """Drop the constraints that are kept for later requests."""
    compile_source.cache_clear()
    compile_large_source.cache_clear()


CONSTRAINT_BYTES = 2**18  # that a constraint takes at least
SOURCE_BYTES = 2**9  # beside these for each byte of its source; an enum of objects takes 300
LARGE_BYTES = 2**23


def constraint_bytes(source: str | tuple[str, ...]) -> int:
    """Estimate the bytes of a constraint by its source. Texts that it holds take more."""
    texts = [source] if isinstance(source, str) else source
    return CONSTRAINT_BYTES + SOURCE_BYTES * sum(len(text.encode()) for text in texts)


def compiled_bytes() -> int:
    """Estimate the memory of all compiled constraints that something holds, in bytes."""
    return sum(constraint_bytes(source) for _, source, _ in compiled.copy())


def compile_constraint(
    params: SamplingParams, vocabulary: Vocabulary
) -> ChoiceTrie | Grammar | None:
    """The constraint that these parameters ask for; None for any.

    Raises UserError as `ChoiceTrie` and `Grammar`.
    """
    constraint_field = params.constraint_field
    if constraint_field is None:
        return None
    source = getattr(params, constraint_field)
    make = compile_large_source if constraint_bytes(source) > LARGE_BYTES else compile_source
    return make(constraint_field, source, vocabulary)


def make_matcher(params: SamplingParams, encoding, config) -> Matcher | None:
    """A matcher for a text with these parameters; None if it may be any text.

    config: of the model. Raises UserError as `compile_constraint`, and if there is no encoding.
    """
    if params.constraint_field is None:
        return None
    if encoding is None:
        raise UserError(f"{params.constraint_field}: the constraint of a text needs an encoding")
    vocabulary = get_vocabulary(encoding, config.vocab_size, tuple(config.eos_token_ids))
    return compile_constraint(params, vocabulary).matcher()

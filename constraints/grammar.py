"""JSON schemas, regular expressions and Lark grammars, compiled by llguidance."""

import contextlib
import itertools
import json
import re
import signal
import threading

import numpy
import torch

from cache import common_prefix_length
from constraints.matcher import Matcher, single_allowed_token
from constraints.schema import parse_schema
from constraints.vocabulary import Vocabulary
from errors import UserError


@contextlib.contextmanager
def interruptible():
    """Let Ctrl-C kill the process in the block; Python's handler would wait for the native call."""
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
# another one twice. 65,536 take up to 12 MB; a million, llguidance's default, takes 90 MB.
MAX_EXPRESSIONS = 2**16
MAX_MULTIPLE_OF_EXPRESSIONS = 10**6  # of a schema with multipleOf, including remainders
MAX_FORCED_PREFIX = 32  # jump-forward tokens that are checked at compile time
# Flexible whitespace would let a model emit whitespace forever. \u is off, because llguidance
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
            limit = MAX_MULTIPLE_OF_EXPRESSIONS if multiples else MAX_EXPRESSIONS
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


LLGUIDANCE_ADVICE = "consider making your grammar"  # only grammar authors can follow it


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
        new = list(itertools.takewhile(lambda token: token not in eos_token_ids, output[known:]))
        with interruptible():
            self.tokens += new[: self.state.try_consume_tokens(new)]
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
                + "use fewer alternatives and optional properties"
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
        raise UserError("'=' is not supported in a grammar: the only supported option is lazy")


def tool_error(grammar: str, error: str) -> str:
    """Return an llguidance error with the tool's name in place of the grammar's line."""
    position, _, reason = re.split(r"\n +\d+ \| ", error)[0].partition(": ")
    line = re.match(r"at (\d+)", position)
    rule = grammar.splitlines()[int(line[1]) - 1] if line else ""
    name = re.match(r'call\d+: "([\w-]+)', rule)
    return f"{name[1]}: {short_error(reason)}" if name else short_error(error)


ONE_OF_ADVICE = (  # replaces llguidance's advice to set an option that clients cannot set
    "oneOf works only if its schemas differ in type or in the const of a required property; "
    "otherwise use anyOf"
)


def short_error(error: str) -> str:
    """Return an error of llguidance in one line of up to 300 characters, without parser state."""
    line = " ".join(re.split(r"<backtrace>|<non-verbose/>", error)[0].split())[:300]
    return ONE_OF_ADVICE if line.startswith("oneOf constraints are not supported") else line

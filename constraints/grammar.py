"""JSON schemas, regular expressions and Lark grammars, compiled by llguidance."""

import itertools
import json
import re

import numpy
import torch

from cache import common_prefix_length
from constraints.matcher import Matcher
from constraints.schema import parse_schema
from constraints.vocabulary import Vocabulary
from errors import UserError

# Expressions of the lexer, plus two per source byte. They grow exponentially if each terminal uses
# another one twice. 65,536 take up to 12 MB; a million, llguidance's default, takes 90 MB.
MAX_EXPRESSIONS = 2**16
MAX_MULTIPLE_OF_EXPRESSIONS = 10**6  # of a schema with multipleOf, including remainders


class Grammar:
    """JSON schema, regular expression or grammar, compiled by llguidance.

    constraint_field: SamplingParams field of the source. Raises UserError if the source is invalid,
    or if no output satisfies it.
    """

    def __init__(self, constraint_field: str, source: str, vocabulary: Vocabulary):
        from llguidance import LLMatcher, LLParserLimits  # takes 0.04 s, and few requests need it

        self.vocabulary = vocabulary
        self.usable_tokens = vocabulary.usable_tokens
        try:
            if constraint_field == "tool_grammar":
                text = source
                self.usable_tokens = vocabulary.usable_tokens_in_tool_calls
            elif constraint_field == "json_schema":
                schema = json.dumps(parse_schema(source))
                options = {"whitespace_flexible": False}  # else whitespace could repeat for ever
                text = LLMatcher.grammar_from_json_schema(schema, overrides=options)
            elif constraint_field == "regex":
                text = LLMatcher.grammar_from_regex(source)
            else:
                if re.search(r"%(json|llguidance)\b", source):
                    raise UserError("%json and %llguidance are not supported in a grammar")
                text = LLMatcher.grammar_from_lark(source)
            multiples = (
                constraint_field in ("json_schema", "tool_grammar") and '"multipleOf"' in text
            )
            limit = MAX_MULTIPLE_OF_EXPRESSIONS if multiples else MAX_EXPRESSIONS
            limits = LLParserLimits(
                verbose_errors=False, initial_lexer_fuel=limit + 2 * len(source)
            )
            # Never mutated: each matcher has a copy, which shares the compiled grammar.
            self.initial_state = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
            if self.initial_state.is_error():
                error = self.initial_state.get_error()
                raise UserError(
                    tool_error(text, error)
                    if constraint_field == "tool_grammar"
                    else short_error(error)
                )
            self.matcher().checked_token_mask([])
        except ValueError as error:  # a UserError is one
            name = "tools" if constraint_field == "tool_grammar" else constraint_field
            raise UserError(f"{name}: {error}") from None

    def matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self)


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
        return reason


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

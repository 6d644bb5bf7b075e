"""Tokens that may follow by an expression or a grammar. Oracles: re, and Python's eval."""

import random
import re

import pytest
import torch
from conftest import refused
from constrained import letters, small_vocabulary, walks

from constraints.vocabulary import Vocabulary


def test_usable_tokens_are_a_padded_bitmask():
    import numpy

    vocabulary = small_vocabulary()
    assert hasattr(vocabulary, "usable_tokens")
    bits = numpy.unpackbits(vocabulary.usable_tokens, bitorder="little")
    usable = [token for token, piece in enumerate(vocabulary.pieces) if piece]
    assert len(bits) % 32 == 0
    assert numpy.flatnonzero(bits).tolist() == sorted([*usable, *vocabulary.eos_token_ids])


SUMS = 'start: sum\nsum: num ("+" num)*\nnum: /[1-9][0-9]?/ | "(" sum ")"\n'


@pytest.mark.parametrize(
    "regex", [r"", r"[a-c]{2,5}", r"(x|yy)*z", r"[0-9]{3}-[0-9]", r"é+🙂?", r"[^ab]", r" a|b "]
)
def test_walks_match_the_expression(regex):
    from constraints.grammar import Grammar

    matcher = Grammar("regex", regex, small_vocabulary()).matcher()
    found = walks(matcher, 20)
    assert found and all(re.fullmatch(regex, text) for text in found)


def test_walks_are_of_the_grammar():
    from constraints.grammar import Grammar

    found = walks(Grammar("grammar", SUMS, small_vocabulary()).matcher(), 30)
    assert len(found) > 3
    assert all(set(text) <= set("0123456789+()") and eval(text) > 0 for text in found)


@pytest.mark.parametrize(
    "field, source, message",
    [
        ("regex", "[", 'regex: at 1(8): invalid regex "["'),
        ("regex", r"[^\s\S]", "regex: no token "),
        ("grammar", "begin: x", "grammar: no start rule found"),
        ("grammar", "start: x", 'grammar: at 1(8): unknown name: "x"'),
        ("grammar", 'start: %json {"foo": 1}', "grammar: %json "),
    ],
)
def test_a_source_that_cannot_be_kept_is_refused_in_one_line(field, source, message):
    from constraints.grammar import Grammar

    assert refused(Grammar, field, source, small_vocabulary()).startswith(message)


def test_a_special_token_is_no_text():
    from constraints.grammar import Grammar

    message = refused(Grammar, "grammar", "start: <[6]>", Vocabulary(letters(), 8, (7,)))
    assert message.startswith("grammar: ") and "token" in message


@pytest.mark.parametrize("field, text", [("regex", r"([a-z ]{1,9}|\d+)*!"), ("grammar", SUMS)])
def test_the_allowed_tokens_depend_on_the_output_alone(field, text):
    """Also after other outputs: refused drafts, an EOS, a text that begins again."""
    from constraints.grammar import Grammar

    source = random.Random(1)
    grammar = Grammar(field, text, small_vocabulary())
    matcher = grammar.matcher()
    outputs = [[]]
    for _ in range(150):
        output = source.choice(outputs)
        kind = source.random()
        if kind < 0.2:
            output = output + [source.randrange(4096), source.randrange(4096)]
        elif kind < 0.3:
            output = output + [4095, 5]
        expected = grammar.matcher().token_mask(output)
        assert torch.equal(matcher.token_mask(output), expected)
        if not expected.all():
            following = expected.nonzero()[:, 0].tolist()
            if 4095 not in following:
                outputs.append(output + [source.choice(following)])
    assert len(outputs) > 50

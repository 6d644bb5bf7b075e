"""Constraints from outside: each has a bound, and a reader of JSON sees what the schema allows."""

import json

import pytest
from serving import small_encoding

from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from errors import UserError

A = b"a"


def vocabulary():
    return get_vocabulary(small_encoding(), 4096, (4095,))


def compiled(kind, source):
    source = source if isinstance(source, str) else json.dumps(source)
    return Grammar(kind, source, vocabulary())


def allows(kind, source, text: str) -> bool:
    """Whether a constraint has this text, asked token by token."""
    matcher = compiled(kind, source).matcher()
    tokens = vocabulary().tokenize(text)
    steps = [matcher.token_mask(tokens[:count])[token] for count, token in enumerate(tokens)]
    return all(steps) and bool(matcher.token_mask(tokens)[4095])


REFUSED = {  # what the refusal names -> grammars
    "parametric rules (::)": [
        'start: p::0x0\np::_: "a" p::incr([0:20]) | ""',
        'start: "b"{60} p::0\np::_: p::set_bit(1) | "a"',
        'start: "a" // "\nb::_: "a" b::decr(_)',
        'start: b # /\nb ::_: b::incr(_) "a" // /',
        'start: "\\"" p::0 "\\""\np::_: "a"',
    ],
    "%if": ['start: "a" %if true'],
    "%json": ['start: %json {"type": "object"}'],
    "%regex": ['start: %regex {"substring_words": "a b"}'],
    "%lark": ['start: %lark { start: "a" }'],
    "%llguidance": ['%llguidance {"no_forcing": true}\nstart: "a"'],
    "%declare": ['%declare X\nstart: "a"'],
    "%override": ['%override start: "a"'],
    "@other": ["start: @other"],
    "<|im_end|>": ["start: <|im_end|>"],
    "<[*]>": ["start: <[*]>"],
    "<[^5]>": ["start: <[^5]>"],
    "'stop'": ['start: x\nx[stop="b"]: /a/'],
    "'suffix'": ['start: x\nx[suffix="b"]: /a/'],
    "'max_tokens'": ["start: x\nx[max_tokens=5]: /a+/"],
    "'temperature'": ["start: x\nx[lazy, temperature=0.5]: /a/"],
    "'capture'": ["start: x\n?x[ capture ] : /a/"],
}


def steps_of(kind, source, text: str) -> tuple[int, str]:
    """How many characters, one by one, until no token may follow, and why none may."""
    matcher = compiled(kind, source).matcher()
    output = []
    for character in text:
        token = vocabulary().ids[character.encode()][0]
        try:
            if not matcher.checked_token_mask(output)[token]:
                return len(output), "another text"
        except UserError as error:
            return len(output), str(error)
        output.append(token)
    return len(output), ""


AMBIGUOUS = [
    'start: start start | "a"',
    'start: start start start | "a"',
    'start: x+\nx: y+\ny: z+\nz: "a"+',
    'start: x{1000000}\nx: "a"? "b"?',
    'start: "a" start | "a"',
]


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_text(grammar, monkeypatch):
    """Each row takes time with the cube of its items; a server has a budget of time, too."""
    monkeypatch.setattr("constraints.grammar.MAX_ITEMS", 100)
    count, error = steps_of("grammar", grammar, "a" * 120)
    assert 0 < count < 120
    assert "max is 100" in error and "left-recursive" in error


def test_a_long_list_is_a_grammar():
    grammar = 'start: x ("," x)*\nx: "a" | "(" start ")"'
    assert steps_of("grammar", grammar, "a,(a,a)," * 80) == (640, "")
    optional = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}
    assert allows("json_schema", optional, '{"p0":null,"p200":null,"p399":null}')
    assert not allows("json_schema", optional, '{"p1":null,"p0":null}')


def test_a_rule_may_have_many_alternatives():
    grammar = "start: " + " | ".join(f'"{i}"' for i in range(1900))
    assert allows("grammar", grammar, "1899") and not allows("grammar", grammar, "1900")


def test_a_schema_with_too_many_ways_to_go_on_says_what_to_change():
    lists = [{"type": "array", "items": {"$ref": "#"}, "maxItems": 1000 + i} for i in range(200)]
    count, error = steps_of("json_schema", json.dumps({"anyOf": [*lists, {"const": 1}]}), "[[")
    assert count == 1 and "max is 2000; use fewer alternatives and optional prop" in error


NULL = {"type": "null"}


ENDLESS = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "items": NULL, "minItems": 60_000},
    {"type": "object", "properties": {"a": NULL, "b": {"$ref": "#"}}, "required": ["a", "b"]},
]


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMES = [  # fields of a schema of objects, a text it allows, texts it does not
    (OBJECT, '{"a":1,"b":"x"}', ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":1}']),
    (OBJECT, '{"b":1,"b":"x"}', ['{"b":1,"a":"x"}', '{"b":1,"a":1}', '{"b":1,"\\u0061":1}']),
    (
        {"properties": {'"\n\\': NULL}},
        '{"\\"\\n\\\\":null}',
        ['{"\\u0022\\n\\\\":1}', '{"\\"\\u000a\\\\":1}', '{"\\"\\n\\u005C":1}'],
    ),
    ({"properties": {"\x01": NULL}}, '{"\\u0001":null}', ['{"\\u0001":1}']),
    ({"properties": {"é/": {}}}, '{"é/":1}', ['{"\\u00e9/":1}', '{"é\\/":1}']),
    (
        {"patternProperties": {"^a": {"type": "integer"}}},
        '{"ab":1,"b":"x"}',
        ['{"ab":"x"}', '{"\\u0061b":"x"}'],
    ),
    ({"properties": {"a": False}}, '{"b":1}', ['{"a":1}', '{"\\u0061":1}']),
    (
        {"required": ["a"], "additionalProperties": {"type": "integer"}},
        '{"a":1,"b":2}',
        ['{"a":1,"a":2}', '{"\\u0061":1}', '{"a":1,"\\u0061":2}'],
    ),
    (
        {"properties": {"a": {}}, "required": ["a"], "minProperties": 2},
        '{"a":1,"b":1}',
        ['{"a":1}', '{"a":1,"a":1}', '{"a":1,"\\u0061":1}'],
    ),
]


FEW = "names of other properties may repeat, and a reader of JSON counts them once"


FEW = "other names may repeat, and JSON parsers count a repeated name once"

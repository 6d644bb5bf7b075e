"""Constraints from outside: each has a bound, and a reader of JSON sees what the schema allows."""

import json
import signal
import weakref

import jsonschema
import llguidance
import pytest
from chats import HERMES, tool, tool_grammar
from conftest import refused
from serving import small_encoding

from constraints import compiler
from constraints.compiler import compile_constraint, compiled_bytes, constraint_bytes
from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from errors import UserError
from sampling import SamplingParams
from text.tokenizer import load_encoding


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


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_known_bound_is_refused_by_name(name):
    for grammar in REFUSED[name]:
        found = refused(compiled, "grammar", grammar)
        assert found.startswith("grammar: ") and name in found


KEPT = [
    ('start: "::a" // ::\n# ::', "::a"),
    ("start: /::+/", ":::"),
    ('start: "\\"" "::"', '"::'),
    ('start: "<a>" "@b" "%if" "="', "<a>@b%if="),
    ("start: x\nx[lazy]: /a+b/", "aab"),
    ('%import common.INT\n%ignore " "\nstart: INT ("," INT)*', "12, 3"),
    ('start: [x] y~2..3 -> z\nx: "a"\n!y: "b" | "B"i', "abb"),
    ("start: C\nC: A & ~B\nA: /[ab]+/\nB: /a+/", "ab"),
    ("start: " + " | ".join(f'"{i}"' for i in range(1900)), "1899"),
]


@pytest.mark.parametrize("grammar, text", KEPT, ids=lambda value: str(value)[:30])
def test_rules_terminals_and_expressions_are_a_grammar(grammar, text):
    assert allows("grammar", grammar, text) and not allows("grammar", grammar, text + "x")


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


def test_a_schema_with_too_many_ways_to_go_on_says_what_to_change():
    lists = [{"type": "array", "items": {"$ref": "#"}, "maxItems": 1000 + i} for i in range(200)]
    count, error = steps_of("json_schema", json.dumps({"anyOf": [*lists, {"const": 1}]}), "[[")
    assert count == 1 and "max is 2000; use fewer alternatives and optional prop" in error


def test_the_states_of_a_lexer_are_counted(monkeypatch):
    monkeypatch.setattr("constraints.grammar.MAX_STATES", 1000)
    count, error = steps_of("regex", ".*a.{100}b.*c", "abdxfaad" * 20)
    assert count < 160 and "too many states" in error


def test_terminals_that_double_each_other_are_bounded():
    def doubled(levels):
        lines = [f"A{level}: A{level + 1} A{level + 1}" for level in range(levels)]
        return "\n".join(["start: A0", *lines, f'A{levels}: "a"'])

    assert allows("grammar", doubled(8), "a" * 256) and not allows("grammar", doubled(8), "a" * 255)
    for levels in (16, 18):
        assert "too many expressions" in refused(compiled, "grammar", doubled(levels))
    assert "too many expressions" in refused(compiled, "regex", "(a{300}){300}")


NULL = {"type": "null"}
ENDLESS = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "items": NULL, "minItems": 60_000},
    {"type": "object", "properties": {"a": NULL, "b": {"$ref": "#"}}, "required": ["a", "b"]},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_a_text_that_must_end_nowhere_is_refused_at_once(schema):
    found = refused(compiled, "json_schema", schema)
    assert found.startswith("json_schema: no token may follow after ")


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


@pytest.mark.parametrize("fields, text, others", NAMES, ids=str)
def test_a_name_has_one_spelling(fields, text, others):
    """A reader takes "\\u0061" for "a", and of two equal names the last value."""
    schema = {"type": "object"} | fields
    assert allows("json_schema", schema, text)
    jsonschema.validate(json.loads(text), schema)
    for other in others:
        assert not allows("json_schema", schema, other), other


UNWRITTEN = [  # schema, where, which value
    ({"const": "a\x01b"}, "const", r"'a\x01b'"),
    ({"enum": ["b", {"c": ["a\x7fb"]}]}, "enum", r"'a\x7fb'"),
    ({"properties": {"a": {"enum": ["\x0b", "b"]}}}, "properties.a.enum", r"'\x0b'"),
    ({"items": {"pattern": "^a\x01b$"}}, "items.pattern", r"'^a\x01b$'"),
    ({"pattern": r"^a\u001fb$"}, "pattern", r"'^a\\u001fb$'"),
    ({"patternProperties": {r"\x00": {}}}, "patternProperties", r"'\\x00'"),
]


@pytest.mark.parametrize("schema, where, value", UNWRITTEN, ids=str)
def test_a_value_is_not_written_without_a_character_of_its_own(schema, where, value):
    found = refused(compiled, "json_schema", schema)
    assert found.startswith(f"json_schema: {where} ") and value in found
    assert r"\b, \f, \n, \r and \t" in found


def test_other_strings_have_control_characters():
    schema = {"const": "\b\f\n\r\t\x80", "default": "\x01"}
    assert allows("json_schema", schema, '"\\b\\f\\n\\r\\t\x80"')
    assert allows("json_schema", {"const": {"\x01": 1}}, '{"\\u0001":1}')
    for pattern in (r"^[^\x00-\x1f]b$", r"^[\]\x01a]b$"):
        assert allows("json_schema", {"type": "string", "pattern": pattern}, '"ab"')
    assert allows("json_schema", {"type": "string", "pattern": r"^\\x01$"}, r'"\\x01"')


REPEATED = [  # schema, where, its value, the largest that is allowed
    ({"type": "object", "minProperties": 2}, "minProperties", 2, 1),
    ({"items": OBJECT | {"minProperties": 3.0}}, "items.minProperties", 3.0, 1),
    ({"required": ["a", "a"], "minProperties": 3}, "minProperties", 3, 2),
    ({"allOf": [OBJECT, {"minProperties": 2}]}, "allOf[1].minProperties", 2, 1),
]


@pytest.mark.parametrize("schema, where, value, most", REPEATED, ids=str)
def test_a_number_of_names_that_repeated_ones_reach_is_refused(schema, where, value, most):
    found = refused(compiled, "json_schema", schema)
    assert found.startswith(f"json_schema: {where} {value}: ") and f"at most {most}, " in found


@pytest.mark.parametrize("least", [1.5, 0.5, float("inf")])
def test_a_number_of_names_is_whole(least):
    found = refused(compiled, "json_schema", {"items": {"minProperties": least}})
    assert "items.minProperties" in found and str(least) in found and "integer" in found


def test_one_of_says_what_it_may_hold():
    tagged = [{"type": "object", "properties": {"kind": {"const": kind}}} for kind in "ab"]
    tagged = [schema | {"required": ["kind"]} for schema in tagged]
    assert allows("json_schema", {"oneOf": tagged}, '{"kind":"b"}')
    assert allows("json_schema", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null")
    numbers = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    found = refused(compiled, "json_schema", numbers)
    assert found.startswith("json_schema: oneOf ") and "anyOf" in found and "coerce" not in found


NOTED = [
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, "[null,null]"),
    ({"type": "string", "readOnly": True, "writeOnly": False, "format": "password"}, '"b"'),
    ({"type": "integer", "format": "int32", "nullable": False, "example": 4}, "12"),
    ({"const": "a", "contentMediaType": "text/html", "contentEncoding": "base64"}, '"a"'),
    (OBJECT | {"propertyNames": True, "unevaluatedProperties": {}, "xml": {"a": 1}}, '{"a":1}'),
    ({"type": "string", "format": "x-own", "pattern": "^[ab]$"}, '"b"'),
    ({"anyOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "null", "format": "n"}}}, "null"),
    ({"properties": {"format": {"const": 1}, "xml": {"const": 2}}}, '{"format":1,"xml":2}'),
]


@pytest.mark.parametrize("schema, text", NOTED, ids=str)
def test_what_says_nothing_is_taken(schema, text):
    assert allows("json_schema", schema, text)


SAYING = [
    ({"uniqueItems": True}, "'uniqueItems'"),
    ({"uniqueItems": 0}, "'uniqueItems'"),
    ({"items": {"nullable": True}}, "'items.nullable'"),
    ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    ({"format": "regex"}, "format 'regex' is not supported; supported are date, date-time"),
]


@pytest.mark.parametrize("schema, words", SAYING, ids=str)
def test_what_says_something_is_refused(schema, words):
    assert words in refused(compiled, "json_schema", schema)


def test_tools_are_held_to_the_same(write_chat):
    look = tool("look", {"a": {"type": "integer", "format": "int32"}})
    look["function"]["parameters"] |= {"additionalProperties": True, "uniqueItems": False}
    directory = write_chat(HERMES)
    encoding = load_encoding(directory, 4104)
    vocabulary = get_vocabulary(encoding, 4104, (4098,))
    source = tool_grammar(directory, [look], "required")
    matcher = Grammar("tool_grammar", source, vocabulary).matcher()
    begun = [4102, *encoding.encode_ordinary('\n{"name": "look", "arguments": {"a": 1, "b": "')]
    letter, slash, *escaped = (encoding.encode_ordinary(text)[0] for text in ("x", "\\", "n", "u"))
    assert matcher.token_mask(begun)[[letter, slash]].all()
    assert matcher.token_mask([*begun, slash])[escaped].tolist() == [True, False]


def test_few_bytes_of_constraints_are_kept_for_later(monkeypatch):
    """Eight small constraints, or one large one; what something else holds counts, too."""
    compiler.clear_constraint_cache()
    monkeypatch.setattr(compiler, "compiled", weakref.WeakValueDictionary())
    values = [f"{number:x}" * 400 for number in range(10, 42)]
    large = [json.dumps({"enum": [name + value for value in values]}) for name in "abc"]
    assert constraint_bytes(large[0]) > compiler.LARGE_BYTES
    for source in large:
        compile_constraint(SamplingParams(json_schema=source), vocabulary())
    assert compiled_bytes() == constraint_bytes(large[-1])
    held = compile_constraint(SamplingParams(json_schema=large[0]), vocabulary())
    for count in range(12):
        compile_constraint(SamplingParams(regex=f"a{{{count + 1}}}b"), vocabulary())
    kept = constraint_bytes(large[0]) + 8 * constraint_bytes("a{9}b")
    assert abs(compiled_bytes() - kept) < 8 * compiler.SOURCE_BYTES
    compiler.clear_constraint_cache()
    assert compiled_bytes() == constraint_bytes(large[0])
    del held
    assert compiled_bytes() == 0


def test_ctrl_c_ends_a_script_in_native_code(monkeypatch):
    """Python's own handler waits for llguidance to return."""
    seen = []

    class Watched:
        def __init__(self, *args, **options):
            seen.append(signal.getsignal(signal.SIGINT))
            self.own = known(*args, **options)

        def __getattr__(self, name):
            if name in ("try_consume_tokens", "unsafe_compute_mask_ptr"):
                seen.append(signal.getsignal(signal.SIGINT))
            return getattr(self.own, name)

        def deep_copy(self):
            copy = Watched.__new__(Watched)
            copy.own = self.own.deep_copy()
            return copy

    known = llguidance.LLMatcher
    for name in ("grammar_from_lark", "grammar_from_regex"):
        setattr(Watched, name, staticmethod(getattr(known, name)))
    monkeypatch.setattr(llguidance, "LLMatcher", Watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Grammar("regex", "a", vocabulary()).matcher().token_mask([vocabulary().ids[b"a"][0]])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        count = len(seen)
        assert count > 4 and set(seen) == {signal.SIG_DFL}
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a script in the background
        Grammar("regex", "a", vocabulary())
        assert len(seen) > count and set(seen[count:]) == {signal.SIG_IGN}
    finally:
        signal.signal(signal.SIGINT, before)

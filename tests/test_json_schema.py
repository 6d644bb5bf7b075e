"""JSON schemas: outputs against jsonschema, and what is refused at once."""

import json
import random

import jsonschema
import pytest
from conftest import CHECKPOINTS, refused
from constrained import allows, drawn, schema_of, texts_of
from serving import small_encoding

import infer_engine
import infer_speculative
from infer import generate
from infer_speculative import generate_speculative, propose_prompt_lookup
from sampling import SamplingParams

DRAFT = CHECKPOINTS / "stories-draft"
SAID = ["--model", DRAFT, "--prompt", "Lily saw a big"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 2, 33]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_outputs_are_valid_by_jsonschema(story_model):
    source = random.Random(0)
    whole = 0
    for _ in range(60):
        schema = schema_of(source)
        for text in texts_of(story_model, drawn(2, json_schema=json.dumps(schema))):
            if text is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                whole += 1
    assert whole > 100


def test_batches_drafts_and_context_shifts_change_no_output(story_model, tiny):
    encoding = small_encoding()
    schema = {"type": "array", "items": PERSON, "minItems": 6, "maxItems": 7}
    constraints = [{"json_schema": json.dumps(schema)}, {"regex": "(a|bc){40}"}, {}]
    constraints.append({"choices": ("Tom", "Tom and Lily" * 9, "")})
    each = [SamplingParams(140, temperature=0.0, **constraint) for constraint in constraints]
    prompts = [[1], [2, 3], [4], [5, 6, 7]]
    together = list(zip(*generate(story_model, prompts, each, encoding=encoding)))
    draft = tiny(vocab_size=4096, n_layer=1, seed=3, eos_token_id=4095)
    for prompt, own, row in zip(prompts, each, together):
        row = [token for token in row if token is not None]
        steps = generate(story_model, [prompt], own, use_cache=False, encoding=encoding)
        assert [token for (token,) in steps] == row
        for drafter in (draft, story_model, propose_prompt_lookup):
            steps = list(
                generate_speculative(story_model, drafter, prompt, own, 3, encoding=encoding)
            )
            assert [token for step in steps for token in step.tokens] == row
            if drafter is story_model:
                assert all(step.accepted == len(step.drafts) for step in steps)
    assert len(together[0]) > 64  # the window has moved


def nested(count: int) -> dict:
    """Return schemas that all hold for one text."""
    schema = {"pattern": "a"}
    for _ in range(count):
        schema = {"pattern": "a", "anyOf": [schema]}
    return schema


def union(*kinds) -> dict:
    properties = [{"kind": {"const": kind}} for kind in kinds]
    schemas = [{"type": "object", "properties": own, "required": ["kind"]} for own in properties]
    return {"oneOf": schemas}


NULL = {"type": "null"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "object", "required": ["a"]}
OPTIONAL = {"type": "object", "properties": {f"p{i}": NULL for i in range(400)}}
ALLOWED = [  # schema, a text that it allows, texts that it does not
    ({"type": "integer", "multipleOf": 9973, "minimum": 9}, "9973", ["9974"]),
    ({"allOf": [{"type": "integer", "multipleOf": 91}, {"multipleOf": 89}]}, "8099", ["91"]),
    ({"$ref": "#/$defs/a", "title": "a", "$defs": {"a": {"const": "b"}}}, '"b"', ['"a"']),
    (nested(8) | {"type": "string"}, '"a"', ['"b"']),
    (union("a", "b"), '{"kind":"b"}', ['{"kind":"c"}']),
    # pydantic writes OpenAPI's `discriminator` beside oneOf, which says it all.
    (union("a", "b") | {"discriminator": {"propertyName": "kind"}}, '{"kind":"a"}', ["{}"]),
    ({"oneOf": [{"type": "integer"}, NULL]}, "null", ["true"]),
    (OPTIONAL, '{"p0":null,"p200":null,"p399":null}', ['{"p1":null,"p0":null}']),
    # A name has one spelling: a reader takes "\u0061" for "a", and of two equal names the last.
    (OBJECT, '{"a":1,"b":"x"}', ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":1}']),
    (OBJECT, '{"b":1,"b":"x"}', ['{"b":1,"a":"x"}', '{"b":1,"a":1}', '{"b":1,"\\u0061":1}']),
    (
        {"type": "object", "properties": {'"\n\\': NULL}},
        '{"\\"\\n\\\\":null}',
        ['{"\\u0022\\n\\\\":1}', '{"\\"\\u000a\\\\":1}', '{"\\"\\n\\u005C":1}'],
    ),
    ({"type": "object", "properties": {"\x01": NULL}}, '{"\\u0001":null}', ['{"\\u0001":1}']),
    ({"type": "object", "properties": {"é/": {}}}, '{"é/":1}', ['{"\\u00e9/":1}', '{"é\\/":1}']),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        '{"ab":1,"b":"x"}',
        ['{"ab":"x"}', '{"\\u0061b":"x"}'],
    ),
    ({"type": "object", "properties": {"a": False}}, '{"b":1}', ['{"a":1}', '{"\\u0061":1}']),
    (
        NAMED | {"additionalProperties": {"type": "integer"}},
        '{"a":1,"b":2}',
        ['{"a":1,"a":2}', '{"\\u0061":1}', '{"a":1,"\\u0061":2}'],
    ),
    (
        NAMED | {"properties": {"a": {}}, "minProperties": 2},
        '{"a":1,"b":1}',
        ['{"a":1}', '{"a":1,"a":1}', '{"a":1,"\\u0061":1}'],
    ),
    # Strings have the control characters that JSON can write in one way.
    ({"const": "\b\f\n\r\t\x80", "default": "\x01"}, '"\\b\\f\\n\\r\\t\x80"', []),
    ({"const": {"\x01": 1}}, '{"\\u0001":1}', []),
    ({"type": "string", "pattern": r"^[^\x00-\x1f]b$"}, '"ab"', []),
    ({"type": "string", "pattern": r"^[\]\x01a]b$"}, '"ab"', []),
    ({"type": "string", "pattern": r"^\\x01$"}, r'"\\x01"', []),
    # Keywords that say nothing are taken.
    ({"type": "array", "items": NULL, "uniqueItems": False}, "[null,null]", []),
    ({"type": "string", "readOnly": True, "writeOnly": False, "format": "password"}, '"b"', []),
    ({"type": "integer", "format": "int32", "nullable": False, "example": 4}, "12", ["null"]),
    ({"const": "a", "contentMediaType": "text/html", "contentEncoding": "base64"}, '"a"', []),
    (OBJECT | {"propertyNames": True, "unevaluatedProperties": {}, "xml": {}}, '{"a":1}', []),
    ({"type": "string", "format": "x-own", "pattern": "^[ab]$"}, '"b"', ['"c"']),
    ({"anyOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": NULL | {"format": "n"}}}, "null", ["1"]),
    ({"properties": {"format": {"const": 1}, "xml": {"const": 2}}}, '{"format":1,"xml":2}', []),
]


@pytest.mark.parametrize("schema, text, others", ALLOWED, ids=lambda value: str(value)[:40])
def test_what_a_schema_allows(schema, text, others):
    assert allows("json_schema", schema, text)
    assert not allows("json_schema", schema, text[:-1] if len(text) > 2 else "")
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    for other in others:
        assert not allows("json_schema", schema, other), other


def deep(count: int) -> str:
    return '{"items":' * count + "{}" + "}" * count


def chain(count: int) -> dict:
    return {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}


REMAINDERS = "more than 50,000 remainders of multipleOf"
BESIDE = "more than 8 schemas intersected with another"
ESCAPES = r"\b, \f, \n, \r and \t"
REFUSED = [  # schema, words of the error
    ("{", "not JSON: Expecting property name"),
    ("[]", "must be an object"),
    ({"properties": [1]}, "properties [1]: must be an object"),
    ({"foo": 1}, "the keyword 'foo' is not supported"),
    ({"properties": {"x": {"patternz": "a"}}}, "the keyword 'properties.x.patternz' is not"),
    ({"x-guidance": {"whitespace_flexible": True}}, "the keyword 'x-guidance' is not supported"),
    ({"type": "array", "uniqueItems": True}, "the keyword 'uniqueItems' is not supported"),
    ({"uniqueItems": 0}, "'uniqueItems'"),
    ({"items": {"nullable": True}}, "'items.nullable'"),
    ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    ({"discriminator": {"propertyName": "kind"}}, "discriminator needs oneOf beside it"),
    ({"items": 3}, "items 3: must be an object or a boolean"),
    ({"anyOf": 3}, "anyOf 3: must be a list"),
    ({"type": "text"}, "Invalid type: text"),
    ({"type": "string", "format": "iri"}, "format 'iri' is not supported; supported are date"),
    ({"items": {"format": 3}}, "items.format 3: must be a string"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "json_schema: oneOf ", "anyOf"),
    ({"$ref": "http://a.org/b.json"}, "$ref 'http://a.org/b.json': must begin with #"),
    ({"$ref": "#/default", "default": {"unique": True}}, "$ref '#/default': must lead to"),
    ({"items": {"$ref": "#/enum/0"}, "enum": [{"foo": 1}]}, "items.$ref '#/enum/0': must"),
    ({"$ref": "#/%64efault", "default": {"foo": 1}}, "must lead to a schema"),
    ({"$ref": "#/$defs/no"}, "no"),
    ({"$ref": "#"}, "no token is allowed after 0 output tokens"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},),
    ({"allOf": [{"type": "string"}, NULL]},),
    (deep(33), "more than 32 levels of nested schemas"),
    (deep(6000), "more than 32 "),  # found by json in older Pythons
    ('{"const":' + "[" * 900 + "]" * 900 + "}", "recursion limit exceeded"),
    ('{"const":' + "[" * 30000 + "]" * 30000 + "}",),  # by json, or by llguidance
    ({"enum": list(range(5001))}, "more than 5,000 enum values"),
    ({"properties": {f"p{i}": {} for i in range(1000)}}, "more than 1,000 schemas"),
    ({"$defs": chain(1001), "type": "null"}, "more than 1,000 schemas"),
    ({"type": "string", "pattern": "a?" * 2049}, "more than 4,096 characters in patterns"),
    # llguidance would take seconds for these, and minutes for a little more.
    ({"allOf": [{"multipleOf": number} for number in (83, 89, 97)]}, REMAINDERS),
    ({"anyOf": [{"multipleOf": 89}], "multipleOf": 8.3}, REMAINDERS),
    ({"multipleOf": 123_457}, REMAINDERS),
    ({"properties": {f"p{i}": {"multipleOf": 997 - i} for i in range(900)}}, REMAINDERS),
    ({"allOf": [{"pattern": f".*{letter}.{{30}}$"} for letter in "abcdefghij"]}, BESIDE),
    (nested(9), BESIDE),
    ({"properties": {"a" * 2**15: 3}}, "aaa 3: must be an object or a boolean"),
    ({"type": "integer", "minimum": -(10**300), "maximum": 10**300}, "integer range"),
    ({"const": "a" * 2**16}, "a string of at most 65,536 bytes of UTF-8"),
    # An output that must end nowhere.
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no token is allowed after "),
    ({"type": "array", "items": NULL, "minItems": 60_000}, "no token is allowed after "),
    (
        NAMED | {"properties": {"a": NULL, "b": {"$ref": "#"}}, "required": ["a", "b"]},
        "no token is allowed after ",
    ),
    # A value is not written without a character of its own.
    ({"const": "a\x01b"}, "json_schema: const ", r"'a\x01b'", ESCAPES),
    ({"enum": ["b", {"c": ["a\x7fb"]}]}, "json_schema: enum ", r"'a\x7fb'", ESCAPES),
    ({"properties": {"a": {"enum": ["\x0b", "b"]}}}, "properties.a.enum ", r"'\x0b'", ESCAPES),
    ({"items": {"pattern": "^a\x01b$"}}, "json_schema: items.pattern ", r"'^a\x01b$'", ESCAPES),
    ({"pattern": r"^a\u001fb$"}, "json_schema: pattern ", r"'^a\\u001fb$'", ESCAPES),
    ({"patternProperties": {r"\x00": {}}}, "json_schema: patternProperties ", r"'\\x00'", ESCAPES),
    # A number of names that repeated ones would reach.
    ({"type": "object", "minProperties": 2}, "json_schema: minProperties 2: ", "at most 1, "),
    ({"items": OBJECT | {"minProperties": 3.0}}, "items.minProperties 3.0: ", "at most 1, "),
    ({"required": ["a", "a"], "minProperties": 3}, "minProperties 3: ", "at most 2, "),
    ({"allOf": [OBJECT, {"minProperties": 2}]}, "allOf[1].minProperties 2: ", "at most 1, "),
    ({"items": {"minProperties": 1.5}}, "items.minProperties", "1.5", "integer"),
    ({"items": {"minProperties": float("inf")}}, "items.minProperties", "inf", "integer"),
]


@pytest.mark.parametrize("schema, words", [(own[0], own[1:]) for own in REFUSED])
def test_a_schema_that_cannot_be_kept_is_refused_at_once(schema, words, story_model):
    source = schema if isinstance(schema, str) else json.dumps(schema)
    found = refused(lambda: texts_of(story_model, drawn(1, json_schema=source)))
    assert found.startswith("json_schema") and all(word in found for word in words)
    assert "coerce" not in found


def test_the_command_line(cli, run_main, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    code, out, err = cli(*SAID, "--json-schema", schema, "--max-new-tokens", 60)
    assert (code, "note" in err) == (0, False)
    written = json.loads(out.removeprefix(SAID[3]))
    assert written.keys() == {"name", "age"} and written["age"] in (1, 2, 33)
    options = [*SAID[2:], "--json-schema", schema, "--max-new-tokens", 60]
    drafted = ["--target", DRAFT, "--draft", "lookup", *options]
    assert run_main(infer_speculative.main, *drafted)[1] == out
    assert run_main(infer_engine.main, "--model", DRAFT, *options)[1] == out
    _, out, err = cli(*SAID, "--json-schema", schema, "--max-new-tokens", 3)
    assert err.endswith("note: --max-new-tokens 3 truncated 1 of 1 constrained outputs\n")

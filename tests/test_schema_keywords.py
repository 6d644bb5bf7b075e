"""Schemas that are compiled, and those that are refused. Oracle: jsonschema."""

import json
import random

import pytest
from conftest import refused
from constrained import schema_of, small_vocabulary, walks
from serving import small_encoding

from constraints.grammar import Grammar


def test_walks_are_valid_by_jsonschema():
    from importlib.util import find_spec

    assert find_spec("constraints.schema")
    import jsonschema

    source = random.Random(0)
    whole = 0
    for _ in range(60):
        schema = schema_of(source)
        for text in walks(
            Grammar("json_schema", json.dumps(schema), small_vocabulary()).matcher(), 2
        ):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            whole += 1
    assert whole > 100


def deep(count: int) -> str:
    return '{"items":' * count + "{}" + "}" * count


def chain(count: int) -> dict:
    return {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}


def nested(count: int) -> dict:
    """Schemas that all hold for one text."""
    schema = {"pattern": "a"}
    for _ in range(count):
        schema = {"pattern": "a", "anyOf": [schema]}
    return schema


REMAINDERS = "more than 50,000 remainders of multipleOf"
BESIDE = "more than 8 schemas intersected with another"
SCHEMAS = [
    ("{", "not JSON: Expecting property name"),
    ("[]", "must be an object"),
    ("true", "must be an object"),
    ({"foo": 1}, "the keyword 'foo' is not supported"),
    ({"properties": {"x": {"patternz": "a"}}}, "the keyword 'properties.x.patternz' is not"),
    ({"x-guidance": {"whitespace_flexible": True}}, "the keyword 'x-guidance' is not supported"),
    ({"type": "array", "uniqueItems": True}, "the keyword 'uniqueItems' is not supported"),
    ({"not": {}}, "the keyword 'not' is not supported"),
    ({"anyOf": [{}, {"if": {}}]}, "the keyword 'anyOf[1].if' is not supported"),
    ({"items": 3}, "items 3: must be an object or a boolean"),
    ({"anyOf": 3}, "anyOf 3: must be a list"),
    ({"properties": [1]}, "properties [1]: must be an object"),
    ({"type": "text"}, "Invalid type: text"),
    ({"type": "string", "format": "iri"}, "format 'iri' is not supported; supported are date"),
    ({"items": {"format": 3}}, "items.format 3: must be a string"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "http://a.org/b.json"}, "$ref 'http://a.org/b.json': must begin with #"),
    ({"$ref": "#/default", "default": {"unique": True}}, "$ref '#/default': must lead to"),
    ({"items": {"$ref": "#/enum/0"}, "enum": [{"foo": 1}]}, "items.$ref '#/enum/0': must"),
    ({"$ref": "#/%64efault", "default": {"foo": 1}}, "must lead to a schema"),
    ({"$ref": "#/$defs/no"}, "no"),
    ({"$ref": "#"}, "no token may follow after 0 tokens"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, ""),
    (deep(33), "more than 32 levels of nested schemas"),
    (deep(6000), "more than 32 "),  # found by json in older Pythons
    ('{"const":' + "[" * 900 + "]" * 900 + "}", "recursion limit exceeded"),
    ('{"const":' + "[" * 30000 + "]" * 30000 + "}", ""),  # by json, or by llguidance
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
]


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": "integer", "multipleOf": 9973, "minimum": 9}, "9973"),
        ({"allOf": [{"type": "integer", "multipleOf": 91}, {"multipleOf": 89}]}, "8099"),
        ({"$ref": "#/$defs/a", "title": "a", "$defs": {"a": {"const": "b"}}}, '"b"'),
        (nested(8) | {"type": "string"}, '"a"'),
    ],
    ids=str,
)
def test_still_what_holds_at_once_is_kept(schema, text):
    matcher = Grammar("json_schema", json.dumps(schema), small_vocabulary()).matcher()
    assert matcher.is_accepting(small_encoding().encode_ordinary(text))
    assert not matcher.is_accepting(small_encoding().encode_ordinary(text[:-1]))


@pytest.mark.parametrize("schema, message", SCHEMAS, ids=lambda value: str(value)[:40])
def test_a_schema_that_cannot_be_kept_is_refused_at_once(schema, message):
    from importlib.util import find_spec

    assert find_spec("constraints.schema")
    source = schema if isinstance(schema, str) else json.dumps(schema)
    found = refused(Grammar, "json_schema", source, small_vocabulary())
    assert message in found and found.startswith("json_schema")

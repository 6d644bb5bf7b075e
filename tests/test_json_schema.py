"""Lesson 141: JSON schemas, expressions and grammars. Oracles: jsonschema, and re."""

import functools
import json
import random
import re
from typing import Annotated, Literal

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, refused
from constrained import letters, schema_of
from serving import small_encoding

import infer_speculative
from constraints.compiler import compile_constraint, make_matcher
from constraints.grammar import Grammar
from constraints.vocabulary import Vocabulary, get_vocabulary
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative, propose_prompt_lookup
from sampling import SamplingParams
from text.tokenizer import Encoding

DRAFT = CHECKPOINTS / "stories-draft"
SAID = ["--model", DRAFT, "--prompt", "Lily saw a big"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 2, 33]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def speaking(tiny):
    """A random model with the vocabulary of an embedded one."""
    return tiny(vocab_size=4096, block_size=64, n_layer=1, eos_token_id=4095)


def texts_of(model, params, encoding=None, **options) -> list[str | None]:
    """What it writes; None for a text that its limit cuts."""
    encoding = encoding or small_encoding()
    steps = list(generate(model, [[1]] * len(params), params, encoding=encoding, **options))
    rows = [[step[row] for step in steps if step[row] is not None] for row in range(len(params))]
    ends = model.config.eos_token_ids
    data = [b"".join(map(encoding.decode_single_token_bytes, row[:-1])) for row in rows]
    return [part.decode() if row[-1] in ends else None for part, row in zip(data, rows)]


def drawn(count, limit=300, **constraint) -> list[SamplingParams]:
    return [
        SamplingParams(limit, temperature=1.0, seed=seed, **constraint) for seed in range(count)
    ]


def test_texts_are_valid_by_jsonschema(speaking):
    import jsonschema

    source = random.Random(0)
    whole = 0
    for _ in range(60):
        schema = schema_of(source)
        for text in texts_of(speaking, drawn(2, json_schema=json.dumps(schema))):
            if text is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                whole += 1
    assert whole > 100


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_texts_of_sentencepiece_are_valid_without_a_first_blank(kind, tiny):
    import jsonschema
    from test_sentencepiece import FORMS, made

    encoding = Encoding("tokenizer.json", made(FORMS[kind]))
    vocabulary = get_vocabulary(encoding, 640, (2,))
    for text in ("", " the", "the end", '{"é🙂": 1}'):
        pieces = [vocabulary.pieces[token] for token in vocabulary.tokenize(text)]
        assert b"".join(pieces) == text.encode()
    model = tiny(vocab_size=640, block_size=64, eos_token_id=2)
    source = random.Random(5)
    whole = 0
    for _ in range(6):
        schema = schema_of(source)
        for text in texts_of(model, drawn(2, 200, json_schema=json.dumps(schema)), encoding):
            if text is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                whole += 1
    assert whole > 6


@pytest.mark.parametrize(
    "regex", [r"", r"[a-c]{2,5}", r"(x|yy)*z", r"\d{3}-\d", r"é+🙂?", r"[^ab]", r" a|b "]
)
def test_texts_match_the_expression(regex, speaking):
    found = [
        text for text in texts_of(speaking, drawn(8, limit=80, regex=regex)) if text is not None
    ]
    assert found and all(re.fullmatch(regex, text) for text in found)


def test_texts_are_of_the_grammar(speaking):
    grammar = 'start: sum\nsum: num ("+" num)*\nnum: /[1-9][0-9]?/ | "(" sum ")"\n'
    found = texts_of(speaking, drawn(12, limit=60, grammar=grammar))
    found = [text for text in found if text is not None]
    assert len(found) > 3
    assert all(set(text) <= set("0123456789+()") and eval(text) > 0 for text in found)


def test_the_allowed_tokens_depend_on_the_output_alone(speaking):
    """Also after other outputs: refused drafts, an EOS, a text that begins again."""
    source = random.Random(1)
    params = SamplingParams(json_schema=json.dumps(PERSON))
    config = speaking.config
    matcher = make_matcher(params, small_encoding(), config)
    outputs = [[]]
    for _ in range(150):
        output = source.choice(outputs)
        kind = source.random()
        if kind < 0.2:
            output = output + [source.randrange(4096), source.randrange(4096)]
        elif kind < 0.3:
            output = output + [4095, 5]
        expected = make_matcher(params, small_encoding(), config).token_mask(output)
        assert torch.equal(matcher.token_mask(output), expected)
        if not expected.all():
            following = expected.nonzero()[:, 0].tolist()
            if 4095 not in following:
                outputs.append(output + [source.choice(following)])
    assert len(outputs) > 50


def test_batches_drafts_and_hops_change_no_text(speaking, tiny):
    encoding = small_encoding()
    schema = {"type": "array", "items": PERSON, "minItems": 6, "maxItems": 7}
    constraints = [
        {"json_schema": json.dumps(schema)},
        {"regex": "(a|bc){40}"},
        {"choices": ("Tom",)},
        {},
    ]
    each = [SamplingParams(140, temperature=0.0, **constraint) for constraint in constraints]
    prompts = [[1], [2, 3], [4], [5, 6, 7]]
    together = list(zip(*generate(speaking, prompts, each, encoding=encoding)))
    draft = tiny(vocab_size=4096, n_layer=1, seed=3, eos_token_id=4095)
    for prompt, own, row in zip(prompts, each, together):
        row = [token for token in row if token is not None]
        assert [token for (token,) in generate(speaking, [prompt], own, encoding=encoding)] == row
        for drafter in (draft, speaking, propose_prompt_lookup):
            steps = generate_speculative(speaking, drafter, prompt, own, 3, encoding=encoding)
            assert [token for step in steps for token in step.tokens] == row
    assert len(together[0]) > 64  # the window has moved


def test_texts_of_a_discriminated_union_are_valid(speaking):
    """pydantic writes OpenAPI's `discriminator` beside oneOf, which says it all."""
    import jsonschema
    from pydantic import BaseModel, Field, TypeAdapter

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: Annotated[int, Field(ge=0, le=9)]

    class Dog(BaseModel):
        kind: Literal["dog", "puppy"]
        friend: Cat | None

    kinds = TypeAdapter(Annotated[Cat | Dog, Field(discriminator="kind")])
    schema = kinds.json_schema()
    assert "discriminator" in schema
    texts = texts_of(speaking, drawn(24, json_schema=json.dumps(schema)))
    whole = [text for text in texts if text is not None]
    for text in whole:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert {kinds.validate_json(text).kind for text in whole} == {"cat", "dog", "puppy"}
    del schema["oneOf"]
    message = "json_schema: discriminator needs oneOf beside it"
    run = functools.partial(texts_of, speaking, drawn(1, json_schema=json.dumps(schema)))
    assert refused(run) == message


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
    ({"const": "a" * 2**16}, "a string of at most 65,536 bytes of UTF-8"),
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
def test_still_what_holds_at_once_is_kept(schema, text, speaking):
    vocabulary = get_vocabulary(small_encoding(), 4096, (4095,))
    matcher = Grammar("json_schema", json.dumps(schema), vocabulary).matcher()
    assert matcher.is_accepting(vocabulary.tokenize(text))
    assert not matcher.is_accepting(vocabulary.tokenize(text[:-1]))


@pytest.mark.parametrize("schema, message", SCHEMAS, ids=lambda value: str(value)[:40])
def test_a_schema_that_cannot_be_kept_is_refused_at_once(schema, message, speaking):
    source = schema if isinstance(schema, str) else json.dumps(schema)
    found = refused(lambda: texts_of(speaking, drawn(1, json_schema=source)))
    assert message in found and found.startswith("json_schema")


LARGE = [
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    {"json_schema": {"type": "string", "minLength": 10**9}},
    {"json_schema": {"$defs": chain(900) | {"a900": {"type": "null"}}, "$ref": "#/$defs/a0"}},
    {"json_schema": {"enum": [f"word {i}" for i in range(3000)]}},
    {"json_schema": {"properties": {f"p{i}": {} for i in range(900)}, "type": "object"}},
    {"json_schema": {"type": "string", "pattern": "^(.*a){30}$"}},
    {"json_schema": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
    {"regex": "(.*a){1000}"},
    {"regex": "(a|b)*a(a|b){30}"},
    {"grammar": "start: start start | /a/"},
    {"grammar": 'start: "a"{1000000000}'},
]


@pytest.mark.parametrize("constraint", LARGE, ids=lambda value: str(value)[:50])
def test_a_large_constraint_costs_little_or_ends_with_a_reason(constraint, speaking):
    constraint = {
        name: v if isinstance(v, str) else json.dumps(v) for name, v in constraint.items()
    }
    try:
        texts_of(speaking, drawn(1, limit=8, **constraint))
    except UserError as error:
        assert str(error).startswith((*constraint, "no token may follow"))


LONG = "Lily saw a cat. " * 4000
FORCING = [
    {"json_schema": json.dumps({"const": LONG})},
    {"grammar": f'start: "{LONG[:16]}"{{20000}}'},
]


@pytest.mark.parametrize("constraint", FORCING, ids=lambda value: str(value)[:40])
def test_of_a_long_text_that_must_follow_little_is_spelled(constraint, monkeypatch):
    """Else each token takes 10 ms to 300 ms, and what is kept of spellings half a gigabyte."""
    sizes = []
    tokenize = Vocabulary.tokenize

    def watched(vocabulary, text):
        sizes.append(len(text))
        return tokenize(vocabulary, text)

    monkeypatch.setattr(Vocabulary, "tokenize", watched)
    vocabulary = Vocabulary(small_encoding(), 4096, (4095,))
    matcher = compile_constraint(SamplingParams(**constraint), vocabulary).matcher()
    output = []
    for _ in range(20):
        (token,) = matcher.token_mask(output).nonzero()[:, 0].tolist()
        output.append(token)
    text = b"".join(vocabulary.pieces[token] for token in output).decode()
    assert len(text) > 40 and LONG.startswith(text.lstrip('"'))
    assert sizes and max(sizes) < 1000


OTHERS = [
    ({"regex": "["}, 'regex: at 1(8): invalid regex "["'),
    ({"regex": "a" * 4097}, "regex "),
    ({"regex": r"[^\s\S]"}, "regex: no token may follow after 0 tokens of output: no"),
    ({"grammar": "begin: x"}, "grammar: no start rule found"),
    ({"grammar": "start: x"}, 'grammar: at 1(8): unknown name: "x"'),
    ({"grammar": 'start: %json {"foo": 1}'}, "grammar: %json is not supported in a grammar"),
    ({"grammar": "start: " + "(" * 4000 + '"a"' + ")" * 4000}, "grammar: "),
    ({"grammar": "a" * 8193}, "grammar "),
    ({"regex": "a", "grammar": "b"}, "regex conflicts with grammar: only one constraint"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos conflicts with regex: the constraint"),
    ({"json_schema": 3}, "json_schema 3: must be None or a string of at most 65,536 bytes"),
]


@pytest.mark.parametrize("constraint, message", OTHERS, ids=lambda value: str(value)[:40])
def test_other_constraints_are_refused_in_one_line(constraint, message, speaking):
    def write():
        texts_of(speaking, [SamplingParams(20, **constraint)])

    assert refused(write).startswith(message)


def test_what_a_vocabulary_cannot_write_ends_the_text_with_a_reason(tiny):
    model = tiny(vocab_size=8, eos_token_id=7)
    params = SamplingParams(20, regex="(a|b)c d")  # there is no blank
    options = {"encoding": letters()}
    for run in (
        lambda: list(generate(model, [[1]], params, **options)),
        lambda: list(generate_speculative(model, model, [1], params, 3, **options)),
    ):
        message = refused(run)
        assert message.startswith("no token may follow after ") and "vocabulary" in message
    special = SamplingParams(20, grammar="start: <[6]>")
    assert "grammar: <[6]> is not supported: output cannot contain special tokens" in refused(
        lambda: list(generate(model, [[1]], special, **options))
    )


def test_the_command_line(cli, run_main, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    code, out, err = cli(*SAID, "--json-schema", schema, "--max-new-tokens", 60)
    assert (code, "note" in err) == (0, False)
    written = json.loads(out.removeprefix(SAID[3]))
    assert written.keys() == {"name", "age"} and written["age"] in (1, 2, 33)
    drafted = ["--target", DRAFT, "--draft", "lookup", *SAID[2:], "--json-schema", schema]
    assert run_main(infer_speculative.main, *drafted, "--max-new-tokens", 60)[1] == out
    _, out, err = cli(*SAID, "--json-schema", schema, "--max-new-tokens", 3)
    assert err.endswith("note: --max-new-tokens 3 truncated 1 of 1 constrained outputs\n")
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: " dog" | " cat"')
    assert cli(*SAID, "--grammar", grammar)[1] in (SAID[3] + " dog\n", SAID[3] + " cat\n")
    assert cli(*SAID, "--regex", " (x|z) ?")[1].startswith(SAID[3] + " ")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--json-schema", "/missing.json"], ["--json-schema", "No such file"]),
        (["--grammar", CHECKPOINTS], ["--grammar", "Is a directory"]),
        (["--regex", "["], ["regex: ", "unclosed character class"]),
        (["--regex", "a", "--choice", "b"], ["choices conflicts with regex"]),
        (["--regex", "a", "--num-beams", 2], ["omit --regex"]),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(cli, options, words):
    assert is_one_line(cli(*SAID, *options), *words)

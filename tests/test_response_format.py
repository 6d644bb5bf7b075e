"""Requests that say which constraint a text must have. Oracles: the engine alone, jsonschema."""

import asyncio
import concurrent.futures
import json
import threading

import jsonschema
import pytest
from conftest import count_calls
from serving import PATH, engine_alone, refusal, serving, small_engine, until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "fox"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 8},
        "wild": {"type": "boolean"},
    },
    "required": ["animal", "legs", "wild"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
FORMS = [
    ({"response_format": NAMED}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"regex": "[a-c]{1,4}!"}}, {"regex": "[a-c]{1,4}!"}),
    ({"structured_outputs": {"choice": ["a cat", "a dog"]}}, {"choices": ("a cat", "a dog")}),
    ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, {"grammar": 'start: "a"+ "b"'}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
]


@pytest.mark.parametrize("fields, own", FORMS, ids=str)
def test_a_text_is_that_of_the_engine(client, tiny_llama, fields, own):
    for seed in range(3):
        body = {"prompt": "Tom saw", "max_tokens": 40, "seed": seed} | fields
        known = {"max_new_tokens": 40, "seed": seed} | own
        text, reason = engine_alone(tiny_llama, "Tom saw", **known)[1::2]
        status, found = client.post(PATH, body)
        assert status == 200, found
        assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (text, reason)
        events = client.events(PATH, body | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events) == text


def test_still_a_text_may_be_any_text(client, tiny_llama):
    text = engine_alone(tiny_llama, "Tom saw", max_new_tokens=40, seed=1)[1]
    body = {"prompt": "Tom saw", "max_tokens": 40, "seed": 1, "response_format": {"type": "text"}}
    assert client.post(PATH, body)[1]["choices"][0]["text"] == text


def test_replies_hold_to_a_schema(client):
    body = {"messages": MESSAGES, "response_format": NAMED, "n": 8, "seed": 1}
    choices = client.post(CHAT, body)[1]["choices"]
    texts = {choice["message"]["content"] for choice in choices}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(texts) > 1 and {choice["finish_reason"] for choice in choices} == {"stop"}


def test_a_reply_that_is_cut_says_so(client):
    body = {"messages": MESSAGES, "response_format": NAMED, "max_tokens": 3}
    (choice,) = client.post(CHAT, body)[1]["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(ValueError):
        json.loads(choice["message"]["content"])


def test_the_official_client_parses(client):
    from typing import Literal

    import openai
    from pydantic import BaseModel

    class Animal(BaseModel):
        name: Literal["cat", "dog"]
        legs: Literal[2, 4]

    where = {"base_url": f"http://127.0.0.1:{client.port}/v1", "api_key": "none"}
    with openai.OpenAI(**where, max_retries=0) as openai_client:
        ask = {"model": "small", "messages": MESSAGES, "response_format": Animal}
        reply = openai_client.chat.completions.parse(**ask, seed=2)
        animal = reply.choices[0].message.parsed
        assert isinstance(animal, Animal)
        with pytest.raises(openai.LengthFinishReasonError):
            openai_client.chat.completions.parse(**ask, max_completion_tokens=2)
        with openai_client.chat.completions.stream(**ask, seed=2) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == animal
        ask["messages"] = [
            *MESSAGES,
            reply.choices[0].message,
            *MESSAGES,
        ]  # it has the field parsed
        assert openai_client.chat.completions.parse(**ask, seed=2).choices[0].message.parsed


ONE = "structured_outputs: it must have exactly one of json, json_object, regex, choice and grammar"
NEEDED = "json_schema must be set for the type json_schema, and only for it"
JSON = "structured_outputs.json: it must be"
CHOICE = "structured_outputs.choice: it must be"
CHOSEN = {"structured_outputs": {"choice": ["a"]}}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"structured_outputs": {}}, ONE),
        ({"structured_outputs": {"json_object": False}}, ONE),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ONE),
        ({"structured_outputs": {"json": SCHEMA, "json_object": True}}, ONE),
        (
            {"structured_outputs": {"choise": ["a"]}},
            "structured_outputs.choise is not a field of this request; did you mean choice?",
        ),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag is not supported",
        ),
        ({"response_format": {"type": "json_schema"}}, f"response_format.{NEEDED}"),
        ({"response_format": NAMED | {"type": "json_object"}}, f"response_format.{NEEDED}"),
        ({"structured_outputs": {"json": [1]}}, f"{JSON} an object or its JSON"),
        ({"structured_outputs": {"choice": []}}, f"{CHOICE} a list of 1 to 1024 strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, f"{CHOICE} a list of 1 to 1024 strings"),
        ({"structured_outputs": {"choice": [""] * 1025}}, f"{CHOICE} a list of 1 to 1024 strings"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema'",
        ),
    ],
)
def test_what_no_constraint_is(client, fields, message):
    for path, needed in ((PATH, {}), (CHAT, {"messages": MESSAGES})):
        found = client.post(path, needed | fields)
        assert found == (400, refusal(message, message.partition(".")[0].partition(":")[0]))


def test_one_constraint_a_request(client):
    body = {"structured_outputs": {"choice": ["a"]}, "response_format": NAMED}
    message = "structured_outputs cannot be combined with response_format"
    assert client.post(PATH, body) == (400, refusal(message, "structured_outputs"))
    body["response_format"] = {"type": "text"}
    assert client.post(PATH, body)[1]["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "dependencies": {}}, "dependencies"),
        ({"$ref": "http://127.0.0.1/schema"}, "$ref"),
        ({"type": "string", "pattern": "("}, "json_schema: "),
        ({"not": {}}, "the keyword 'not' is not supported"),
    ],
)
def test_a_schema_that_is_not_done_is_refused_with_what_it_is(client, schema, words):
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    status, found = client.post(CHAT, {"messages": MESSAGES, "response_format": named})
    error = found["error"]
    assert status == 400 and error["param"] == "response_format"
    assert words in error["message"] and len(error["message"]) < 500
    status, found = client.post(PATH, {"structured_outputs": {"json": schema}})
    assert status == 400 and found["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize(
    "name, value", [("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])]
)
def test_a_constraint_decides_where_its_text_ends(client, name, value):
    for constraint, field in (({"response_format": NAMED}, "json_schema"), (CHOSEN, "choices")):
        status, found = client.post(CHAT, {"messages": MESSAGES, name: value} | constraint)
        assert status == 400 and found["error"]["param"] == name
        assert found["error"]["message"].startswith(f"{name} does not go with {field}: ")


@pytest.mark.parametrize(
    "constraint",
    [{"json": {"title": "a" * 2**16}}, {"regex": "a" * 5000}, {"choice": ["a" * 2**17]}],
)
def test_a_constraint_that_is_too_large_is_named(client, constraint):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": constraint.get("json")}}
    bodies = [{"structured_outputs": constraint}, {"response_format": schema}][
        : 1 + ("json" in constraint)
    ]
    for fields in bodies:
        status, found = client.post(PATH, fields)
        assert status == 400 and found["error"]["param"] == next(iter(fields))
        assert "bytes of UTF-8 at most" in found["error"]["message"]
        assert len(found["error"]["message"]) < 700


def deep(levels: int) -> dict:
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "deep": deep(300),
    "wide": {"properties": {f"a{number}": {"type": "string"} for number in range(20_000)}},
    "long enum": {"enum": [f"{number:x}" for number in range(100_000)]},
    "repeated": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "long": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "long text": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "own": {"$ref": "#"},
    "itself": {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
}


def test_other_clients_do_not_wait_for_a_hostile_schema(client, monkeypatch):
    """The event loop neither looks at a schema nor compiles it: other threads do."""
    import constraints

    seen = []
    real = constraints.Grammar

    def watched(*key):
        seen.append(threading.get_ident())
        return real(*key)

    async def ident() -> int:
        return threading.get_ident()

    loop = asyncio.run_coroutine_threadsafe(ident(), client.thread.loop).result(60)
    monkeypatch.setattr(constraints, "Grammar", watched)
    for schema in HOSTILE.values():
        body = {"structured_outputs": {"json": schema}, "max_tokens": 2}
        status, found = client.post(PATH, body)
        assert status in (200, 400) and len(str(found)) < 1000
    # Two of them are longer than a schema may be, so nothing is compiled.
    assert len(seen) == len(HOSTILE) - 2
    assert not {loop, client.thread.thread.ident} & {*seen}


def test_the_engine_compiles_no_constraint(client, monkeypatch):
    """Also where more constraints are asked for at once than are kept for later requests."""
    import constraints

    compiled = []
    grammar = constraints.Grammar

    def watched(constraint, source, vocabulary):
        compiled.append((threading.current_thread().name, source))
        return grammar(constraint, source, vocabulary)

    monkeypatch.setattr(constraints, "Grammar", watched)
    sources = [f"(a|b){{{count}}}" for count in range(3, 27)]
    release = threading.Event()
    client.thread.commands.put(release.wait)  # as in a long step

    def ask(source):
        return client.post(PATH, {"structured_outputs": {"regex": source}, "max_tokens": 30})

    with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
        answers = [pool.submit(ask, source) for source in sources]
        until(lambda: len(compiled) >= len(sources) and client.thread.commands.qsize() == 24)
        release.set()
        found = [answer.result()[1]["choices"][0]["text"] for answer in answers]
    assert [len(text) for text in found] == list(range(3, 27))
    assert {source for _, source in compiled} == set(sources)
    assert "engine" not in {name for name, _ in compiled}


def test_a_constraint_that_a_text_has_is_not_compiled_again(tiny_llama, monkeypatch):
    from constraints import Grammar
    from sampling import SamplingParams

    compiled = []
    init = Grammar.__init__

    def watched(grammar, constraint, source, vocabulary):
        compiled.append(source)
        init(grammar, constraint, source, vocabulary)

    monkeypatch.setattr(Grammar, "__init__", watched)
    engine = small_engine(tiny_llama)
    constraints = [SamplingParams(9, regex=f"x{{{count}}}y?") for count in range(1, 21)]
    first = [engine.add([1], params) for params in constraints]
    again = [engine.add([2], params) for params in constraints]
    assert sorted(compiled) == sorted(params.regex for params in constraints)
    while engine.busy:
        engine.step()
    assert [request.text.rstrip("y") for request in first + again] == 2 * [
        "x" * min(count, 9) for count in range(1, 21)
    ]


def test_threads_that_compile_a_constraint_at_once_hold_the_same(monkeypatch):
    """Else what one of them holds is not known when the other's is gone."""
    import constraints

    both = threading.Barrier(2)

    class Slow:
        def __init__(self, *key):
            both.wait(60)

    monkeypatch.setattr(constraints, "Grammar", Slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: constraints.compile_source("regex", "a{7}", None), "ab")
    assert first is second


def test_still_hostile_schemas_leave_a_server_that_answers(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        for schema in HOSTILE.values():
            body = {"structured_outputs": {"json": schema}, "max_tokens": 2}
            status, _ = client.post(PATH, body)
            assert status in (200, 400)
        assert client.post(PATH, {"max_tokens": 1})[0] == 200


def test_many_choices_of_many_texts_hold_up_nobody(tiny_llama):
    """Each of 128 texts checks its parameters in the event loop; the most choices there may be."""
    from server.protocol import CompletionRequest

    body = {"structured_outputs": {"choice": [""] * 1024}, "n": 128}
    calls = count_calls(lambda: CompletionRequest.model_validate(body).to_sampling_params(4, None))
    assert calls < 8 * 1024 * 128

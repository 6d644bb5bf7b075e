"""Requests that say which constraint a text must have. Oracles: the engine alone, jsonschema."""

import asyncio
import concurrent.futures
import json
import threading
from typing import Literal

import openai
import pytest
from conftest import count_calls, record
from pydantic import BaseModel
from serving import PATH, check_refused, engine_alone, official_client, texts_by_index

from constraints import compiler
from server.protocol import CompletionRequest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
ANIMAL = {"enum": ["cat", "dog", "fox"]}
LEGS = {"type": "integer", "minimum": 2, "maximum": 8}
SCHEMA = {
    "type": "object",
    "properties": {"animal": ANIMAL, "legs": LEGS, "wild": {"type": "boolean"}},
    "required": ["animal", "legs", "wild"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
SOURCE = {"json_schema": json.dumps(SCHEMA)}
OBJECT = {"json_schema": '{"type": "object"}'}
CONSTRAINTS = [
    ({"response_format": NAMED}, SOURCE),
    ({"structured_outputs": {"json": SCHEMA}}, SOURCE),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SOURCE),
    ({"structured_outputs": {"regex": "[a-c]{1,4}!"}}, {"regex": "[a-c]{1,4}!"}),
    ({"structured_outputs": {"choice": ["a cat", "a dog"]}}, {"choices": ("a cat", "a dog")}),
    ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, {"grammar": 'start: "a"+ "b"'}),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"response_format": {"type": "text"}}, {}),
]


def test_a_text_is_that_of_the_engine(client, tiny_llama):
    for fields, own in CONSTRAINTS:
        body = {"prompt": "Tom saw", "max_tokens": 40, "seed": 1} | fields
        known = engine_alone(tiny_llama, "Tom saw", max_new_tokens=40, seed=1, **own)[1::2]
        (choice,) = client.post(PATH, body)[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == known
        assert texts_by_index(client.events(PATH, body | {"stream": True})) == {0: known}


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


def test_the_official_client_parses(client):
    ask = {"model": "small", "response_format": Animal, "seed": 2}
    with official_client(client) as openai_client:
        completions = openai_client.chat.completions
        message = completions.parse(messages=MESSAGES, **ask).choices[0].message
        assert isinstance(message.parsed, Animal)
        with pytest.raises(openai.LengthFinishReasonError):
            completions.parse(messages=MESSAGES, max_completion_tokens=2, **ask)
        with completions.stream(messages=MESSAGES, **ask) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == message.parsed
        talk = [*MESSAGES, message, *MESSAGES]  # the message has the field parsed
        assert completions.parse(messages=talk, **ask).choices[0].message.parsed


def outputs(**fields) -> dict:
    return {"structured_outputs": fields}


ALL = "json json_object regex choice grammar"
REFUSED = [  # fields, words of the message
    (outputs(), ALL),
    (outputs(json_object=False), ALL),
    (outputs(regex="a", choice=["a"]), ALL),
    (outputs(json=SCHEMA, json_object=True), ALL),
    (outputs(choise=["a"]), "structured_outputs.choise choice?"),
    (outputs(structural_tag={}), "structured_outputs.structural_tag"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": NAMED | {"type": "json_object"}}, "response_format.json_schema"),
    (outputs(json=[1]), "structured_outputs.json object"),
    *(
        (outputs(choice=choice), "structured_outputs.choice 1024")
        for choice in ([], ["a", 1], [""] * 1025)
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type text json_object json_schema"),
]


def test_what_no_constraint_is(client):
    for fields, said in REFUSED:
        for path, needed in ((PATH, {}), (CHAT, {"messages": MESSAGES})):
            check_refused(client.post(path, needed | fields), next(iter(fields)), said)
    body = outputs(choice=["a"]) | {"response_format": NAMED}
    check_refused(client.post(PATH, body), "structured_outputs", "response_format")
    body["response_format"] = {"type": "text"}
    assert client.post(PATH, body)[1]["choices"][0]["text"] == "a"
    own = {"json_schema": {"response_format": NAMED}, "choices": outputs(choice=["a"])}
    for name, value in (("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])):
        for field, constraint in own.items():
            body = {"messages": MESSAGES, name: value} | constraint
            check_refused(client.post(CHAT, body), name, f"{name} {field}")


def named(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_a_schema_that_is_not_done_is_refused_with_what_it_is(client):
    for schema, words in (
        ({"type": "objekt"}, "objekt"),
        ({"$ref": "http://127.0.0.1/schema"}, "$ref"),
        ({"type": "string", "pattern": "("}, "json_schema: "),
        ({"not": {}}, "'not'"),
        ({"title": "a" * 2**16}, "bytes"),
    ):
        body = {"messages": MESSAGES, "response_format": named(schema)}
        check_refused(client.post(CHAT, body), "response_format", words)
        check_refused(client.post(PATH, outputs(json=schema)), "structured_outputs", words)
    for constraint in ({"regex": "a" * 5000}, {"choice": ["a" * 2**17]}):
        check_refused(client.post(PATH, outputs(**constraint)), "structured_outputs", "bytes")


def deep(levels: int) -> dict:
    if not levels:
        return {"type": "integer"}
    return {"type": "array", "items": deep(levels - 1)}


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
    threads = record(monkeypatch, compiler, "Grammar", lambda *_: threading.current_thread())

    async def current():
        return threading.current_thread()

    loop = asyncio.run_coroutine_threadsafe(current(), client.thread.loop).result(60)
    for schema in HOSTILE.values():
        status, found = client.post(PATH, outputs(json=schema) | {"max_tokens": 2})
        assert status in (200, 400) and len(str(found)) < 1000
    # Two of them are longer than a schema may be, so nothing is compiled.
    assert len(threads) == len(HOSTILE) - 2
    assert not {loop, client.thread.thread} & set(threads)
    assert client.post(PATH, {"max_tokens": 1})[0] == 200


def test_threads_hold_the_same_constraint_and_many_choices_hold_up_nobody(monkeypatch, tiny_llama):
    """Else what one of them holds is not known when the other's is gone."""
    both = threading.Barrier(2)

    class Slow:
        def __init__(self, *key):
            both.wait(60)

    monkeypatch.setattr(compiler, "Grammar", Slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: compiler.compile_source("regex", "a{7}", None), "ab")
    assert first is second
    body = outputs(choice=[""] * 1024) | {"n": 128}
    calls = count_calls(lambda: CompletionRequest.model_validate(body).to_sampling_params(4, None))
    assert calls < 8 * 1024 * 128

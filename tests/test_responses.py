"""/v1/responses. Oracles: the engine alone, chat completions, OpenAI's own types and client."""

import functools
import json
import re
from typing import Literal

import jsonschema
import pydantic
import pytest
from chats import HERMES, call, conversation, tool
from serving import (
    SMALL,
    check_refused,
    engine_alone,
    failing,
    in_turns,
    is_free,
    official_client,
    refusal,
    serving,
    small_encoding,
    small_engine,
    stop_engine,
    until,
)
from test_chat_completions import said
from test_tool_messages import FUNCTION

from text.chat import Chat

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
LOGPROBS = {"include": ["message.output_text.logprobs"]}
MESSAGES = [
    {"role": "user", "content": "cat, moon"},
    {"role": "assistant", "content": "A cat saw the moon."},
    {"role": "user", "content": "dog"},
]
ORDER = ("name", "description", "parameters", "strict")
LOOK = {"place": {"enum": ["sea", "w\u00e9d"]}}
COUNT = {"things": {"type": "integer", "minimum": 3, "maximum": 40}}
TOOLS = [
    {"type": "function"}
    | tool("look", LOOK, description="What is there?", strict=True)["function"],
    tool("count", COUNT)["function"] | {"description": None, "type": "function"},
]
# As the documentation of chat completions writes them, which is what templates show to models.
NESTED = [
    {"type": "function", "function": {name: each[name] for name in ORDER if each.get(name)}}
    for each in TOOLS
]
SCHEMAS = {each["name"]: each["parameters"] for each in TOOLS}


@functools.cache
def types():
    """The official client's types of a response and of an event."""
    from openai.types.responses import Response, ResponseStreamEvent

    return pydantic.TypeAdapter(Response), pydantic.TypeAdapter(ResponseStreamEvent)


def whole(client, body: dict) -> dict:
    """A response, which the official client's types accept."""
    status, found = client.post(PATH, body)
    assert status == 200, found
    types()[0].validate_python(found)
    return found


def events_of(client, body: dict) -> list[dict]:
    """The events of a streamed response, which the official client's types accept."""
    with client.send("POST", PATH, body | {"stream": True}) as answer:
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *blocks, empty = answer.read().decode().split("\n\n")
    assert empty == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert types()[1].validate_python(events[-1]).type == events[-1]["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def replayed(events: list[dict]) -> list[dict]:
    """The output that events amount to, each of them in its place."""
    output = []
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["response"]["output"] for event in events[:2]] == [[], []]
    steps = iter(events[2:-1])

    def step(name: str, where: dict) -> dict:
        event = next(steps)
        assert event["type"] == f"response.{name}" and where.items() <= event.items()
        return event

    for event in steps:
        item = event["item"]
        assert event["type"] == "response.output_item.added"
        assert (event["output_index"], item["status"]) == (len(output), "in_progress")
        where = {"item_id": item["id"], "output_index": len(output)}
        if item["type"] == "message":
            assert item["content"] == []
            name, field, where = "output_text", "text", where | {"content_index": 0}
            assert step("content_part.added", where)["part"]["text"] == ""
        else:
            assert item["arguments"] == ""
            name, field = "function_call_arguments", "arguments"
        text = ""
        entries = []
        event = next(steps)
        while event["type"] == f"response.{name}.delta":
            assert where.items() <= event.items()
            text += event["delta"]
            entries += event.get("logprobs", [])
            event = next(steps)
        assert event["type"] == f"response.{name}.done" and where.items() <= event.items()
        assert event[field] == text
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
            assert step("content_part.done", where)["part"] == part
            item["content"] = [part]
        else:
            item["arguments"] = text
        done = step("output_item.done", {"output_index": len(output)})["item"]
        item["status"] = done["status"]
        assert done == item
        output.append(item)
    assert events[-1]["response"]["output"] == output
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    return output


def plain(value):
    """A response, or its output, without what is its own: ids and times."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = {"id", "call_id", "created_at", "completed_at"}
    return {name: plain(each) for name, each in value.items() if name not in own}


def items_of(message: dict) -> list[tuple]:
    """What a chat message says, and each of its calls."""
    made = [each["function"] for each in message.get("tool_calls", ())]
    said = [message["content"]] if message["content"] or not made else []
    return said + [(each["name"], each["arguments"]) for each in made]


def said_in(output: list[dict]) -> list[tuple]:
    return [
        item["content"][0]["text"]
        if item["type"] == "message"
        else (item["name"], item["arguments"])
        for item in output
    ]


@pytest.fixture(scope="session")
def chat_engine(tiny_llama, write_chat):
    """A function that makes an engine of a random model with the vocabulary of `write_chat`."""
    from chats import HERMES

    from engine.engine import Engine
    from text.tokenizer import load_encoding

    shape = {"vocab_size": 4104, "block_size": 1280, "bos_token_id": 4096, "eos_token_id": 4098}
    encoding = load_encoding(write_chat(HERMES), 4104)
    return lambda: Engine(tiny_llama(**shape), encoding=encoding)


@pytest.fixture(scope="module")
def hermes(chat_engine, write_chat):
    """A Client to a model whose template writes system messages and tools."""
    with serving(chat_engine, Chat(write_chat(HERMES))) as client:
        yield client


@pytest.mark.parametrize("given", ["cat, moon", MESSAGES])
@pytest.mark.parametrize("length", [6, None])
def test_a_response_is_the_text_of_the_engine(client, tiny_llama, given, length):
    talk = given if isinstance(given, list) else MESSAGES[:1]
    prompt = Chat(SMALL).encode(talk, small_encoding())
    params = {"seed": 4, "top_p": 0.9, "temperature": 0.8}
    most = length or 64 - len(prompt)  # the rest of the context window
    tokens, text, _, reason = engine_alone(tiny_llama, prompt, max_new_tokens=most, **params)
    assert reason == "length"
    body = {"input": given, "max_output_tokens": length} | params
    found = whole(client, body)
    expected = {"object": "response", "model": "small", "status": "incomplete", "store": False}
    expected |= {"temperature": 0.8, "top_p": 0.9, "max_output_tokens": length}
    expected["incomplete_details"] = {"reason": "max_output_tokens"}
    expected["usage"] = {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(tokens),
    }
    assert {name: found[name] for name in expected} == expected
    assert found["id"].startswith("resp_") and found["created_at"] > 0
    (item,) = found["output"]
    assert item["id"].startswith("msg_")
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    assert plain(item) == message
    events = events_of(client, body)
    assert said_in(replayed(events)) == [text]
    assert plain(events[-1]["response"]) == plain(found)


def test_a_response_that_ends_by_itself_is_completed(client):
    body = {"input": "Tom", "seed": 2, "logit_bias": {"4095": 100}}
    found = whole(client, body)
    assert (found["status"], found["incomplete_details"]) == ("completed", None)
    assert said_in(found["output"]) == [""] and found["usage"]["output_tokens"] == 1
    assert found["completed_at"] >= found["created_at"]
    assert events_of(client, body)[-1]["type"] == "response.completed"
    body = {"input": "Tom", "seed": 2, "max_output_tokens": 0}
    assert said_in(whole(client, body)["output"]) == [""]
    assert said_in(replayed(events_of(client, body))) == [""]


CALLED = call("look", '{"place": "sea"}', "aB3dE6gH9")
RESULT = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
CALL = {"type": "function_call", "call_id": "aB3dE6gH9"} | CALLED["function"]
OUTPUT = {"type": "function_call_output", "call_id": "aB3dE6gH9", "output": "a ship"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"x": 1}]}
TOM = conversation("Tom")


def input_text(*texts: str) -> list[dict]:
    return [{"type": "input_text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "given, messages",
    [
        ({"instructions": "", "input": "Tom"}, conversation("Tom")),
        (
            {"instructions": "Be kind.", "input": "Tom"},
            [{"role": "system", "content": "Be kind."}, *conversation("Tom")],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": each} for each in ("To", "m")],
                    },
                ]
            },
            [{"role": "developer", "content": "Be kind."}, *conversation("Tom")],
        ),
        (
            {"input": [*conversation("Tom"), REASONING, CALL, OUTPUT]},
            [*conversation("Tom"), {"role": "assistant", "tool_calls": [CALLED]}, RESULT],
        ),
        (
            {
                "input": [
                    *conversation("Tom", "Yes."),
                    CALL,
                    REASONING,
                    CALL | {"call_id": "second"},
                    OUTPUT | {"output": [{"type": "input_text", "text": "a ship"}]},
                    OUTPUT | {"call_id": "second", "output": "", "name": "look"},
                    *conversation("So?"),
                ]
            },
            [
                *conversation("Tom"),
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "tool_calls": [CALLED, CALLED | {"id": "second"}],
                },
                RESULT,
                RESULT | {"tool_call_id": "second", "content": ""},
                *conversation("So?"),
            ],
        ),
    ],
)
def test_input_is_the_chat_it_stands_for(hermes, given, messages):
    """The same tokens go in, and the same text comes out."""
    own = {"seed": 3, "min_p": 0.01, "top_k": 50}
    for tools, nested in ((None, None), (TOOLS, NESTED)):
        body = {"messages": messages, "tools": nested, "max_tokens": 7} | own
        status, chat = hermes.post(CHAT, body)
        assert status == 200, chat
        found = whole(hermes, given | {"tools": tools, "max_output_tokens": 7} | own)
        assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert said_in(found["output"]) == items_of(chat["choices"][0]["message"])


CHOICES = [
    {"logit_bias": {"4102": 7}},
    {"tool_choice": "required"},
    {"tool_choice": FUNCTION},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": "none"},
]


def test_calls_are_those_of_chat_completions(hermes):
    called = cut = texts = 0
    for number, fields in enumerate(CHOICES):
        theirs = dict(fields)
        if theirs.get("tool_choice") == FUNCTION:
            theirs["tool_choice"] = {"type": "function", "function": {"name": "count"}}
        for seed, length in ((number, 150), (number + 1, 30)):
            body = {"messages": TOM, "tools": NESTED, "max_tokens": length, "seed": seed}
            (choice,) = hermes.post(CHAT, body | theirs)[1]["choices"]
            body = {"input": "Tom", "tools": TOOLS, "max_output_tokens": length, "seed": seed}
            found = whole(hermes, body | fields)
            assert said_in(found["output"]) == items_of(choice["message"])
            assert found["tool_choice"] == fields.get("tool_choice", "auto")
            assert found["parallel_tool_calls"] == fields.get("parallel_tool_calls", True)
            assert [each["name"] for each in found["tools"]] == ["look", "count"]
            events = events_of(hermes, body | fields)
            replayed(events)
            assert plain(events[-1]["response"]) == plain(found)
            texts += found["output"][0]["type"] == "message"
            is_cut = choice["finish_reason"] == "length"
            assert found["status"] == ("incomplete" if is_cut else "completed")
            *before, last = found["output"]
            assert {item["status"] for item in before} <= {"completed"}
            if last["type"] == "message" or not is_cut:
                assert last["status"] == found["status"]
            for item in (each for each in found["output"] if each["type"] == "function_call"):
                assert re.fullmatch("fc_[0-9a-f]{32}", item["id"])
                assert re.fullmatch("[A-Za-z0-9]{9}", item["call_id"])
                if item["status"] == "completed":
                    called += 1
                    jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])
                else:
                    cut += 1
                    with pytest.raises(json.JSONDecodeError):
                        json.loads(item["arguments"])
    assert called > 2 and cut and texts


def test_a_call_that_a_stop_string_cuts_is_incomplete(hermes):
    """The text ended by itself, but nobody should run half of a call, nor send it back."""
    body = {"input": "Tom", "tools": TOOLS, "tool_choice": FUNCTION, "seed": 1, "stop": ['"things']}
    found = whole(hermes, body)
    (item,) = found["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", "{")
    assert found["status"] == "completed"
    for items in ([item], by_id([item])):
        check_refused(hermes.post(PATH, {"input": items}), "input", "input.0.arguments JSON")


SHORT = {"place": {"enum": ["the sea", "a w\u00e9d"]}}  # a random model writes long texts
SCHEMA = {"type": "object", "properties": SHORT, "required": ["place"]}
TEXT_FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize("text_format", [TEXT_FORMAT, {"type": "json_object"}, {"type": "text"}])
def test_the_format_of_a_text(hermes, text_format):
    nested = {"type": text_format["type"]}
    if text_format is TEXT_FORMAT:
        nested["json_schema"] = {name: TEXT_FORMAT[name] for name in ("name", "schema", "strict")}
    body = {"messages": TOM, "response_format": nested, "max_tokens": 200, "seed": 2}
    (choice,) = hermes.post(CHAT, body)[1]["choices"]
    body = {"input": "Tom", "text": {"format": text_format, "verbosity": "low"}}
    found = whole(hermes, body | {"max_output_tokens": 200, "seed": 2})
    assert said_in(found["output"]) == [choice["message"]["content"]]
    assert text_format.items() <= found["text"]["format"].items()
    if text_format is TEXT_FORMAT:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_log_probabilities_are_those_of_chat_completions(client):
    own = {"seed": 3, "top_logprobs": 2}
    body = {"messages": MESSAGES[:1], "logprobs": True, "max_tokens": 9} | own
    (choice,) = client.post(CHAT, body)[1]["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 9
    body = {"input": "cat, moon", "max_output_tokens": 9} | LOGPROBS | own
    found = whole(client, body)
    assert found["output"][0]["content"][0]["logprobs"] == entries and found["top_logprobs"] == 2
    (item,) = replayed(events_of(client, body))
    assert item["content"][0]["logprobs"] == entries


def test_truncation_keeps_the_last_tokens(client):
    body = {"input": "x " * 100, "max_output_tokens": 4, "seed": 1}
    given = {"messages": conversation("x " * 100), "max_tokens": 4, "seed": 1}
    (choice,) = client.post(CHAT, given | {"truncate_prompt_tokens": -1})[1]["choices"]
    found = whole(client, body | {"truncation": "auto"})
    assert said_in(found["output"]) == [choice["message"]["content"]]
    assert found["usage"]["input_tokens"] == 60 and found["truncation"] == "auto"
    answer = client.post(PATH, body | {"truncation": "disabled"})
    check_refused(answer, "input", 'truncation "auto"', code="context_length_exceeded")


HARMLESS = {
    "background": False,
    "conversation": None,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "max_tool_calls": 3,
    "metadata": {"trace": "1"},
    "moderation": {"model": "omni-moderation-latest"},
    "previous_response_id": None,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": "30m"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "high", "summary": "auto"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "stream_options": {"include_obfuscation": False},
    "text": {"verbosity": "high"},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": "u",
}


def test_what_changes_no_text_is_taken(client):
    body = {"input": "Tom", "max_output_tokens": 4, "seed": 3}
    known = whole(client, body)
    for fields in (HARMLESS, dict.fromkeys(HARMLESS), {"store": False}):
        found = whole(client, body | fields)
        assert plain(found["output"]) == plain(known["output"])
        assert found["metadata"] == (fields.get("metadata") or {})
    # What the answer says was done.
    assert found["reasoning"]["effort"] is None and found["store"] is False


DONE = {"truncation": "auto", "tool_choice": "auto", "metadata": {"a": "b"}, "user": "u"}


def test_minus_one_is_no_limit_of_its_own(client):
    body = {"input": "Tom", "seed": 1, "ignore_eos": True}
    found = [whole(client, body | {"max_output_tokens": most}) for most in (-1, None)]
    assert found[0]["usage"] == found[1]["usage"] and found[0]["usage"]["total_tokens"] == 64


STORED = "is not supported: the server stores no responses, so send earlier items in input"
ROLE = "Input should be 'user', 'assistant', 'system' or 'developer'"
LIMIT = "with 1 sequences, 0 log-probabilities per token it may be at most 262144"
SAYS = "this server supports {} only"


NOT_KEPT = (
    "is not the id of an item that this server still keeps; set store: false, so that the client "
    "sends the items themselves (AI SDK: providerOptions: {openai: {store: false}})"
)


def test_null_in_a_schema_is_a_value(client):
    """Fields without a value are left out of the request, and not of what the client describes."""
    text_format = {"type": "json_schema", "name": "n", "schema": {"const": None}}
    body = {"input": "Tom", "text": {"format": text_format}}
    assert said_in(whole(client, body)["output"]) == ["null"]
    function = {"type": "object", "properties": {"a": {"const": None, "description": "b"}}}
    from server.responses_protocol import ResponsesRequest

    tools = [{"type": "function", "name": "f", "parameters": function}]
    asked = ResponsesRequest.model_validate({"input": "Tom", "tools": tools})
    assert asked.to_chat().tools[0]["function"]["parameters"] == function


def message(**fields) -> dict:
    return {"input": [{"role": "user", "content": "Tom"} | fields]}


def items(*more, **fields) -> dict:
    return {"input": [*more, fields] if fields else list(more)}


def tools(*more, **fields) -> dict:
    return {"tools": [*TOOLS, *more]} | fields


def text(**fields) -> dict:
    return {"text": {"format": fields}}


REFERENCE = {"type": "item_reference", "id": "a"}
ITEM_TYPES = "message function_call function_call_output reasoning item_reference"


DEEP = functools.reduce(lambda inner, _: {"default": inner}, range(300), {"type": "integer"})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOLS[0] | {"parameters": DEEP}], "tool_choice": "none"},
        text(**TEXT_FORMAT | {"schema": DEEP}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_response_could_not_repeat_is_refused(hermes, fields, stream):
    found = hermes.post(PATH, {"input": "Tom", "stream": stream} | fields)
    check_refused(found, next(iter(fields)), "250")


REFUSED = [  # fields, the one that is named, words of the message
    ({"previous_response_id": "resp_1"}, "previous_response_id", "input"),
    ({"conversation": "conv_1"}, "conversation", "input"),
    ({"background": True}, "background", ""),
    ({"prompt": {"id": "p"}}, "prompt", "input"),
    ({"context_management": [{}]}, "context_management", ""),
    (items(REFERENCE), "input", "input.0.id store: false providerOptions:"),
    (items(id="msg_1"), "input", "input.0.id msg_1 store: false"),
    (items(*MESSAGES, REFERENCE | {"id": "m" * 10**5}), "input", f"input.3.id {'m' * 100}"),
    (items(REFERENCE | {"id": ["msg_1"]}), "input", "input.0.id item_reference string"),
    (items(REFERENCE | {"role": "user"}), "input", "input.0.role item_reference"),
    (items(REFERENCE | {"name": "b"}), "input", "input.0.name item_reference"),
    (items(type="web_search_call", id="w", action={}), "input", f"web_search_call {ITEM_TYPES}"),
    ({"store": "no"}, "store", ""),
    (message(content=[{"type": "input_image"}]), "input", "content.0.type input_image input_text"),
    (tools({"type": "mcp"}), "tools", "tools.2.type mcp function"),
    ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "allowed_tools"),
    ({"tool_choice": "any"}, "tool_choice", "none auto required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    (tools(tool_choice=FUNCTION | {"name": "messages"}), "tool_choice", "tool_choice.name"),
    (tools(TOOLS[0]), "tools", "tools.2.name look"),
    (tools({"type": "function"}), "tools", "tools.2.name"),
    (tools({"type": "function", "name": "f", "function": {}}), "tools", "tools.2.function"),
    (tools(text={"format": {"type": "json_object"}}), "text", "text.format tools"),
    (tools(**LOGPROBS), "include", "message.output_text.logprobs tools"),
    ({"top_logprobs": 2}, "top_logprobs", "include message.output_text.logprobs"),
    (LOGPROBS | {"top_logprobs": 21}, "top_logprobs", "20"),
    ({"include": ["everything"]}, "include", ""),
    (text(type="json_schema", name="a"), "text", "text.format.schema json_schema"),
    (text(**TEXT_FORMAT | {"schema": {"not": {}}}), "text", "text.format.schema 'not'"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "json_schema 'not'"),
    (text(type="json_object") | {"structured_outputs": {"regex": "a"}}, "structured_outputs", ""),
    (text(type="grammar"), "text", "text.format.type grammar text json_object json_schema"),
    ({"max_output_tokens": 10**9}, "max_output_tokens", "1000000000 262144"),
    ({"max_output_tokens": "3"}, "max_output_tokens", "integer"),
    ({"max_output_tokens": -2}, "max_output_tokens", "-1"),
    ({"max_output_tokens": 3, "min_tokens": 9}, "min_tokens", "9 max_output_tokens 3"),
    ({"temperature": -1}, "temperature", "-1.0"),
    ({"reasoning": {"effort": 3}}, "reasoning", "reasoning.effort string"),
    ({"reasoning": {"efort": "low"}}, "reasoning", "reasoning.efort effort?"),
    ({"stream": 1}, "stream", ""),
    ({"model": 3}, "model", ""),
    ({"messages": MESSAGES}, "messages", "input?"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format?"),
    ({"temprature": 1}, "temprature", "temperature?"),
    ({"n": 2}, "n", ""),
    ({"verbosity": "low"}, "verbosity", "text.verbosity?"),
    ({"metadata": {"a": 1}}, "metadata", ""),
    ({"metadata": {f"{n}": f"{n}" for n in range(17)}}, "metadata", "17 16"),
    ({"stream_options": {"include_obfuscation": 1}}, "stream_options", "include_obfuscation"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", ""),
    *(({"input": value}, "input", "") for value in (3, None, [], ["Tom"])),
    (items(REASONING), "input", "message reasoning"),
    (items(REASONING, REASONING) | {"instructions": ""}, "input", "message reasoning"),
    (message(role="tool"), "input", "input.0.role user assistant system developer"),
    (message(content=None), "input", "input.0.content message"),
    (message(name="<|im_end|>"), "input", "input.0.name [A-Za-z0-9_-]"),
    (message(contents="a"), "input", "input.0.contents"),
    (items(*MESSAGES, OUTPUT), "input", "input.3.call_id function_call"),
    (items(CALL | {"arguments": "[1]"}), "input", "input.0.arguments JSON"),
    (items(CALL | {"namespace": "a"}), "input", "input.0.namespace"),
    (items(*(CALL | {"call_id": f"{n}"} for n in range(129))), "input", "128"),
]


@pytest.mark.parametrize(
    "fields, error, param",
    [
        ({"previous_response_id": "resp_1"}, f"previous_response_id {STORED}", None),
        ({"conversation": "conv_1"}, f"conversation {STORED}", None),
        (
            {"background": True},
            "background is not supported: a response ends with its connection",
            None,
        ),
        (
            {"prompt": {"id": "p"}},
            "prompt is not supported: the server stores no prompts, so send the text in input",
            None,
        ),
        ({"context_management": [{}]}, "context_management is not supported", None),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            f"input.0.id: msg_1 {NOT_KEPT}",
            "input",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "w", "action": {}}]},
            "input.0.type is web_search_call; "
            + SAYS.format(
                "message, function_call, function_call_output, reasoning, item_reference"
            ),
            "input",
        ),
        ({"input": [{"id": "msg_1"}]}, f"input.0.id: msg_1 {NOT_KEPT}", "input"),
        (
            {"input": [*MESSAGES, {"type": "item_reference", "id": "m" * 10**5}]},
            f"input.3.id: {'m' * 100} {NOT_KEPT}",
            "input",
        ),
        (
            {"input": [{"type": "item_reference", "id": ["msg_1"]}]},
            "input.0.id is required for the type item_reference: a string",
            "input",
        ),
        (
            {"input": [{"type": "item_reference", "id": "a", "role": "user"}]},
            "input.0.role is not a field of the type item_reference",
            "input",
        ),
        ({"store": "no"}, None, "store"),
        (
            message(content=[{"type": "input_image", "image_url": "a"}]),
            "input.0.content.0.type is input_image; "
            + SAYS.format("input_text, output_text, text"),
            "input",
        ),
        (tools({"type": "mcp"}), "tools.2.type is mcp; " + SAYS.format("function"), "tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.type is allowed_tools; " + SAYS.format("function"),
            "tool_choice",
        ),
        (
            {"tool_choice": "any"},
            'tool_choice: it must be none, auto, required or {"type": "function", "name": ...}',
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice requires tools", "tool_choice"),
        (
            tools() | {"tool_choice": {"type": "function", "name": "messages"}},
            "tool_choice.name: messages is not in tools",
            "tool_choice",
        ),
        (tools(TOOLS[0]), "tools.2.name: duplicate name look", "tools"),
        (tools({"type": "function"}), "tools.2.name: Field required", "tools"),
        (
            tools({"type": "function", "name": "f", "function": {}}),
            "tools.2.function is not a field of this request",
            "tools",
        ),
        (
            tools() | {"text": {"format": {"type": "json_object"}}},
            "text.format cannot be combined with tools, unless tool_choice is none",
            "text",
        ),
        (
            tools() | LOGPROBS,
            "include message.output_text.logprobs cannot be combined with tools, "
            "unless tool_choice is none",
            "include",
        ),
        (
            {"top_logprobs": 2},
            'top_logprobs requires include: ["message.output_text.logprobs"]',
            "top_logprobs",
        ),
        (LOGPROBS | {"top_logprobs": 21}, None, "top_logprobs"),
        ({"include": ["everything"]}, None, "include"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema must be set for the type json_schema, and only for it",
            "text",
        ),
        (
            text(**TEXT_FORMAT | {"schema": {"not": {}}}),
            "text.format.schema: the keyword 'not' is not supported",
            "text",
        ),
        (
            {"structured_outputs": {"json": {"not": {}}}},
            "json_schema: the keyword 'not' is not supported",
            "structured_outputs",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs cannot be combined with text.format",
            "structured_outputs",
        ),
        (
            {"text": {"format": {"type": "grammar"}}},
            "text.format.type is grammar; " + SAYS.format("text, json_object, json_schema"),
            "text",
        ),
        ({"max_output_tokens": 10**9}, f"max_output_tokens is 1000000000; {LIMIT}", None),
        ({"max_output_tokens": "3"}, None, "max_output_tokens"),
        (
            {"max_output_tokens": 3, "min_tokens": 9},
            "min_tokens is 9; it must be at most max_output_tokens, 3",
            "min_tokens",
        ),
        (
            {"temperature": -1},
            "temperature: temperature is -1.0; it must be a finite number >= 0",
            None,
        ),
        (
            {"reasoning": {"effort": 3}},
            "reasoning.effort: Input should be a valid string",
            "reasoning",
        ),
        (
            {"reasoning": {"efort": "low"}},
            "reasoning.efort is not a field of this request; did you mean effort?",
            "reasoning",
        ),
        ({"stream": 1}, None, "stream"),
        ({"model": 3}, None, "model"),
        (
            {"max_tokens": 3},
            "max_tokens is not a field of this request; did you mean max_output_tokens?",
            None,
        ),
        (
            {"messages": MESSAGES},
            "messages is not a field of this request; did you mean input?",
            None,
        ),
        (
            {"response_format": {"type": "text"}},
            "response_format is not a field of this request; did you mean text.format?",
            None,
        ),
        (
            {"temprature": 1},
            "temprature is not a field of this request; did you mean temperature?",
            None,
        ),
        ({"n": 2}, "n is not a field of this request", None),
        ({"metadata": {"a": 1}}, None, "metadata"),
        (
            {"metadata": {f"{n}": n for n in range(17)}},
            "metadata: it has 17 fields: at most 16 are allowed",
            "metadata",
        ),
        ({"stream_options": {"include_obfuscation": 1}}, None, "stream_options"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is not supported", None),
        (
            {"verbosity": "low"},
            "verbosity is not a field of this request; did you mean text.verbosity?",
            None,
        ),
        ({"input": 3}, "input: it must be a string or a list of items", None),
        ({"input": None}, "input: it must be a string or a list of items", None),
        ({"input": []}, None, "input"),
        (
            {"input": [REASONING]},
            "input has no message: all its items are of the type reasoning",
            "input",
        ),
        (
            {"input": [REASONING] * 2, "instructions": ""},
            "input has no message: all its items are of the type reasoning",
            "input",
        ),
        ({"input": ["Tom"]}, None, "input"),
        (message(role="tool"), f"input.0.role: {ROLE}", "input"),
        (message(content=None), "input.0.content is required for the type message", "input"),
        (
            message(name="<|im_end|>"),
            "input.0.name: String should match pattern '^[A-Za-z0-9_-]+$'",
            "input",
        ),
        (
            {"input": [{"type": "item_reference", "id": "a", "name": "b"}]},
            "input.0.name is not a field of the type item_reference",
            "input",
        ),
        ({"max_output_tokens": -2}, None, "max_output_tokens"),
        (message(contents="a"), None, "input"),
        (
            {"input": [*MESSAGES, OUTPUT]},
            "input.3.call_id is not the call_id of an earlier function_call",
            "input",
        ),
        (
            {"input": [CALL | {"arguments": "[1]"}]},
            "input.0.arguments: it must be a JSON object, as a string",
            "input",
        ),
        ({"input": [CALL | {"namespace": "a"}]}, "input.0.namespace is not supported", "input"),
        ({"input": [CALL | {"call_id": f"{n}"} for n in range(129)]}, None, "input"),
    ],
)
def test_what_is_refused_is_named_as_the_client_wrote_it(hermes, fields, error, param):
    if param is None and error:
        param = next(iter(fields))
    for stream in (False, True):
        body = {"input": "Tom", "max_output_tokens": 1, "stream": stream} | fields
        status, found = hermes.post(PATH, body)
        assert status == 400, found
        if error:
            assert found == refusal(error, param)
        said = found["error"]["message"]
        assert found["error"]["param"] == param and len(said) < 400
        assert not re.search(r"\bmessages\.|response_format\b(?! is not a field)|function\.", said)


LONE_SURROGATE = "a\ud800"


def test_a_template_without_system_messages_is_named(client):
    found = client.post(PATH, {"input": "Tom", "instructions": "Be kind."})
    check_refused(found, "input", "chat template")


def test_a_megabyte_of_items_has_a_short_answer(client):
    for given in ([{}] * 200_000, [{"x": 1}] * 100_000, [["x"] * 10] * 10_000, {"x" * 10**6: 1}):
        status, found = client.post(PATH, {"input": given})
        assert status == 400 and len(found["error"]["message"]) < 200


def test_nothing_is_stored(client):
    calls = [("GET", "/r"), ("DELETE", "/r"), ("POST", "/r/cancel"), ("GET", "/r/input")]
    for method, path in calls:
        check_refused(client.ask(method, f"{PATH}{path}"), None, "stores no responses", 404)
    with client.send("HEAD", f"{PATH}/r") as head:
        assert (head.status, head.read()) == (404, b"")


def by_id(items: list[dict]) -> list[dict]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def test_embeddings_are_not_served(client):
    check_refused(client.post("/v1/embeddings", {"input": "a"}), None, "embeddings", 404)
    check_refused(client.get("/v1/embeddings"), None, "embeddings", 404)
    with client.send("HEAD", "/v1/embeddings") as head:
        assert (head.status, head.read()) == (404, b"")


def test_deep_arguments_are_refused_by_their_depth_or_their_length(hermes):
    status, answer = hermes.post(PATH, {"messages": said(f'{{"a": {"[" * 900 + "]" * 900}}}')})
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_token_is_no_response(tiny_llama, stream):
    body = {"input": "Tom", "max_output_tokens": 9, "stream": stream}
    with serving(lambda: failing(small_engine(tiny_llama), lambda request: True)) as client:
        if not stream:
            assert client.post(PATH, body)[0] == 500
        stop_engine(client)
        status, answer = client.post(PATH, body)
        assert (status, answer["error"]["type"]) == (503, "server_error")


def test_what_fails_later_is_an_event(tiny_llama):
    def make():
        return failing(small_engine(tiny_llama), lambda request: len(request.output) == 3)

    body = {"input": "Tom", "max_output_tokens": 9, "seed": 1}
    with serving(make) as client:
        *before, error, failed = events_of(client, body)
        assert before[-1]["type"] == "response.output_text.delta"
        assert (error["type"], error["code"]) == ("error", "server_error")
        assert error["message"] == client.post(PATH, body)[1]["error"]["message"]
        assert failed["type"] == "response.failed"
        found = failed["response"]
        assert (found["status"], found["usage"]) == ("failed", None)
        assert found["error"] == {"code": "server_error", "message": error["message"]}
        until(lambda: is_free(client))


def test_where_the_queue_is_full_a_client_waits(tiny_llama):
    import threading

    turn = threading.Semaphore(0)
    with serving(
        lambda: in_turns(small_engine(tiny_llama, max_num_seqs=1), turn), max_waiting=0
    ) as client:
        import concurrent.futures

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            first = pool.submit(whole, client, {"input": "Tom", "max_output_tokens": 2})
            until(lambda: client.thread.generations)
            for stream in (False, True):
                with client.send("POST", PATH, {"input": "Tom", "stream": stream}) as answer:
                    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
            for _ in range(4):
                turn.release()
            assert first.result()["status"] == "incomplete"


def test_the_official_client(hermes):
    import openai

    class Place(pydantic.BaseModel):
        place: Literal["the sea", "a lake"]

    ask = {"model": "small", "extra_body": {"seed": 1, "logit_bias": {"4098": 3}}}
    ask["max_output_tokens"] = 200
    with official_client(hermes) as openai_client:
        responses = openai_client.responses
        first = responses.create(input="Tom", **ask)
        assert first.output_text
        with responses.stream(input="Tom", **ask) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert stream.get_final_response().output_text == first.output_text
        assert "".join(texts) == first.output_text
        parsed = responses.parse(
            input="Tom", text_format=Place, **ask | {"extra_body": {"seed": 1, "temperature": 0}}
        )
        assert isinstance(parsed.output_parsed, Place)
        talk = [{"role": "user", "content": "Tom"}, *first.output, *parsed.output]
        options = ask | {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"}
        for turn in range(2):
            (made,) = responses.create(input=talk, **options).output
            jsonschema.validate(json.loads(made.arguments), SCHEMAS[made.name])
            with responses.stream(input=talk, **options) as stream:
                (again,) = stream.get_final_response().output
            assert again.arguments == made.arguments
            output = {"type": "function_call_output", "call_id": made.call_id, "output": str(turn)}
            talk += [made if turn else made.model_dump(), output]
        found = responses.create(input=talk, **options | {"tool_choice": "none"})
        assert found.output_text
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            responses.retrieve(found.id)

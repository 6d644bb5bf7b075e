"""/v1/responses. Oracles: the engine alone, chat completions, OpenAI's own types and client."""

import functools
import json
import re
from typing import Literal

import jsonschema
import pydantic
import pytest
from chats import HERMES, WITH_TOOLS, call, conversation, tool
from serving import (
    SMALL,
    engine_alone,
    failing,
    in_turns,
    is_free,
    refusal,
    server_error,
    serving,
    small_encoding,
    small_engine,
    until,
)

from text.chat import Chat
from text.tokenizer import load_encoding

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
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert [event["response"]["output"] for event in events[:2]] == [[], []]
    steps = iter(events[2:-1])
    for event in steps:
        assert event["type"] == "response.output_item.added"
        item = event["item"]
        assert event["output_index"] == len(output) and item["status"] == "in_progress"
        where = {"item_id": item["id"], "output_index": len(output)}
        if item["type"] == "message":
            assert item["content"] == []
            kind, written, where = "output_text", "text", where | {"content_index": 0}
            event = next(steps)
            assert event["type"] == "response.content_part.added" and where.items() <= event.items()
            assert event["part"]["text"] == ""
        else:
            assert item["arguments"] == ""
            kind, written = "function_call_arguments", "arguments"
        text = ""
        entries = []
        event = next(steps)
        while event["type"] == f"response.{kind}.delta":
            assert where.items() <= event.items()
            text += event["delta"]
            entries += event.get("logprobs", [])
            event = next(steps)
        assert event["type"] == f"response.{kind}.done" and where.items() <= event.items()
        assert event[written] == text
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
            event = next(steps)
            assert event["type"] == "response.content_part.done" and event["part"] == part
            item["content"] = [part]
        else:
            item["arguments"] = text
        event = next(steps)
        assert event["type"] == "response.output_item.done"
        item["status"] = event["item"]["status"]
        assert event["item"] == item
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


@pytest.fixture(scope="module")
def engine(tiny_llama, write_chat):
    """A function that makes an engine of a random model with the vocabulary of `write_chat`."""
    from engine.engine import Engine

    shape = {"vocab_size": 4104, "block_size": 1280, "bos_token_id": 4096, "eos_token_id": 4098}
    encoding = load_encoding(write_chat(HERMES), 4104)
    return lambda: Engine(tiny_llama(**shape), encoding=encoding)


@pytest.fixture(scope="module")
def hermes(engine, write_chat):
    """A Client to a model whose template writes system messages and tools."""
    with serving(engine, Chat(write_chat(HERMES))) as client:
        yield client


@pytest.mark.parametrize("given", ["cat, moon", MESSAGES])
def test_a_response_is_the_text_of_the_engine(client, tiny_llama, given):
    talk = given if isinstance(given, list) else MESSAGES[:1]
    prompt = Chat(SMALL).encode(talk, small_encoding())
    params = {"seed": 4, "top_p": 0.9, "temperature": 0.8}
    for length, status in ((6, "incomplete"), (None, "incomplete")):
        most = length or 64 - len(prompt)  # what the window has room for
        tokens, text, _, reason = engine_alone(tiny_llama, prompt, max_new_tokens=most, **params)
        assert reason == "length"
        body = {"input": given} | params | ({"max_output_tokens": length} if length else {})
        found = whole(client, body)
        assert found["id"].startswith("resp_") and found["object"] == "response"
        assert found["model"] == "small" and found["created_at"] > 0
        assert (found["temperature"], found["top_p"]) == (0.8, 0.9)
        assert found["max_output_tokens"] == length and found["store"] is False
        assert found["status"] == status
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["usage"] == {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt) + len(tokens),
        }
        (item,) = found["output"]
        assert item["id"].startswith("msg_")
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        known = {"type": "message", "role": "assistant", "status": status, "content": [part]}
        assert plain(item) == known
        events = events_of(client, body)
        assert said_in(replayed(events)) == [text]
        assert len(events) >= 9  # one delta or more: what is not fetched in time is joined
        assert plain(events[-1]["response"]) == plain(found)


def test_a_response_that_ends_by_itself_is_completed(client):
    body = {"input": "Tom", "seed": 2, "logit_bias": {"4095": 100}}
    found = whole(client, body)
    assert (found["status"], found["incomplete_details"]) == ("completed", None)
    assert said_in(found["output"]) == [""] and found["usage"]["output_tokens"] == 1
    assert found["completed_at"] >= found["created_at"]
    events = events_of(client, body)
    assert said_in(replayed(events)) == [""] and events[-1]["type"] == "response.completed"
    body = {"input": "Tom", "seed": 2, "max_output_tokens": 0}
    assert said_in(whole(client, body)["output"]) == [""]
    assert said_in(replayed(events_of(client, body))) == [""]


CALLED = call("look", '{"place": "sea"}', "aB3dE6gH9")
RESULT = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
CALL = {"type": "function_call", "call_id": "aB3dE6gH9"} | CALLED["function"]
OUTPUT = {"type": "function_call_output", "call_id": "aB3dE6gH9", "output": "a ship"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"x": 1}]}


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
    {"tool_choice": {"type": "function", "name": "count"}},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": "none"},
]


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_calls_are_those_of_chat_completions(engine, write_chat, template):
    called = cut = texts = 0
    with serving(engine, Chat(write_chat(WITH_TOOLS[template]))) as client:
        for number, own in enumerate(CHOICES):
            named = isinstance(own.get("tool_choice"), dict)
            theirs = {"tool_choice": {"type": "function", "function": {"name": "count"}}}
            theirs = own | (theirs if named else {})
            for seed, length in ((number, 150), (number + 1, 30)):
                body = {"messages": conversation("Tom"), "tools": NESTED, "max_tokens": length}
                (choice,) = client.post(CHAT, body | {"seed": seed} | theirs)[1]["choices"]
                body = {"input": "Tom", "tools": TOOLS, "max_output_tokens": length, "seed": seed}
                body |= own
                found = whole(client, body)
                assert said_in(found["output"]) == items_of(choice["message"])
                assert found["tool_choice"] == own.get("tool_choice", "auto")
                assert found["parallel_tool_calls"] == own.get("parallel_tool_calls", True)
                assert [each["name"] for each in found["tools"]] == ["look", "count"]
                events = events_of(client, body)
                replayed(events)
                assert plain(events[-1]["response"]) == plain(found)
                texts += found["output"][0]["type"] == "message"
                is_cut = choice["finish_reason"] == "length"
                assert found["status"] == ("incomplete" if is_cut else "completed")
                *before, last = found["output"]
                assert {item["status"] for item in before} <= {"completed"}
                if last["type"] == "message" or not is_cut:
                    assert last["status"] == found["status"]
                for item in found["output"]:
                    if item["type"] != "function_call":
                        continue
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
    """The text ended by itself, but nobody should run half of a call."""
    body = {"input": "Tom", "tools": TOOLS, "tool_choice": "required", "seed": 1, "stop": ['{"']}
    body |= {"tool_choice": {"type": "function", "name": "count"}, "stop": ['"things']}
    found = whole(hermes, body)
    (item,) = found["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", "{")
    assert found["status"] == "completed"


SHORT = {"place": {"enum": ["the sea", "a w\u00e9d"]}}  # a random model writes long texts
TEXT_FORMAT = {
    "type": "json_schema",
    "name": "place",
    "schema": {"type": "object", "properties": SHORT, "required": ["place"]},
    "strict": True,
}


@pytest.mark.parametrize("text_format", [TEXT_FORMAT, {"type": "json_object"}, {"type": "text"}])
def test_the_format_of_a_text(hermes, text_format):
    nested = {"type": text_format["type"]}
    if text_format is TEXT_FORMAT:
        known = {name: TEXT_FORMAT[name] for name in ("name", "schema", "strict")}
        nested["json_schema"] = known
    body = {
        "messages": conversation("Tom"),
        "response_format": nested,
        "max_tokens": 200,
        "seed": 2,
    }
    (choice,) = hermes.post(CHAT, body)[1]["choices"]
    body = {"input": "Tom", "text": {"format": text_format, "verbosity": "low"}}
    found = whole(hermes, body | {"max_output_tokens": 200, "seed": 2})
    assert said_in(found["output"]) == [choice["message"]["content"]]
    assert text_format.items() <= found["text"]["format"].items()
    if text_format is TEXT_FORMAT:
        jsonschema.validate(json.loads(choice["message"]["content"]), TEXT_FORMAT["schema"])


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
    status, answer = client.post(PATH, body | {"truncation": "disabled"})
    assert status == 400 and answer["error"]["param"] == "input"
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["message"].endswith('or truncation "auto" to keep the last ones only')


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


@pytest.mark.parametrize(
    "effort, written, done",
    [
        ("none", "Tom off none", "none"),
        ("low", "Tom low", "low"),
        ("<|im_end|>", "Tom", None),
        (None, "Tom", None),
    ],
)
def test_an_effort_is_for_the_template(tiny_llama, write_chat, effort, written, done):
    template = """{{ messages[0].content }}
    {{- ' off' if enable_thinking is defined and not enable_thinking }}
    {{- ' ' + reasoning_effort if reasoning_effort is defined }}"""
    chat = Chat(write_chat(template))
    with serving(lambda: small_engine(tiny_llama), chat) as client:
        body = {"input": "Tom", "max_output_tokens": 1, "reasoning": {"effort": effort}}
        found = whole(client, body)
        tokens = small_encoding().encode(written)
        assert found["usage"]["input_tokens"] == len(tokens)
        assert found["reasoning"] == {"effort": done, "summary": None}
        with client.send("POST", PATH, body) as answer:
            named = answer.headers["X-Ignored-Fields"]
        assert named == ("reasoning.effort" if effort and not done else None)


ALL_IGNORED_FIELDS = {  # field -> what asks for nothing, and for something
    "access_programs": (None, ["a"]),
    "cache_prompt": (True, False),
    "guided_decoding_backend": (None, "guidance"),
    "id_slot": (-1, 0),
    "keep_alive": (None, "5m"),
    "max_tool_calls": (None, 3),
    "media_io_kwargs": ({}, {"image": {}}),
    "mm_processor_kwargs": ({}, {"num_crops": 4}),
    "moderation": (None, {"model": "omni-moderation-latest"}),
    "priority": (0, 1),
    "reasoning": (
        {"context": "auto", "mode": "standard"},
        {
            "context": "all_turns",
            "effort": "high",
            "generate_summary": "auto",
            "mode": "pro",
            "summary": "auto",
        },
    ),
    "request_id": (None, "a"),
    "service_tier": ("auto", "flex"),
    "store": (False, True),
    "stream_options": (
        {"include_obfuscation": False, "include_usage": True, "continuous_usage_stats": False},
        {"include_obfuscation": True, "include_usage": True, "continuous_usage_stats": True},
    ),
    "text": ({"verbosity": "medium"}, {"verbosity": "low"}),
    "think": (None, True),
    "enable_thinking": (None, True),
    "timings_per_token": (False, True),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ignored_is_named_as_the_client_wrote_it(client, stream):
    from server.protocol import IGNORED_FIELDS

    assert IGNORED_FIELDS.keys() - ALL_IGNORED_FIELDS.keys() == {"reasoning_effort", "verbosity"}
    names = []
    body = {"input": "Tom", "max_output_tokens": 1, "stream": stream}
    for place in (0, 1):
        fields = {name: values[place] for name, values in ALL_IGNORED_FIELDS.items()}
        with client.send("POST", PATH, body | fields) as answer:
            assert answer.status == 200, answer.read()
            names.append(answer.headers["X-Ignored-Fields"])
    assert names[0] is None
    inside = {
        "reasoning": {f"reasoning.{name}" for name in ALL_IGNORED_FIELDS["reasoning"][1]},
        "stream_options": {
            "stream_options.continuous_usage_stats",
            "stream_options.include_obfuscation",
        },
        "text": {"text.verbosity"},
    }
    named = names[1].split(", ")
    assert len(named) == len(set(named))
    assert set(named) == (ALL_IGNORED_FIELDS.keys() - inside.keys()).union(*inside.values())


def test_what_is_done_is_not_named(client):
    body = {"input": "Tom", "max_output_tokens": 1, "truncation": "auto", "tool_choice": "auto"}
    body |= {"metadata": {"a": "b"}, "user": "u"} | LOGPROBS
    with client.send("POST", PATH, body) as answer:
        assert (answer.status, answer.headers["X-Ignored-Fields"]) == (200, None)


def test_minus_one_is_no_limit_of_its_own(client):
    body = {"input": "Tom", "seed": 1, "ignore_eos": True}
    found = [whole(client, body | {"max_output_tokens": most}) for most in (-1, None)]
    assert found[0]["usage"] == found[1]["usage"] and found[0]["usage"]["total_tokens"] == 64


def test_a_part_and_a_name_as_chats_have_them():
    from server.responses_protocol import ResponsesRequest

    part = {"type": "text", "text": "Tom", "cache_control": {"type": "ephemeral"}, "refusal": None}
    item = {"role": "user", "name": "Ann", "content": [part], "timestamp": 1, "function_call": None}
    asked = ResponsesRequest.model_validate({"input": [item]})
    said = {"role": "user", "name": "Ann", "content": "Tom"}
    assert [each.as_dict for each in asked.to_chat().messages] == [said]


STORED = "is not supported: the server stores no responses, so send earlier items in input"
ROLE = "Input should be 'user', 'assistant', 'system' or 'developer'"
LIMIT = "with 1 sequences, 0 log-probabilities per token it may be at most 262144"
SAYS = "this server supports {} only"


NOT_KEPT = (
    "is not the id of an item that this server still keeps; set store: false, so that the client "
    "sends the items themselves (AI SDK: providerOptions: {openai: {store: false}})"
)


def message(**fields) -> dict:
    return {"input": [{"role": "user", "content": "Tom"} | fields]}


def tools(*more) -> dict:
    return {"tools": [*TOOLS, *more]}


def text_format(schema, **fields) -> dict:
    return {"text": {"format": TEXT_FORMAT | {"schema": schema} | fields}}


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
            text_format({"not": {}}),
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


@pytest.mark.parametrize(
    "name",
    [
        "max_completion_tokens",
        "max_length",
        "max_new_tokens",
        "max_tokens",
        "n_predict",
        "num_predict",
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_another_name_of_the_limit_has_its_hint(client, name, value):
    message = f"{name} is not a field of this request; did you mean max_output_tokens?"
    assert client.post(PATH, {"input": "Tom", name: value}) == (400, refusal(message, name))


DEEP = functools.reduce(lambda inner, _: {"default": inner}, range(300), {"type": "integer"})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOLS[0] | {"parameters": DEEP}], "tool_choice": "none"},
        {"text": {"format": TEXT_FORMAT | {"schema": DEEP}}},
    ],
)
def test_what_a_response_could_not_repeat_is_refused(hermes, fields):
    name = next(iter(fields))
    what = f"{name} may be nested up to 250 levels deep"
    for stream in (False, True):
        found = hermes.post(PATH, {"input": "Tom", "stream": stream} | fields)
        assert found == (400, refusal(what, name))


def test_a_template_without_system_messages_is_named(client):
    status, found = client.post(PATH, {"input": "Tom", "instructions": "Be kind."})
    assert status == 400 and found["error"]["param"] == "input"
    assert found["error"]["message"].startswith("chat template: ")


def test_a_megabyte_of_items_has_a_short_answer(client):
    for given in ([{}] * 200_000, [{"x": 1}] * 100_000, [["x"] * 10] * 10_000, {"x" * 10**6: 1}):
        status, found = client.post(PATH, {"input": given})
        assert status == 400 and len(found["error"]["message"]) < 200


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


def test_nothing_is_stored(client):
    message = "the server stores no responses: none can be read, cancelled or deleted"
    for method, path in (
        ("GET", "/r"),
        ("DELETE", "/r"),
        ("POST", "/r/cancel"),
        ("GET", "/r/input"),
    ):
        assert client.ask(method, f"{PATH}{path}") == (404, refusal(message))
    with client.send("HEAD", f"{PATH}/r") as head:
        assert (head.status, head.read()) == (404, b"")


def by_id(items: list[dict]) -> list[dict]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_by_its_id_is_the_item(hermes, stream):
    """The second turn has the tokens, and the text, that it has with the items sent whole."""
    kinds = []
    for choice, length in (("none", 9), ("required", 150)):
        own = {"tools": TOOLS, "tool_choice": choice, "seed": 2}
        asked = own | {"input": "Tom", "max_output_tokens": length, "store": True}
        output = replayed(events_of(hermes, asked)) if stream else whole(hermes, asked)["output"]
        kinds += {item["type"] for item in output}
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        ends = [OUTPUT | {"call_id": name} for name in calls] + conversation("So?")
        first, *others = (
            whole(hermes, own | {"input": [*MESSAGES[:1], *items, *ends], "max_output_tokens": 9})
            for items in (output, by_id(output), [{"id": item["id"]} for item in output])
        )
        assert plain(others) == plain([first] * 2)
    assert kinds == ["message", "function_call"]


def test_half_a_call_is_refused_by_its_id_as_it_is_whole(hermes):
    body = {"input": "Tom", "tools": TOOLS, "seed": 2}
    body |= {"tool_choice": {"type": "function", "name": "count"}, "stop": ['"things']}
    output = whole(hermes, body)["output"]
    what = "input.0.arguments: it must be a JSON object, as a string"
    for items in (output, by_id(output)):
        assert hermes.post(PATH, {"input": items}) == (400, refusal(what, "input"))


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_is_kept_unless_its_client_asks_not_to_store(client, stream):
    for fields, status in (({"store": False}, 400), ({"store": None}, 200), ({}, 200)):
        body = {"input": "Tom", "max_output_tokens": 3} | LOGPROBS | fields
        (item,) = replayed(events_of(client, body)) if stream else whole(client, body)["output"]
        body = {"input": [*by_id([item]), *MESSAGES[2:]], "max_output_tokens": 1}
        found = client.post(PATH, body)
        assert found[0] == status
        if status == 400:
            assert found[1] == refusal(f"input.0.id: {item['id']} {NOT_KEPT}", "input")


def test_kept_items_leave_by_their_last_use():
    from server.responses import MAX_STORED_BYTES, ItemStore

    def item(name, length=100):
        part = {"type": "output_text", "text": "a" * length, "logprobs": [{"token": "a"}] * length}
        return {"id": name, "type": "message", "role": "assistant", "content": [part]}

    one = ItemStore()
    assert one.max_bytes == MAX_STORED_BYTES == 2**24
    one.add(item("a"))
    size = len(one.get("a"))
    assert size < 300 and json.loads(one.get("a"))["content"][0]["logprobs"] == []
    item_store = ItemStore(3 * size + 1)
    for name in "abc":
        item_store.add(item(name))
    assert item_store.get("a") and item_store.get("x") is None
    item_store.add(item("d"))
    assert [name for name in "abcd" if item_store.get(name)] == ["a", "c", "d"]
    item_store.add(item("e", 100 + size))
    assert [name for name in "abcde" if item_store.get(name)] == ["d", "e"]
    assert item_store.num_bytes == 3 * size == sum(map(len, item_store.items.values()))
    item_store.add(item("f", 4 * size))
    assert (item_store.num_bytes, item_store.items) == (0, {})


def test_an_item_that_has_left_or_is_of_another_server_is_refused(client, tiny_llama, monkeypatch):
    import server.responses as module

    monkeypatch.setattr(module, "ItemStore", functools.partial(module.ItemStore, 500))
    with serving(lambda: small_engine(tiny_llama)) as other:
        body = {"input": "Tom", "max_output_tokens": 2}
        items = [whole(other, body)["output"][0] for _ in range(4)]
        body = {"max_output_tokens": 1, "store": False}
        answers = [other.post(PATH, body | {"input": by_id([item])}) for item in items]
        answers.append(client.post(PATH, body | {"input": by_id(items[3:])}))
    assert [answer[0] for answer in answers] == [400, 400, 200, 200, 400]
    for item, place in ((items[0], 0), (items[1], 1), (items[3], 4)):
        assert answers[place][1] == refusal(f"input.0.id: {item['id']} {NOT_KEPT}", "input")


def test_items_by_id_are_no_more_than_a_body(hermes):
    """A short body of references is no way to a long one."""
    from server.app import MAX_BODY_BYTES
    from server.protocol import APIError
    from server.responses_protocol import MAX_REFERENCED_BYTES, ResponsesRequest

    assert MAX_REFERENCED_BYTES == MAX_BODY_BYTES
    part = {"type": "output_text", "text": "a" * 2**16}
    data = json.dumps({"role": "assistant", "content": [part]}).encode()
    for times in (15, 16):
        body = {"input": [{"type": "item_reference", "id": "a"}] * times}
        asked = ResponsesRequest.model_validate(body)
        if times == 15:
            assert len(asked.resolve_references(lambda name: data).messages) == 15
            continue
        with pytest.raises(APIError) as error:
            asked.resolve_references(lambda name: data)
        assert str(error.value) == "input: the items that it refers to exceed 1048576 bytes"


def test_embeddings_are_not_served(client):
    message = "embeddings are not supported: this server only generates text"
    assert client.post("/v1/embeddings", {"input": "a"}) == (404, refusal(message))
    assert client.get("/v1/embeddings") == (404, refusal(message))
    with client.send("HEAD", "/v1/embeddings") as head:
        assert (head.status, head.read()) == (404, b"")


def test_another_model_is_not_found(client):
    status, found = client.post(PATH, {"input": "Tom", "model": "gpt-4"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")


def test_what_fails_before_the_first_token_is_no_response(tiny_llama):
    body = {"input": "Tom", "max_output_tokens": 9}
    with serving(lambda: failing(small_engine(tiny_llama), lambda request: True)) as client:
        assert client.post(PATH, body)[0] == 500
        client.thread.commands.put(lambda: 1 / 0)
        client.thread.thread.join(60)
        dead = "the engine has failed: ZeroDivisionError: division by zero"
        for stream in (False, True):
            assert client.post(PATH, body | {"stream": stream}) == (503, server_error(dead))


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

    where = {"base_url": f"http://127.0.0.1:{hermes.port}/v1", "api_key": "none"}
    ends = {"seed": 1, "logit_bias": {"4098": 3}}
    ask = {"model": "small", "extra_body": ends, "max_output_tokens": 200}
    with openai.OpenAI(**where, max_retries=0) as openai_client:
        first = openai_client.responses.create(input="Tom", **ask)
        assert first.output_text
        with openai_client.responses.stream(input="Tom", **ask) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert stream.get_final_response().output_text == first.output_text
        assert "".join(texts) == first.output_text
        text_format = TEXT_FORMAT["schema"] | {"additionalProperties": False}
        text = {"format": TEXT_FORMAT | {"schema": text_format}}
        found = openai_client.responses.create(input="Tom", text=text, **ask)
        jsonschema.validate(json.loads(found.output_text), text_format)
        parsed = openai_client.responses.parse(
            input="Tom", text_format=Place, **ask | {"extra_body": {"seed": 1, "temperature": 0}}
        )
        talk = [{"role": "user", "content": "Tom"}, *first.output, *parsed.output]
        options = ask | {"tools": TOOLS, "parallel_tool_calls": False}
        for turn in range(2):
            options["tool_choice"] = "required"
            found = openai_client.responses.create(input=talk, **options)
            (made,) = found.output
            jsonschema.validate(json.loads(made.arguments), SCHEMAS[made.name])
            with openai_client.responses.stream(input=talk, **options) as stream:
                (again,) = stream.get_final_response().output
            assert again.arguments == made.arguments
            output = {"type": "function_call_output", "call_id": made.call_id, "output": str(turn)}
            talk += [made if turn else made.model_dump(), output]
        found = openai_client.responses.create(input=talk, **options | {"tool_choice": "none"})
        assert found.output_text
        with pytest.raises(openai.NotFoundError, match="the server stores no responses"):
            openai_client.responses.retrieve(found.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            openai_client.responses.create(input="Tom", previous_response_id=found.id, **ask)


def test_replicas_write_the_same(tiny_llama, tmp_path):
    from replicas import make_engine, parse, save_small, serving_replicas

    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    args = parse(save_small(tiny_llama, tmp_path), "--chat-template", template)
    body = {"input": "Tom", "max_output_tokens": 7, "seed": 2}
    chat = Chat(tmp_path, template)
    with serving_replicas(args, 2) as (client, _), serving(lambda: make_engine(args), chat) as one:
        own = whole(one, body)
        for _ in range(2):  # each of them once
            assert plain(whole(client, body)["output"]) == plain(own["output"])
        assert plain(replayed(events_of(client, body))) == plain(own["output"])

"""/v1/responses. Oracles: the engine alone, chat completions, OpenAI's own types and client."""

import functools
import json
import re

import jsonschema
import pydantic
import pytest
from chats import HERMES, call, conversation, tool
from serving import (
    IGNORED_FIELDS,
    SMALL,
    check_refused,
    engine_alone,
    failing,
    is_free,
    serving,
    small_encoding,
    small_engine,
    stop_engine,
    until,
)

from server import responses
from server.app import MAX_BODY_BYTES
from server.protocol import APIError
from server.responses_protocol import ResponsesRequest
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
    from openai.types.responses import Response, ResponseStreamEvent

    return pydantic.TypeAdapter(Response), pydantic.TypeAdapter(ResponseStreamEvent)


def whole(client, body: dict) -> dict:
    status, found = client.post(PATH, body)
    assert status == 200, found
    types()[0].validate_python(found)
    return found


def events_of(client, body: dict) -> list[dict]:
    with client.send("POST", PATH, body | {"stream": True}) as answer:
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *blocks, empty = answer.read().decode().split("\n\n")
    assert empty == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        assert types()[1].validate_python(event).type == event["type"]
        events.append(event)
    return events


def replayed(events: list[dict]) -> list[dict]:
    kinds = ["response.created", "response.in_progress"]
    assert [(each["type"], each["response"]["output"]) for each in events[:2]] == [
        (kind, []) for kind in kinds
    ]
    output = []
    steps = iter(events[2:-1])

    def step(name: str, where: dict) -> dict:
        event = next(steps)
        assert event["type"] == f"response.{name}" and where.items() <= event.items()
        return event

    for event in steps:
        item = event["item"]
        place = {"output_index": len(output)}
        assert event["type"] == "response.output_item.added" and item["status"] == "in_progress"
        assert place.items() <= event.items()
        where = place | {"item_id": item["id"]}
        is_message = item["type"] == "message"
        name, field = "function_call_arguments", "arguments"
        if is_message:
            name, field, where = "output_text", "text", where | {"content_index": 0}
            assert step("content_part.added", where)["part"]["text"] == ""
        assert not item["content" if is_message else "arguments"]
        text, entries = "", []
        while (event := next(steps))["type"] == f"response.{name}.delta":
            assert where.items() <= event.items()
            text += event["delta"]
            entries += event.get("logprobs", [])
        assert event["type"] == f"response.{name}.done"
        assert (where | {field: text}).items() <= event.items()
        own = {"arguments": text}
        if is_message:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
            assert step("content_part.done", where)["part"] == part
            own = {"content": [part]}
        done = step("output_item.done", place)["item"]
        assert done == item | own | {"status": done["status"]}
        output.append(done)
    last = events[-1]["response"]
    assert (last["output"], events[-1]["type"]) == (output, f"response.{last['status']}")
    return output


def plain(value):
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        own = {"id", "call_id", "created_at", "completed_at", "cached_tokens"}
        return {name: plain(each) for name, each in value.items() if name not in own}
    return value


def items_of(message: dict) -> list[tuple]:
    """What a chat message says, and each of its calls."""
    made = [each["function"] for each in message.get("tool_calls", ())]
    said = [message["content"]] if message["content"] or not made else []
    return said + [(each["name"], each["arguments"]) for each in made]


def said_in(output: list[dict]) -> list[tuple]:
    return [
        item["content"][0]["text"] if "content" in item else (item["name"], item["arguments"])
        for item in output
    ]


@pytest.fixture(scope="module")
def hermes(chat_engine, write_chat):
    with serving(chat_engine, Chat(write_chat(HERMES))) as client:
        yield client


@pytest.mark.parametrize("given, length", [("cat, moon", 6), (MESSAGES, None)])
def test_a_response_is_the_text_of_the_engine(client, tiny_llama, given, length):
    prompt = Chat(SMALL).encode(MESSAGES if length is None else MESSAGES[:1], small_encoding())
    params = {"seed": 4, "top_p": 0.9, "temperature": 0.8}
    most = length or 64 - len(prompt)  # the rest of the context window
    tokens, text, _, reason = engine_alone(tiny_llama, prompt, max_new_tokens=most, **params)
    assert reason == "length"
    body = {"input": given, "max_output_tokens": length} | params
    found = whole(client, body)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    assert plain(found["output"]) == [message] and found["output"][0]["id"].startswith("msg_")
    expected = {"object": "response", "model": "small", "status": "incomplete", "store": False}
    expected |= {"temperature": 0.8, "top_p": 0.9, "max_output_tokens": length}
    expected["incomplete_details"] = {"reason": "max_output_tokens"}
    expected["usage"] = {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cache_write_tokens": 0},
        "output_tokens": len(tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(tokens),
    }
    assert expected.items() <= plain(found).items()
    assert found["id"].startswith("resp_") and found["created_at"] > 0
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
    body = {"input": "Tom", "max_output_tokens": 0}
    texts = whole(client, body)["output"], replayed(events_of(client, body))
    assert list(map(said_in, texts)) == [[""], [""]]


CALLED = call("look", '{"place": "sea"}', "aB3dE6gH9")
RESULT = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
CALL = {"type": "function_call", "call_id": "aB3dE6gH9"} | CALLED["function"]
OUTPUT = {"type": "function_call_output", "call_id": "aB3dE6gH9", "output": "a ship"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"x": 1}]}
TOM = conversation("Tom")


def input_text(*texts: str) -> list[dict]:
    return [{"type": "input_text", "text": text} for text in texts]


SYSTEM = {"role": "developer", "content": "Be kind."}
ANSWERED = conversation("Tom", "Yes.")
INPUTS = [  # fields, the messages that they stand for
    ({"instructions": "", "input": "Tom"}, TOM),
    ({"instructions": "Be kind.", "input": "Tom"}, conversation("Tom", system="Be kind.")),
    (
        {"input": [SYSTEM, {"type": "message", "role": "user", "content": input_text("To", "m")}]},
        [SYSTEM, *TOM],
    ),
    (
        {"input": [*TOM, REASONING, CALL, OUTPUT]},
        [*TOM, {"role": "assistant", "tool_calls": [CALLED]}, RESULT],
    ),
    (
        {
            "input": [
                *(*ANSWERED, CALL, REASONING, CALL | {"call_id": "second"}),
                OUTPUT | {"output": input_text("a ship")},
                OUTPUT | {"call_id": "second", "output": "", "name": "look"},
                *TOM,
            ]
        },
        [
            *(TOM[0], ANSWERED[1] | {"tool_calls": [CALLED, CALLED | {"id": "second"}]}),
            *(RESULT, RESULT | {"tool_call_id": "second", "content": ""}, *TOM),
        ],
    ),
]


@pytest.mark.parametrize("given, messages", INPUTS)
def test_input_is_the_chat_it_stands_for(hermes, given, messages):
    own = {"seed": 3, "min_p": 0.01, "top_k": 50}
    body = {"messages": messages, "tools": NESTED, "max_tokens": 7} | own
    status, chat = hermes.post(CHAT, body)
    assert status == 200, chat
    found = whole(hermes, given | {"tools": TOOLS, "max_output_tokens": 7} | own)
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert said_in(found["output"]) == items_of(chat["choices"][0]["message"])


FUNCTION = {"type": "function", "name": "count"}
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
        expected = {"tool_choice": "auto", "parallel_tool_calls": True} | fields
        expected.pop("logit_bias", None)
        for seed, length in ((number, 150), (number + 1, 30)):
            body = {"messages": TOM, "tools": NESTED, "max_tokens": length, "seed": seed}
            (choice,) = hermes.post(CHAT, body | theirs)[1]["choices"]
            body = {"input": "Tom", "tools": TOOLS, "max_output_tokens": length, "seed": seed}
            found = whole(hermes, body | fields)
            *before, last = found["output"]
            assert said_in(found["output"]) == items_of(choice["message"])
            assert expected.items() <= found.items()
            assert [each["name"] for each in found["tools"]] == ["look", "count"]
            events = events_of(hermes, body | fields)
            replayed(events)
            assert plain(events[-1]["response"]) == plain(found)
            is_cut = choice["finish_reason"] == "length"
            assert found["status"] == ("incomplete" if is_cut else "completed")
            assert {item["status"] for item in before} <= {"completed"}
            if last["type"] == "message" or not is_cut:
                assert last["status"] == found["status"]
            for item in found["output"]:
                texts += item["type"] == "message"
                if item["type"] == "message":
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


def test_calls_cut_by_stop_strings_are_incomplete_and_texts_have_formats(hermes):
    body = {"input": "Tom", "tools": TOOLS, "tool_choice": FUNCTION, "seed": 1, "stop": ['"things']}
    found = whole(hermes, body)
    (item,) = found["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", "{")
    assert found["status"] == "completed"
    for items in ([item], by_id([item])):
        check_refused(hermes.post(PATH, {"input": items}), "input", "input.0.arguments JSON")
    named = {"json_schema": {name: TEXT_FORMAT[name] for name in ("name", "schema", "strict")}}
    body = {"messages": TOM, "response_format": named | {"type": "json_schema"}, "seed": 2}
    (choice,) = hermes.post(CHAT, body | {"max_tokens": 200})[1]["choices"]
    body = {"input": "Tom", "text": {"format": TEXT_FORMAT, "verbosity": "low"}, "seed": 2}
    found = whole(hermes, body | {"max_output_tokens": 200})
    assert said_in(found["output"]) == [choice["message"]["content"]]
    assert TEXT_FORMAT.items() <= found["text"]["format"].items()


# Of short texts, as a random model writes long ones.
PLACE = {"enum": ["the sea", "a w\u00e9d"]}
SCHEMA = {"type": "object", "properties": {"place": PLACE}, "required": ["place"]}
TEXT_FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}


def test_log_probabilities_and_truncation_are_those_of_chat_completions(client):
    own = {"seed": 3, "top_logprobs": 2}
    body = {"messages": conversation("x " * 100), "logprobs": True, "truncate_prompt_tokens": -1}
    (choice,) = client.post(CHAT, body | own | {"max_tokens": 4})[1]["choices"]
    entries = choice["logprobs"]["content"]
    body = {"input": "x " * 100, "max_output_tokens": 4, "truncation": "auto"} | LOGPROBS | own
    found = whole(client, body)
    assert len(entries) == 4 and found["output"][0]["content"][0]["logprobs"] == entries
    assert said_in(found["output"]) == [choice["message"]["content"]]
    assert (found["top_logprobs"], found["truncation"]) == (2, "auto")
    assert found["usage"]["input_tokens"] == 60
    (item,) = replayed(events_of(client, body))
    assert item["content"][0]["logprobs"] == entries
    answer = client.post(PATH, body | {"truncation": "disabled"})
    check_refused(answer, "input", 'truncation "auto"', code="context_length_exceeded")


NAMES = (
    "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier user".split()
)
HARMLESS = dict.fromkeys(["conversation", "previous_response_id"]) | dict.fromkeys(NAMES, "k")
HARMLESS |= {"background": False, "metadata": {"trace": "1"}, "tool_choice": "auto", "tools": []}
HARMLESS |= {"truncation": "auto"} | LOGPROBS


def test_an_effort_is_for_the_template(tiny_llama, write_chat):
    template = "{{ messages[0].content }} {{ reasoning_effort }}"
    with serving(lambda: small_engine(tiny_llama), Chat(write_chat(template))) as client:
        for effort, written in (("low", "Tom low"), ("<|im_end|>", "Tom "), (None, "Tom ")):
            done = effort if effort == "low" else None
            body = {"input": "Tom", "max_output_tokens": 1, "reasoning": {"effort": effort}}
            found = whole(client, body)
            assert found["usage"]["input_tokens"] == len(small_encoding().encode(written))
            assert found["reasoning"] == {"effort": done, "summary": None}
            with client.send("POST", PATH, body) as answer:
                named = answer.headers["X-Ignored-Fields"]
            assert named == ("reasoning.effort" if effort != done else None)


NESTED_FIELDS = {  # field -> what asks for nothing, and for something
    **dict.fromkeys(["access_programs", "reasoning.generate_summary"], (None, "a")),
    **dict.fromkeys(["reasoning.effort", "reasoning.summary"], (None, "high")),
    **dict.fromkeys(["stream_options.continuous_usage_stats"], (False, True)),
    **dict.fromkeys(["stream_options.include_obfuscation"], (False, True)),
    "max_tool_calls": (None, 3),
    "reasoning.context": ("auto", "all_turns"),
    "reasoning.mode": ("standard", "pro"),
    "text.verbosity": ("medium", "low"),
}


def test_what_changes_no_text_is_taken_and_named_as_the_client_wrote_it(client):
    body = {"input": "Tom", "max_output_tokens": 1, "seed": 3}
    known = said_in(whole(client, body)["output"])
    ignored = IGNORED_FIELDS | NESTED_FIELDS
    for place, harmless in ((0, HARMLESS), (1, HARMLESS), (0, dict.fromkeys(HARMLESS))):
        fields = harmless | {"stream_options": {"include_usage": True}}
        for name, values in ignored.items():
            parent, _, child = name.partition(".")
            fields[parent] = (
                fields.get(parent, {}) | {child: values[place]} if child else values[place]
            )
        found = whole(client, body | fields)
        assert said_in(found["output"]) == known
        # What the answer says was done.
        assert found["metadata"] == (fields["metadata"] or {})
        assert found["reasoning"]["effort"] is None and found["store"] is False
        for stream in (False, True):
            with client.send("POST", PATH, body | fields | {"stream": stream}) as answer:
                assert answer.status == 200, answer.read()
                named = answer.headers["X-Ignored-Fields"]
            assert sorted(named.split(", ") if named else []) == sorted(ignored if place else ())


def test_null_in_a_schema_is_a_value_and_parts_are_as_chats_have_them(client):
    """Fields without a value are left out of the request, and not of what the client describes."""
    text_format = {"type": "json_schema", "name": "n", "schema": {"const": None}}
    body = {"input": "Tom", "text": {"format": text_format}}
    assert said_in(whole(client, body)["output"]) == ["null"]
    function = {"type": "object", "properties": {"a": {"const": None, "description": "b"}}}
    tools = [{"type": "function", "name": "f", "parameters": function}]
    part = {"type": "text", "text": "Tom", "cache_control": {"type": "ephemeral"}, "refusal": None}
    item = {"role": "user", "name": "Ann", "content": [part], "timestamp": 1, "function_call": None}
    asked = ResponsesRequest.model_validate({"input": [item], "tools": tools}).to_chat()
    assert asked.tools[0]["function"]["parameters"] == function
    said = {"role": "user", "name": "Ann", "content": "Tom"}
    assert [each.as_dict for each in asked.messages] == [said]


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


def deep(key: str) -> dict:
    return functools.reduce(lambda inner, _: {key: inner}, range(300), {"type": "integer"})


REFUSED = [  # fields, the one that is named, words of the message
    ({"previous_response_id": "resp_1"}, "previous_response_id", "input"),
    ({"background": True}, "background", ""),
    ({"prompt": {"id": "p"}}, "prompt", "input"),
    (items(REFERENCE), "input", "input.0.id store: false providerOptions:"),
    (items(id="msg_1"), "input", "input.0.id msg_1 store: false"),
    (items(*MESSAGES, REFERENCE | {"id": "m" * 10**5}), "input", f"input.3.id {'m' * 100}"),
    (items(REFERENCE | {"id": ["msg_1"]}), "input", "input.0.id item_reference string"),
    (items(type="web_search_call", id="w", action={}), "input", f"web_search_call {ITEM_TYPES}"),
    (message(content=[{"type": "input_image"}]), "input", "content.0.type input_image input_text"),
    (tools({"type": "mcp"}), "tools", "tools.2.type mcp function"),
    ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "allowed_tools"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    (tools(tool_choice=FUNCTION | {"name": "messages"}), "tool_choice", "tool_choice.name"),
    (tools(TOOLS[0]), "tools", "tools.2.name look"),
    (tools({"type": "function", "name": "f", "function": {}}), "tools", "tools.2.function"),
    (tools(text={"format": {"type": "json_object"}}), "text", "text.format tools"),
    (tools(**LOGPROBS), "include", "message.output_text.logprobs tools"),
    (
        {"tools": [TOOLS[0] | {"parameters": deep("default")}], "tool_choice": "none"},
        "tools",
        "250",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "include message.output_text.logprobs"),
    (LOGPROBS | {"top_logprobs": 21}, "top_logprobs", "20"),
    (text(type="json_schema", name="a"), "text", "text.format.schema json_schema"),
    (text(**TEXT_FORMAT | {"schema": {"not": {}}}), "text", "text.format.schema 'not'"),
    (text(**TEXT_FORMAT | {"schema": deep("default")}), "text", "250"),
    (text(type="grammar"), "text", "text.format.type grammar text json_object json_schema"),
    ({"max_output_tokens": 10**9}, "max_output_tokens", "1000000000 262144"),
    ({"max_output_tokens": 3, "min_tokens": 9}, "min_tokens", "9 max_output_tokens 3"),
    ({"reasoning": {"effort": 3}}, "reasoning", "reasoning.effort string"),
    ({"reasoning": {"efort": "low"}}, "reasoning", "reasoning.efort effort?"),
    ({"messages": MESSAGES}, "messages", "input?"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format?"),
    ({"verbosity": "low"}, "verbosity", "text.verbosity?"),
    ({"metadata": {f"{n}": f"{n}" for n in range(17)}}, "metadata", "17 16"),
    *(({"input": value}, "input", "") for value in (3, None, [], ["Tom"])),
    (items(REASONING), "input", "message reasoning"),
    (message(role="tool"), "input", "input.0.role user assistant system developer"),
    (items(*MESSAGES, OUTPUT), "input", "input.3.call_id function_call"),
    (items(CALL | {"arguments": "[1]"}), "input", "input.0.arguments JSON"),
    (items(CALL | {"namespace": "a"}), "input", "input.0.namespace"),
    (items(CALL | {"output": "a"}), "input", "input.0.output function_call"),
    (items(TOM[0] | {"content": 3}), "input", "input.0.content string list"),
    (items(*(CALL | {"call_id": f"{n}"} for n in range(129))), "input", "128"),
]
REFUSED += [
    ({name: value}, name, "max_output_tokens?")
    for name in "max_completion_tokens max_length max_new_tokens max_tokens num_predict".split()
    for value in (1, None)
]


@pytest.mark.parametrize("fields, param, said", REFUSED)
def test_what_is_refused_is_named_as_the_client_wrote_it(hermes, fields, param, said):
    for stream in (False, True):
        body = {"input": "Tom", "max_output_tokens": 1, "stream": stream} | fields
        answer = hermes.post(PATH, body)
        check_refused(answer, param, said)
        names_of_chats = r"\bmessages\.|response_format\b(?! is not a field)|function\."
        assert not re.search(names_of_chats, answer[1]["error"]["message"])


def test_nothing_is_stored_and_a_megabyte_of_items_has_a_short_answer(client):
    for given in ([{}] * 200_000, [["x"] * 10] * 10_000, {"x" * 10**6: 1}):
        status, found = client.post(PATH, {"input": given})
        assert status == 400 and len(found["error"]["message"]) < 200
    found = client.post(PATH, {"input": "Tom", "instructions": "Be kind."})
    check_refused(found, "input", "chat template")  # which has no system messages
    calls = [("GET", "/r"), ("DELETE", "/r"), ("POST", "/r/cancel"), ("GET", "/r/input")]
    for method, path in calls:
        check_refused(client.ask(method, f"{PATH}{path}"), None, "stores no responses", 404)
    check_refused(client.post("/v1/embeddings", {"input": "a"}), None, "embeddings", 404)
    check_refused(client.get("/v1/embeddings"), None, "embeddings", 404)
    for path in (f"{PATH}/r", "/v1/embeddings"):
        with client.send("HEAD", path) as head:
            assert (head.status, head.read()) == (404, b"")


def by_id(items: list[dict]) -> list[dict]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_by_its_id_is_the_item(hermes, stream):
    kinds = []
    for choice, length in (("none", 9), ("required", 150)):
        own = {"tools": TOOLS, "tool_choice": choice, "seed": 2}
        asked = own | {"input": "Tom", "max_output_tokens": length, "store": True}
        output = replayed(events_of(hermes, asked)) if stream else whole(hermes, asked)["output"]
        kinds += {item["type"] for item in output}
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        ends = [OUTPUT | {"call_id": name} for name in calls] + TOM
        found = [  # the second turn
            whole(hermes, own | {"input": [*TOM, *items, *ends], "max_output_tokens": 9})
            for items in (output, by_id(output), [{"id": item["id"]} for item in output])
        ]
        assert plain(found) == plain(found[:1] * 3)
    assert kinds == ["message", "function_call"]


def test_an_item_is_kept_unless_its_client_asks_not_to_store(client):
    for fields in ({"store": False}, {"store": None}, {}):
        body = {"input": "Tom", "max_output_tokens": 3} | LOGPROBS | fields
        for (item,) in (replayed(events_of(client, body)), whole(client, body)["output"]):
            again = {"input": [*by_id([item]), *MESSAGES[2:]], "max_output_tokens": 1}
            if fields.get("store") is False:
                check_refused(client.post(PATH, again), "input", f"input.0.id {item['id']}")
            else:
                whole(client, again)


def test_kept_items_leave_by_their_last_use_and_are_no_more_than_a_body():
    def item(name, length=100):
        part = {"type": "output_text", "text": "a" * length, "logprobs": [{"token": "a"}] * length}
        return {"id": name, "type": "message", "role": "assistant", "content": [part]}

    one = responses.ItemStore()
    assert one.max_bytes == responses.MAX_STORED_BYTES == 2**24
    one.add(item("a"))
    size = len(one.get("a"))
    assert size < 300 and json.loads(one.get("a"))["content"][0]["logprobs"] == []
    store = responses.ItemStore(3 * size + 1)
    for name in "abc":
        store.add(item(name))
    assert store.get("a") and store.get("x") is None
    store.add(item("d"))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    store.add(item("e", 100 + size))
    assert [name for name in "abcde" if store.get(name)] == ["d", "e"]
    assert store.num_bytes == 3 * size == sum(map(len, store.items.values()))
    store.add(item("f", 4 * size))
    assert (store.num_bytes, store.items) == (0, {})
    part = {"type": "output_text", "text": "a" * 2**16}
    data = json.dumps({"role": "assistant", "content": [part]}).encode()
    references = [{"type": "item_reference", "id": "a"}] * 16
    asked = ResponsesRequest.model_validate({"input": references[:15]})
    assert len(asked.resolve_references(lambda name: data).messages) == 15
    asked = ResponsesRequest.model_validate({"input": references})
    message = f"^input: the items that it refers to exceed {MAX_BODY_BYTES} bytes$"
    with pytest.raises(APIError, match=message):
        asked.resolve_references(lambda name: data)


def test_what_fails_before_the_first_token_is_no_response_and_later_is_an_event(tiny_llama):
    def make():
        return failing(small_engine(tiny_llama), lambda request: len(request.output) == 3)

    body = {"input": "Tom", "max_output_tokens": 9, "seed": 1}
    with serving(make) as client:
        *before, error, failed = events_of(client, body)
        assert before[-1]["type"] == "response.output_text.delta"
        status, answer = client.post(PATH, body)
        message = answer["error"]["message"]
        assert status == 500
        assert (error["type"], error["code"]) == ("error", "server_error")
        assert error["message"] == message and failed["type"] == "response.failed"
        expected = {"status": "failed", "usage": None}
        expected["error"] = {"code": "server_error", "message": message}
        assert expected.items() <= failed["response"].items()
        until(lambda: is_free(client))
        stop_engine(client)
        for stream in (False, True):
            status, answer = client.post(PATH, body | {"stream": stream})
            assert (status, answer["error"]["type"]) == (503, "server_error")

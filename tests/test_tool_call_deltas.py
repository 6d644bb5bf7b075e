"""A stream tells the calls of a whole answer. Oracles: that answer, OpenAI's client."""

import pytest
from chats import HERMES, WITH_TOOLS
from serving import official_client, serving
from test_tool_calls import FIELDS, UNFORCED, without_ids
from test_tools_in_requests import MESSAGES, PATH, TOOLS

from sampling import SamplingParams
from server.backend import GenerateInput
from text.chat import Chat
from text.tokenizer import load_encoding


@pytest.fixture(scope="module", params=WITH_TOOLS)
def served(request, chat_engine, write_chat):
    """A Client, the chat behind it, and its template."""
    chat = Chat(write_chat(WITH_TOOLS[request.param]))
    with serving(chat_engine, chat) as client:
        yield client, chat, WITH_TOOLS[request.param]


def test_a_cut_call_streams_the_same(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "tool_choice": "required"}
    for length in range(1, 60, 5):
        body |= {"max_tokens": length, "parallel_tool_calls": False}
        (choice,) = client.post(PATH, body)[1]["choices"]
        message, reason = whole_of(client.events(PATH, body | {"stream": True}))
        assert without_ids(message) == without_ids(choice["message"])
        assert reason == choice["finish_reason"]


def test_n_streams_have_calls_of_their_own(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 3, "seed": 2}
    body |= {"max_tokens": 120, "parallel_tool_calls": False}
    messages = [choice["message"] for choice in client.post(PATH, body)[1]["choices"]]
    events = client.events(PATH, body | {"stream": True})
    for index, message in enumerate(messages):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert without_ids(whole_of(own)[0]) == without_ids(message)


def test_the_official_client_sees_calls_begin_and_end(chat_engine, write_chat):
    ask = {"model": "small", "messages": MESSAGES, "tools": TOOLS, "seed": 1, "max_tokens": 200}
    ask |= {"tool_choice": "required", "parallel_tool_calls": False}
    with serving(chat_engine, Chat(write_chat(HERMES))) as client:
        with official_client(client) as openai_client:
            completions = openai_client.chat.completions
            (made,) = completions.create(**ask).choices[0].message.tool_calls
            with completions.stream(**ask) as stream:
                types = {event.type for event in stream}
                (again,) = stream.get_final_completion().choices[0].message.tool_calls
    for part in ("name", "arguments"):
        assert getattr(again.function, part) == getattr(made.function, part)
    assert types >= {f"tool_calls.function.arguments.{end}" for end in ("delta", "done")}


def whole_of(events: list[dict]) -> tuple[dict, str]:
    """The message and the finish reason that the events of one text amount to."""
    message = {"content": None}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert ("role" in delta) == (event is events[0])
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls) and part["function"]["arguments"] == ""
                calls.append({name: part[name] for name in ("id", "type", "function")})
            else:
                assert part["index"] == len(calls) - 1 and part.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message, choice["finish_reason"]


def check_streams(served, fields) -> None:
    """Compare streams with whole answers."""
    client, _, _ = served
    named = pieces = 0
    for seed in range(3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": 120} | fields
        (choice,) = client.post(PATH, body)[1]["choices"]
        events = client.events(PATH, body | {"stream": True})
        message, reason = whole_of(events)
        assert without_ids(message) == without_ids(choice["message"])
        assert reason == choice["finish_reason"]
        for event in events:
            parts = event["choices"][0]["delta"].get("tool_calls", ())
            named += sum("id" in part for part in parts)
            pieces += sum("id" not in part for part in parts)
    assert fields.get("tool_choice") != "required" or pieces > named > 0


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_stream_tells_the_same(served, fields):
    check_streams(served, fields)


@pytest.mark.parametrize("fields", UNFORCED, ids=str)
def test_still_a_stream_without_calls_tells_the_same(served, fields):
    check_streams(served, fields)


def test_arguments_come_in_pieces(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    events = client.events(PATH, body | {"stream": True, "seed": 1})
    parts = [
        part for event in events for part in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    named = sum("id" in part for part in parts)
    assert len(parts) - named > named > 0


def test_a_finish_reason_comes_after_all_calls(write_chat):
    """Also where a whole reply is new at once: clients look for the end of a call after it."""
    from server.backend import Update
    from server.chat_completions import ChatCompletionBuilder
    from server.protocol import ChatRequest
    from text.tools import detect_tool_format

    directory = write_chat(HERMES)
    tool_format = detect_tool_format(Chat(directory), load_encoding(directory, 4104), (4098,))
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "model": "a"}
    body = ChatRequest.model_validate(body)
    inputs = GenerateInput([[1]], [SamplingParams()])
    reply = ChatCompletionBuilder(body, None, inputs, None, tool_format)
    text = f"Yes{tool_format.begin}count{tool_format.middle}{{}}{tool_format.end}"
    deltas = reply.delta(0, Update((1,), text, (), "stop"))
    assert [each["finish_reason"] for each in deltas] == [None, None, "tool_calls"]
    first, second, last = [each["delta"] for each in deltas]
    assert (first["role"], first["content"], last) == ("assistant", "Yes", {})
    assert first["tool_calls"][0]["function"] == {"name": "count", "arguments": ""}
    assert second["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    cut = ChatCompletionBuilder(body, None, inputs, None, tool_format)  # in what could begin a call
    texts = ["Yes <tool", "_ca", ""]
    deltas = [
        delta["delta"]["content"]
        for text, reason in zip(texts, [None, None, "length"])
        for delta in cut.delta(0, Update((1,), text, (), reason))
    ]
    assert deltas == ["Yes ", "", "<tool_ca"]

"""Requests with tools, calls and results. Oracle: what the chat template makes of them."""

import pytest
from chats import CHATML, WITH_TOOLS, call, conversation, tool
from serving import check_refused, serving

from text.chat import Chat

PATH = "/v1/chat/completions"
MESSAGES = conversation("Tom")
PLACE = {
    "place": {"enum": ["sea", 'w"{}\\o\u00e9d']},
    "far": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "integer", "maximum": 9, "minimum": 0},
    },
}
LOOK = tool("look", PLACE, description="What is there?")
COUNT = tool("count", {"things": {"type": "integer", "minimum": 3, "maximum": 40}})
TOOLS = [LOOK, COUNT]
TOOL_RESULT = {"role": "tool", "content": "x"}


@pytest.fixture(scope="module", params=WITH_TOOLS)
def served(request, chat_engine, write_chat):
    """A Client, the chat behind it, and its template."""
    chat = Chat(write_chat(WITH_TOOLS[request.param]))
    with serving(chat_engine, chat) as client:
        yield client, chat, WITH_TOOLS[request.param]


def said(arguments) -> list[dict]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call("look", arguments)]}]


def after(*messages) -> dict:
    return {"messages": [*MESSAGES, *messages]}


def test_wrong_tools_and_messages_are_refused(served):
    client, _, _ = served
    rows = [  # fields, the one that is named, words of the message
        ({"tools": [LOOK, LOOK]}, "tools", "tools.1.function.name look"),
        ({"tools": [LOOK] * 129}, "tools", "128"),
        ({"tools": {}}, "tools", "list"),
        ({"tools": [{}]}, "tools", "tools.0 function"),
        (
            after(MESSAGES[0] | {"tool_calls": [call("f", "{}")]}),
            "messages",
            "tool_calls assistant",
        ),
        (after(MESSAGES[0] | {"tool_call_id": "a"}), "messages", "1.tool_call_id must role"),
        (after(TOOL_RESULT), "messages", "messages.1.tool_call_id must role"),
        (after(TOOL_RESULT | {"tool_call_id": "a"}), "messages", "1.tool_call_id earlier"),
    ]
    where = "messages.1.tool_calls.0.function.arguments JSON"
    rows += [({"messages": said(text)}, "messages", where) for text in ("{", "[1]", "[" * 10**5)]
    rows.append(({"messages": said('{"a": "\\ud800"}')}, "messages", "arguments UTF-8"))
    for fields, param, words in rows:
        for stream in (False, True):
            body = {"messages": MESSAGES, "max_tokens": 4, "stream": stream} | fields
            check_refused(client.post(PATH, body), param, words)


def test_results_go_back(served):
    """The prompt has what the template makes of the call and of its result."""
    client, chat, template = served
    said = call("look", '{"place": "sea", "far": []}', "aB3dE6gH9")
    back = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
    reply = {"role": "assistant", "content": None, "tool_calls": [said | {"index": 0}]}
    parsed = call("look", {"place": "sea", "far": []}, said["id"])
    plain = [*MESSAGES, reply | {"content": "", "tool_calls": [parsed]}, back]
    encoding = client.thread.engine.encoding
    for tools in (TOOLS, None):
        body = {"messages": [*MESSAGES, reply, back], "tools": tools, "max_tokens": 1}
        status, found = client.post(PATH, body)
        assert status == 200, found
        ids = chat.with_tools(tools).encode(plain, encoding)
        assert found["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("template", [CHATML, "{{ messages[0].content }}"])
def test_a_template_without_calls_is_named(chat_engine, write_chat, template):
    with serving(chat_engine, Chat(write_chat(template))) as client:
        body = {"messages": MESSAGES, "max_tokens": 1}
        if template != CHATML:  # which writes tools, but no calls
            check_refused(client.post(PATH, body | {"tools": TOOLS}), "tools", "chat template")
        messages = [*said("{}"), TOOL_RESULT | {"tool_call_id": "abcdefghi"}]
        check_refused(client.post(PATH, {"messages": messages}), "messages", "chat template")
        for tools in ([], None):
            assert client.post(PATH, body | {"tools": tools})[0] == 200


def test_what_arguments_say_is_seen_by_checks():
    """Whether the vocabulary lacks bytes of them, also of escaped characters."""
    from server.protocol import Message

    made = [call("f", '{"a": "\\u00e9"}')]
    message = Message.model_validate({"role": "assistant", "content": "b", "tool_calls": made})
    assert message.text_fields == ["b", '{"a": "\u00e9"}']


def test_results_come_in_any_order():
    """Also after other messages, as long as their calls came before."""
    from server.protocol import ChatRequest

    made = [call("f", "{}", id) for id in ("first", "second")]
    results = [
        {"role": "tool", "tool_call_id": id, "content": "x"} for id in ("second", "first", "second")
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": made},
        *results[:2],
        *MESSAGES,
        results[2],
    ]
    assert len(ChatRequest.model_validate({"messages": messages}).messages) == 6

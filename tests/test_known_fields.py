"""A field that nothing knows is refused by its name, wherever it stands."""

import functools

import pytest
from serving import PATH, check_refused

from server.protocol import ChatRequest, find_lone_surrogate
from text.chat import Chat

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
PART = {"type": "text", "text": "Tom"}


UNKNOWN = {  # name -> the one that was meant
    "max_token": "max_tokens?",
    "temprature": "temperature?",
    "n_predict": "max_tokens?",
    "repeat_penalty": "repetition_penalty?",
    "Seed": "seed?",
    **dict.fromkeys(["num_ctx", "", "{what}", "{field}"], ""),
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_a_field_that_nothing_knows_is_refused_by_its_name(client, path):
    own = {"messages": MESSAGES} if path == CHAT else {}
    for name, meant in UNKNOWN.items():
        for stream, value in ((False, 1), (True, 1), (False, None)):
            answer = client.post(path, own | {"stream": stream, name: value})
            check_refused(answer, name, f"{name} {meant}")
            assert meant or "?" not in answer[1]["error"]["message"]


def user(**fields) -> dict:
    return {"messages": [MESSAGES[0] | fields]}


INSIDE = [  # fields, words of the message
    ({"prompt": "Tom"}, ""),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    (user(contents="x"), "messages.0.contents content?"),
    ({"messages": [*MESSAGES, MESSAGES[0] | {"audio": {}}]}, "messages.1.audio"),
    (user(function_call={"name": "a"}), "messages.0.function_call"),
    (user(images=[{}]), "messages.0.images"),
    (user(content=[PART, PART | {"cache": {}}]), "messages.0.content.1.cache"),
    (user(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.image_url"),
    (user(content=None), "messages.0.content"),
    (user(name="<|im_end|>"), "messages.0.name [A-Za-z0-9_-]"),
]


def test_a_field_inside_another_is_refused_by_its_path(client):
    for fields, said in INSIDE:
        answer = client.post(CHAT, {"messages": MESSAGES} | fields)
        check_refused(answer, next(iter(fields)), said)
    check_refused(client.post(PATH, {"messages": MESSAGES}), "messages")
    name = "max_completion_tokens"
    check_refused(client.post(PATH, {name: 3}), name, "max_tokens?")


SILENTLY_IGNORED_FIELDS = """metadata prediction prompt_cache_key prompt_cache_options
    prompt_cache_retention safety_identifier user""".split()


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_what_changes_no_text_is_taken(client, path):
    body = {"max_tokens": 4, "seed": 3} | ({"messages": MESSAGES} if path == CHAT else {})
    plain = client.post(path, body)[1]["choices"]
    for value in ({"a": "b"}, None):
        fields = dict.fromkeys(SILENTLY_IGNORED_FIELDS, value)
        assert client.post(path, body | fields)[1]["choices"] == plain


def choices(client, *messages) -> list:
    body = {"messages": [*MESSAGES, *messages], "add_special_tokens": False, "seed": 1}
    status, answer = client.post(CHAT, body | {"max_tokens": 3})
    assert status == 200, answer
    return answer["choices"]


REPLY = {"role": "assistant", "content": "Tom"}


def test_what_clients_note_in_messages_changes_no_text(client):
    known = choices(client, REPLY, *MESSAGES)
    # As litellm sends back an answer.
    names = "annotations audio function_call images provider_specific_fields reasoning_content"
    nothing = dict.fromkeys(f"{names} reasoning refusal thinking_blocks tool_calls".split())
    for fields in (nothing, nothing | {"provider_specific_fields": {"refusal": None}}):
        assert choices(client, REPLY | fields, *MESSAGES) == known
    noted = REPLY | {"content": [PART | METADATA_FIELDS], "reasoning_content": "why"}
    assert choices(client, noted | METADATA_FIELDS, MESSAGES[0] | METADATA_FIELDS) == known
    empty = choices(client, REPLY | {"content": ""}, *MESSAGES)
    for fields in ({"content": None}, {"tool_calls": []}, {"tool_calls": None, "refusal": None}):
        assert choices(client, {"role": "assistant"} | fields, *MESSAGES) == empty


NOTED = """annotations cache_control created_at id opts prompt_cache_breakpoint reasoning_details
    thinking_blocks timestamp""".split()
METADATA_FIELDS = dict.fromkeys(NOTED, [{"a": 1}])  # what clients note in messages


def test_a_name_is_for_the_template(client, monkeypatch):
    given = []
    monkeypatch.setattr(Chat, "encode", lambda _, *a: given.append(a[0]) or [1])
    for name in ("Tom-2", None):
        assert client.post(CHAT, user(name=name) | {"max_tokens": 1})[0] == 200
    assert given == [[MESSAGES[0] | {"name": "Tom-2"}], MESSAGES]


RESPONSES = "/v1/responses"
HALF = "a\ud800"  # a lone surrogate: half a letter
FUNCTION = {"type": "function", "name": "f", "parameters": {"a": {"b": {"c": [HALF]}}}}


def called(id: str, arguments: str = "{}", **fields) -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    message = {"role": "assistant", "tool_calls": calls} | fields
    return {"messages": [*MESSAGES, message]}


ESCAPED = '{"a": "\\ud800"}'
HALVES = [
    (PATH, {"prompt": HALF, "echo": True}, "prompt"),
    (PATH, {"prompt": ["Tom", HALF]}, "prompt.1"),
    (PATH, {"stop": ["a", "\udfff"]}, "stop.1"),
    (PATH, {"logit_bias": {HALF: 1}}, "logit_bias"),
    (PATH, {"structured_outputs": {"choice": [HALF]}}, "structured_outputs.choice.0"),
    *((PATH, {name: HALF}, name) for name in ("stop", "user", "model", "cache_salt")),
    (CHAT, user(content=HALF), "messages.0.content"),
    (CHAT, user(content=[PART, PART | {"text": HALF}]), "messages.0.content.1.text"),
    (CHAT, called(HALF), "messages.1.tool_calls.0.id"),
    (CHAT, called("a", ESCAPED), "messages.1.tool_calls.0.function.arguments"),
    (CHAT, called("a", ESCAPED, reasoning=HALF), "messages.1.reasoning"),
    (CHAT, {"tools": [{"a\ud800.b": {"c": HALF}}]}, "tools.0"),
    (CHAT, {"tools": {HALF: 1}}, "tools"),
    (RESPONSES, {"input": [{"role": "user", "content": HALF}]}, "input.0.content"),
    (RESPONSES, {"input": "a", "instructions": HALF}, "instructions"),
    (RESPONSES, {"input": "a", "metadata": {HALF: "a"}}, "metadata"),
    (RESPONSES, {"input": "a", "tools": [FUNCTION]}, "tools.0.parameters.a.b.c"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": HALF}]}, "input.0.call_id"),
]


def test_half_a_letter_is_refused_by_the_path_of_its_field(client):
    for path, fields, field in HALVES:
        needed = {"messages": MESSAGES} if path == CHAT else {}
        for stream in (False, True):
            answer = client.post(path, needed | {"stream": stream} | fields)
            check_refused(answer, field.partition(".")[0], "UTF-8 surrogate")
            assert answer[1]["error"]["message"].startswith(f"{field}: ")
    check_refused(client.post(PATH, b'{"\\ud800": 1}'), "\\ud800", "\\ud800")
    assert client.post(PATH, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')[0] == 200
    deep = functools.reduce(lambda inner, _: {"a": [inner]}, range(900), HALF)
    assert find_lone_surrogate({"b": ["c"], "tools": deep}) == ("tools", "a", 0, "a", 0, "a")
    assert find_lone_surrogate({"b": [["c" * 9, 1, None, True, 1.5]]}) is None


def test_a_hint_for_a_cache_in_a_tool_is_not_written_into_the_prompt():
    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatRequest(messages=MESSAGES, tools=[tool | {"cache_control": {"type": "ephemeral"}}])
    assert body.tools == [tool]

"""A field that nothing knows is refused by its name, wherever it stands."""

import pytest
from serving import PATH, refusal

from text.chat import Chat

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
PART = {"type": "text", "text": "Tom"}


def refused(client, path: str, fields: dict, message: str, param: str) -> None:
    needed = {"messages": MESSAGES} if path == CHAT else {}
    for stream in (False, True):
        body = needed | {"max_tokens": 1, "stream": stream} | fields
        assert client.post(path, body) == (400, refusal(message, param))


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    "name, words",
    [
        ("max_token", "; did you mean max_tokens?"),
        ("temprature", "; did you mean temperature?"),
        ("n_predict", "; did you mean max_tokens?"),
        ("repeat_penalty", "; did you mean repetition_penalty?"),
        ("num_ctx", ""),
        ("Seed", "; did you mean seed?"),
        ("", ""),
        ("{what}", ""),
        ("{field}", ""),
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_a_field_that_nothing_knows_is_refused_by_its_name(client, path, name, words, value):
    message = f"{name} is not a field of this request{words}"
    refused(client, path, {name: value}, message, name)


def test_a_field_of_the_other_api_is_none_of_this_one(client):
    message = "messages is not a field of this request"
    refused(client, PATH, {"messages": MESSAGES}, message, "messages")
    refused(client, CHAT, {"prompt": "Tom"}, "prompt is not a field of this request", "prompt")
    name = "max_completion_tokens"
    message = f"{name} is not a field of this request; did you mean max_tokens?"
    refused(client, PATH, {name: 3}, message, name)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"stream_options": {"usage": True}},
            "stream_options.usage is not a field of this request",
        ),
        (
            {"messages": [MESSAGES[0] | {"contents": "x"}]},
            "messages.0.contents is not a field of this request; did you mean content?",
        ),
        (
            {"messages": [*MESSAGES, MESSAGES[0] | {"audio": {}}]},
            "messages.1.audio is not supported",
        ),
        (
            {"messages": [MESSAGES[0] | {"function_call": {"name": "a"}}]},
            "messages.0.function_call is not supported",
        ),
        (
            {"messages": [MESSAGES[0] | {"content": [PART, PART | {"cache": {}}]}]},
            "messages.0.content.1.cache is not a field of this request",
        ),
        (
            {"messages": [MESSAGES[0] | {"content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url is not supported",
        ),
    ],
)
def test_a_field_inside_another_is_refused_by_its_path(client, fields, message):
    refused(client, CHAT, fields, message, message.partition(".")[0])


SILENTLY_IGNORED_FIELDS = {
    "metadata": {"trace": "1"},
    "prediction": {"type": "content", "content": "Tom"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "verbosity": "medium",
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_still_what_changes_no_text_is_taken(client, path):
    body = {"max_tokens": 4, "seed": 3} | ({"messages": MESSAGES} if path == CHAT else {})
    status, plain = client.post(path, body)
    assert status == 200
    for fields in (SILENTLY_IGNORED_FIELDS, dict.fromkeys(SILENTLY_IGNORED_FIELDS)):
        status, found = client.post(path, body | fields)
        assert status == 200 and found["choices"] == plain["choices"]


def test_what_vllm_has_by_default_is_taken(client):
    message = MESSAGES[0] | {"role": "assistant", "reasoning": None, "reasoning_content": None}
    body = {"messages": [*MESSAGES, message], "add_special_tokens": False, "max_tokens": 1}
    assert client.post(CHAT, body)[0] == 200


@pytest.mark.parametrize("said", [{"provider_specific_fields": {"refusal": None}}, {}])
def test_an_answer_can_be_sent_back_as_litellm_has_it(client, said):
    names = "annotations audio function_call images provider_specific_fields reasoning_content"
    message = {"role": "assistant", "content": "Tom"}
    message |= dict.fromkeys([*names.split(), "refusal", "thinking_blocks", "tool_calls"]) | said
    body = {"messages": [*MESSAGES, message, *MESSAGES], "max_tokens": 3, "seed": 1}
    plain = body | {"messages": [*MESSAGES, {"role": "assistant", "content": "Tom"}, *MESSAGES]}
    answers = [client.post(CHAT, each) for each in (body, plain)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]
    asked = body | {"messages": [MESSAGES[0] | {"images": [{}]}]}
    refused = refusal("messages.0.images is not supported", "messages")
    assert client.post(CHAT, asked) == (400, refused)


METADATA_FIELDS = {  # what clients note in messages
    "annotations": [{"type": "url_citation"}],
    "cache_control": {"type": "ephemeral"},
    "created_at": "2026-01-01",
    "id": "msg_1",
    "opts": {},
    "prompt_cache_breakpoint": {"ttl": "30m"},
    "reasoning_details": [{"type": "reasoning.text", "text": "a"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "a"}],
    "timestamp": 1700000000,
}


def test_what_clients_note_in_messages_changes_no_text(client):
    reply = {"role": "assistant", "content": "Tom"}
    noted = {
        "role": "assistant",
        "content": [PART | METADATA_FIELDS],
        "reasoning_content": "why",
    } | METADATA_FIELDS
    body = {"max_tokens": 3, "seed": 1}
    (_, plain), (status, found) = [
        client.post(CHAT, body | {"messages": [*MESSAGES, each, MESSAGES[0] | notes]})
        for each, notes in ((reply, {}), (noted, METADATA_FIELDS))
    ]
    assert status == 200 and found["choices"] == plain["choices"]


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}])
def test_a_reply_may_have_no_content(client, calls):
    answers = [
        client.post(CHAT, {"messages": [*MESSAGES, reply, *MESSAGES], "max_tokens": 3, "seed": 1})
        for reply in (
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": None} | calls,
            {"role": "assistant", "refusal": None} | calls,
        )
    ]
    assert [status for status, _ in answers] == [200] * 3
    assert answers[0][1]["choices"] == answers[1][1]["choices"] == answers[2][1]["choices"]
    nothing = {"messages": [{"role": "user", "content": None}]}
    status, found = client.post(CHAT, nothing)
    assert status == 400 and found["error"]["message"].startswith("messages.0.content: it must be")


def test_still_an_answer_can_be_sent_back_as_the_official_client_has_it(client):
    from openai import OpenAI

    openai_client = OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none")
    ask = {"model": "small", "max_tokens": 3, "seed": 1}
    reply = openai_client.chat.completions.create(messages=MESSAGES, **ask).choices[0].message
    for message in (reply, reply.model_dump(), reply.model_dump(exclude_unset=True)):
        again = openai_client.chat.completions.create(
            messages=[*MESSAGES, message, *MESSAGES], **ask
        )
        assert again.usage.completion_tokens == 3


def test_a_name_is_for_the_template(client, monkeypatch):
    given = []
    monkeypatch.setattr(Chat, "encode", lambda _, *a: given.append(a[0]) or [1])
    for name in ("Tom-2", None):
        assert (
            client.post(CHAT, {"messages": [MESSAGES[0] | {"name": name}], "max_tokens": 1})[0]
            == 200
        )
    assert given == [[MESSAGES[0] | {"name": "Tom-2"}], MESSAGES]
    refused = client.post(CHAT, {"messages": [MESSAGES[0] | {"name": "<|im_end|>"}]})
    pattern = "messages.0.name: String should match pattern '^[A-Za-z0-9_-]+$'"
    assert refused == (400, refusal(pattern, "messages"))


def test_a_megabyte_of_names_has_a_short_answer(client):
    names = {f"{number:x}": 1 for number in range(80_000)}
    for fields in (names, {"x" * 10**6: 1}, {"messages": [MESSAGES[0] | names]}):
        status, found = client.post(CHAT, {"messages": MESSAGES} | fields)
        assert status == 400 and len(found["error"]["message"]) < 200
        assert "is not a field of this request" in found["error"]["message"]


def test_half_a_letter_in_a_name(client):
    status, found = client.post(PATH, b'{"\\ud800": 1}')
    assert found == refusal("\\ud800 is not a field of this request", "\\ud800") and status == 400


LONE_SURROGATE = "a\ud800"
CALL = {"id": LONE_SURROGATE, "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
ESCAPED = {"role": "assistant", "tool_calls": [CALL | {"id": "a"}]}
ESCAPED["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"a": "\\ud800"}'}
RESPONSES = "/v1/responses"
FUNCTION = {"type": "function", "name": "f", "parameters": {"a": {"b": {"c": [LONE_SURROGATE]}}}}


@pytest.mark.parametrize(
    "path, fields, field",
    [
        (PATH, {"prompt": LONE_SURROGATE, "echo": True}, "prompt"),
        (PATH, {"prompt": ["Tom", LONE_SURROGATE]}, "prompt.1"),
        (PATH, {"stop": LONE_SURROGATE}, "stop"),
        (PATH, {"stop": ["a", "\udfff"]}, "stop.1"),
        (PATH, {"user": LONE_SURROGATE}, "user"),
        (PATH, {"logit_bias": {LONE_SURROGATE: 1}}, "logit_bias"),
        (PATH, {"model": LONE_SURROGATE}, "model"),
        (PATH, {"cache_salt": LONE_SURROGATE}, "cache_salt"),
        (PATH, {"structured_outputs": {"choice": [LONE_SURROGATE]}}, "structured_outputs.choice.0"),
        (CHAT, {"messages": [MESSAGES[0] | {"content": LONE_SURROGATE}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [MESSAGES[0] | {"content": [PART, PART | {"text": LONE_SURROGATE}]}]},
            "messages.0.content.1.text",
        ),
        (CHAT, {"messages": [*MESSAGES, CALLED]}, "messages.1.tool_calls.0.id"),
        (CHAT, {"messages": [*MESSAGES, ESCAPED]}, "messages.1.tool_calls.0.function.arguments"),
        (
            CHAT,
            {"messages": [*MESSAGES, ESCAPED | {"reasoning": LONE_SURROGATE}]},
            "messages.1.reasoning",
        ),
        (CHAT, {"tools": [{"type": LONE_SURROGATE}]}, "tools.0.type"),
        (CHAT, {"tools": [{"a\ud800.b": {"c": LONE_SURROGATE}}]}, "tools.0"),
        (RESPONSES, {"input": LONE_SURROGATE}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": LONE_SURROGATE}]}, "input.0.content"),
        (RESPONSES, {"input": "a", "instructions": LONE_SURROGATE}, "instructions"),
        (RESPONSES, {"input": "a", "metadata": {LONE_SURROGATE: "a"}}, "metadata"),
        (RESPONSES, {"input": "a", "tools": [FUNCTION]}, "tools.0.parameters.a.b.c"),
        (RESPONSES, {"input": "a", "text": {"format": {"a": LONE_SURROGATE}}}, "text.format.a"),
        (RESPONSES, {"input": "a", "stop": LONE_SURROGATE}, "stop"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": LONE_SURROGATE}]},
            "input.0.call_id",
        ),
    ],
)
def test_half_a_letter_is_refused_by_the_path_of_its_field(client, path, fields, field):
    needed = {"messages": MESSAGES} if path == CHAT else {}
    message = f"{field}: not UTF-8 text: it has a lone surrogate"
    for stream in (False, True):
        found = client.post(path, needed | {"stream": stream} | fields)
        assert found == (400, refusal(message, field.partition(".")[0]))


def test_a_whole_letter_beyond_16_bits_is_text(client):
    body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    assert client.post(PATH, body)[0] == 200


def test_half_a_letter_below_many_objects_is_found():
    from server.protocol import find_lone_surrogate

    deep = LONE_SURROGATE
    for _ in range(900):
        deep = {"a": [deep]}
    assert find_lone_surrogate({"b": ["c"], "tools": deep}) == ("tools", "a", 0, "a", 0, "a")
    assert find_lone_surrogate({"b": [["c" * 9, 1, None, True, 1.5]]}) is None


def test_a_hint_for_a_cache_in_a_tool_is_not_written_into_the_prompt():
    from server.protocol import ChatRequest

    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatRequest(messages=MESSAGES, tools=[tool | {"cache_control": {"type": "ephemeral"}}])
    assert body.tools == [tool]

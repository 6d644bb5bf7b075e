"""A field that nothing knows is refused by its name, wherever it stands."""

import pytest
from serving import PATH, check_refused, official_client, refusal

from text.chat import Chat

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
PART = {"type": "text", "text": "Tom"}


def refused(client, path: str, fields: dict, message: str, param: str) -> None:
    needed = {"messages": MESSAGES} if path == CHAT else {}
    for stream in (False, True):
        body = needed | {"max_tokens": 1, "stream": stream} | fields
        assert client.post(path, body) == (400, refusal(message, param))


UNKNOWN = {  # name -> the one that was meant
    "max_token": "max_tokens?",
    "temprature": "temperature?",
    "n_predict": "max_tokens?",
    "repeat_penalty": "repetition_penalty?",
    "Seed": "seed?",
    **dict.fromkeys(["num_ctx", "", "{what}", "{field}"], ""),
}


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_field_that_nothing_knows_is_refused_by_its_name(client, path, name):
    for stream, value in ((False, 1), (True, 1), (False, None)):
        body = {"messages": MESSAGES} if path == CHAT else {}
        answer = client.post(path, body | {"stream": stream, name: value})
        check_refused(answer, name, f"{name} {UNKNOWN[name]}")
        assert UNKNOWN[name] or "?" not in answer[1]["error"]["message"]


def test_a_field_of_the_other_api_is_none_of_this_one(client):
    check_refused(client.post(PATH, {"messages": MESSAGES}), "messages")
    check_refused(client.post(CHAT, {"messages": MESSAGES, "prompt": "Tom"}), "prompt")
    name = "max_completion_tokens"
    check_refused(client.post(PATH, {name: 3}), name, "max_tokens?")


def user(**fields) -> dict:
    return {"messages": [MESSAGES[0] | fields]}


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
    plain = client.post(path, body)[1]["choices"]
    for fields in (SILENTLY_IGNORED_FIELDS, dict.fromkeys(SILENTLY_IGNORED_FIELDS)):
        assert client.post(path, body | fields)[1]["choices"] == plain


def choices(client, *messages) -> list:
    body = {"messages": [*MESSAGES, *messages], "add_special_tokens": False, "seed": 1}
    status, answer = client.post(CHAT, body | {"max_tokens": 3})
    assert status == 200, answer
    return answer["choices"]


def test_still_an_answer_can_be_sent_back_as_the_official_client_has_it(client):
    with official_client(client) as openai_client:
        completions = openai_client.chat.completions
        ask = {"model": "small", "max_tokens": 3, "seed": 1}
        reply = completions.create(messages=MESSAGES, **ask).choices[0].message
        for message in (reply, reply.model_dump(), reply.model_dump(exclude_unset=True)):
            again = completions.create(messages=[*MESSAGES, message, *MESSAGES], **ask)
            assert again.usage.completion_tokens == 3


def test_a_name_is_for_the_template(client, monkeypatch):
    given = []
    monkeypatch.setattr(Chat, "encode", lambda _, *a: given.append(a[0]) or [1])
    for name in ("Tom-2", None):
        assert client.post(CHAT, user(name=name) | {"max_tokens": 1})[0] == 200
    assert given == [[MESSAGES[0] | {"name": "Tom-2"}], MESSAGES]


def test_a_megabyte_of_names_has_a_short_answer(client):
    names = {f"{number:x}": 1 for number in range(80_000)}
    for fields in (names, {"x" * 10**6: 1}, {"messages": [MESSAGES[0] | names]}):
        status, found = client.post(CHAT, {"messages": MESSAGES} | fields)
        assert status == 400 and len(found["error"]["message"]) < 200
        assert "is not a field of this request" in found["error"]["message"]


def test_half_a_letter_in_a_name(client):
    check_refused(client.post(PATH, b'{"\\ud800": 1}'), "\\ud800", "\\ud800")

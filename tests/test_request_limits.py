"""What a request may have: bytes, and elements of a list."""

import json

import pytest
from conftest import count_calls
from pydantic import ValidationError
from serving import PATH, check_refused

from server import protocol
from server.protocol import ChatRequest, CompletionRequest


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_at_most_a_mebibyte(client, chunked):
    """A client that writes more, all of it before it reads, gets the 413."""
    for more in (0, 1, 2**20, 2**22):
        body = b"[" + b" " * (2**20 - 1 + more)
        parts = [body[start : start + 2**18] for start in range(0, len(body), 2**18)]
        found = client.post(PATH, iter(parts) if chunked else body)
        check_refused(found, None, "body 1048576" if more else "JSON", 413 if more else 400)


def test_a_body_without_an_end_is_cut_off(client):
    sent = 0

    def endless():
        nonlocal sent
        while sent < 2**26:
            sent += 2**20
            yield b" " * 2**20

    with pytest.raises(OSError):
        client.post(PATH, endless())
    assert sent < 2**26


MANY = 2**18  # elements, as a body of 1 MiB can have
MESSAGE = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}


def prompts(value):
    return CompletionRequest.model_validate({"prompt": value})


def stops(value):
    return CompletionRequest.model_validate({"stop": value})


def messages(value):
    return ChatRequest.model_validate({"messages": value})


def chat(content):
    return messages([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "make, value",
    [
        *((prompts, [{}] * MANY), (prompts, [[]] * MANY), (prompts, [[1]] * MANY)),
        *((prompts, [[{}] * MANY]), (prompts, ["a"] + [[]] * MANY), (prompts, [1] + [[]] * MANY)),
        *((chat, [{}] * MANY), (chat, [PART] * MANY), (messages, [MESSAGE] * MANY)),
        (stops, [[]] * MANY),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(make, value):
    """One error, after at most the elements that are allowed: all streams wait meanwhile."""

    def check() -> None:
        with pytest.raises(ValidationError) as refused:
            make(value)
        assert refused.value.error_count() == 1

    assert count_calls(check) < 16 * 2**14 < MANY * 2


@pytest.mark.parametrize(
    "make, item", [(prompts, "a"), (prompts, [1]), (chat, PART), (messages, MESSAGE)]
)
def test_the_longest_lists(make, item):
    """The most prompts, messages or parts are valid; one more is refused by name."""
    make([item] * 2**14)
    with pytest.raises(ValidationError, match=str(2**14)):
        make([item] * (2**14 + 1))


def test_a_prompt_of_ids_may_be_longer():
    assert prompts([1] * MANY).prompts == [[1] * MANY]


def test_a_long_schema_and_long_arguments_are_written_and_read_once(monkeypatch):
    """In the event loop, where all streams wait."""

    class Counted:
        loads = staticmethod(lambda text: counts.append("loads") or json.loads(text))

        @staticmethod
        def dumps(value, **options):
            counts.append("dumps")
            return json.dumps(value, **options)

    counts = []
    monkeypatch.setattr(protocol, "json", Counted)
    schema = {"enum": list(range(1000))}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    talk = {"messages": [{"role": "user", "content": "a"}]}
    asked = [
        ChatRequest.model_validate(talk | {"response_format": named, "n": 3}),
        CompletionRequest.model_validate({"structured_outputs": {"json": schema}}),
    ]
    for request in asked:
        params = request.to_sampling_params(4, None)
        assert {own.json_schema for own in params} == {json.dumps(schema)}
    assert counts == ["dumps", "dumps"]
    counts.clear()
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\u00e9"}'}}
    calls = [call | {"id": f"c{number}"} for number in range(5)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    (message,) = ChatRequest.model_validate({"messages": [message]}).messages
    assert message.text_fields[1:] == ['{"a": "\u00e9"}'] * 5
    assert [own["function"]["arguments"] for own in message.as_dict["tool_calls"]] == [
        {"a": "\u00e9"}
    ] * 5
    assert counts.count("loads") == 5

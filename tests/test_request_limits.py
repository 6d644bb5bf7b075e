"""What is wrong with a body or too long in it, and how long an answer may become."""

import pytest
from conftest import count_calls
from pydantic import ValidationError
from serving import ENDLESS, PATH, check_refused, serving, small_encoding, small_engine

from server.protocol import ChatRequest, CompletionRequest

CHAT = "/v1/chat/completions"
CAT = {"messages": [{"role": "user", "content": "cat"}]}
OBJECT = "JSON object Content-Type: application/json"
WRONG = [  # body, the field that is named, words of the message
    (b"", None, OBJECT),
    (b"[1]", None, OBJECT),
    (b'{"prompt', None, "JSON Unterminated string"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "3"}, "max_tokens", "integer"),
    ({"max_tokens": -2}, "max_tokens", "-1"),
    ({"temperature": -1}, "temperature", "-1.0 0"),
    (b'{"temperature": NaN}', "temperature", "nan 0"),
    (b'{"prompt": "caf\xe9"}', None, "UTF-8 15"),
    (b"\x1f\x8b\x08\x00", None, "UTF-8 1"),  # compressed
    (b"\xff\xfe{\x00}\x00\x01", None, "UTF-8 6"),  # half a letter of UTF-16
]


def test_a_wrong_body_is_one_sentence(client):
    for body, param, said in WRONG:
        check_refused(client.post(PATH, body), param, said)
    # A page of another origin could send it unasked.
    check_refused(client.post(PATH, {}, {"Content-Type": "text/plain"}), None, OBJECT)
    body = b'{"prompt": "Tom", "max_tokens": 3, "seed": 1}'
    status, marked = client.post(PATH, b"\xef\xbb\xbf" + body)  # a mark of byte order
    assert status == 200 and marked["choices"] == client.post(PATH, body)[1]["choices"]


def test_a_wrong_body_of_a_megabyte_has_a_short_answer(client):
    names = {f"{number:x}": 1 for number in range(80_000)}
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with client.send("POST", PATH, body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300
    for fields in (names, {"x" * 10**6: 1}, {"messages": [CAT["messages"][0] | names]}):
        status, found = client.post(CHAT, CAT | fields)
        assert status == 400 and len(found["error"]["message"]) < 200
        assert "is not a field of this request" in found["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_at_most_a_mebibyte(client, chunked):
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
        *((prompts, [item] * MANY) for item in ({}, [], [1])),
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
    make([item] * 2**14)
    with pytest.raises(ValidationError, match=str(2**14)):
        make([item] * (2**14 + 1))
    assert prompts([1] * MANY).prompts == [[1] * MANY]  # one of ids may be longer


@pytest.mark.parametrize(
    "body, texts, count",
    [
        ({}, 1, 0),
        ({"logprobs": 20, "n": 3}, 3, 20),
        ({"prompt": ["a", "b", "c"], "n": 2, "logprobs": 0}, 6, 0),
    ],
)
def test_all_texts_of_a_request_have_a_bound(client, body, texts, count):
    most = 2**22 // (texts * (16 + (64 * (1 + count) if "logprobs" in body else 0)))
    said = f"{most + 1} {texts} {count} {most}"
    asked = {"max_tokens": most + 1}
    for stream in (False, True):
        answer = client.post(PATH, body | asked | {"stream": stream})
        check_refused(answer, "max_tokens", said)
    body = ENDLESS | body | {"max_tokens": most, "stream": True}
    with client.send("POST", PATH, body) as answer:
        assert answer.status == 200
    if "prompt" not in body:
        talk = CAT | asked | {"n": texts, "logprobs": count > 0, "top_logprobs": count}
        check_refused(client.post(CHAT, talk), "max_tokens", said)


def test_what_an_echo_may_repeat(tiny_llama, monkeypatch):
    (word,) = small_encoding().encode(" uncomfortable")
    with serving(lambda: small_engine(tiny_llama), max_waiting=4000) as client:
        asked = {"prompt": [[word] * 60] * 11, "max_tokens": 0, "echo": True}
        said = f"{11 * 128 * 60 * 14} 1048576"
        check_refused(client.post(PATH, asked | {"n": 128}), "echo", said)
        assert not client.thread.generations
        assert client.post(PATH, asked | {"n": 113})[0] == 200
        monkeypatch.setattr(type(small_encoding()), "encode", None)
        for prompt, size in (("x" * 106_000, 106_000 * 128), ("\u20ac" * 2**16, 3 * 2**16 * 128)):
            answer = client.post(PATH, asked | {"prompt": prompt, "n": 128})
            check_refused(answer, "echo", f"{size} 1048576")


def test_a_reply_whose_length_is_not_asked_for_fits_the_answer(client, monkeypatch):
    monkeypatch.setattr("server.protocol.MAX_RESPONSE_BYTES", 3 * 2 * (16 + 6 * 64))
    body = CAT | {"n": 2, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    assert client.post(CHAT, body)[1]["usage"]["completion_tokens"] == 2 * 3
    check_refused(client.post(CHAT, body | {"max_tokens": 4}), "max_tokens", "4 3")

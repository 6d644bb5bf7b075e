"""How long an answer may become."""

import pytest
from serving import ENDLESS, PATH, check_refused, serving, small_encoding, small_engine

CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "cat"}]}
STREAM = ENDLESS | {"stream": True}


@pytest.mark.parametrize(
    "body, texts, count",
    [
        ({}, 1, 0),
        ({"logprobs": 1}, 1, 1),
        ({"logprobs": 20, "n": 3}, 3, 20),
        ({"prompt": ["a", "b", "c"], "n": 2, "logprobs": 0}, 6, 0),
    ],
)
def test_all_texts_of_a_request_have_a_bound(tiny_llama, body, texts, count):
    most = 2**22 // (texts * (16 + (64 * (1 + count) if "logprobs" in body else 0)))
    said = f"{most + 1} {texts} {count} {most}"
    body = body | {"max_tokens": most + 1}
    talk = MESSAGES | {"max_tokens": most + 1, "n": texts}
    talk |= {"logprobs": count > 0, "top_logprobs": count}
    with serving(lambda: small_engine(tiny_llama)) as client:
        for stream in (False, True):
            check_refused(client.post(PATH, body | {"stream": stream}), "max_tokens", said)
        with client.send("POST", PATH, STREAM | body | {"max_tokens": most}) as answer:
            assert answer.status == 200
        if "prompt" not in body:
            check_refused(client.post(CHAT, talk), "max_tokens", said)


LONG = {"prompt": [" uncomfortable" * 60] * 8, "n": 120, "max_tokens": 0, "echo": True}  # 0.9 MB


def test_what_an_echo_may_repeat(tiny_llama, monkeypatch):
    """It is refused before there is work, or, where only tokens tell its length, any text."""
    (word,) = small_encoding().encode(" uncomfortable")
    with serving(lambda: small_engine(tiny_llama), max_waiting=4000) as client:
        asked = LONG | {"prompt": [[word] * 60] * 11}
        said = f"{11 * 128 * 60 * 14} 1048576"
        check_refused(client.post(PATH, asked | {"n": 128}), "echo", said)
        assert not client.thread.generations
        assert client.post(PATH, asked | {"n": 113})[0] == 200
        monkeypatch.setattr(type(small_encoding()), "encode", None)
        for prompt, size in (("x" * 106_000, 106_000 * 128), ("\u20ac" * 2**16, 3 * 2**16 * 128)):
            answer = client.post(PATH, LONG | {"prompt": prompt, "n": 128})
            check_refused(answer, "echo", f"{size} 1048576")


def test_a_reply_whose_length_is_not_asked_for_fits_the_answer(client, monkeypatch):
    """A window has room for more tokens than an answer with all their log-probabilities."""
    monkeypatch.setattr("server.protocol.MAX_RESPONSE_BYTES", 3 * 2 * (16 + 6 * 64))
    body = MESSAGES | {"n": 2, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    assert client.post(CHAT, body)[1]["usage"]["completion_tokens"] == 2 * 3
    check_refused(client.post(CHAT, body | {"max_tokens": 4}), "max_tokens", "4 3")

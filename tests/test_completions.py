"""/v1/completions for one prompt, over a real socket. Oracle: the engine itself."""

import pytest
from serving import (
    PATH,
    check_refused,
    engine_alone,
    failing,
    server_error,
    serving,
    small_encoding,
    small_engine,
    stop_engine,
)

from sampling import NOT_FINITE

PROMPTS = ["", "Once upon a time", "Tom <|endoftext|> and", "é😀 " * 3, "a dog " * 31 + "a "]


def greedy(tiny_llama, prompt: str, **params) -> tuple:
    """Prompt tokens, text and finish reason of the engine alone."""
    tokens, text, _, reason = engine_alone(tiny_llama, prompt, temperature=0, **params)
    given = len(small_encoding().encode(prompt, allowed_special="all")) or 1
    return given, len(tokens), text, reason


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_is_that_of_the_engine(client, tiny_llama, prompt):
    status, found = client.post(PATH, {"prompt": prompt, "temperature": 0})
    given, new, text, reason = greedy(tiny_llama, prompt)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    assert (status, found.pop("usage")) == (200, usage)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    assert found.pop("id").startswith("cmpl-") and isinstance(found.pop("created"), int)
    assert found == {"object": "text_completion", "model": "small", "choices": [choice]}


def test_nothing_said_and_null_are_the_same(client, tiny_llama):
    body = {"model": None, "prompt": None, "max_tokens": None, "temperature": None}
    _, found = client.post(PATH, body)
    assert found["usage"]["prompt_tokens"] == 1 and found["usage"]["completion_tokens"] <= 16
    _, found = client.post(PATH, {"max_tokens": 0})
    assert found["choices"][0]["text"] == "" and found["usage"]["completion_tokens"] == 0
    known = {"model": "small", "prompt": "Tom", "temperature": 0}
    _, found = client.post(PATH, known)
    assert found["choices"][0]["text"] == greedy(tiny_llama, "Tom")[2]


def test_what_the_engine_refuses(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, num_pages=2)) as client:
        check_refused(client.post(PATH, {"prompt": "word " * 30}), None, "47 3 2 16")


def test_what_fails_in_the_engine(tiny_llama):
    with serving(lambda: failing(small_engine(tiny_llama), lambda request: True)) as client:
        assert client.post(PATH, {}) == (500, server_error(NOT_FINITE))
        stop_engine(client)
        status, answer = client.post(PATH, {})
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert answer["error"]["message"].endswith("ZeroDivisionError: division by zero")

"""/v1/completions for one prompt, over a real socket. Oracle: the engine itself."""

import pytest
from serving import (
    engine_alone,
    failing,
    refusal,
    server_error,
    serving,
    small_encoding,
    small_engine,
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
    status, found = client.post("/v1/completions", {"prompt": prompt, "temperature": 0})
    given, new, text, reason = greedy(tiny_llama, prompt)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    assert (status, found.pop("usage")) == (200, usage)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    assert found.pop("id").startswith("cmpl-") and isinstance(found.pop("created"), int)
    assert found == {"object": "text_completion", "model": "small", "choices": [choice]}


def test_nothing_said_and_null_are_the_same(client, tiny_llama):
    body = {"model": None, "prompt": None, "max_tokens": None, "temperature": None}
    _, found = client.post("/v1/completions", body)
    assert found["usage"]["prompt_tokens"] == 1 and found["usage"]["completion_tokens"] <= 16
    _, found = client.post("/v1/completions", {"max_tokens": 0})
    assert found["choices"][0]["text"] == "" and found["usage"]["completion_tokens"] == 0
    known = {"model": "small", "prompt": "Tom", "temperature": 0}
    _, found = client.post("/v1/completions", known)
    assert found["choices"][0]["text"] == greedy(tiny_llama, "Tom")[2]


def test_another_model_is_not_found(client):
    message = "the model 'gpt-4' does not exist; this server has 'small'"
    found = client.post("/v1/completions", {"model": "gpt-4"})
    assert found == (404, refusal(message, "model", "model_not_found"))


def test_what_the_engine_refuses(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, num_pages=2)) as client:
        found = client.post("/v1/completions", {"prompt": "word " * 30})
    message = "a sequence of up to 47 positions needs 3 pages; there are 2 pages of 16"
    assert found == (400, refusal(message))


def test_what_fails_in_the_engine(tiny_llama):
    with serving(lambda: failing(small_engine(tiny_llama), lambda request: True)) as client:
        assert client.post("/v1/completions", {}) == (500, server_error(NOT_FINITE))
        client.thread.commands.put(lambda: 1 / 0)
        client.thread.thread.join(60)
        message = "the engine has failed: ZeroDivisionError: division by zero"
        assert client.post("/v1/completions", {}) == (503, server_error(message))

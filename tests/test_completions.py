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
def test_a_text_is_that_of_the_engine(door, tiny_llama, prompt):
    status, found = door.post("/v1/completions", {"prompt": prompt, "temperature": 0})
    given, new, text, reason = greedy(tiny_llama, prompt)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    assert (status, found.pop("usage")) == (200, usage)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    assert found.pop("id").startswith("cmpl-") and isinstance(found.pop("created"), int)
    assert found == {"object": "text_completion", "model": "small", "choices": [choice]}


def test_nothing_said_and_null_are_the_same(door, tiny_llama):
    body = {"model": None, "prompt": None, "max_tokens": None, "temperature": None}
    _, found = door.post("/v1/completions", body)
    assert found["usage"]["prompt_tokens"] == 1 and found["usage"]["completion_tokens"] <= 16
    _, found = door.post("/v1/completions", {"max_tokens": 0})
    assert found["choices"][0]["text"] == "" and found["usage"]["completion_tokens"] == 0
    known = {"model": "small", "prompt": "Tom", "temperature": 0, "nothing_that_is_known": [1]}
    _, found = door.post("/v1/completions", known)
    assert found["choices"][0]["text"] == greedy(tiny_llama, "Tom")[2]


NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"
INTEGER = "max_tokens: Input should be a valid integer"
NEGATIVE = "max_tokens: Input should be greater than or equal to 0"
FINITE = "temperature: temperature is {}; it must be a finite number >= 0"
KEEP = "truncate_prompt_tokens"


@pytest.mark.parametrize(
    "body, message, param",
    [
        (b"", NO_OBJECT, None),
        (b"[1]", NO_OBJECT, None),
        (b'{"prompt', "the body is not JSON: Unterminated string starting at", None),
        ({"max_tokens": 1.5}, INTEGER, "max_tokens"),
        ({"max_tokens": "3"}, INTEGER, "max_tokens"),
        ({"max_tokens": -1}, NEGATIVE, "max_tokens"),
        ({"temperature": -1}, FINITE.format("-1.0"), "temperature"),
        (b'{"temperature": NaN}', FINITE.format("nan"), "temperature"),
        *(
            ({KEEP: keep}, f"{KEEP}: it must be -1 or an integer >= 1", KEEP)
            for keep in (0, -2, 1.5, "1", True)
        ),
        ({KEEP: 65}, f"{KEEP} is 65; this model's window has 64 tokens", KEEP),
    ],
)
def test_a_wrong_body_is_one_sentence(door, body, message, param):
    assert door.post("/v1/completions", body) == (400, refusal(message, param))


@pytest.mark.parametrize("prompt", ["a dog " * 32, [5] * 65, ["Tom", "a dog " * 32]])
def test_a_prompt_longer_than_the_window_is_refused(door, prompt):
    message = "a prompt of 65 tokens; this model's window has 64 tokens: send fewer, or"
    message += " truncate_prompt_tokens to keep the last ones only"
    found = door.post("/v1/completions", {"prompt": prompt})
    assert found == (400, refusal(message, "prompt", "context_length_exceeded"))


@pytest.mark.parametrize(
    "keep, max_tokens, kept",
    [(1, 5, 1), (63, 5, 63), (64, 5, 64), (-1, 5, 59), (-1, 63, 1), (-1, 64, 64), (-1, None, 48)],
)
def test_a_prompt_is_cut_where_that_is_asked_for(door, keep, max_tokens, kept):
    """To its last tokens, which alone are counted, and shown by echo."""
    ids = [7 * row for row in range(70)]
    asked = {"max_tokens": max_tokens, "temperature": 0, "echo": True}
    status, found = door.post("/v1/completions", asked | {"prompt": ids, KEEP: keep})
    assert (status, found["usage"]["prompt_tokens"]) == (200, kept)
    _, own = door.post("/v1/completions", asked | {"prompt": ids[-kept:]})
    assert found["choices"] == own["choices"] and found["usage"] == own["usage"]


def test_a_prompt_that_is_short_enough_is_not_cut(door):
    body = {"prompt": ["Tom 😀", "a dog " * 10], "temperature": 0, "echo": True}
    _, found = door.post("/v1/completions", body)
    for keep in (21, -1, None):
        _, same = door.post("/v1/completions", body | {KEEP: keep})
        assert (same["choices"], same["usage"]) == (found["choices"], found["usage"])


def test_another_type_of_body_is_refused(door):
    """A page of another origin could send it unasked."""
    found = door.post("/v1/completions", {}, {"Content-Type": "text/plain"})
    assert found == (400, refusal(NO_OBJECT))


def test_a_malformed_body_of_a_megabyte_has_a_short_answer(door):
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with door.send("POST", "/v1/completions", body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300


def test_another_model_is_not_found(door):
    message = "the model 'gpt-4' does not exist; this server has 'small'"
    found = door.post("/v1/completions", {"model": "gpt-4"})
    assert found == (404, refusal(message, "model", "model_not_found"))


def test_what_the_engine_refuses(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, num_pages=2)) as door:
        found = door.post("/v1/completions", {"prompt": "word " * 30})
    message = "a text of up to 47 positions needs 3 pages; there are 2 pages of 16"
    assert found == (400, refusal(message))


def test_what_fails_in_the_engine(tiny_llama):
    with serving(lambda: failing(small_engine(tiny_llama), lambda request: True)) as door:
        assert door.post("/v1/completions", {}) == (500, server_error(NOT_FINITE))
        door.thread.commands.put(lambda: 1 / 0)
        door.thread.thread.join(60)
        message = "the engine has failed: ZeroDivisionError: division by zero"
        assert door.post("/v1/completions", {}) == (503, server_error(message))

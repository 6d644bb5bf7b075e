"""Prompts that are longer than the window."""

import pytest
from serving import PATH, SMALL, refusal, small_encoding, token_counts

from text.chat import Chat

CHAT = "/v1/chat/completions"
KEEP = "truncate_prompt_tokens"


def prompt_of(messages) -> list[int]:
    return Chat(SMALL).encode(messages, small_encoding())


@pytest.mark.parametrize("prompt", ["a dog " * 32, [5] * 65, ["Tom", "a dog " * 32]])
def test_a_prompt_longer_than_the_window_is_refused(client, prompt):
    message = "the prompt has 65 tokens; the context window holds 64: shorten it, or"
    message += " set truncate_prompt_tokens to keep only its last tokens"
    found = client.post(PATH, {"prompt": prompt})
    assert found == (400, refusal(message, "prompt", "context_length_exceeded"))


@pytest.mark.parametrize(
    "keep, max_tokens, kept",
    [(1, 5, 1), (63, 5, 63), (64, 5, 64), (-1, 5, 59), (-1, 63, 1), (-1, 64, 64), (-1, None, 48)],
)
def test_a_prompt_is_cut_where_that_is_asked_for(client, keep, max_tokens, kept):
    ids = [7 * row for row in range(70)]
    asked = {"max_tokens": max_tokens, "temperature": 0, "echo": True}
    status, found = client.post(PATH, asked | {"prompt": ids, KEEP: keep})
    assert (status, found["usage"]["prompt_tokens"]) == (200, kept)
    _, own = client.post(PATH, asked | {"prompt": ids[-kept:]})
    assert found["choices"] == own["choices"]
    assert token_counts(found["usage"]) == token_counts(own["usage"])


def test_a_prompt_that_is_short_enough_is_not_cut(client):
    body = {"prompt": ["Tom 😀", "a dog " * 10], "temperature": 0, "echo": True}
    _, found = client.post(PATH, body)
    for keep in (21, -1, None):
        _, same = client.post(PATH, body | {KEEP: keep})
        assert same["choices"] == found["choices"]
        assert token_counts(same["usage"]) == token_counts(found["usage"])


@pytest.mark.parametrize(
    "keep, message",
    [
        *((keep, f"{KEEP}: must be -1 or an integer >= 1") for keep in (0, -2, 1.5, "1", True)),
        (65, f"{KEEP} 65: must be at most the context window (64)"),
    ],
)
def test_how_many_tokens_may_be_kept(client, keep, message):
    assert client.post(PATH, {KEEP: keep}) == (400, refusal(message, KEEP))


FULL = [{"role": "user", "content": "x " * 27 + "x,"}]  # a window of tokens


def test_messages_longer_than_the_window_are_refused(client):
    long = [{"role": "user", "content": "x " * 28 + "x"}]
    count = len(prompt_of(long))
    status, found = client.post(CHAT, {"messages": long})
    assert len(prompt_of(FULL)) == 64 < count and status == 400
    message = f"the prompt has {count} tokens; the context window holds 64: shorten it, or"
    message += " set truncate_prompt_tokens to keep only its last tokens"
    assert found == refusal(message, "messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "limits, kept, new",
    [({}, 32, 32), ({"max_tokens": 10}, 54, 10), ({"max_completion_tokens": 100}, 64, 100)],
)
def test_messages_that_are_cut_leave_room_for_the_reply(client, limits, kept, new):
    long = [{"role": "user", "content": "x " * 90}]
    body = {"messages": long, "truncate_prompt_tokens": -1, "seed": 4, "ignore_eos": True}
    status, found = client.post(CHAT, body | limits)
    assert status == 200
    usage = {"prompt_tokens": kept, "completion_tokens": new, "total_tokens": kept + new}
    assert token_counts(found["usage"]) == usage
    plain = {"prompt": prompt_of(long)[-kept:], "max_tokens": new, "seed": 4, "ignore_eos": True}
    _, own = client.post(PATH, plain)
    assert found["choices"][0]["message"]["content"] == own["choices"][0]["text"]

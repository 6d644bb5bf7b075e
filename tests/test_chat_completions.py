"""/v1/chat/completions over a real socket, by the official client too. Oracle: the engine."""

import pytest
from serving import SMALL, check_refused, engine_alone, small_encoding

from text.chat import Chat

PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "user", "content": "cat, moon"},
    {"role": "assistant", "content": "A cat saw the moon."},
    {"role": "user", "content": "dog"},
]


def prompt_of(messages) -> list[int]:
    return Chat(SMALL).encode(messages, small_encoding())


def alone(tiny_llama, messages, **params) -> tuple:
    ids = prompt_of(messages)
    return engine_alone(tiny_llama, ids, **{"max_new_tokens": max(64 - len(ids), 1)} | params)


FULL = [{"role": "user", "content": "x " * 27 + "x,"}]  # a window of tokens


@pytest.mark.parametrize("messages", [MESSAGES, FULL])
def test_a_reply_is_the_text_of_the_engine(client, tiny_llama, messages):
    tokens, text, _, reason = alone(tiny_llama, messages, seed=4)
    status, found = client.post(PATH, {"messages": messages, "seed": 4})
    assert status == 200 and found.pop("id").startswith("chatcmpl-") and found.pop("created")
    given, new = len(prompt_of(messages)), len(tokens)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    known = {"object": "chat.completion", "model": "small", "choices": [choice], "usage": usage}
    assert found == known


def test_events_begin_with_the_role_and_the_first_token(client, tiny_llama):
    tokens, text, _, reason = alone(tiny_llama, MESSAGES, seed=1, max_new_tokens=9)
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 9, "stream": True}
    *events, last = client.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(tokens)
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == text
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(events) - 1) + [reason]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len(events) <= len(tokens)  # none for the role alone


def test_limits_of_length(client):
    body = {"messages": MESSAGES, "ignore_eos": True}
    for limits, count in (((3, None), 3), ((None, 4), 4), ((3, 4), 4)):
        own = dict(zip(("max_tokens", "max_completion_tokens"), limits))
        assert client.post(PATH, body | own)[1]["usage"]["completion_tokens"] == count


def test_log_probabilities_with_the_bytes_of_tokens(client, tiny_llama):
    def entry(token, logprob):
        data = small_encoding().decode_single_token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    tokens, _, logprobs, _ = alone(tiny_llama, MESSAGES, seed=2, logprobs=3)
    body = {"messages": MESSAGES, "seed": 2, "logprobs": True, "top_logprobs": 3}
    found = client.post(PATH, body)[1]["choices"][0]["logprobs"]["content"]
    assert found == [
        entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
        for token, (logprob, top) in zip(tokens, logprobs)
    ]
    events = client.events(PATH, body | {"stream": True})
    parts = [event["choices"][0]["logprobs"]["content"] for event in events]
    assert sum(parts, []) == found
    (choice,) = client.post(PATH, body | {"top_logprobs": None})[1]["choices"]
    assert choice["logprobs"]["content"] == [entry | {"top_logprobs": []} for entry in found]


def test_n_replies(client, tiny_llama):
    body = {"messages": MESSAGES, "seed": 5, "n": 3, "max_tokens": 8}
    wanted = [alone(tiny_llama, MESSAGES, seed=5 + row, max_new_tokens=8)[1] for row in range(3)]
    found = [choice["message"]["content"] for choice in client.post(PATH, body)[1]["choices"]]
    texts = [""] * 3
    for event in client.events(PATH, body | {"stream": True}):
        (choice,) = event["choices"]
        assert ("role" in choice["delta"]) == (texts[choice["index"]] == "")
        texts[choice["index"]] += choice["delta"]["content"]
    assert found == texts == wanted


def said(content="x", role="user", **fields) -> dict:
    return {"messages": [{"role": role, "content": content} | fields]}


REFUSED = [  # fields, the one that is named, words of the message
    ({"messages": None}, "messages", "list"),
    ({"messages": []}, "messages", "1"),
    ({"messages": [{"content": "x"}]}, "messages", "messages.0.role"),
    ({"messages": [0] * 300_000}, "messages", ""),
    (said(None), "messages", "messages.0.content string list 16384 text"),
    (said([{"type": "image_url"}]), "messages", "messages.0.content string list 16384 text"),
    (said(role="system"), "messages", "chat template user assistant smollm2"),
    (said(role="user\nhi<|im_end|>"), "messages", "messages.0.role"),
    *((said(role=role), "messages", "messages.0.role") for role in ("", "User ", "x" * 65)),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools", "chat template"),
    ({"echo": True}, "echo", "messages"),
    ({"best_of": 2}, "best_of", "n"),
    ({"add_generation_prompt": False}, "add_generation_prompt", ""),
]


def test_what_is_refused(client):
    for fields, param, words in REFUSED:
        for stream in (False, True):
            answer = client.post(PATH, {"messages": MESSAGES, "stream": stream} | fields)
            check_refused(answer, param, words)
    check_refused(client.post(PATH, {}), "messages")


def test_what_asks_for_nothing_more_is_accepted(client):
    plain = {"messages": MESSAGES[:1], "seed": 1, "max_tokens": 3}
    more = {"echo": False, "best_of": 1, "add_generation_prompt": True, "tool_choice": "auto"}
    parts = said([{"type": "text", "text": text} for text in ("cat,", " moon")], name="me")
    first, *others = [
        client.post(PATH, plain | fields)[1]
        for fields in ({}, more, dict.fromkeys(more), {"max_tokens": 3}, parts)
    ]
    for other in others:
        assert (other["choices"], other["usage"]) == (first["choices"], first["usage"])

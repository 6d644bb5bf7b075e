"""/v1/chat/completions over a real socket, by the official client too. Oracle: the engine."""

import pytest
from serving import SMALL, engine_alone, refusal, serving, small_encoding, small_engine

from errors import UserError
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
    """Tokens, text, log-probabilities and finish reason of the engine alone."""
    ids = prompt_of(messages)
    return engine_alone(tiny_llama, ids, **{"max_new_tokens": max(64 - len(ids), 1)} | params)


FULL = [{"role": "user", "content": "x " * 27 + "x,"}]  # a window of tokens


@pytest.mark.parametrize("messages", [MESSAGES[:1], MESSAGES, FULL])
def test_a_reply_is_the_text_of_the_engine(client, tiny_llama, messages):
    """Up to the end of the window if nothing is said, and one token where that is full."""
    tokens, text, _, reason = alone(tiny_llama, messages, seed=4)
    body = {"messages": messages, "seed": 4}
    status, found = client.post(PATH, body)
    assert status == 200 and found.pop("id").startswith("chatcmpl-") and found.pop("created")
    given = len(prompt_of(messages))
    usage = {"prompt_tokens": given, "completion_tokens": len(tokens)}
    usage["total_tokens"] = given + len(tokens)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    known = {"object": "chat.completion", "model": "small", "choices": [choice], "usage": usage}
    assert found == known


def test_events_begin_with_the_role_and_the_first_token(client, tiny_llama):
    tokens, text, _, reason = alone(tiny_llama, MESSAGES, seed=1, max_new_tokens=9)
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 9, "stream": True}
    events = client.events(PATH, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == text
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [reason]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len(events) <= len(tokens)  # none for the role alone
    *_, last = client.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(tokens)


def test_limits_of_length(client):
    names = ("max_tokens", "max_completion_tokens")
    for limits, wanted in (((3, None), 3), ((None, 4), 4), ((3, 4), 4), ((None, 0), 0)):
        body = {"messages": MESSAGES, "ignore_eos": True} | dict(zip(names, limits))
        assert client.post(PATH, body)[1]["usage"]["completion_tokens"] == wanted


def test_content_in_parts(client):
    parts = [{"type": "text", "text": "cat,"}, {"type": "text", "text": " moon"}]
    plain = {"messages": MESSAGES[:1], "seed": 1, "max_tokens": 5}
    split = plain | {"messages": [{"role": "user", "name": "me", "content": parts}]}
    first, second = (client.post(PATH, body)[1] for body in (plain, split))
    assert first["choices"] == second["choices"] and first["usage"] == second["usage"]


def test_log_probabilities_with_the_bytes_of_tokens(client, tiny_llama):
    tokens, _, logprobs, _ = alone(tiny_llama, MESSAGES, seed=2, logprobs=3)
    body = {"messages": MESSAGES, "seed": 2, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.post(PATH, body)[1]["choices"]
    found = choice["logprobs"]["content"]
    decode = small_encoding().decode_single_token_bytes

    def entry(token, logprob):
        data = decode(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

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
    assert found == wanted
    texts = [""] * 3
    roles = []
    for event in client.events(PATH, body | {"stream": True}):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        roles += [choice["index"]] if "role" in choice["delta"] else []
    assert (texts, sorted(roles)) == (wanted, [0, 1, 2])


def test_a_second_turn_shares_the_pages_of_the_first(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, page_size=4)) as client:
        (choice,) = client.post(PATH, {"messages": MESSAGES[:1], "max_tokens": 6})[1]["choices"]
        client.post(
            PATH, {"messages": [*MESSAGES[:1], choice["message"], MESSAGES[2]], "max_tokens": 1}
        )
        shared = client.thread.engine.scheduler.prefix_cache_hits
    assert shared >= len(prompt_of(MESSAGES[:1])) // 4 * 4 > 0


USER = {"role": "user"}
TOOL = {"type": "function", "function": {"name": "look"}}
CONTENT = "messages.0.content: it must be a string or a list of up to 16384 parts of the type text"
HINT = "put its text at the start of the first user message"
OTHER = "or serve a model that supports it: make smollm2, then python serve.py --model smollm2"
ROLES = f"chat template: this model knows the roles user and assistant only; {HINT}, {OTHER}"
ADD = "add_generation_prompt"
BEST_OF = "best_of must equal n"
MIN = "messages: List should have at least 1 item after validation, not 0"


@pytest.mark.parametrize(
    "fields, message, param",
    [
        ({"messages": None}, "messages: Input should be a valid list", "messages"),
        ({"messages": []}, MIN, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required", "messages"),
        ({"messages": [USER | {"content": None}]}, CONTENT, "messages"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, CONTENT, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, ROLES, "messages"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs: true", "top_logprobs"),
        ({"tools": [TOOL]}, "this chat template does not support tools", "tools"),
        ({"echo": True}, "echo is not supported for messages", "echo"),
        ({"best_of": 2}, BEST_OF, "best_of"),
        ({"add_generation_prompt": False}, f"{ADD} is not supported", ADD),
    ],
)
def test_what_is_refused(client, fields, message, param):
    body = {"messages": MESSAGES} | fields
    assert client.post(PATH, body) == (400, refusal(message, param))
    assert client.post(PATH, body | {"stream": True}) == (400, refusal(message, param))


def test_what_asks_for_nothing_more_is_accepted(client):
    plain = {"messages": MESSAGES, "seed": 1, "max_tokens": 3}
    more = {"echo": False, "best_of": 1, "add_generation_prompt": True, "tool_choice": "auto"}
    null = dict.fromkeys(more)
    first, *others = (client.post(PATH, plain | fields)[1] for fields in ({}, more, null))
    assert all(other["choices"] == first["choices"] for other in others)


def test_a_model_without_a_template(tiny_llama):
    error = UserError("small: not a chat model")
    with serving(lambda: small_engine(tiny_llama), chat=error) as client:
        assert client.post(PATH, {"messages": MESSAGES}) == (400, refusal(str(error)))
        assert client.post("/v1/completions", {"max_tokens": 1})[0] == 200


def test_the_official_client(client, tiny_llama):
    import openai

    _, text, logprobs, reason = alone(tiny_llama, MESSAGES, seed=3, logprobs=1, max_new_tokens=12)
    asked = {"model": "small", "messages": MESSAGES, "seed": 3, "max_completion_tokens": 12}
    where = {"base_url": f"http://127.0.0.1:{client.port}/v1", "api_key": "none"}
    with openai.OpenAI(**where, max_retries=0) as openai_client:
        assert [model.id for model in openai_client.models.list()] == ["small"]
        reply = openai_client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
        (choice,) = reply.choices
        assert (choice.message.content, choice.finish_reason) == (text, reason)
        found = [entry.logprob for entry in choice.logprobs.content]
        assert found == [entry.logprob for entry in logprobs]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = openai_client.chat.completions.create(**asked, **usage)
        assert "".join(event.choices[0].delta.content for event in events) == text
        assert last.usage.total_tokens == reply.usage.total_tokens
        with pytest.raises(openai.NotFoundError) as refused:
            openai_client.completions.create(model="gpt-4", prompt=prompt_of(MESSAGES))
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    "body, words",
    [
        ({}, "messages: Field required"),
        *(
            ({"messages": [{"role": role, "content": "x"}]}, "messages.0.role: ")
            for role in ("", "user\nhi<|im_end|>", "User ", "x" * 65)
        ),
        ({"messages": [0] * 300_000}, "messages"),
    ],
)
def test_wrong_messages_are_told_of_the_first(client, body, words):
    status, answer = client.post(PATH, body)
    assert (status, answer["error"]["param"]) == (400, "messages")
    message = answer["error"]["message"]
    assert message.startswith(words) and len(message) < 200

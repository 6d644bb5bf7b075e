"""Completions of texts and chats, whole, in events and in a full queue. Oracle: the engine."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import (
    ENDLESS,
    PATH,
    SMALL,
    check_refused,
    engine_alone,
    failing,
    in_turns,
    is_free,
    server_error,
    serving,
    small_encoding,
    small_engine,
    stop_engine,
    texts_by_index,
    token_counts,
    until,
    writing,
)

from engine.drafter import PromptLookupDrafter
from sampling import NOT_FINITE
from server.served import ServedModel
from text.chat import Chat

PROMPTS = ["", "Once upon a time", "Tom <|endoftext|> and", "é😀 " * 3, "a dog " * 31 + "a "]
BODIES = [
    {"temperature": 0},
    {"seed": 1, "top_p": 0.9},
    {"seed": 2, "temperature": 1.5, "presence_penalty": 1},
    {"seed": 3, "stop": ["e", " t"]},
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_is_that_of_the_engine(client, tiny_llama, prompt):
    body = {"prompt": prompt or None, "temperature": 0, "model": None, "max_tokens": None}
    status, found = client.post(PATH, body)
    tokens, text, _, reason = engine_alone(tiny_llama, prompt, temperature=0)
    given, new = len(small_encoding().encode(prompt, allowed_special="all")) or 1, len(tokens)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    assert (status, token_counts(found.pop("usage"))) == (200, usage)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    assert found.pop("id").startswith("cmpl-") and isinstance(found.pop("created"), int)
    assert found == {"object": "text_completion", "model": "small", "choices": [choice]}
    usage = client.post(PATH, {"prompt": prompt, "max_tokens": 0})[1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (given, 0)


def test_what_the_engine_refuses_and_what_fails_in_it(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, num_pages=2)) as client:
        check_refused(client.post(PATH, {"prompt": "word " * 30}), None, "47 3 2 16")

    def fails(request):
        return len(request.output) == 2 and request.tokens[0] == 7

    with serving(lambda: failing(small_engine(tiny_llama), fails)) as client:
        assert client.post(PATH, ENDLESS | {"prompt": [7]}) == (500, server_error(NOT_FINITE))
        for last, status in ((4096, 400), (7, 500)):  # it ends the other texts of its call
            body = {"prompt": [[9], [8], [last]], "max_tokens": 9999}
            assert client.post(PATH, ENDLESS | body)[0] == status
            until(lambda: is_free(client))
        body = {"prompt": [[9], [4096]], "max_tokens": 0, "stream": True}
        assert client.post(PATH, body)[0] == 400  # no text before it
        stop_engine(client)
        status, answer = client.post(PATH, {})
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert answer["error"]["message"].endswith("ZeroDivisionError: division by zero")


def test_16_clients_have_the_texts_of_the_engine(tiny_llama):
    prompts = ["word " * 20 + "Tom " * row for row in range(16)]

    def make():
        return small_engine(tiny_llama, max_num_seqs=6, drafter=PromptLookupDrafter())

    with serving(make) as client, ThreadPoolExecutor(16) as pool:

        def ask(prompt, body):
            asked = {"prompt": prompt, "max_tokens": 30} | body
            streamed = texts_by_index(client.events(PATH, asked | {"stream": True}))[0]
            (choice,) = client.post(PATH, asked | {"stream": False})[1]["choices"]
            assert streamed == (choice["text"], choice["finish_reason"])
            return streamed

        found = list(pool.map(ask, prompts, BODIES * 4))
    for prompt, body, own in zip(prompts, BODIES * 4, found, strict=True):
        assert own == engine_alone(tiny_llama, prompt, max_new_tokens=30, **body)[1::2]


def test_letters_come_whole_and_a_token_before_the_next_is_computed(tiny_llama):
    text = "äß😀é\n" * 3
    ids = small_encoding().encode(text)
    with serving(lambda: writing(small_engine(tiny_llama), ids)) as client:
        body = {"prompt": "x", "max_tokens": len(ids), "stream": True}
        events = client.events(PATH, body)
        assert texts_by_index(events)[0] == (text, "length")
        # A token that completes no letter has an event all the same.
        assert "" in [event["choices"][0]["text"] for event in events]
        found = texts_by_index(client.events(PATH, body | {"stop": ["😀é"]}))[0]
        assert found == ("äß", "stop")
    turn = threading.Semaphore(1)
    with serving(lambda: in_turns(small_engine(tiny_llama), turn)) as client:
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": True}
        with client.send("POST", PATH, body) as answer:
            for _ in range(4):
                assert answer.readline().startswith(b"data: {") and answer.readline() == b"\n"
                turn.release()
            assert answer.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("continuous", [False, True])
def test_events_and_usage_in_them(client, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": "word " * 9, "max_tokens": 6, "ignore_eos": True, "stream": True}
    *events, last = client.events(PATH, body | {"stream_options": options})
    prompt = len(small_encoding().encode("word " * 9))
    usage = {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert (last["choices"], token_counts(last["usage"])) == ([], usage)
    usages = [event.pop("usage") for event in events]
    counts = [usage["completion_tokens"] for usage in usages if usage]
    assert counts == sorted(counts) and counts[-1:] == ([6] if continuous else [])
    assert len(counts) == (len(events) if continuous else 0) and 0 not in counts
    for event in events:
        known = {"object": "text_completion", "model": "small", "id": last["id"]}
        choice = event["choices"][0] | {"index": 0, "logprobs": None}
        assert event == known | {"choices": [choice], "created": last["created"]}
        assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert last["id"].startswith("cmpl-") and isinstance(last["created"], int)
    for options in (None, {}, {"include_usage": False}):
        events = client.events(PATH, body | {"stream_options": options})
        assert all("usage" not in event for event in events)
    answer = client.post(PATH, body | {"stream_options": {"include_usage": 1}})
    check_refused(answer, "stream_options", "stream_options.include_usage boolean")


CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "cat"}]}
FULL = (None, "try again", 429, "rate_limit_exceeded")
STREAM = ENDLESS | {"stream": True}


def test_more_texts_than_there_is_room_for_are_429(tiny_llama):
    turn = threading.Semaphore(0)

    def make():
        return in_turns(small_engine(tiny_llama, max_num_seqs=2), turn)

    with serving(make, max_waiting=3) as client, ThreadPoolExecutor(12) as pool:
        bodies = [{"seed": row, "max_tokens": 4} for row in range(12)]
        answers = [pool.submit(client.post, PATH, body) for body in bodies]
        until(lambda: sum(answer.done() for answer in answers) == 7)
        for answer in answers:
            if answer.done():
                check_refused(answer.result(), *FULL)
                assert "(5 sequences)" in answer.result()[1]["error"]["message"]
        for path, body in ((CHAT, MESSAGES), ("/v1/responses", {"input": "Tom"})):
            for stream in (False, True):
                with client.send("POST", path, body | {"stream": stream}) as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert client.get("/v1/models")[0] == client.get("/health")[0] == 200
        turn.release(10**6)
        assert sorted(answer.result()[0] for answer in answers) == [200] * 5 + [429] * 7
        assert client.post(PATH, {"n": 5, "max_tokens": 1})[0] == 200


def test_all_texts_are_counted_before_there_is_work(tiny_llama, monkeypatch):
    for name in ("encode", "prepare_chat"):
        monkeypatch.setattr(ServedModel, name, None)
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=2), max_waiting=3) as client:
        for path, body in (
            (PATH, {"prompt": ["a", "b"], "n": 3}),
            (PATH, {"prompt": ["a"] * 6}),
            (CHAT, MESSAGES | {"n": 6}),
        ):
            check_refused(client.post(path, body), None, "6 5")


def test_more_tokens_of_prompts_than_there_is_room_for_are_429(tiny_llama, monkeypatch):
    """They count until their text begins, or their call ends."""
    turn = threading.Semaphore(0)
    prompt = {"prompt": [1] * 10, "max_tokens": 3}

    def make():
        return in_turns(small_engine(tiny_llama), turn)

    with serving(make, max_waiting_tokens=25) as client, ThreadPoolExecutor(2) as pool:
        first = [pool.submit(client.post, PATH, prompt) for _ in range(2)]
        until(lambda: len(client.thread.generations) == 2)
        check_refused(client.post(PATH, prompt), *FULL)
        check_refused(client.post(PATH, {"prompt": [1] * 26}), None, "26 25")
        turn.release(10**6)
        assert [answer.result()[0] for answer in first] == [200, 200]
        with client.send("POST", PATH, STREAM | {"prompt": [1] * 20}) as answer:
            answer.readline()  # it has begun
            assert client.post(PATH, {"prompt": [1] * 25, "max_tokens": 1})[0] == 200
        until(lambda: client.thread.waiting_tokens == client.thread.num_open_requests == 0)
        assert client.post(PATH, {"prompt": [[1], [4096]]})[0] == 400
        assert client.thread.waiting_tokens == client.thread.num_open_requests == 0
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=1), max_waiting=0) as client:
        with client.send("POST", PATH, STREAM):
            until(lambda: client.thread.generations)
            # Where there is no room, a request is not encoded.
            monkeypatch.setattr(type(small_encoding()), "encode", None)
            check_refused(client.post(PATH, {"prompt": "x"}), *FULL)


TALK = [
    {"role": "user", "content": "cat, moon"},
    {"role": "assistant", "content": "A cat saw the moon."},
    {"role": "user", "content": "dog"},
]


def prompt_of(messages) -> list[int]:
    return Chat(SMALL).encode(messages, small_encoding())


def reply_alone(tiny_llama, messages, **params) -> tuple:
    ids = prompt_of(messages)
    return engine_alone(tiny_llama, ids, **{"max_new_tokens": max(64 - len(ids), 1)} | params)


WINDOW = [{"role": "user", "content": "x " * 27 + "x,"}]  # a window of tokens


@pytest.mark.parametrize("messages", [TALK, WINDOW])
def test_a_reply_is_the_text_of_the_engine(client, tiny_llama, messages):
    """Up to the end of the window if nothing is said, and one token where that is full."""
    tokens, text, _, reason = reply_alone(tiny_llama, messages, seed=4)
    status, found = client.post(CHAT, {"messages": messages, "seed": 4})
    assert status == 200 and found.pop("id").startswith("chatcmpl-") and found.pop("created")
    given, new = len(prompt_of(messages)), len(tokens)
    usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    reply = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": reply, "logprobs": None, "finish_reason": reason}
    assert token_counts(found.pop("usage")) == usage
    known = {"object": "chat.completion", "model": "small", "choices": [choice]}
    assert found == known
    for limits, count in (((3, None), 3), ((None, 4), 4), ((3, 4), 4)):
        body = dict(zip(("max_tokens", "max_completion_tokens"), limits)) | {"ignore_eos": True}
        _, found = client.post(CHAT, body | {"messages": TALK})
        assert found["usage"]["completion_tokens"] == count


def test_events_begin_with_the_role_and_the_first_token(client, tiny_llama):
    tokens, text, _, reason = reply_alone(tiny_llama, TALK, seed=1, max_new_tokens=9)
    body = {"messages": TALK, "seed": 1, "max_tokens": 9, "stream": True}
    *events, last = client.events(CHAT, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(tokens)
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == text
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(events) - 1) + [reason]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len(events) <= len(tokens)  # none for the role reply_alone


def test_log_probabilities_with_the_bytes_of_tokens(client, tiny_llama):
    def entry(token, logprob):
        data = small_encoding().decode_single_token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    tokens, _, logprobs, _ = reply_alone(tiny_llama, TALK, seed=2, logprobs=3)
    body = {"messages": TALK, "seed": 2, "logprobs": True, "top_logprobs": 3}
    found = client.post(CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert found == [
        entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
        for token, (logprob, top) in zip(tokens, logprobs)
    ]
    events = client.events(CHAT, body | {"stream": True})
    parts = [event["choices"][0]["logprobs"]["content"] for event in events]
    assert sum(parts, []) == found
    (choice,) = client.post(CHAT, body | {"top_logprobs": None})[1]["choices"]
    assert choice["logprobs"]["content"] == [entry | {"top_logprobs": []} for entry in found]


def test_n_replies(client, tiny_llama):
    body = {"messages": TALK, "seed": 5, "n": 3, "max_tokens": 8}
    wanted = [reply_alone(tiny_llama, TALK, seed=5 + row, max_new_tokens=8)[1] for row in range(3)]
    found = [choice["message"]["content"] for choice in client.post(CHAT, body)[1]["choices"]]
    texts = [""] * 3
    for event in client.events(CHAT, body | {"stream": True}):
        (choice,) = event["choices"]
        assert ("role" in choice["delta"]) == (texts[choice["index"]] == "")
        texts[choice["index"]] += choice["delta"]["content"]
    assert found == texts == wanted


def message(content="x", role="user", **fields) -> dict:
    return {"messages": [{"role": role, "content": content} | fields]}


REFUSED = [  # fields, the one that is named, words of the message
    ({"messages": None}, "messages", "list"),
    ({"messages": []}, "messages", "1"),
    ({"messages": [{"content": "x"}]}, "messages", "messages.0.role"),
    ({"messages": [0] * 300_000}, "messages", ""),
    (message(None), "messages", "messages.0.content string list 16384 text"),
    (message([{"type": "image_url"}]), "messages", "messages.0.content string list 16384 text"),
    (message(role="system"), "messages", "chat template user assistant smollm2"),
    (message(role="user\nhi<|im_end|>"), "messages", "messages.0.role"),
    *((message(role=role), "messages", "messages.0.role") for role in ("", "User ", "x" * 65)),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools", "chat template"),
    ({"echo": True}, "echo", "messages"),
    ({"best_of": 2}, "best_of", "n"),
    ({"add_generation_prompt": False}, "add_generation_prompt", ""),
]


def test_what_is_refused(client):
    for fields, param, words in REFUSED:
        for stream in (False, True):
            answer = client.post(CHAT, {"messages": TALK, "stream": stream} | fields)
            check_refused(answer, param, words)
    check_refused(client.post(CHAT, {}), "messages")

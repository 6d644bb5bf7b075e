"""Answers in server-sent events, over a real socket. Oracle: the engine itself."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import (
    PATH,
    check_refused,
    engine_alone,
    failing,
    in_turns,
    server_error,
    serving,
    small_encoding,
    small_engine,
    texts_by_index,
    writing,
)

from engine.drafter import PromptLookupDrafter
from sampling import NOT_FINITE

BODIES = [
    {"temperature": 0},
    {"seed": 1, "top_p": 0.9},
    {"seed": 2, "temperature": 1.5, "presence_penalty": 1},
    {"seed": 3, "stop": ["e", " t"]},
]


def test_16_clients_have_the_texts_of_the_engine(tiny_llama):
    """Whole and in events, with prefixes in common, and one or several tokens a step."""
    prompts = ["word " * 20 + "Tom " * row for row in range(16)]
    bodies = [BODIES[row % 4] for row in range(16)]

    def make():
        return small_engine(tiny_llama, max_num_seqs=6, drafter=PromptLookupDrafter())

    with serving(make) as client, ThreadPoolExecutor(16) as pool:

        def ask(prompt, body):
            asked = {"prompt": prompt, "max_tokens": 30} | body
            streamed = texts_by_index(client.events(PATH, asked | {"stream": True}))[0]
            (choice,) = client.post(PATH, asked | {"stream": False})[1]["choices"]
            assert streamed == (choice["text"], choice["finish_reason"])
            return streamed

        found = list(pool.map(ask, prompts, bodies))
    for prompt, body, own in zip(prompts, bodies, found, strict=True):
        assert own == engine_alone(tiny_llama, prompt, max_new_tokens=30, **body)[1::2]


def test_the_form_of_an_event(client):
    events = client.events(PATH, {"prompt": "Tom", "max_tokens": 5, "stream": True})
    (name,) = {event.pop("id") for event in events}
    assert name.startswith("cmpl-")
    for event in events:
        assert isinstance(event.pop("created"), int)
        choice = event["choices"][0]
        assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
        known = {"object": "text_completion", "model": "small", "choices": [choice]}
        assert event == known and (choice["index"], choice["logprobs"]) == (0, None)


def test_letters_cut_over_tokens_come_whole(tiny_llama):
    """Letters of several tokens: no event has a part of one, and U+FFFD is in none."""
    text = "äß😀é\n" * 3
    ids = small_encoding().encode(text)
    assert len(ids) > len(text)
    with serving(lambda: writing(small_engine(tiny_llama), ids)) as client:
        body = {"prompt": "x", "max_tokens": len(ids), "stream": True}
        events = client.events(PATH, body)
        assert texts_by_index(events)[0] == (text, "length")
        pieces = [event["choices"][0]["text"] for event in events]
        assert "" in pieces  # a token that completes no letter has an event all the same
        found = texts_by_index(client.events(PATH, body | {"stop": ["😀é"]}))[0]
        assert found == ("äß", "stop")


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_events(client, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": "word " * 9, "max_tokens": 6, "ignore_eos": True, "stream": True}
    *events, last = client.events(PATH, body | {"stream_options": options})
    prompt = len(small_encoding().encode("word " * 9))
    usage = {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert (last["choices"], last["usage"]) == ([], usage)
    if continuous:
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and 1 <= counts[0] and counts[-1] == 6
    else:
        assert all(event["usage"] is None for event in events)
    for options in (None, {}, {"include_usage": False}):
        events = client.events(PATH, body | {"stream_options": options})
        assert all("usage" not in event for event in events)
    answer = client.post(PATH, body | {"stream_options": {"include_usage": 1}})
    check_refused(answer, "stream_options", "stream_options.include_usage boolean")


def test_a_first_token_comes_before_the_second_is_computed(tiny_llama):
    turn = threading.Semaphore(1)
    with serving(lambda: in_turns(small_engine(tiny_llama), turn)) as client:
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": True}
        assert len(client.events(PATH, body | {"max_tokens": 1})) == 1
        turn.release()
        with client.send("POST", PATH, body) as answer:
            for _ in range(4):
                assert answer.readline().startswith(b"data: {")
                assert answer.readline() == b"\n"
                turn.release()
            assert answer.read() == b"data: [DONE]\n\n"


def test_an_error_in_a_stream_is_an_event_before_the_end(tiny_llama):
    def make():
        return failing(small_engine(tiny_llama), lambda request: len(request.output) == 3)

    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    with serving(make) as client:
        *events, error = client.events(PATH, body | {"ignore_eos": True})
        assert all(event["choices"][0]["finish_reason"] is None for event in events)
        assert error == server_error(NOT_FINITE)

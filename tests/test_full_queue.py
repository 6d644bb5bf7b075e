"""The bounds of the queue, in texts and in tokens of prompts."""

import threading
from concurrent.futures import ThreadPoolExecutor

from serving import (
    ENDLESS,
    PATH,
    check_refused,
    in_turns,
    serving,
    small_encoding,
    small_engine,
    until,
)

from server.served import ServedModel

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

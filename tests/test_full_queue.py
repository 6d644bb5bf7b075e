"""The bounds of the queue, in texts and in tokens of prompts."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import collect, results_of, run_calls, serving, small_encoding, small_engine

from errors import UserError
from sampling import SamplingParams

PATH = "/v1/completions"
ENDLESS = {"prompt": "Tom", "max_tokens": 2**18, "ignore_eos": True, "stream": True}


def full(present: int, what: str) -> dict:
    error = {"message": f"the queue is full, with {present} {what}: try again", "param": None}
    known = {"type": "invalid_request_error", "code": "rate_limit_exceeded"}
    return {"error": error | known}


def held_engine(tiny_llama, gate: threading.Event, **options):
    """An engine that computes nothing until the gate is open."""
    engine = small_engine(tiny_llama, **options)
    step = engine.step

    def gated():
        assert gate.wait(20)
        return step()

    engine.step = gated
    return engine


def test_more_texts_than_there_is_room_for_are_429(tiny_llama):
    """Of 12 requests at once 5 get in: 2 rows and 3 that wait. Later there is room again."""
    gate = threading.Event()

    def make():
        return held_engine(tiny_llama, gate, max_rows=2)

    with serving(make, max_waiting=3) as door, ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(door.post, PATH, {"seed": row, "max_tokens": 4}) for row in range(12)
        ]
        while sum(answer.done() for answer in answers) < 7:
            pass
        refused = [answer.result() for answer in answers if answer.done()]
        assert refused == [(429, full(5, "texts"))] * 7
        with door.send(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}
        ) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        gate.set()
        assert sorted(answer.result()[0] for answer in answers) == [200] * 5 + [429] * 7
        assert door.post(PATH, {"n": 5, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "path, body",
    [
        (PATH, {"prompt": ["a", "b"], "n": 3}),
        (PATH, {"prompt": ["a"] * 6}),
        (PATH, {"n": 6}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 6}),
    ],
)
def test_all_texts_are_counted_before_there_is_work(tiny_llama, monkeypatch, path, body):
    from server.served import Served

    with serving(lambda: small_engine(tiny_llama, max_rows=2), max_waiting=3) as door:
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(Served, name, None)
        status, answer = door.post(path, body)
    message = "6 texts in one request; there is room for 5"
    assert (status, answer["error"]["message"]) == (400, message)


def test_more_tokens_of_prompts_than_there_is_room_for_are_429(tiny_llama):
    """They count until their text begins."""
    gate = threading.Event()
    prompt = {"prompt": [1] * 10, "max_tokens": 3}

    def make():
        return held_engine(tiny_llama, gate)

    with serving(make, max_waiting_tokens=25) as door, ThreadPoolExecutor(2) as pool:
        first = [pool.submit(door.post, PATH, prompt) for _ in range(2)]
        while len(door.thread.calls) < 2:
            pass
        assert door.post(PATH, prompt) == (429, full(20, "tokens of prompts"))
        assert door.post(PATH, prompt | {"stream": True})[0] == 429
        gate.set()
        assert [answer.result()[0] for answer in first] == [200, 200]
        with door.send("POST", PATH, ENDLESS | {"prompt": [1] * 20}) as answer:
            answer.readline()  # it has begun
            assert door.post(PATH, {"prompt": [1] * 25, "max_tokens": 1})[0] == 200
    assert door.thread.waiting_tokens == door.thread.unfinished == 0


def test_what_never_fits_is_400(tiny_llama):
    with serving(
        lambda: small_engine(tiny_llama, max_rows=2), max_waiting=1, max_waiting_tokens=9
    ) as door:
        status, found = door.post(PATH, {"n": 4})
        assert (status, found["error"]["message"]) == (
            400,
            "4 texts in one request; there is room for 3",
        )
        status, found = door.post(PATH, {"prompt": [1] * 10})
        assert (status, found["error"]["message"]) == (
            400,
            "10 tokens of prompts in one request; there is room for 9",
        )


def test_nothing_is_encoded_for_a_full_queue(tiny_llama, monkeypatch):
    with serving(lambda: small_engine(tiny_llama, max_rows=1), max_waiting=0) as door:
        with door.send("POST", PATH, ENDLESS):
            while not door.thread.calls:
                pass
            monkeypatch.setattr(type(small_encoding()), "encode", None)
            assert door.post(PATH, {"prompt": "x"}) == (429, full(1, "texts"))


def test_a_request_needs_room_for_one_text_if_nothing_is_said(tiny_llama):
    talk = {"messages": [{"role": "user", "content": "cat"}]}
    with serving(lambda: small_engine(tiny_llama, max_rows=1), max_waiting=0) as door:
        for path, body in ((PATH, {}), ("/v1/chat/completions", talk)):
            assert door.post(path, body | {"max_tokens": 1})[0] == 200


@pytest.mark.parametrize("end", ["over", "cancelled", "refused"])
def test_room_is_given_back_however_a_call_ends(tiny_llama, end):
    from server.engine_thread import QueueFull

    params = SamplingParams(max_new_tokens=10**9 if end == "cancelled" else 2, ignore_eos=True)
    prompt = [4096] if end == "refused" else [1]

    async def use(thread):
        for _ in range(3):
            task = asyncio.ensure_future(collect(thread.generate([prompt] * 2, [params] * 2)))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                thread.admit(1)
            if end == "cancelled":
                task.cancel()
            await asyncio.wait([task])
            assert (thread.unfinished, thread.waiting_tokens) == (0, 0)
            thread.admit(2, 5)
        if end == "refused":
            assert isinstance(task.exception(), UserError)

    options = {"max_waiting": 1, "max_waiting_tokens": 5}
    run_calls(lambda: small_engine(tiny_llama, max_rows=1), use, **options)


def test_a_text_that_is_over_counts_until_its_reader_is_done(tiny_llama):
    """Who does not read cannot have more and more texts made."""
    from server.engine_thread import QueueFull, Update

    params = SamplingParams(max_new_tokens=9, ignore_eos=True)

    async def use(thread):
        slow = thread.generate([[1], [2]], [params] * 2)
        parts = [await anext(slow)]
        (call,) = thread.calls
        async with asyncio.timeout(20):
            while call.left:
                await asyncio.sleep(0)
        assert thread.unfinished == 2
        with pytest.raises(QueueFull):
            thread.admit(1)
        parts += [updates async for updates in slow]
        other = await collect(thread.generate([[1], [2]], [params] * 2))
        return [tuple(Update.join([part[row] for part in parts])) for row in (0, 1)], other

    options = {"max_waiting": 0}
    found, other = run_calls(lambda: small_engine(tiny_llama, max_rows=2), use, **options)
    assert found == [other[0], other[1]]
    assert found == results_of(small_engine(tiny_llama), [[1], [2]], [params] * 2)


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
    what = f"{texts} texts with {count} log-probabilities for each token"
    error = {"message": f"max_tokens is {most + 1}; for {what} it may be {most}", "code": None}
    error |= {"type": "invalid_request_error", "param": "max_tokens"}
    with serving(lambda: small_engine(tiny_llama)) as door:
        body = body | {"max_tokens": most + 1}
        with door.send("POST", PATH, body | {"stream": True}) as answer:
            assert answer.status == 400
        assert door.post(PATH, body) == (400, {"error": error})
        with door.send("POST", PATH, ENDLESS | body | {"max_tokens": most}) as answer:
            assert answer.status == 200
        if "prompt" not in body:
            talk = {"messages": [{"role": "user", "content": "cat"}], "max_tokens": most + 1}
            talk |= {"n": texts, "logprobs": count > 0, "top_logprobs": count}
            assert door.post("/v1/chat/completions", talk) == (400, {"error": error})

"""Clients that leave, over a real socket: what they held is free, and other texts go on."""

import threading

import pytest
from serving import ENDLESS, connect, is_free, request_of, serving, small_engine, until

STREAM = {"ignore_eos": True}
CHAT = STREAM | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18}
RESPONSE = STREAM | {"input": "x", "max_output_tokens": 2**18}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
TEXT, REPLY, RESPONDED = PATHS


def settle(client) -> None:
    for _ in range(20):
        client.get("/health")


@pytest.mark.parametrize(
    "path, state, stream",
    [
        *((TEXT, "decoding", False), (TEXT, "queued", False), (TEXT, "queued", True)),
        *((TEXT, "prefill", False), (REPLY, "decoding", False), (REPLY, "decoding", True)),
        *((RESPONDED, "decoding", False), (RESPONDED, "decoding", True)),
    ],
)
def test_a_client_that_leaves_frees_what_it_held(tiny_llama, path, state, stream):
    gate = threading.Event()
    gate.set()
    victims, steps = [], []  # steps: while the request of the client that left is unfinished

    def make():
        size = 1 if state == "queued" else 4
        engine = small_engine(tiny_llama, max_num_seqs=size, max_num_batched_tokens=8)
        step = engine.step

        def gated():
            assert gate.wait(60)
            if any(victim.finish_reason is None for victim in victims):
                steps.append(1)
            return step()

        engine.step = gated
        return engine

    with serving(make) as client:
        scheduler = client.thread.engine.scheduler
        other = connect(client, request_of("/v1/completions", ENDLESS | {"stream": True}))
        until(lambda: scheduler.running and scheduler.running[0].output)
        if state == "prefill":
            gate.clear()  # one step may be under way
        long = {"prompt": "word " * 60} if state == "prefill" else {}
        connection = connect(client, request_of(path, PATHS[path] | {"stream": stream} | long))
        if state == "queued":
            until(lambda: len(scheduler.waiting) == 1)
        elif state == "decoding":
            until(lambda: len(scheduler.running) == 2 and scheduler.running[1].output)
        else:
            until(lambda: len(client.thread.generations) == 2)
            gate.set()
            until(lambda: len(scheduler.running) == 2)
        victim = scheduler.waiting[0] if state == "queued" else scheduler.running[-1]
        victims.append(victim)
        connection.close()
        settle(client)
        assert len(client.thread.generations) == 1
        before = len(steps)
        until(lambda: victim.finish_reason)
        assert len(steps) <= before + 2
        assert victim.finish_reason == "abort" and not victim.pages
        assert len(scheduler.running) == 1 and not scheduler.waiting
        other.close()
        until(lambda: is_free(client))


def test_a_client_is_read_on_while_it_waits_whatever_it_says(tiny_llama):
    """So its end is seen at once; one that says more than a megabyte is cut off."""
    with serving(lambda: small_engine(tiny_llama)) as client:
        for size, is_cut in ((2**20, False), (2**20 + 1, True)):
            connection = connect(client, request_of(TEXT, ENDLESS))
            until(lambda: client.thread.generations)
            connection.sendall(b"x" * size)
            if not is_cut:
                settle(client)
                assert client.thread.generations
                connection.close()
            until(lambda: is_free(client))


def test_many_requests_at_once_are_answered_one_after_the_other(client):
    """What is answered does not count any more, however much it is in all."""
    request = request_of(TEXT, {"prompt": "x", "max_tokens": 0, "user": "x" * 10_000})
    with connect(client, b"") as connection:
        for _ in range(60):  # 1.2 million bytes
            connection.sendall(request + request)
            data = b""
            while data.count(b" 200 OK") < 2 or not data.endswith(b"}"):
                data += connection.recv(2**16) or pytest.fail(data)

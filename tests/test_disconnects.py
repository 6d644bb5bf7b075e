"""Clients that leave, over a real socket: what they held is free, and other texts go on."""

import asyncio
import json
import socket
import threading
import time

import pytest
from serving import ENDLESS, connect, is_free, request_of, serving, small_engine, until

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18, "ignore_eos": True}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT}


def settle(door) -> None:
    """Let the event loop see what has come before: it answers these, one after the other."""
    for _ in range(20):
        door.get("/health")


def check_noticed(door) -> None:
    """A client that leaves is noticed at all, however long his text would be."""
    client = connect(door, request_of("/v1/completions", ENDLESS))
    until(lambda: door.thread.calls)
    client.close()
    settle(door)
    assert not door.thread.calls
    until(lambda: is_free(door))


class Gate:
    """An engine whose steps are let through, or counted."""

    def __init__(self, engine):
        self.engine = engine
        self.open = threading.Event()
        self.open.set()
        self.steps = 0
        self.gone = None  # steps when the watched requests were no more
        step = engine.step

        def gated():
            assert self.open.wait(60)
            self.steps += 1
            return step()

        engine.step = gated


LEFT_BEFORE = [("decoding", False), ("queued", False), ("queued", True), ("prefill", False)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("state, stream", LEFT_BEFORE)
def test_a_client_that_leaves_frees_what_it_held(tiny_llama, path, state, stream):
    check_leaving(tiny_llama, path, state, stream)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("state", ["decoding", "prefill"])
def test_still_a_stream_that_is_left_frees_what_it_held(tiny_llama, path, state):
    check_leaving(tiny_llama, path, state, True)


def check_leaving(tiny_llama, path, state, stream) -> None:
    """What a client held is free within two steps; the text beside it goes on."""
    gates = []

    def make():
        engine = small_engine(tiny_llama, max_rows=1 if state == "queued" else 4, budget=8)
        gates.append(Gate(engine))
        return engine

    long = {"prompt": "word " * 60} if "prompt" in PATHS[path] else {}
    if not long:
        long = {"messages": [{"role": "user", "content": "word " * 50}]}
    with serving(make) as door:
        (gate,) = gates
        scheduler = door.thread.engine.scheduler
        other = connect(door, request_of("/v1/completions", ENDLESS | {"stream": True}))
        until(lambda: scheduler.running and scheduler.running[0].output)
        if state == "prefill":
            gate.open.clear()  # one step may be under way
        body = PATHS[path] | {"stream": stream} | (long if state == "prefill" else {})
        client = connect(door, request_of(path, body))
        if state == "queued":
            until(lambda: len(scheduler.waiting) == 1)
        elif state == "decoding":
            until(lambda: len(scheduler.running) == 2 and scheduler.running[1].output)
        else:
            until(lambda: len(door.thread.calls) == 2)
            gate.open.set()
            until(lambda: len(scheduler.running) == 2)
        victim = (list(scheduler.waiting) + scheduler.running)[0 if state == "queued" else -1]
        client.close()
        settle(door)
        assert len(door.thread.calls) == 1
        steps = gate.steps
        until(lambda: victim.finish_reason)
        assert gate.steps <= steps + 2
        assert victim.finish_reason == "abort" and not victim.pages
        assert len(scheduler.running) == 1 and not scheduler.waiting
        other.close()
        until(lambda: is_free(door))


def test_still_a_client_that_never_reads_stops_nobody(tiny_llama):
    """Its events fill the buffers of the socket; then they wait, joined into one."""
    with serving(lambda: small_engine(tiny_llama)) as door:
        body = ENDLESS | {"stream": True, "max_tokens": 3000, "n": 4}
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", door.port))
        client.sendall(request_of("/v1/completions", body))
        until(lambda: door.thread.calls)
        for _ in range(3):
            assert door.post("/v1/completions", {"prompt": "Tom", "max_tokens": 5})[0] == 200
        client.close()
        until(lambda: is_free(door))


def test_200_clients_of_which_some_vanish(tiny_llama):
    """The others have the texts they have alone, and afterwards nothing is held."""
    body = {"prompt": "Tom and", "max_tokens": 12}

    with serving(lambda: small_engine(tiny_llama, max_rows=16, num_pages=24)) as door:
        check_noticed(door)
        alone = {
            seed: door.post("/v1/completions", body | {"seed": seed})[1]["choices"]
            for seed in range(8)
        }

        async def vanish(row):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            stream = row % 20 == 0
            writer.write(request_of("/v1/completions", ENDLESS | {"stream": stream}))
            if stream:
                await reader.readline()
            else:
                await writer.drain()
            writer.transport.abort()

        async def stay(seed):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            data = request_of("/v1/completions", body | {"seed": seed})
            writer.write(data.replace(b"localhost", b"localhost\r\nConnection: close"))
            answer = await reader.read()
            writer.close()
            return json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"] == alone[seed]

        async def main():
            tasks = [vanish(row) if row % 10 == 0 else stay(row % 8) for row in range(200)]
            found = await asyncio.wait_for(asyncio.gather(*tasks), 100)
            assert [same for same in found if same is not None] == [True] * 180

        asyncio.run(main())
        until(lambda: is_free(door))


def test_a_client_that_says_more_and_leaves_frees_what_it_held(tiny_llama):
    """uvicorn stops reading where bytes come after a body, and does not see the end by itself."""
    with serving(lambda: small_engine(tiny_llama)) as door:
        check_noticed(door)
        client = connect(door, request_of("/v1/completions", ENDLESS))
        until(lambda: door.thread.engine.scheduler.running)
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        time.sleep(0.1)  # it comes in a segment of its own
        client.close()
        until(lambda: is_free(door))

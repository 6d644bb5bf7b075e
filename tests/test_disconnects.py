"""Clients that leave, over a real socket: what they held is free, and other texts go on."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import serving, small_engine

ENDLESS = {"prompt": "Tom", "max_tokens": 2**18, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18, "ignore_eos": True}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT}


def request_of(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(door, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", door.port), timeout=60)
    client.sendall(data)
    return client


def until(condition) -> None:
    """Wait for what happens in other threads; that long is for ever."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


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


def is_free(door) -> bool:
    scheduler = door.thread.engine.scheduler
    idle = not scheduler.running and not scheduler.waiting and not door.thread.calls
    return idle and scheduler.pool.available == scheduler.pool.num_pages


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
            writer.write(data.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            answer = await reader.read()
            writer.close()
            return json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"] == alone[seed]

        async def main():
            tasks = [vanish(row) if row % 10 == 0 else stay(row % 8) for row in range(200)]
            found = await asyncio.wait_for(asyncio.gather(*tasks), 100)
            assert [same for same in found if same is not None] == [True] * 180

        asyncio.run(main())
        until(lambda: is_free(door))


def test_still_hostile_bytes_leave_nothing(tiny_llama):
    good = request_of("/v1/completions", ENDLESS | {"stream": True})
    pieces = [b"", b"GET", good[:40], good[:-3], b"\x00" * 5000, b"POST / HTTP/9.9\r\n\r\n", good]
    with serving(lambda: small_engine(tiny_llama)) as door:

        def attack(row):
            client = connect(door, pieces[row % len(pieces)])
            if row % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(attack, range(70)))
        assert door.post("/v1/completions", {"max_tokens": 2})[0] == 200
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


ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = request_of("/v1/completions", ENDLESS)


@pytest.fixture
def limit(monkeypatch) -> float:
    """Seconds that a head may take, or the next piece of a body."""
    import serve

    monkeypatch.setattr(serve.Protocol, "seconds", 0.5)
    return 0.5


def read_to(client: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = client.recv(2**16)
        assert piece, data
        data += piece
    return data


def check_cut_off(door, client: socket.socket, since: float, limit: float) -> None:
    """The connection is closed when the time is over, and not before, and nothing is held."""
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""
    assert limit - 0.02 < time.monotonic() - since < 10
    until(lambda: not door.server.server_state.connections)


@pytest.mark.parametrize("data", [b"", ASK[:-2], BODY[: BODY.index(b"{")], BODY[:-1]])
def test_a_client_without_a_whole_request_is_cut_off(tiny_llama, limit, data):
    with serving(lambda: small_engine(tiny_llama)) as door:
        began = time.monotonic()
        with connect(door, data) as client:
            check_cut_off(door, client, began, limit)


def test_so_is_one_whose_second_head_does_not_come(tiny_llama, limit):
    """Its time begins with its first byte; until then uvicorn's own for idle connections runs."""
    with serving(lambda: small_engine(tiny_llama)) as door, connect(door, ASK) as client:
        read_to(client, b"\r\n\r\n")
        time.sleep(1.2 * limit)
        began = time.monotonic()
        client.sendall(ASK[:-2])
        check_cut_off(door, client, began, limit)


def test_so_is_one_whose_second_body_does_not_come(tiny_llama, limit):
    """Though its beginning came with the first request, and nothing came after the answer."""
    with serving(lambda: small_engine(tiny_llama)) as door:
        began = time.monotonic()
        with connect(door, ASK + BODY[:-1]) as client:
            read_to(client, b"\r\n\r\n")
            check_cut_off(door, client, began, limit)


@pytest.mark.parametrize("before", [b"", ASK])
def test_a_head_in_drips_has_no_more_time(tiny_llama, limit, before):
    with serving(lambda: small_engine(tiny_llama)) as door, connect(door, before) as client:
        if before:
            read_to(client, b"\r\n\r\n")

        def drip():
            with contextlib.suppress(OSError):
                for byte in ASK[:-2] + 5000 * b"x":
                    client.sendall(bytes([byte]))
                    time.sleep(0.01)

        began = time.monotonic()
        dripping = threading.Thread(target=drip)
        dripping.start()
        check_cut_off(door, client, began, limit)
        dripping.join()


def test_of_a_client_that_leaves_no_time_runs_on(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as door:
        client = connect(door, ASK[:-2])
        until(lambda: door.server.server_state.connections)
        (protocol,) = door.server.server_state.connections
        client.close()
        until(lambda: protocol.timer.cancelled())


def test_a_body_and_an_answer_may_take_longer(tiny_llama, limit):
    """Also those of a second request, and of one that waits behind another."""

    def make():
        engine = small_engine(tiny_llama)
        step = engine.step

        def slow_step():
            time.sleep(limit / 5)
            return step()

        engine.step = slow_step
        return engine

    text = {"prompt": "Tom", "max_tokens": 6, "ignore_eos": True}
    data = request_of("/v1/completions", text | {"stream": True})
    body = data.index(b"{")
    with serving(make) as door, connect(door, b"") as client:
        for _ in range(2):
            client.sendall(data[:9])
            time.sleep(limit / 20)
            client.sendall(data[9:body])
            for at in range(body, len(data), 3):
                time.sleep(limit / 20)
                client.sendall(data[at : at + 3])
            assert b"data: [DONE]" in read_to(client, b"\r\n0\r\n\r\n")
        client.sendall(2 * request_of("/v1/completions", text) + ASK[:-2])
        for _ in range(2):
            assert b"200 OK" in read_to(client, b"}}")
        client.sendall(ASK[-2:])
        assert b"200 OK" in read_to(client, b"\r\n\r\n")

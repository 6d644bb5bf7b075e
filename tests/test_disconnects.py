"""Clients that leave, do not read, or do not send the whole of a request."""

import contextlib
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import h11
import pytest
from serving import (
    ENDLESS,
    PATH,
    Script,
    connect,
    in_turns,
    is_free,
    request_of,
    serving,
    small_engine,
    until,
)
from uvicorn.protocols.http.h11_impl import H11Protocol

import serve

STREAM = {"ignore_eos": True}
CHAT = STREAM | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18}
RESPONSE = STREAM | {"input": "x", "max_output_tokens": 2**18}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
TEXT, REPLY, RESPONDED = PATHS


def settle(client) -> None:
    """Let the event loop see what has come before: it answers these, one after the other."""
    for _ in range(20):
        client.get("/health")


def take_step(engine, turn) -> None:
    steps = engine.steps
    turn.release()
    until(lambda: engine.steps > steps)


@pytest.mark.parametrize(
    "path, state, stream",
    [
        *((TEXT, "decoding", False), (TEXT, "queued", False), (TEXT, "queued", True)),
        *((TEXT, "prefill", False), (REPLY, "decoding", False), (REPLY, "decoding", True)),
        *((RESPONDED, "decoding", False), (RESPONDED, "decoding", True)),
    ],
)
def test_a_client_that_leaves_frees_what_it_held(tiny_llama, path, state, stream):
    """Within two steps; the text beside it goes on."""
    turn = threading.Semaphore(0)
    size = 1 if state == "queued" else 4

    def make():
        engine = small_engine(tiny_llama, max_num_seqs=size, max_num_batched_tokens=8)
        return in_turns(engine, turn)

    def step_until(condition):
        while not condition():
            take_step(client.thread.engine, turn)

    with serving(make) as client:
        scheduler = client.thread.engine.scheduler
        other = connect(client, request_of(TEXT, ENDLESS | {"stream": True}))
        until(lambda: client.thread.generations)
        step_until(lambda: scheduler.running and scheduler.running[0].output)
        long = {"prompt": "word " * 60} if state == "prefill" else {}
        connection = connect(client, request_of(path, PATHS[path] | {"stream": stream} | long))
        until(lambda: len(client.thread.generations) == 2)
        step_until(lambda: len(scheduler.running + list(scheduler.waiting)) == 2)
        if state != "queued":
            step_until(lambda: len(scheduler.running) == 2)
        if state == "decoding":
            step_until(lambda: scheduler.running[1].output)
        victim = [*scheduler.running, *scheduler.waiting][-1]
        connection.close()
        settle(client)
        assert len(client.thread.generations) == 1
        turn.release(2)
        until(lambda: victim.finish_reason)
        assert victim.finish_reason == "abort" and not victim.pages
        assert len(scheduler.running) == 1 and not scheduler.waiting
        other.close()
        turn.release(10**6)
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


STREAMED = ENDLESS | {"stream": True}
LONG = {"prompt": [" uncomfortable" * 60] * 8, "n": 120, "max_tokens": 0, "echo": True}  # 0.9 MB
ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = request_of(PATH, ENDLESS)


@contextlib.contextmanager
def not_reading(client, body: dict):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", client.port))
        protocol = protocol_of(client)
        until(lambda: protocol.transport)
        sending = protocol.transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(request_of(PATH, body))
        until(lambda: protocol.transport.get_write_buffer_size())
        yield connection


def protocol_of(client):
    until(lambda: client.server.server_state.connections)
    (protocol,) = client.server.server_state.connections
    return protocol


BODIES = [LONG, LONG | {"stream": True}, STREAMED]


@pytest.mark.parametrize("body", BODIES, ids=["whole", "echo", "endless"])
def test_a_client_that_does_not_read_is_cut_off(tiny_llama, monkeypatch, body):
    monkeypatch.setattr(serve.Protocol, "seconds", 1)
    most = 1 if body is STREAMED else 960
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=1), max_waiting=most - 1) as client:
        with not_reading(client, body):
            assert client.thread.num_open_requests == most
            assert client.post(PATH, {"max_tokens": 1})[0] == 429
            until(lambda: not client.thread.generations)
            until(lambda: not client.server.server_state.connections)
            assert client.post(PATH, {"max_tokens": 1})[0] == 200


@pytest.mark.parametrize("body", BODIES[:2], ids=["whole", "echo"])
def test_a_client_that_reads_slowly_is_not(tiny_llama, monkeypatch, body):
    waits = []
    pause = serve.Protocol.pause_writing

    def pausing(protocol):
        pause(protocol)
        waits.append(protocol.send_timer)

    monkeypatch.setattr(serve.Protocol, "pause_writing", pausing)
    with (
        serving(lambda: small_engine(tiny_llama)) as client,
        not_reading(client, body) as connection,
    ):
        data = b""
        while not data.endswith((b"}}", b"\r\n0\r\n\r\n")):
            data += connection.recv(2**15)
        data = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)  # between chunks
        assert data.count(b" uncomfortable") == 960 * 60
        until(lambda: not client.thread.generations)
        until(lambda: all(wait.cancelled() for wait in waits))
        assert len(waits) > 1


def test_a_half_request_does_not_hold_a_server_that_ends_and_h11_reads_it(tmp_path):
    with Script(tmp_path) as server:
        client = server.client()
        data = request_of(PATH, STREAMED)
        with connect(client, data[:-1]), connect(client, data[:9]):
            assert client.get("/health") == (200, None)  # so both have been read
            server.signal(signal.SIGTERM)
            assert server.end() == (0, "")
    state = SimpleNamespace(served=SimpleNamespace(monitor=None))
    config = serve.Server(SimpleNamespace(state=state), None, 1).config
    config.load()
    assert config.http_protocol_class is serve.Protocol and issubclass(serve.Protocol, H11Protocol)


def read_to(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = connection.recv(2**16)
        assert piece, data
        data += piece
    return data


LIMIT = 0.5  # seconds that a head may take, or the next piece of a body


@pytest.mark.parametrize(
    "sent, more",  # what is sent, then waited for an answer of, and what comes after that
    [
        *((b"", data) for data in (b"", ASK[:-2], BODY[: BODY.index(b"{")], BODY[:-1])),
        # The time of a second head begins with its first byte; until then uvicorn's own for idle
        # connections runs.
        (ASK, ASK[:-2]),
        # Though the beginning of a body came with the first request, and nothing came after.
        (ASK + BODY[:-1], b""),
        # The bytes of a first body that ends after its answer end uvicorn's own time.
        (ASK[:-2] + b"Content-Length: 5\r\n\r\n", b"12345"),
    ],
)
def test_a_client_without_a_whole_request_is_cut_off(tiny_llama, monkeypatch, sent, more):
    monkeypatch.setattr(serve.Protocol, "seconds", LIMIT)
    with serving(lambda: small_engine(tiny_llama)) as client:
        began = time.monotonic()
        with connect(client, sent) as connection:
            if sent:
                read_to(connection, b"\r\n\r\n")
            if sent == ASK:
                time.sleep(1.2 * LIMIT)
                began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                connection.sendall(more)
                assert connection.recv(100) == b""
            assert LIMIT - 0.02 < time.monotonic() - began  # and not before
            until(lambda: not client.server.server_state.connections)


def test_a_head_in_drips_has_no_more_time(tiny_llama, monkeypatch):
    monkeypatch.setattr(serve.Protocol, "seconds", LIMIT)
    with serving(lambda: small_engine(tiny_llama)) as client, connect(client, ASK) as connection:
        read_to(connection, b"\r\n\r\n")
        with pytest.raises(OSError):
            for byte in ASK[:-2] + 5000 * b"x":
                connection.sendall(bytes([byte]))
                time.sleep(0.01)


def test_a_body_and_an_answer_may_take_longer(tiny_llama):
    """Each piece of a body renews the time, and none runs during an answer."""
    gate = threading.Semaphore(0)
    text = {"prompt": "Tom", "max_tokens": 6, "ignore_eos": True}
    data = request_of(PATH, text | {"stream": True})
    body = data.index(b"{")
    with (
        serving(lambda: in_turns(small_engine(tiny_llama), gate)) as client,
        connect(client, b"") as connection,
    ):
        protocol = protocol_of(client)
        for _ in range(2):
            connection.sendall(data[:body])
            until(lambda: protocol.timer and protocol.conn.their_state is h11.SEND_BODY)
            for at in range(body, len(data), 20):
                timer = protocol.timer
                connection.sendall(data[at : at + 20])
                until(timer.cancelled)
            until(lambda: client.thread.generations)
            assert protocol.timer is None
            gate.release(10)
            assert b"data: [DONE]" in read_to(connection, b"\r\n0\r\n\r\n")
        gate.release(20)
        # So it is for a request that waits behind another.
        connection.sendall(2 * request_of(PATH, text) + ASK[:-2])
        for _ in range(2):
            assert b"200 OK" in read_to(connection, b"}}")
        connection.sendall(ASK[-2:])
        assert b"200 OK" in read_to(connection, b"\r\n\r\n")

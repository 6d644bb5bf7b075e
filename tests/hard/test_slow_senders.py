"""Clients that do not send a whole request in time, or send nonsense, over a real socket."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import h11
import pytest
from serving import ENDLESS, connect, is_free, request_of, serving, small_engine, until


def test_still_hostile_bytes_leave_nothing(tiny_llama):
    good = request_of("/v1/completions", ENDLESS | {"stream": True})
    pieces = [b"", b"GET", good[:40], good[:-3], b"\x00" * 5000, b"POST / HTTP/9.9\r\n\r\n", good]
    with serving(lambda: small_engine(tiny_llama)) as client:

        def attack(row):
            connection = connect(client, pieces[row % len(pieces)])
            if row % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(attack, range(70)))
        assert client.post("/v1/completions", {"max_tokens": 2})[0] == 200
        until(lambda: is_free(client))


ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = request_of("/v1/completions", ENDLESS)


@pytest.fixture
def limit(monkeypatch) -> float:
    """Seconds that a head may take, or the next piece of a body."""
    monkeypatch.setattr("serve.Protocol.seconds", 0.5)
    return 0.5


def read_to(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = connection.recv(2**16)
        assert piece, data
        data += piece
    return data


def check_cut_off(client, connection: socket.socket, since: float, limit: float) -> None:
    """The connection is closed when the time is over, and not before, and nothing is held."""
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(100) == b""
    assert limit - 0.02 < time.monotonic() - since
    until(lambda: not client.server.server_state.connections)


@pytest.mark.parametrize("data", [b"", ASK[:-2], BODY[: BODY.index(b"{")], BODY[:-1]])
def test_a_client_without_a_whole_request_is_cut_off(tiny_llama, limit, data):
    with serving(lambda: small_engine(tiny_llama)) as client:
        began = time.monotonic()
        with connect(client, data) as connection:
            check_cut_off(client, connection, began, limit)


def test_so_is_one_whose_second_head_does_not_come(tiny_llama, limit):
    """Its time begins with its first byte; until then uvicorn's own for idle connections runs."""
    with serving(lambda: small_engine(tiny_llama)) as client, connect(client, ASK) as connection:
        read_to(connection, b"\r\n\r\n")
        time.sleep(1.2 * limit)
        began = time.monotonic()
        connection.sendall(ASK[:-2])
        check_cut_off(client, connection, began, limit)


def test_so_is_one_whose_second_body_does_not_come(tiny_llama, limit):
    """Though its beginning came with the first request, and nothing came after the answer."""
    with serving(lambda: small_engine(tiny_llama)) as client:
        began = time.monotonic()
        with connect(client, ASK + BODY[:-1]) as connection:
            read_to(connection, b"\r\n\r\n")
            check_cut_off(client, connection, began, limit)


def test_so_is_one_whose_first_body_ends_after_its_answer(tiny_llama, limit):
    """These bytes end uvicorn's own time for idle connections, and nothing begins it again."""
    with serving(lambda: small_engine(tiny_llama)) as client:
        began = time.monotonic()
        with connect(client, ASK[:-2] + b"Content-Length: 5\r\n\r\n") as connection:
            read_to(connection, b"\r\n\r\n")
            connection.sendall(b"12345")
            check_cut_off(client, connection, began, limit)


@pytest.mark.parametrize("before", [b"", ASK])
def test_a_head_in_drips_has_no_more_time(tiny_llama, limit, before):
    with serving(lambda: small_engine(tiny_llama)) as client, connect(client, before) as connection:
        if before:
            read_to(connection, b"\r\n\r\n")

        def drip():
            with contextlib.suppress(OSError):
                for byte in ASK[:-2] + 5000 * b"x":
                    connection.sendall(bytes([byte]))
                    time.sleep(0.01)

        began = time.monotonic()
        dripping = threading.Thread(target=drip)
        dripping.start()
        check_cut_off(client, connection, began, limit)
        dripping.join()


def test_of_a_client_that_leaves_no_time_runs_on(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        connection = connect(client, ASK[:-2])
        until(lambda: client.server.server_state.connections)
        (protocol,) = client.server.server_state.connections
        connection.close()
        until(lambda: protocol.timer.cancelled())


def test_a_body_and_an_answer_may_take_longer(tiny_llama):
    """Each piece of a body renews the time, and none runs during an answer.

    So it is for a second request, too, and for one that waits behind another.
    """
    gate = threading.Semaphore(0)

    def make():
        engine = small_engine(tiny_llama)
        step = engine.step
        engine.step = lambda: gate.acquire(timeout=60) and step()
        return engine

    text = {"prompt": "Tom", "max_tokens": 6, "ignore_eos": True}
    data = request_of("/v1/completions", text | {"stream": True})
    body = data.index(b"{")
    with serving(make) as client, connect(client, b"") as connection:
        until(lambda: client.server.server_state.connections)
        (protocol,) = client.server.server_state.connections
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
        connection.sendall(2 * request_of("/v1/completions", text) + ASK[:-2])
        for _ in range(2):
            assert b"200 OK" in read_to(connection, b"}}")
        connection.sendall(ASK[-2:])
        assert b"200 OK" in read_to(connection, b"\r\n\r\n")

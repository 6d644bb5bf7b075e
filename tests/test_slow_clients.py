"""Clients that do not read, or do not send the whole of a request."""

import contextlib
import re
import signal
import socket
from types import SimpleNamespace

import pytest
from serving import ENDLESS, PATH, Script, connect, request_of, serving, small_engine, until
from uvicorn.protocols.http.h11_impl import H11Protocol

import serve

STREAM = ENDLESS | {"stream": True}
LONG = {"prompt": [" uncomfortable" * 60] * 8, "n": 120, "max_tokens": 0, "echo": True}  # 0.9 MB


@contextlib.contextmanager
def not_reading(client, body: dict):
    """A client whose answer fills all buffers between it and the server, which it does not read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", client.port))
        until(lambda: client.server.server_state.connections)
        (protocol,) = client.server.server_state.connections
        until(lambda: protocol.transport)
        sending = protocol.transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(request_of(PATH, body))
        until(lambda: protocol.transport.get_write_buffer_size())
        yield connection


BODIES = [LONG, LONG | {"stream": True}, STREAM]


@pytest.mark.parametrize("body", BODIES, ids=["whole", "echo", "endless"])
def test_a_client_that_does_not_read_is_cut_off(tiny_llama, monkeypatch, body):
    """Its texts count until then."""
    monkeypatch.setattr(serve.Protocol, "seconds", 1)
    most = 1 if body is STREAM else 960
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=1), max_waiting=most - 1) as client:
        with not_reading(client, body):
            assert client.thread.num_open_requests == most
            assert client.post(PATH, {"max_tokens": 1})[0] == 429
            until(lambda: not client.thread.generations)
            until(lambda: not client.server.server_state.connections)
            assert client.post(PATH, {"max_tokens": 1})[0] == 200


@pytest.mark.parametrize("body", BODIES[:2], ids=["whole", "echo"])
def test_a_client_that_reads_slowly_is_not(tiny_llama, monkeypatch, body):
    """Each piece of its answer has a time of its own, which ends when the client has taken it."""
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


def test_a_half_request_does_not_hold_it(tmp_path):
    with Script(tmp_path) as server:
        client = server.client()
        data = request_of(PATH, STREAM)
        with connect(client, data[:-1]), connect(client, data[:9]):
            assert client.get("/health") == (200, None)  # so both have been read
            server.signal(signal.SIGTERM)
            assert server.end() == (0, "")


def test_a_server_reads_with_h11_whatever_is_installed():
    state = SimpleNamespace(served=SimpleNamespace(monitor=None))
    config = serve.Server(SimpleNamespace(state=state), None, 1).config
    config.load()
    assert config.http_protocol_class is serve.Protocol and issubclass(serve.Protocol, H11Protocol)

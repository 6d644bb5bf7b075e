"""How a server begins and ends: 503 while it loads, and what signals do."""

import contextlib
import json
import os
import signal
import socket

import pytest
from serving import ENDLESS, PATH, Client, Script, until

import serve

STREAM = ENDLESS | {"stream": True}


@pytest.fixture
def start(tmp_path):
    return lambda *options: Script(tmp_path, "--drain-seconds", 60, *options)


@pytest.fixture
def slow(start, monkeypatch):
    """A server that waits before it loads its model, a Client to it, and what lets it go on."""
    held, let_go = os.pipe()
    load = serve.load_engine

    def load_later(*args):
        os.read(held, 1)
        return load(*args)

    monkeypatch.setattr(serve, "load_engine", load_later)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = Client(port, None, None)
    with start("--port", port) as server:
        until(lambda: lets_in(client) or not server.process.is_alive())
        yield server, client, lambda: os.write(let_go, b"x")


def lets_in(client) -> bool:
    with contextlib.suppress(OSError):
        return bool(client.get("/health"))
    return False


def rest_of(answer) -> list[dict]:
    """The events of a stream that are still to come; after them it ends as it should."""
    *lines, done, empty = answer.read().split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    return [json.loads(line.strip().removeprefix(b"data: ")) for line in lines]


def test_after_the_limit_texts_end_with_an_error(start):
    with start("--drain-seconds", 0.5) as server:
        client = server.client()
        with client.send("POST", PATH, STREAM) as answer:
            answer.readline()
            server.signal(signal.SIGTERM)
            error = rest_of(answer)[-1]["error"]
            assert error["type"] == "server_error" and "shutting down" in error["message"]
        assert server.end()[0] == 0


def test_a_second_signal_ends_it_at_once(start):
    with start() as server:
        client = server.client()
        with client.send("POST", PATH, STREAM) as answer:
            answer.readline()
            server.signal(signal.SIGTERM)
            until(lambda: not lets_in(client))
            assert answer.readline() and server.process.is_alive()
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 128 + signal.SIGTERM


def test_503_while_the_model_is_loaded_and_texts_end_after_a_signal(slow):
    server, client, let_go = slow
    talk = {"messages": [{"role": "user", "content": "cat"}]}
    assert client.get("/health") == (503, None)
    for answer in (
        client.get("/v1/models"),
        client.post(PATH, {}),
        client.post("/v1/chat/completions", talk),
    ):
        assert (answer[0], answer[1]["error"]["type"]) == (503, "server_error")
    let_go()
    assert server.client().port == client.port
    assert client.get("/health") == (200, None)
    with client.send("POST", PATH, STREAM | {"max_tokens": 60}) as answer:
        answer.readline()
        server.signal(signal.SIGTERM)
        assert rest_of(answer)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end() == (0, "")
    with pytest.raises(ConnectionRefusedError):
        client.get("/health")


def test_a_signal_while_the_model_is_loaded(slow):
    server, _, _ = slow
    server.signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM
    assert server.written(server.out) == ""

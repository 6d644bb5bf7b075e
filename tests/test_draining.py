"""How a server begins and ends: 503 while it loads, and what signals do."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import ROOT
from serving import Door
from test_disconnects import connect, request_of

PATH = "/v1/completions"
ENDLESS = {"prompt": "Tom", "max_tokens": 2**18, "ignore_eos": True, "stream": True}
SLOW = """
import os
import serve

load = serve.load_engine

def slow(*args):
    os.read(0, 1)  # from the test
    return load(*args)

serve.load_engine = slow
serve.main({arguments})
"""


@contextlib.contextmanager
def start(*arguments, program=None) -> Iterator[subprocess.Popen]:
    """A process of serve.py, which is no more after the block."""
    options = ["--port", "0", "--device", "cpu", "--backend", "torch"]
    options += ["--drain-seconds", "60", *arguments]
    command = [sys.executable, "serve.py", *options]
    if program:
        command = [sys.executable, "-c", program.format(arguments=options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    threads = os.environ | {"OMP_NUM_THREADS": "1"}  # more would only wait for each other
    with subprocess.Popen(command, cwd=ROOT, text=True, env=threads, **pipes) as server:
        try:
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def start_slow() -> Iterator[tuple[subprocess.Popen, Door]]:
    """One that waits before it loads its model, as soon as it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start("--port", str(port), program=SLOW) as server:
        status = None
        while status is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request("GET", "/health")
                status = connection.getresponse().status
            except ConnectionRefusedError:
                assert server.poll() is None
                time.sleep(0.02)  # its imports need the processor
        assert status == 503
        yield server, Door(port, None, server)


def door_of(server: subprocess.Popen) -> Door:
    return Door(int(server.stdout.readline().rsplit(":", 1)[1]), None, server)


def data_of(line: bytes) -> dict:
    return json.loads(line.removeprefix(b"data: "))


def test_after_the_limit_texts_end_with_an_error():
    with start("--drain-seconds", "0.5") as server:
        door = door_of(server)
        with door.send("POST", PATH, ENDLESS) as answer:
            answer.readline()
            server.send_signal(signal.SIGTERM)
            lines = [line for line in answer.read().split(b"\n\n") if line]
        assert lines[-1] == b"data: [DONE]"
        error = {"message": "the server is shutting down", "type": "server_error"}
        assert data_of(lines[-2]) == {"error": error | {"param": None, "code": None}}
        assert server.wait(20) == 0


def test_a_second_signal_ends_it_at_once():
    with start() as server:
        door = door_of(server)
        with door.send("POST", PATH, ENDLESS) as answer:
            answer.readline()
            server.send_signal(signal.SIGTERM)
            while True:  # until nobody new is let in
                try:
                    door.get("/health")
                except OSError:
                    break
            assert answer.readline() and server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 128 + signal.SIGTERM


def test_a_half_request_does_not_hold_it():
    with start() as server:
        door = door_of(server)
        data = request_of(PATH, ENDLESS)
        with connect(door, data[:-1]), connect(door, data[:9]):
            assert door.get("/health") == (200, None)  # so both have been read
            server.send_signal(signal.SIGTERM)
            assert (server.wait(20), server.stderr.read()) == (0, "")


def test_503_while_the_model_is_loaded_and_texts_end_after_a_signal():
    with start_slow() as (server, door):
        error = {"message": "the model is being loaded", "type": "server_error"}
        refused = (503, {"error": error | {"param": None, "code": None}})
        talk = {"messages": [{"role": "user", "content": "cat"}]}
        assert door.get("/health") == (503, None)
        assert door.get("/v1/models") == door.post(PATH, {}) == refused
        assert door.post("/v1/chat/completions", talk) == refused
        server.stdin.write("\n")
        server.stdin.flush()
        assert door_of(server).port == door.port
        assert door.get("/health") == (200, None)
        with door.send("POST", PATH, ENDLESS | {"max_tokens": 60}) as answer:
            answer.readline()
            server.send_signal(signal.SIGTERM)
            lines = [line for line in answer.read().split(b"\n\n") if line]
        assert lines[-1] == b"data: [DONE]"
        assert data_of(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert (server.wait(20), server.stderr.read()) == (0, "")
        with pytest.raises(ConnectionRefusedError):
            door.get("/health")


def test_a_signal_while_the_model_is_loaded():
    with start_slow() as (server, _):
        server.send_signal(signal.SIGTERM)
        assert (server.wait(20), server.stdout.read()) == (128 + signal.SIGTERM, "")


def test_still_a_model_that_cannot_be_loaded(run_main, tmp_path):
    import serve

    code, out, err = run_main(serve.main, "--port", 0, "--model", tmp_path)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: {tmp_path}: no config.json in this directory\n")


def test_limits_below_0(run_main):
    import serve

    code, out, err = run_main(serve.main, "--port", 0, "--drain-seconds=-1")
    assert (code, out) == (2, "")
    assert err.endswith("error: drain_seconds is -1.0; it must be a number >= 0\n")

"""What hostile clients can take from a server: the event loop's time, descriptors, memory."""

import asyncio
import contextlib
import gc
import os
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from serving import (
    ENDLESS,
    PATH,
    Script,
    door_of,
    refusal,
    request_of,
    serving,
    small_encoding,
    small_engine,
    start,
    until,
)

import serve
from server.protocol import ChatRequest, CompletionRequest

STREAM = ENDLESS | {"stream": True}
MANY = 2**18  # elements, as a body of 1 MiB can have
MESSAGE = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}


def completion(**fields):
    return CompletionRequest.model_validate(fields)


def prompts(value):
    return completion(prompt=value)


def messages(value):
    return ChatRequest.model_validate({"messages": value})


def chat(content):
    return messages([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "make, value",
    [
        *((prompts, [{}] * MANY), (prompts, [[]] * MANY), (prompts, [[1]] * MANY)),
        *((prompts, [[{}] * MANY]), (prompts, ["a"] + [[]] * MANY), (prompts, [1] + [[]] * MANY)),
        (lambda value: completion(stop=value), [[]] * MANY),
        *((chat, [{}] * MANY), (chat, [PART] * MANY), (messages, [MESSAGE] * MANY)),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(make, value):
    """Within 50 ms: all streams stand still meanwhile."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(ValidationError) as refused:
            make(value)
        times.append(time.thread_time() - began)
        assert refused.value.error_count() == 1
    assert min(times) < 0.05


def test_the_longest_lists():
    """As many prompts, messages or parts as there may be; one more is refused by name."""
    most = 2**14
    for make, item in ((prompts, "a"), (prompts, [1]), (chat, PART), (messages, MESSAGE)):
        make([item] * most)
        with pytest.raises(ValidationError, match=str(most)):
            make([item] * (most + 1))
    assert completion(prompt=[1] * MANY).prompts == [[1] * MANY]


def test_garbage_is_not_looked_for_among_what_stays(tmp_path, monkeypatch):
    """A body of half a million lists would have it looked through several times."""

    def main(words, real=serve.main):
        gc.unfreeze()
        gc.set_threshold(700)
        try:
            real(words)
        finally:
            print(gc.get_freeze_count(), gc.get_threshold()[0])

    monkeypatch.setattr(serve, "main", main)
    with Script(tmp_path) as server:
        server.door()
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "")
        frozen, threshold = map(int, server.written(server.out).split()[-2:])
    assert frozen > 100_000 and threshold >= 10_000


FEW = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import serve

files = [open("serve.py") for _ in range({held})]
serve.main({arguments})
"""


@pytest.mark.parametrize("held", [0, 35])
def test_more_connections_than_descriptors(held):
    """So many are accepted as fit; the others wait until one leaves, and this is said once."""
    with start(program=FEW.replace("{held}", str(held))) as server:
        door = door_of(server)
        with door.send("POST", PATH, STREAM) as answer:
            assert answer.readline().startswith(b"data: ")
            idle = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(100)]
            began = time.monotonic()
            while time.monotonic() < began + 0.5:
                assert answer.readline()
            for connection in idle:
                connection.close()
            assert door.get("/health")[0] == 200
        server.send_signal(signal.SIGTERM)
        said = server.stderr.read()
    limit = r"the limit of open files \(ulimit -n\) allows no more\n"
    present = int(re.fullmatch(rf"note: (\d+) connections are open; {limit}", said)[1])
    assert present == 32 if held == 0 else 10 < present < 32


@pytest.mark.parametrize("limit, most", [(64, 32), (128, 64), (1024, 960), (-1, sys.maxsize)])
def test_how_many_connections_there_may_be(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    assert serve.most_connections() == most


def test_a_page_takes_no_descriptor_of_its_own(tiny_llama, monkeypatch):
    """While it is sent to a client that does not read, no file is open."""
    import anyio

    monkeypatch.setattr(anyio, "open_file", None)
    with serving(lambda: small_engine(tiny_llama)) as door:
        for path in ("/", "/player.js"):
            with door.send("GET", path) as answer:
                assert answer.status == 200 and len(answer.read()) > 1000


LONG = {"prompt": [" uncomfortable" * 60] * 8, "n": 120, "max_tokens": 0, "echo": True}  # 0.9 MB


def test_what_an_echo_may_repeat(tiny_llama, monkeypatch):
    """It is refused before there is work, or, where only tokens tell its length, any text."""

    def refused(size):
        message = f"echo would repeat {size} bytes of prompts; it may repeat 1048576"
        return 400, refusal(message, "echo")

    (word,) = small_encoding().encode(" uncomfortable")
    with serving(lambda: small_engine(tiny_llama), max_waiting=4000) as door:
        asked = LONG | {"prompt": [[word] * 60] * 11}
        assert door.post(PATH, asked | {"n": 128}) == refused(11 * 128 * 60 * 14)
        assert not door.thread.calls
        assert door.post(PATH, asked | {"n": 113})[0] == 200
        monkeypatch.setattr(type(small_encoding()), "encode", None)
        for prompt, size in (("x" * 106_000, 106_000 * 128), ("\u20ac" * 2**16, 3 * 2**16 * 128)):
            assert door.post(PATH, LONG | {"prompt": prompt, "n": 128}) == refused(size)


@contextlib.contextmanager
def not_reading(door, body: dict):
    """A client whose answer fills all buffers between it and the server, which it does not read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", door.port))
        until(lambda: door.server.server_state.connections)
        (protocol,) = door.server.server_state.connections
        until(lambda: protocol.transport)
        sending = protocol.transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(request_of(PATH, body))
        until(lambda: protocol.transport.get_write_buffer_size())
        yield client


BODIES = [LONG, LONG | {"stream": True}, STREAM]


@pytest.mark.parametrize("body", BODIES, ids=["whole", "echo", "endless"])
def test_a_client_that_does_not_read_is_cut_off(tiny_llama, monkeypatch, body):
    """Its texts count until then."""
    monkeypatch.setattr(serve.Protocol, "seconds", 1)
    most = 1 if body is STREAM else 960
    with serving(lambda: small_engine(tiny_llama, max_rows=1), max_waiting=most - 1) as door:
        began = time.monotonic()
        with not_reading(door, body):
            assert door.thread.unfinished == most
            assert door.post(PATH, {"max_tokens": 1})[0] == 429
            until(lambda: not door.thread.calls)
            assert 1 < time.monotonic() - began < 15
            until(lambda: not door.server.server_state.connections)
            assert door.post(PATH, {"max_tokens": 1})[0] == 200


@pytest.mark.parametrize("body", BODIES[:2], ids=["whole", "echo"])
def test_a_client_that_reads_slowly_is_not(tiny_llama, monkeypatch, body):
    """Though its answer takes longer than one piece of it may."""
    monkeypatch.setattr(serve.Protocol, "seconds", 1)
    with serving(lambda: small_engine(tiny_llama)) as door, not_reading(door, body) as client:
        data = b""
        began = time.monotonic()
        while not data.endswith((b"}}", b"\r\n0\r\n\r\n")):
            data += client.recv(2**15)
            time.sleep(0.006)
        assert time.monotonic() - began > serve.Protocol.seconds
        data = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)  # between chunks
        assert data.count(b" uncomfortable") == 960 * 60
        until(lambda: not door.thread.calls)


def test_the_heap_is_trimmed_once_nothing_comes(monkeypatch):
    """Not while there are texts, and not again before something has come."""
    thread = SimpleNamespace(unfinished=0)
    state = SimpleNamespace(served=SimpleNamespace(live=None))
    server = serve.Server(SimpleNamespace(state=state), thread, 1)
    server.config.load()
    times = []
    monkeypatch.setattr(serve, "trim", lambda: times.append(second))
    for second in range(12):
        if second == 2:
            server.accepted += 1
        if second == 5:
            server.server_state.total_requests += 1
            thread.unfinished = 3
        if second == 9:
            thread.unfinished = 0
        for tick in range(10):
            assert not asyncio.run(server.on_tick(10 * second + tick))
    assert times == [3, 9]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells it there")
def test_what_clients_needed_is_given_back():
    """100 clients have sent nearly 1 MiB each when they leave."""

    def resident():  # MiB
        pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    data = request_of(PATH, {"prompt": "x" * 1_000_000})[:-1]
    with start() as server:
        door = door_of(server)
        before = resident()
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                client = socket.create_connection(("127.0.0.1", door.port))
                stack.enter_context(client).sendall(data)
            until(lambda: resident() > before + 80)
        until(lambda: resident() < before + 40)

"""Memory that clients needed, once they have left."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import PATH, client_of, request_of, start, until

import serve


def test_the_heap_is_trimmed_once_nothing_comes(monkeypatch):
    """Not while there are texts, and not again before something has come."""
    thread = SimpleNamespace(num_open_requests=0)
    state = SimpleNamespace(served=SimpleNamespace(monitor=None))
    server = serve.Server(SimpleNamespace(state=state), thread, 1)
    server.config.load()
    times = []
    monkeypatch.setattr(serve, "trim", lambda: times.append(second))
    for second in range(12):
        if second == 2:
            server.accepted += 1
        if second == 5:
            server.server_state.total_requests += 1
            thread.num_open_requests = 3
        if second == 9:
            thread.num_open_requests = 0
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
        client = client_of(server)
        before = resident()
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                connection = socket.create_connection(("127.0.0.1", client.port))
                stack.enter_context(connection).sendall(data)
            until(lambda: resident() > before + 80)
        until(lambda: resident() < before + 40)

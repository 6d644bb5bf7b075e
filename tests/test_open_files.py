"""More connections than descriptors."""

import re
import resource
import signal
import socket
import sys
import time

import pytest
from serving import ENDLESS, PATH, client_of, connect, request_of, start

import serve

STREAM = ENDLESS | {"stream": True}


FEW = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import serve

files = [open("serve.py") for _ in range({held})]
serve.main({arguments})
"""


def receives(connection) -> bool:
    """Whether something comes from the server, within the client's time limit."""
    try:
        return bool(connection.recv(4096))
    except TimeoutError:
        return False


@pytest.mark.parametrize("held", [0, 35])
def test_more_connections_than_descriptors(held):
    """What fits is accepted; the others wait until one leaves, and this is said once."""
    with start(program=FEW.replace("{held}", str(held))) as server:
        client = client_of(server)
        with connect(client, request_of(PATH, STREAM)) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.settimeout(60)
            idle = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(100)]
            began = time.monotonic()
            while time.monotonic() < began + 0.5:
                assert receives(connection)
            for each in idle:
                each.close()
            assert client.get("/health")[0] == 200
        server.send_signal(signal.SIGTERM)
        said = server.stderr.read()
    limit = r"the limit of open files \(ulimit -n\) allows no more\n"
    found = re.fullmatch(rf"note: (\d+) connections are open; {limit}", said)
    assert found, said
    present = int(found[1])
    assert present == 32 if held == 0 else 10 < present < 32


@pytest.mark.parametrize("limit, most", [(64, 32), (128, 64), (1024, 960), (-1, sys.maxsize)])
def test_how_many_connections_there_may_be(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    assert serve.max_connections() == most

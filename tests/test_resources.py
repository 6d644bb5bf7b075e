"""What hostile clients can take from a server: the event loop's time, descriptors."""

import re
import signal
import socket
import sys
import time

import pytest
from test_draining import ENDLESS, PATH, door_of, start

MANY = 2**18  # elements, as a body of 1 MiB can have


def completion(**fields):
    from server.protocol import CompletionRequest

    return CompletionRequest.model_validate(fields)


def chat(content):
    from server.protocol import ChatRequest

    return ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})


def messages(value):
    from server.protocol import ChatRequest

    return ChatRequest.model_validate({"messages": value})


@pytest.mark.parametrize(
    "make, value",
    [
        (lambda value: completion(prompt=value), [{}] * MANY),
        (lambda value: completion(prompt=value), [[]] * MANY),
        (lambda value: completion(prompt=value), [[1]] * MANY),
        (lambda value: completion(prompt=value), [[{}] * MANY]),
        (lambda value: completion(prompt=value), ["a"] + [[]] * MANY),
        (lambda value: completion(prompt=value), [1] + [[]] * MANY),
        (lambda value: completion(stop=value), [[]] * MANY),
        (chat, [{}] * MANY),
        (chat, [{"type": "text", "text": ""}] * MANY),
        (messages, [{"role": "user", "content": ""}] * MANY),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(make, value):
    """Within 50 ms: all streams stand still meanwhile."""
    from pydantic import ValidationError

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
    from pydantic import ValidationError

    most = 2**14
    message = {"role": "user", "content": ""}
    part = {"type": "text", "text": ""}
    for make, item in (
        (lambda value: completion(prompt=value), "a"),
        (lambda value: completion(prompt=value), [1]),
        (chat, part),
        (messages, message),
    ):
        make([item] * most)
        with pytest.raises(ValidationError, match=str(most)):
            make([item] * (most + 1))
    assert completion(prompt=[1] * MANY).prompts == [[1] * MANY]


COUNTS = """
import atexit
import gc
import serve

atexit.register(lambda: print(gc.get_freeze_count(), gc.get_threshold()[0]))
serve.main({arguments})
"""


def test_garbage_is_not_looked_for_among_what_stays():
    """A body of half a million lists would have it looked through several times."""
    with start(program=COUNTS) as server:
        door_of(server)
        server.send_signal(signal.SIGTERM)
        frozen, threshold = map(int, server.stdout.read().split())
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
        with door.send("POST", PATH, ENDLESS) as answer:
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
    note = (
        r"note: (\d+) connections are open; the limit of open files \(ulimit -n\) allows no more\n"
    )
    present = int(re.fullmatch(note, said)[1])
    assert present == 32 if held == 0 else 10 < present < 32


@pytest.mark.parametrize("limit, most", [(64, 32), (128, 64), (1024, 960), (-1, sys.maxsize)])
def test_how_many_connections_there_may_be(monkeypatch, limit, most):
    import resource

    from serve import most_connections

    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    assert most_connections() == most


def test_a_page_takes_no_descriptor_of_its_own(tiny_llama, monkeypatch):
    """While it is sent to a client that does not read, no file is open."""
    import anyio
    from serving import serving, small_engine

    monkeypatch.setattr(anyio, "open_file", None)
    with serving(lambda: small_engine(tiny_llama)) as door:
        for path in ("/", "/player.js"):
            with door.send("GET", path) as answer:
                assert answer.status == 200 and len(answer.read()) > 1000

"""The events of /live: when they come, and when they end."""

import json
import signal

from conftest import random_tokens
from serving import Script, until

PROMPT = random_tokens(5)


def post(client, prompts, tokens, **fields) -> dict:
    body = {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = client.post("/v1/completions", body | fields)
    assert status == 200, answer
    return answer


def listen(client):
    """The events of /live. Close it to leave."""
    with client.send("GET", "/live") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.strip():
                assert line.startswith(b"data: ")
                yield json.loads(line.removeprefix(b"data: "))


def watch(client):
    """Frames from now on."""
    frames = listen(client)
    next(frames), next(frames)
    return frames


def monitor_of(client):
    return next(found for found in client.thread.observers if hasattr(found, "frame"))


def test_nothing_is_done_while_nobody_watches(start):
    client = start()
    monitor = monitor_of(client)
    made = []
    frame = monitor.frame
    monitor.frame = lambda now: made.append(now) or frame(now)
    post(client, [[1, 2]], 3)
    assert made == []
    frames = watch(client)
    assert len(made) == 1
    frames.close()
    until(lambda: not monitor.num_subscribers)  # the server hears of it by itself
    assert client.thread.generations == monitor.subscribers == set()
    made.clear()
    post(client, [[1, 2]], 3)
    assert made == []


def test_the_stream_ends_with_the_engine(start):
    client = start()
    frames = watch(client)
    client.thread.engine.step = lambda: 1 / 0
    assert client.post("/v1/completions", {"prompt": [1], "max_tokens": 3})[0] == 503
    assert list(frames) == []
    assert client.get("/live")[0] == 503


def test_a_server_that_ends_does_not_wait_for_who_watches(start):
    client = start()
    frames = watch(client)
    client.thread.loop.call_soon_threadsafe(monitor_of(client).close)
    assert list(frames) == []
    assert list(listen(client)) == []  # who comes now


def test_the_script_ends_though_somebody_watches(tmp_path):
    with Script(tmp_path) as server:
        frames = listen(server.client())
        next(frames)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0  # sooner than a text would have to end
        frames.close()


def test_who_watches_takes_no_room_of_requests(start):
    client = start()
    watch(client)
    assert (client.thread.num_open_requests, client.thread.waiting_tokens) == (0, 0)

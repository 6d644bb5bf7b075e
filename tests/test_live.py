"""The events of /live: when they come, and when they end."""

import json
import signal

from conftest import random_tokens
from serving import Script, until

PROMPT = random_tokens(5)


def post(door, prompts, tokens, **fields) -> dict:
    body = {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = door.post("/v1/completions", body | fields)
    assert status == 200, answer
    return answer


def listen(door):
    """The events of /live. Close it to leave."""
    with door.send("GET", "/live") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.strip():
                assert line.startswith(b"data: ")
                yield json.loads(line.removeprefix(b"data: "))


def watch(door):
    """Frames from now on."""
    frames = listen(door)
    next(frames), next(frames)
    return frames


def live_of(door):
    return next(found for found in door.thread.observers if hasattr(found, "frame"))


def test_nothing_is_done_while_nobody_watches(start):
    door = start()
    live = live_of(door)
    made = []
    frame = live.frame
    live.frame = lambda now: made.append(now) or frame(now)
    post(door, [[1, 2]], 3)
    assert made == []
    frames = watch(door)
    assert len(made) == 1
    frames.close()
    until(lambda: not live.watched)  # the server hears of it by itself
    assert door.thread.calls == live.watchers == set()
    made.clear()
    post(door, [[1, 2]], 3)
    assert made == []


def test_the_stream_ends_with_the_engine(start):
    door = start()
    frames = watch(door)
    door.thread.engine.step = lambda: 1 / 0
    assert door.post("/v1/completions", {"prompt": [1], "max_tokens": 3})[0] == 503
    assert list(frames) == []
    assert door.get("/live")[0] == 503


def test_a_server_that_ends_does_not_wait_for_who_watches(start):
    door = start()
    frames = watch(door)
    door.thread.loop.call_soon_threadsafe(live_of(door).close)
    assert list(frames) == []
    assert list(listen(door)) == []  # who comes now


def test_the_script_ends_though_somebody_watches(tmp_path):
    with Script(tmp_path) as server:
        frames = listen(server.door())
        next(frames)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0  # sooner than a text would have to end
        frames.close()


def test_who_watches_takes_no_room_of_requests(start):
    door = start()
    watch(door)
    assert (door.thread.unfinished, door.thread.waiting_tokens) == (0, 0)

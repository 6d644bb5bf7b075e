"""A client that leaves, and a replica that is killed, on Ray."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from on_ray import samples, until
from replicas import same
from serving import ENDLESS, PATH, connect, request_of

pytest_plugins = ["ray_fixtures"]
REPLICA = "ray::ServeReplica:default:Replica"
ENDED = "the replica of this request has ended, or cannot be reached: "


def total(client, name: str, **labels) -> float:
    return sum(samples(client, name, **labels).values())


def test_a_client_that_leaves_frees_the_engine(servers):
    client, _, _ = servers
    aborted = {"name": "request_success_total", "finished_reason": "abort"}
    before = total(client, **aborted)
    for stream in (True, False):
        with connect(client, request_of(PATH, ENDLESS | {"stream": stream})):
            until(lambda: total(client, "num_requests_running") == 1)
        until(lambda: total(client, "num_requests_running") == 0)
    assert total(client, **aborted) - before == 2
    assert total(client, "kv_cache_usage_perc") == 0


def read(client, seed: int, progress: dict, ended: dict, stop: threading.Event) -> str:
    """An endless text, as long as it is wanted; its error, if it ends with one, goes to `ended`."""
    text = ""
    with client.send("POST", PATH, ENDLESS | {"seed": seed, "stream": True}) as answer:
        assert answer.status == 200
        for line in answer:
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
            if "error" in event:
                assert answer.read() == b"\ndata: [DONE]\n\n"
                ended[seed] = event["error"]["message"]
            elif event:
                text += event["choices"][0]["text"]
                progress[seed] = progress.get(seed, 0) + 1
            if stop.is_set():
                return text
    return text


def test_of_a_killed_replica_texts_end_with_an_error_and_others_go_on(servers):
    client, server, one = servers
    pids = server.pids(REPLICA)
    assert len(pids) == 2
    progress = {}
    ended = {}
    stop = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        try:
            reading = [pool.submit(read, client, seed, progress, ended, stop) for seed in range(6)]
            until(lambda: len(progress) == 6)
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: ended)
            before = dict(progress)
            until(
                lambda: all(seed in ended or progress[seed] > before[seed] + 50 for seed in before)
            )
        finally:
            stop.set()
        found = [each.result() for each in reading]
    assert all(error.startswith(ENDED) for error in ended.values()) and len(ended) < 6
    for seed, text in enumerate(found):
        _, answer = one.post(PATH, ENDLESS | {"seed": seed, "max_tokens": 100})
        own = answer["choices"][0]["text"]
        assert text.startswith(own) or own.startswith(text)
    until(lambda: len(samples(client, "num_requests_running")) == 2)  # a new one has come
    assert len(set(server.pids(REPLICA)) - set(pids)) == 1
    body = {"prompt": "Tom", "seed": 7}
    assert same(client.post(PATH, body)) == same(one.post(PATH, body))

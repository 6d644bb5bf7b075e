"""Engines that come when there is much to do and go when there is little: no request is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

from on_ray import start, until
from replicas import make_engine, parse, same
from serving import serving

PATH = "/v1/completions"
BODIES = [
    {"prompt": [seed, 7], "seed": seed, "max_tokens": 60 + seed, "ignore_eos": True}
    for seed in range(40)
]
OPTIONS = ["--replicas", 1, "--max-replicas", 3, "--max-num-seqs", 2, "--scale-seconds", 1]
REPLICA = "ray::ServeReplica:default:Replica"


def test_from_one_to_three_and_back_no_request_is_lost(model, tmp_path):
    with serving(lambda: make_engine(parse(model))) as one:
        own = [same(one.post(PATH, body)) for body in BODIES]
    busy = threading.Event()
    over = threading.Event()
    asked = []

    def ask(client, row: int, wanted: threading.Event) -> None:
        while not wanted.is_set():
            number = len(asked) % len(BODIES)
            asked.append(number)
            assert same(client.post(PATH, BODIES[number])) == own[number]

    with start(model, tmp_path, *OPTIONS) as (client, server), ThreadPoolExecutor(12) as pool:
        try:
            assert len(server.pids(REPLICA)) == 1
            # Eleven clients go when there are three engines, and one asks on till there is one.
            clients = [pool.submit(ask, client, row, busy if row else over) for row in range(12)]
            until(lambda: len(server.pids(REPLICA)) == 3 or any(one.done() for one in clients))
            busy.set()
            until(lambda: len(server.pids(REPLICA)) == 1 or clients[0].done())
        finally:
            busy.set()
            over.set()
        for each in clients:
            each.result()
    assert len(asked) > 12

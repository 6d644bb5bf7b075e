"""Requests over engines on Ray: hits are those of one engine, and what a burst needs is spread."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from conftest import random_tokens
from on_ray import samples

pytest_plugins = ["ray_fixtures"]
PATH = "/v1/completions"


def ask(client, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    status, answer = client.post(PATH, body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_hits_are_those_of_one_engine(servers):
    client, _, one = servers
    before = samples(client, "prefix_cache_hits_total")
    expected = -one.thread.engine.scheduler.prefix_cache_hits
    prompts = [
        random_tokens(30, seed=group) + random_tokens(9, seed=100 + turn)
        for turn in range(5)
        for group in range(6)
    ]
    for prompt in prompts:
        assert ask(client, prompt) == ask(one, prompt)
    expected += one.thread.engine.scheduler.prefix_cache_hits
    found = samples(client, "prefix_cache_hits_total")
    assert sum(found.values()) - sum(before.values()) == expected >= 6 * 4 * 28
    assert all(found[name] > before[name] for name in found)  # each engine has some of the six


def test_a_burst_of_one_beginning_is_spread(servers):
    client, _, _ = servers
    prompt = random_tokens(5, seed=7)  # one page
    body = {"prompt": prompt, "max_tokens": 2**17, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(24) as pool, contextlib.ExitStack() as stack:
        for answer in pool.map(lambda _: client.send("POST", PATH, body), range(24)):
            stack.callback(answer.close)
            assert answer.status == 200
        running = samples(client, "num_requests_running").values()
    assert sum(running) == 24 and max(running) - min(running) <= 2, running

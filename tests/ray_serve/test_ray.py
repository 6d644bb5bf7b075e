"""Engines on Ray write what one engine writes, whoever leaves, is killed, comes or goes."""

import contextlib
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, random_tokens
from replicas import OPTIONS, check_texts, make_engine, parse, same, save_small
from serving import ENDLESS, PATH, Client, connect, metric_families, request_of, serving
from serving import until as until_in

until = functools.partial(until_in, seconds=100)


class Server:
    """A process of serve_ray.py, in a session of its own, of which nothing is left after the block.

    directory: for what it says, in files: a pipe is open as long as a process of Ray has it.
    """

    def __init__(self, model, directory, *options):
        command = [sys.executable, "serve_ray.py", "--port", 0, "--cpus", 0.1, "--model", model]
        command = [str(word) for word in [*command, *OPTIONS, *options]]
        self.out = directory / "stdout"
        self.err = directory / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            own = {"cwd": ROOT, "start_new_session": True}
            self.process = subprocess.Popen(command, stdout=out, stderr=err, **own)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)

    def pids(self, name: str = "") -> list[int]:
        found = subprocess.run(["ps", "-wweo", "sid=,pid=,args="], capture_output=True, text=True)
        lines = [line.split(None, 2) for line in found.stdout.splitlines()]
        own = str(self.process.pid)
        return [int(pid) for sid, pid, args in lines if sid == own and name in args]

    def result(self) -> tuple[int, str]:
        """Return the exit code and stderr of a server that ends and leaves no process."""
        code = self.process.wait(100)
        until(lambda: not self.pids())
        return code, self.err.read_text()


@contextlib.contextmanager
def start(model, directory, *options) -> Iterator[tuple[Client, Server]]:
    with Server(model, directory, *options) as server:
        until(lambda: server.out.read_text().endswith("\n") or server.process.poll() is not None)
        assert server.out.read_text(), server.err.read_text()
        yield Client(int(server.out.read_text().rsplit(":", 1)[1]), None, None), server
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
            assert server.result() == (130, "")


def samples(client, name: str, **labels) -> dict[str, float]:
    families = metric_families(client)
    assert len({family.name for family in families}) == len(families)
    return {
        sample.labels["engine"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    }


REPLICA = "ray::ServeReplica:default:Replica"
STREAM = ENDLESS | {"stream": True}


@pytest.fixture(scope="session")
def model(tiny_llama, tmp_path_factory):
    return save_small(tiny_llama, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("server")) as (client, server):
        with serving(lambda: make_engine(parse(model))) as one:
            yield client, server, one


def test_texts_are_those_of_one_engine(servers):
    client, _, one = servers
    check_texts(client, one, clients=8)
    body = {"prompt": [10**6]}
    assert client.post(PATH, body) == one.post(PATH, body)  # what an engine refuses is told
    assert client.get("/v1/nothing")[0] == 404


def ask(client, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    status, answer = client.post(PATH, body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_hits_are_those_of_one_engine(servers):
    client, _, one = servers
    before = samples(client, "prefix_cache_hits_total")
    expected = -one.thread.engine.scheduler.prefix_cache_hits
    for turn in range(5):
        for group in range(6):
            prompt = random_tokens(30, seed=group) + random_tokens(9, seed=100 + turn)
            assert ask(client, prompt) == ask(one, prompt)
    expected += one.thread.engine.scheduler.prefix_cache_hits
    found = samples(client, "prefix_cache_hits_total")
    assert sum(found.values()) - sum(before.values()) == expected >= 6 * 4 * 28
    assert all(found[name] > before[name] for name in found)  # each engine has some of the six


def total(client, name: str, **labels) -> float:
    return sum(samples(client, name, **labels).values())


def test_a_client_that_leaves_frees_the_engine(servers):
    client, _, _ = servers
    until(lambda: total(client, "num_requests_running") == 0)
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
    with client.send("POST", PATH, STREAM | {"seed": seed}) as answer:
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
    progress, ended = {}, {}
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
    message = "the replica of this request has ended, or cannot be reached: "
    assert all(error.startswith(message) for error in ended.values()) and len(ended) < 6
    for seed, text in enumerate(found):
        _, answer = one.post(PATH, ENDLESS | {"seed": seed, "max_tokens": 100})
        own = answer["choices"][0]["text"]
        assert text.startswith(own) or own.startswith(text)
    until(lambda: len(samples(client, "num_requests_running")) == 2)  # a new one has come
    assert len(set(server.pids(REPLICA)) - set(pids)) == 1
    body = {"prompt": "Tom", "seed": 7}
    assert same(client.post(PATH, body)) == same(one.post(PATH, body))


def test_a_signal_lets_texts_end_and_a_second_one_does_not(servers):
    client, server, _ = servers
    assert server.pids("Replica")
    with (
        client.send("POST", PATH, STREAM | {"max_tokens": 1000}) as answer,
        client.send("POST", PATH, STREAM) as endless,
    ):
        server.process.send_signal(signal.SIGTERM)
        events = [line for line in answer if line.startswith(b"data: {")]
        assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"
        assert endless.readline()
        server.process.send_signal(signal.SIGTERM)
        assert server.result() == (130, "")
    with pytest.raises(OSError):
        client.get("/health")


def test_what_replicas_cannot_make_is_a_line(model, tmp_path):
    with Server(model, tmp_path, "--num-pages", 10**15) as server:
        code, said = server.result()
    assert (code, server.out.read_text()) == (2, "")
    line = said.partition("error: ")[2]
    assert line.endswith("\n") and f"num_pages {10**15}, page_size 4: a cache of " in line


BODIES = [
    {"prompt": [seed, 7], "seed": seed, "max_tokens": 60 + seed, "ignore_eos": True}
    for seed in range(40)
]
SCALING = ["--replicas", 1, "--max-replicas", 3, "--max-num-seqs", 2, "--scale-seconds", 1]


def test_from_one_to_three_and_back_no_request_is_lost(model, tmp_path):
    with serving(lambda: make_engine(parse(model))) as one:
        own = [same(one.post(PATH, body)) for body in BODIES]
    busy, over = threading.Event(), threading.Event()
    asked = []

    def ask(client, wanted: threading.Event) -> None:
        while not wanted.is_set():
            number = len(asked) % len(BODIES)
            asked.append(number)
            assert same(client.post(PATH, BODIES[number])) == own[number]

    with start(model, tmp_path, *SCALING) as (client, server), ThreadPoolExecutor(12) as pool:
        try:
            assert len(server.pids(REPLICA)) == 1
            # Eleven clients go when there are three engines, and one asks on till there is one.
            clients = [pool.submit(ask, client, busy if row else over) for row in range(12)]
            until(lambda: len(server.pids(REPLICA)) == 3 or any(one.done() for one in clients))
            busy.set()
            until(lambda: len(server.pids(REPLICA)) == 1 or clients[0].done())
        finally:
            busy.set()
            over.set()
        for each in clients:
            each.result()
    assert len(asked) > 12


# Ray itself dies: all ends, with a line; what Ray starts again is not the end.


def test_a_killed_controller_comes_again_and_a_killed_raylet_ends_all(model, tmp_path):
    with start(model, tmp_path) as (client, server):
        (controller,) = server.pids("ray::ServeController")
        os.kill(controller, signal.SIGKILL)
        until(lambda: set(server.pids("ray::ServeController")) - {controller})
        with client.send("POST", PATH, STREAM) as answer:
            assert answer.readline()
            (raylet,) = server.pids("raylet/raylet")
            os.kill(raylet, signal.SIGKILL)
            lines = []
            with contextlib.suppress(ConnectionError):
                lines = list(iter(answer.readline, b""))
            assert b"data: [DONE]\n" not in lines
        code, said = server.result()
        line = r"serve_ray.py: error: Ray's raylet has ended; its logs are in /.*/logs\n"
        assert code == 2 and re.fullmatch(line, said)


@pytest.mark.parametrize("name", ["gcs_server", "log_monitor"])
def test_of_ray_s_own_processes_two_are_needed(monkeypatch, name):
    import ray

    import serve_ray
    from errors import UserError

    class Node:
        looks = 0

        def dead_processes(self):
            self.looks += 1
            if self.looks == 3:
                signals.put(signal.SIGTERM)
            return [(name, None)] if self.looks > 1 else []

        def get_logs_dir_path(self):
            return "/logs"

    import psutil  # found once ray is imported

    signals = queue.SimpleQueue()
    monkeypatch.setattr(ray._private.worker, "_global_node", Node())
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    if name == "log_monitor":
        assert serve_ray.wait_for_signal(signals) == signal.SIGTERM
    else:
        with pytest.raises(UserError, match="Ray's gcs_server has ended; .* in /logs"):
            serve_ray.wait_for_signal(signals)

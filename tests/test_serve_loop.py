"""serve.py from its first line to its last; signals, descriptors and memory; its options."""

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import CHECKPOINTS, ROOT, is_one_line
from serving import (
    ENDLESS,
    PATH,
    SMALL,
    Client,
    Script,
    client_of,
    connect,
    request_of,
    start,
    until,
)

import serve
import serve_ray
from command_line.parser import Parser
from errors import UserError

STREAM = ENDLESS | {"stream": True}


def test_the_script_prints_its_address_and_answers_there():
    with start() as server:
        line = server.stdout.readline()
        assert line.startswith("stories-llama at http://127.0.0.1:")
        client = Client(int(line.rsplit(":", 1)[1]), None, server)
        (model,) = client.get("/v1/models")[1]["data"]
        assert (model["id"], model["max_model_len"]) == ("stories-llama", 256)
        assert model["root"] == SMALL.relative_to(ROOT).as_posix()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


def test_an_address_that_is_taken_and_what_is_sent_there_at_once(run_main, monkeypatch):
    monkeypatch.setattr(serve, "load_engine", None)  # that is before the model is loaded
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run_main(serve.main, "--port", port)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: --host 127.0.0.1 --port {port}: Address already in use\n")
    with serve.listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_an_address_that_cannot_be_printed_is_one_line(tmp_path):
    script = Script(tmp_path)
    script.out = "/dev/full"
    with script:
        code, err = script.end()
    line = "error: standard output: No space left on device\n"
    assert code == 2 and err.endswith(line) and err.count("\n") == 1


@pytest.mark.parametrize("installed", [True, False])
def test_the_model_is_one_that_takes_system_messages_where_it_is_installed(monkeypatch, installed):
    def find_package_file(name):
        if name != "smollm2" or not installed:
            raise UserError("not installed")

    monkeypatch.setattr(serve, "find_package_file", find_package_file)
    parser = Parser()
    serve.add_server_options(parser)
    found = parser.parse_args([])
    expected = "smollm2" if installed else serve.LLAMA
    assert (found.model, found.host, found.port) == (expected, "127.0.0.1", 8000)


# Signals


@pytest.fixture
def slow(tmp_path, monkeypatch):
    held, let_go = os.pipe()
    load = serve.load_engine

    def load_later(*args):
        os.read(held, 1)
        return load(*args)

    monkeypatch.setattr(serve, "load_engine", load_later)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = Client(port, None, None)
    with Script(tmp_path, "--drain-seconds", 60, "--port", port) as server:
        until(lambda: lets_in(client) or not server.process.is_alive())
        yield server, client, lambda: os.write(let_go, b"x")


def lets_in(client) -> bool:
    with contextlib.suppress(OSError):
        return bool(client.get("/health"))
    return False


def last_of(answer) -> dict:
    *_, last, done, empty = answer.read().split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    return json.loads(last.strip().removeprefix(b"data: "))


def test_after_the_limit_texts_end_with_an_error(tmp_path):
    with Script(tmp_path, "--drain-seconds", 0.5) as server:
        with server.client().send("POST", PATH, STREAM) as answer:
            answer.readline()
            server.signal(signal.SIGTERM)
            error = last_of(answer)["error"]
            assert error["type"] == "server_error" and "shutting down" in error["message"]
        assert server.end()[0] == 0


def test_a_second_signal_ends_it_at_once(tmp_path):
    with Script(tmp_path, "--drain-seconds", 60) as server:
        client = server.client()
        with client.send("POST", PATH, STREAM) as answer:
            answer.readline()
            server.signal(signal.SIGTERM)
            until(lambda: not lets_in(client))
            assert answer.readline() and server.process.is_alive()
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 128 + signal.SIGTERM


def test_503_while_the_model_is_loaded_and_texts_end_after_a_signal(slow):
    server, client, let_go = slow
    assert client.get("/health") == (503, None)
    talk = {"messages": [{"role": "user", "content": "cat"}]}
    answers = [client.get("/v1/models"), client.post(PATH, {})]
    for status, answer in (*answers, client.post("/v1/chat/completions", talk)):
        assert (status, answer["error"]["type"]) == (503, "server_error")
    let_go()
    assert server.client().port == client.port
    assert client.get("/health") == (200, None)
    with client.send("POST", PATH, STREAM | {"max_tokens": 60}) as answer:
        answer.readline()
        server.signal(signal.SIGTERM)
        assert last_of(answer)["choices"][0]["finish_reason"] == "length"
    assert server.end() == (0, "")
    with pytest.raises(ConnectionRefusedError):
        client.get("/health")


def test_a_signal_while_the_model_is_loaded(slow):
    server, _, _ = slow
    server.signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM
    assert server.written(server.out) == ""


# Descriptors and memory


FEW = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import serve

files = [open("serve.py") for _ in range({held})]
serve.main({arguments})
"""


def receives(connection) -> bool:
    try:
        return bool(connection.recv(4096))
    except TimeoutError:
        return False


@pytest.mark.parametrize("held", [0, 35])
def test_more_connections_than_descriptors(held):
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


def test_how_many_connections_there_may_be_and_when_the_heap_is_trimmed(monkeypatch):
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    for limit, most in ((64, 32), (128, 64), (1024, 960), (-1, sys.maxsize)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, own=limit: (own, own))
        assert serve.max_connections() == most
    thread = SimpleNamespace(num_open_requests=0)
    state = SimpleNamespace(served=SimpleNamespace(monitor=None))
    server = serve.Server(SimpleNamespace(state=state), thread, 1)
    server.config.load()
    times = []
    monkeypatch.setattr(serve, "trim", lambda: times.append(second))
    for second in range(12):
        server.accepted += second == 2
        server.server_state.total_requests += second == 5
        thread.num_open_requests = 3 if 5 <= second < 9 else 0
        for tick in range(10):
            assert not asyncio.run(server.on_tick(10 * second + tick))
    assert times == [3, 9]


# Options, of serve_ray.py too, as far as that goes without Ray: see tests/ray_serve


CPUS = os.cpu_count()
SERVE = {  # option -> words of the error
    "--port=-1": "--port 0 65535",
    "--host=": "--host 0.0.0.0",
    f"--host={70 * chr(233)}": f"--host {70 * chr(233)}",
    "--gamma=2": "--gamma --draft",
    "--drain-seconds=-1": "--drain-seconds -1.0 0 1000000",
    "--drain-seconds=nan": "--drain-seconds nan",
    "--max-waiting=-1": "--max-waiting -1 0",
    "--max-waiting-tokens=-1": "--max-waiting-tokens -1 0",
    "--api-key=": "--api-key empty",
    "--api-key=key\n": "--api-key whitespace",
    "--api-key=k\ney": "--api-key control character",
    "--allowed-host=a:8000": "--allowed-host a:8000 port",
    "--allowed-host=http://a": "--allowed-host http://a",
    "--allowed-host=[::1]": "--allowed-host [::1]",
}
MODEL = {
    "--max-num-seqs=0": "max_num_seqs 0 1",
    "--model=.": "config.json",
    "--model=nowhere/x/y": "'nowhere/x/y'",
}
SERVE_RAY = {
    "--replicas=0": "--replicas 0 1",
    "--cpus=0.00001": "--cpus 1e-05 0.0001 1000000",
    "--cpus=1e6": "--cpus 1000000.0 0.0001 1000000",
    "--cpus=1e5": f"--replicas 2 --cpus 100000 {CPUS}",
    "--gamma=2": "--gamma --draft",
    "--max-replicas=1": "--max-replicas 1 --replicas 2",
    "--scale-seconds=0": "--scale-seconds 0.0 1 1000000",
    "--max-replicas=1000000": f"--max-replicas 1000000 --cpus 1 {CPUS}",
    "--routing=luck": "--routing 'luck'",
}
REFUSED = [(serve.main, *case) for case in (SERVE | MODEL).items()]
REFUSED += [(serve_ray.main, *case) for case in SERVE_RAY.items()]


@pytest.mark.parametrize("main, option, words", REFUSED)
def test_what_is_wrong_is_one_line(run_main, monkeypatch, tmp_path, main, option, words):
    monkeypatch.chdir(tmp_path)
    if option not in MODEL:
        monkeypatch.setattr(serve, "load_engine", None)  # what is accepted ends here
    assert is_one_line(run_main(main, "--port", 0, option), "error: ", *words.split())


def test_replicas_that_cannot_be_started_are_one_line(run_main, monkeypatch, tmp_path):
    def check(error, *arguments):
        code, out, err = run_main(serve_ray.main, "--port", 0, *arguments)
        assert (code, out, err.partition("error: ")[2]) == (2, "", error + "\n")

    hint = "Ray is not installed: pip install '.[ray]'"
    monkeypatch.setitem(sys.modules, "ray", None)
    for cpus in (0.0001, CPUS):  # the least and the most that is allowed
        check(hint, "--replicas=1", f"--cpus={cpus}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for count, error in ((1, "--replicas 2: each needs a GPU; this machine has 1"), (2, hint)):
        monkeypatch.setattr("torch.cuda.device_count", lambda own=count: own)
        check(error, "--cpus=0.1", "--device=cuda")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(CHECKPOINTS / "stories-llama" / name, tmp_path)
    error = f"{tmp_path}: no model.safetensors in this directory"
    check(error, "--model", tmp_path)
    monkeypatch.setattr("serve_ray.application", lambda args: args)
    args = serve_ray.build({"replicas": "3", "max-num-seqs": "8"})
    assert (args.replicas, args.max_num_seqs, args.routing) == (3, 8, "prefix")
    with pytest.raises(UserError, match="^--replicas 0"):
        serve_ray.build({"replicas": "0"})


# The options of serve_ray.py that say how many engines there may be. With Ray: tests/ray_serve.


@pytest.mark.parametrize("seconds", [1, 30, 600])
def test_engines_say_several_times_in_that_time_what_there_is_to_do(seconds):
    options = ["--scale-seconds", str(seconds), "--max-replicas", "5", "--max-num-seqs", "7"]
    found = serve_ray.autoscaling_config(serve_ray.make_parser().parse_args(options))
    assert found["metrics_interval_s"] <= min(found["look_back_period_s"] / 4, 10)
    assert found["look_back_period_s"] == seconds
    assert (found["min_replicas"], found["max_replicas"]) == (2, 5)
    assert found["target_ongoing_requests"] == 7


def test_options_that_do_not_go_together_are_a_line(run_main, monkeypatch):
    def said(options):
        code, out, err = run_main(serve_ray.main, "--port", 0, *options.split())
        assert (code, out) == (2, "")
        return err.partition("error: ")[2]

    seconds = "must be a number from 1 to below 1000000"
    replicas = "--max-replicas 2: must be at least --replicas (3)\n"
    assert said("--replicas=3 --max-replicas=2") == replicas
    assert said("--scale-seconds=0.5") == f"--scale-seconds 0.5: {seconds}\n"
    assert said("--scale-seconds=1000000") == f"--scale-seconds 1000000.0: {seconds}\n"
    cpus = f"--cpus 1: this machine has {os.cpu_count()} CPUs\n"
    assert said("--max-replicas=10000000").endswith(cpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = "--max-replicas 3: each needs a GPU; this machine has 2\n"
    assert said("--cpus=0.1 --device=cuda --max-replicas=3") == gpus
    monkeypatch.setitem(sys.modules, "ray", None)  # the least that is allowed
    least = "--replicas=1 --max-replicas=1 --scale-seconds=1"
    assert said(least).startswith("Ray is not installed")

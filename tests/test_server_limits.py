"""By which names a server may be asked, and how many engines there may be."""

import json
import os
import socket
import sys
from types import SimpleNamespace

import pytest
from serving import PATH, check_refused, serving, small_engine

import serve
import serve_ray
from server.app import allowed_hosts

BODY = {"max_tokens": 1}


def status_for(client, host: bytes, path: str = "/v1/models") -> int:
    with client.send("GET", path, None, {"Host": host}) as answer:
        return answer.status


@pytest.fixture(scope="module")
def named(tiny_llama):
    options = {"origins": ["https://page.example"]}
    options["hosts"] = allowed_hosts("models.lan", ["Proxy.Example"])
    with serving(lambda: small_engine(tiny_llama), app_options=options) as client:
        yield client


def test_hosts_that_are_allowed(named):
    names = (b"localhost", b"LOCALHOST", b"localhost.", b"models.lan", b"proxy.example")
    addresses = (b"127.0.0.1", b"192.168.1.7", b"0.0.0.0", b"[::1]", b"[fe80::1]")
    hosts = [host + port for host in names + addresses for port in (b"", b":8000")]
    assert {host: status_for(named, host) for host in hosts} == dict.fromkeys(hosts, 200)
    with socket.create_connection(("127.0.0.1", named.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # it may leave the host out
        assert connection.recv(2**12).split()[1] == b"200"


def test_a_page_that_points_its_own_name_here_reads_nothing(named):
    names = (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"xlocalhost")
    others = (b"127.0.0.1.evil.example", b"127.0.0.1evil", b"", b":8000", b"::1", b"[]", b"[evil]")
    paths = ("/v1/models", "/metrics", "/", "/live", "/health")
    asked = [(host, path) for host in names + others for path in paths]
    assert {pair: status_for(named, *pair) for pair in asked} == dict.fromkeys(asked, 403)


def test_a_refused_host_is_told_why_also_across_origins(named):
    headers = {"Host": "other.lan:8000", "Origin": "https://page.example"}
    with named.send("POST", PATH, BODY, headers) as answer:
        assert answer.status == 403
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        found = answer.status, json.loads(answer.read())
    check_refused(found, None, "'other.lan' --allowed-host", 403)


@pytest.mark.parametrize(
    "host, others, names",
    [
        ("127.0.0.1", [], ["localhost", "127.0.0.1"]),
        ("::1", ["a"], ["localhost", "::1", "a"]),
        ("127.0.0.1", ["*"], None),
        ("0.0.0.0", [], None),
        ("::", [], None),
        ("0.0.0.0", ["a"], ["localhost", "0.0.0.0", "a"]),
    ],
)
def test_which_hosts_are_allowed(host, others, names):
    assert allowed_hosts(host, others) == names


def test_a_server_that_is_started_checks_the_host(monkeypatch):
    seen = []

    def make_app(*options):
        seen.append(options[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "make_app", make_app)
    monkeypatch.setattr(serve, "load_engine", lambda *_: SimpleNamespace(busy=False))
    with pytest.raises(SystemExit):
        serve.main(["--port", "0", "--device", "cpu", "--allowed-host", "a", "--allowed-host", "b"])
    assert seen == [["localhost", "127.0.0.1", "a", "b"]]


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
    assert said("--scale-seconds=0.5") == f"scale_seconds 0.5: {seconds}\n"
    assert said("--scale-seconds=1000000") == f"scale_seconds 1000000.0: {seconds}\n"
    cpus = f"--cpus 1: this machine has {os.cpu_count()} CPUs\n"
    assert said("--max-replicas=10000000").endswith(cpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = "--max-replicas 3: each needs a GPU; this machine has 2\n"
    assert said("--cpus=0.1 --device=cuda --max-replicas=3") == gpus
    monkeypatch.setitem(sys.modules, "ray", None)  # the least that is allowed
    least = "--replicas=1 --max-replicas=1 --scale-seconds=1"
    assert said(least).startswith("Ray is not installed")

"""The host names by which a server may be asked."""

import json
import socket
from types import SimpleNamespace

import pytest
from serving import PATH, check_refused, serving, small_engine

import serve
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

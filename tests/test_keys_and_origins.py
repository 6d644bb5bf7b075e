"""Who may ask: clients with the key, web pages of given origins, and by which names."""

import json
import socket

import pytest
from serving import refusal, serving, small_engine

import serve

PATH = "/v1/completions"
KEY = "s3crét"
BODY = {"max_tokens": 1}


@pytest.fixture(scope="module")
def door(tiny_llama):
    options = {"api_key": KEY, "origins": ["https://page.example"]}
    with serving(lambda: small_engine(tiny_llama), app_options=options) as door:
        yield door


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}".encode()}


def test_the_key_opens_the_door(door):
    assert door.post(PATH, BODY, bearer(KEY))[0] == 200
    spoken = {"Authorization": f"bearer  {KEY}".encode()}  # the scheme's case is free
    with door.send("GET", "/v1/models", None, spoken) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("s3cre"), bearer(KEY + "x"), {"Authorization": KEY.encode()}],
    ids=str,
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/nothing"])
def test_without_it_nothing_is_told(door, headers, path):
    error = refusal("wrong or no API key", code="invalid_api_key")
    assert door.post(path, b"no JSON", headers) == (401, error)


def test_a_body_is_not_read_without_the_key(door):
    for size in (1000, 2**24):
        with door.send("POST", PATH, None, {"Content-Length": str(size)}) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "method, path, status",
    [
        *(("GET", "/health", 200), ("OPTIONS", PATH, 405), ("GET", "/metrics", 200)),
        *(("GET", "/", 200), ("GET", "/live", 401)),
    ],
)
def test_what_needs_no_key(door, method, path, status):
    with door.send(method, path) as answer:
        assert answer.status == status


ASKING = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_browser_may_ask_whether_it_may_ask(door):
    with door.send("OPTIONS", PATH, None, ASKING) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
    with door.send("OPTIONS", PATH, None, ASKING | {"Origin": "https://other.example"}) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers


ASKED = [(KEY, BODY, 200), ("wrong", BODY, 401), (KEY, b" " * 2**22, 413)]


@pytest.mark.parametrize("key, body, status", ASKED)
def test_a_page_can_read_answers_and_refusals(door, key, body, status):
    headers = bearer(key) | {"Origin": "https://page.example"}
    with door.send("POST", PATH, body, headers) as answer:
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert answer.headers["Access-Control-Expose-Headers"] == "Retry-After"
        assert json.loads(answer.read())


def test_any_origin_or_none(tiny_llama):
    for origins in (["*"], []):
        with serving(lambda: small_engine(tiny_llama), app_options={"origins": origins}) as door:
            with door.send("POST", PATH, BODY, {"Origin": "https://any.example"}) as answer:
                assert answer.status == 200
                allowed = answer.headers["Access-Control-Allow-Origin"]
                assert allowed == ("*" if origins else None)


def status_for(door, host: bytes, path: str = "/v1/models") -> int:
    with door.send("GET", path, None, {"Host": host}) as answer:
        return answer.status


@pytest.fixture(scope="module")
def named(tiny_llama):
    from server.app import allowed_hosts

    options = {"origins": ["https://page.example"]}
    options["hosts"] = allowed_hosts("models.lan", ["Proxy.Example"])
    with serving(lambda: small_engine(tiny_llama), app_options=options) as door:
        yield door


def test_hosts_that_are_allowed(named):
    names = (b"localhost", b"LOCALHOST", b"localhost.", b"models.lan", b"proxy.example")
    addresses = (b"127.0.0.1", b"192.168.1.7", b"0.0.0.0", b"[::1]", b"[fe80::1]")
    hosts = [host + port for host in names + addresses for port in (b"", b":8000")]
    assert {host: status_for(named, host) for host in hosts} == dict.fromkeys(hosts, 200)


def test_a_page_that_points_its_own_name_here_reads_nothing(named):
    names = (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"xlocalhost")
    others = (b"127.0.0.1.evil.example", b"127.0.0.1evil", b"", b":8000", b"::1", b"[]", b"[evil]")
    paths = ("/v1/models", "/metrics", "/", "/live", "/health")
    asked = [(host, path) for host in names + others for path in paths]
    assert {pair: status_for(named, *pair) for pair in asked} == dict.fromkeys(asked, 403)


def test_a_client_of_http_1_0_may_leave_the_host_out(named):
    with socket.create_connection(("127.0.0.1", named.port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(2**12).split()[1] == b"200"


def test_a_refused_host_is_told_why_also_across_origins(named):
    headers = {"Host": "other.lan:8000", "Origin": "https://page.example"}
    with named.send("POST", PATH, BODY, headers) as answer:
        assert answer.status == 403
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        found = json.loads(answer.read())
    assert found == refusal("this server is not called 'other.lan'; --allowed-host adds a name")


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
    from server.app import allowed_hosts

    assert allowed_hosts(host, others) == names


def test_a_server_that_is_started_checks_the_host(tiny_llama, monkeypatch):
    """serve.py hands its names to the app."""
    seen = []
    monkeypatch.setattr(serve, "make_app", lambda *options: seen.append(options[-1]) or stop())
    monkeypatch.setattr(serve.EngineThread, "start", lambda self: None)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        serve.main(["--port", "0", "--device", "cpu", "--allowed-host", "a", "--allowed-host", "b"])
    assert seen == [["localhost", "127.0.0.1", "a", "b"]]


BLANK = "--api-key has a blank at an end, which no client can send"
CONTROL = "--api-key has a control character, which no client can send"


@pytest.mark.parametrize(
    "option, words",
    [
        ("--api-key=", "--api-key is empty; leave it out to let anyone ask"),
        ("--api-key=key\n", BLANK),
        ("--api-key=k\ney", CONTROL),
        ("--api-key=k\x7fy", CONTROL),
        *(
            (f"--allowed-host={name}", f"--allowed-host {name}: it must be a name without a port")
            for name in ("a:8000", "http://a", "", "[::1]")
        ),
    ],
)
def test_what_no_client_can_send_is_refused(run_main, option, words):
    code, out, err = run_main(serve.main, "--port", 0, option)
    assert (code, out) == (2, "") and err.endswith(f"error: {words}\n")


def test_an_app_with_hosts_starts_under_a_server_that_runs_its_lifespan():
    """Ray Serve runs the lifespan; serve.py does not."""
    from fastapi.testclient import TestClient

    from server.app import make_app

    app = make_app(None, hosts=["localhost"])
    with TestClient(app, base_url="http://evil.example") as client:
        assert client.get("/").status_code == 403

"""Who may ask: clients with the key, and web pages of given origins."""

import json

import pytest
from serving import check_refused, serving, small_engine

PATH = "/v1/completions"
KEY = "s3crét"
BODY = {"max_tokens": 1}


@pytest.fixture(scope="module")
def client(tiny_llama):
    options = {"api_key": KEY, "origins": ["https://page.example"]}
    with serving(lambda: small_engine(tiny_llama), app_options=options) as client:
        yield client


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}".encode()}


def test_the_key_opens_the_door(client):
    assert client.post(PATH, BODY, bearer(KEY))[0] == 200
    spoken = {"Authorization": f"bearer  {KEY}".encode()}  # the scheme's case is free
    with client.send("GET", "/v1/models", None, spoken) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("s3cre"), bearer(KEY + "x"), {"Authorization": KEY.encode()}],
    ids=str,
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/nothing"])
def test_without_it_nothing_is_told(client, headers, path):
    answer = client.post(path, b"no JSON", headers)
    check_refused(answer, None, "API key", 401, "invalid_api_key")


def test_a_body_is_not_read_without_the_key(client):
    for size in (1000, 2**24):
        with client.send("POST", PATH, None, {"Content-Length": str(size)}) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "method, path, status",
    [
        *(("GET", "/health", 200), ("OPTIONS", PATH, 405)),
        ("GET", "/metrics", 200),
        ("GET", "/live", 401),
        ("GET", "/", 200),
    ],
)
def test_what_needs_no_key(client, method, path, status):
    with client.send(method, path) as answer:
        assert answer.status == status


ASKING = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_browser_may_ask_whether_it_may_ask(client):
    with client.send("OPTIONS", PATH, None, ASKING) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
    with client.send("OPTIONS", PATH, None, ASKING | {"Origin": "https://other.example"}) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_a_public_page_may_ask_a_server_in_a_private_network(client):
    """Chrome asks so before a page of the internet asks a server at 127.0.0.1."""
    private = ASKING | {"Access-Control-Request-Private-Network": "true"}
    with client.send("OPTIONS", PATH, None, private) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Private-Network"] == "true"
    with client.send(
        "OPTIONS", PATH, None, private | {"Origin": "https://other.example"}
    ) as answer:
        assert answer.status == 400 and "Access-Control-Allow-Origin" not in answer.headers


ASKED = [(KEY, BODY, 200), ("wrong", BODY, 401), (KEY, b" " * 2**22, 413)]


@pytest.mark.parametrize("key, body, status", ASKED)
def test_a_page_can_read_answers_and_refusals(client, key, body, status):
    headers = bearer(key) | {"Origin": "https://page.example"}
    with client.send("POST", PATH, body, headers) as answer:
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        shown = answer.headers["Access-Control-Expose-Headers"]
        assert shown == "Retry-After, X-Ignored-Fields"
        assert json.loads(answer.read())


def test_any_origin_or_none(tiny_llama):
    for origins in (["*"], []):
        with serving(lambda: small_engine(tiny_llama), app_options={"origins": origins}) as client:
            with client.send("POST", PATH, BODY, {"Origin": "https://any.example"}) as answer:
                assert answer.status == 200
                allowed = answer.headers["Access-Control-Allow-Origin"]
                assert allowed == ("*" if origins else None)

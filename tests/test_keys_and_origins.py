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


def test_without_the_key_nothing_is_told(client):
    spoken = {"Authorization": f"bearer  {KEY}".encode()}  # the scheme's case is free
    for headers in (bearer(KEY), spoken):
        assert client.post(PATH, BODY, headers)[0] == 200
    wrong = [{}, {"Authorization": KEY.encode()}, *map(bearer, ("", "s3cre", KEY + "x"))]
    for headers in wrong:
        for path in (PATH, "/v1/chat/completions", "/v1/nothing"):
            answer = client.post(path, b"no JSON", headers)
            check_refused(answer, None, "API key", 401, "invalid_api_key")
    for size in (1000, 2**24):  # a body is not read
        with client.send("POST", PATH, None, {"Content-Length": str(size)}) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    for path, status in (("/health", 200), ("/metrics", 200), ("/", 200), ("/live", 401)):
        with client.send("GET", path) as answer:
            assert answer.status == status
    with client.send("OPTIONS", PATH) as answer:
        assert answer.status == 405


ASKING = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_browser_may_ask_whether_it_may_ask(client):
    # Chrome adds this for a page of the internet that asks a server at 127.0.0.1.
    private = ASKING | {"Access-Control-Request-Private-Network": "true"}
    for asking in (ASKING, private):
        with client.send("OPTIONS", PATH, None, asking) as answer:
            found = answer.headers
            assert answer.status == 200
        assert found["Access-Control-Allow-Origin"] == "https://page.example"
        assert "POST" in found["Access-Control-Allow-Methods"]
        assert "authorization" in found["Access-Control-Allow-Headers"].lower()
        allowed = "true" if asking is private else None
        assert found["Access-Control-Allow-Private-Network"] == allowed
        other = asking | {"Origin": "https://other.example"}
        with client.send("OPTIONS", PATH, None, other) as answer:
            assert answer.status == 400 and "Access-Control-Allow-Origin" not in answer.headers


def test_a_page_can_read_answers_and_refusals(client):
    for key, body, status in ((KEY, BODY, 200), ("wrong", BODY, 401), (KEY, b" " * 2**22, 413)):
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
                allowed = answer.headers["Access-Control-Allow-Origin"]
                assert (answer.status, allowed) == (200, "*" if origins else None)

"""Who may ask, which models and paths there are, and whether the server is well."""

import json

import pytest
from serving import check_refused, serving, small_engine, stop_engine

PATH = "/v1/completions"
KEY = "s3crét"
BODY = {"max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(tiny_llama):
    options = {"api_key": KEY, "origins": ["https://page.example"]}
    with serving(lambda: small_engine(tiny_llama), app_options=options) as guarded:
        yield guarded


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}".encode()}


def test_without_the_key_nothing_is_told(guarded):
    spoken = {"Authorization": f"bearer  {KEY}".encode()}  # the scheme's case is free
    for headers in (bearer(KEY), spoken):
        assert guarded.post(PATH, BODY, headers)[0] == 200
    wrong = [{}, {"Authorization": KEY.encode()}, *map(bearer, ("", "s3cre", KEY + "x"))]
    for headers in wrong:
        for path in (PATH, "/v1/chat/completions", "/v1/nothing"):
            answer = guarded.post(path, b"no JSON", headers)
            check_refused(answer, None, "API key", 401, "invalid_api_key")
    for size in (1000, 2**24):  # a body is not read
        with guarded.send("POST", PATH, None, {"Content-Length": str(size)}) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    for path, status in (("/health", 200), ("/metrics", 200), ("/", 200), ("/live", 401)):
        with guarded.send("GET", path) as answer:
            assert answer.status == status
    with guarded.send("OPTIONS", PATH) as answer:
        assert answer.status == 405


ASKING = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_browser_may_ask_whether_it_may_ask(guarded):
    # Chrome adds this for a page of the internet that asks a server at 127.0.0.1.
    private = ASKING | {"Access-Control-Request-Private-Network": "true"}
    for asking in (ASKING, private):
        with guarded.send("OPTIONS", PATH, None, asking) as answer:
            found = answer.headers
            assert answer.status == 200
        assert found["Access-Control-Allow-Origin"] == "https://page.example"
        assert "POST" in found["Access-Control-Allow-Methods"]
        assert "authorization" in found["Access-Control-Allow-Headers"].lower()
        allowed = "true" if asking is private else None
        assert found["Access-Control-Allow-Private-Network"] == allowed
        other = asking | {"Origin": "https://other.example"}
        with guarded.send("OPTIONS", PATH, None, other) as answer:
            assert answer.status == 400 and "Access-Control-Allow-Origin" not in answer.headers


def test_a_page_can_read_answers_of_any_origin_or_none(guarded, tiny_llama):
    for key, body, status in ((KEY, BODY, 200), ("wrong", BODY, 401), (KEY, b" " * 2**22, 413)):
        headers = bearer(key) | {"Origin": "https://page.example"}
        with guarded.send("POST", PATH, body, headers) as answer:
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
            shown = answer.headers["Access-Control-Expose-Headers"]
            assert shown == "Retry-After, X-Ignored-Fields"
            assert json.loads(answer.read())
    for origins in (["*"], []):
        with serving(lambda: small_engine(tiny_llama), app_options={"origins": origins}) as client:
            with client.send("POST", PATH, BODY, {"Origin": "https://any.example"}) as answer:
                allowed = answer.headers["Access-Control-Allow-Origin"]
                assert (answer.status, allowed) == (200, "*" if origins else None)


def test_models_and_unknown_paths_and_methods(client, recwarn):
    status, found = client.get("/v1/models")
    (model,) = found["data"]
    known = {"id": "small", "object": "model", "owned_by": "serve.py", "root": "somewhere/small"}
    known |= {"parent": None, "max_model_len": 64, "chat_roles": ["user", "assistant"]}
    assert (status, found["object"]) == (200, "list") and isinstance(model["created"], int)
    assert model == known | {"created": model["created"]}
    assert client.get("/v1/models/small") == (200, model)
    for name in ("other", "org/other", "x" * 5000):
        answer = client.get(f"/v1/models/{name}")
        check_refused(answer, "model", f"{name[:100]} small", 404, "model_not_found")
    talk = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("completions", {}), ("chat/completions", talk), ("responses", TOM)):
        answer = client.post(f"/v1/{path}", body | {"model": "gpt-4"})
        check_refused(answer, "model", "gpt-4 small", 404, "model_not_found")
    for path in ("/v1/nothing", "/docs", "/redoc"):
        check_refused(client.get(path), None, "", 404)
    check_refused(client.post("/v1/models", {}), None, "", 405)
    with client.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"
    schema = client.get("/openapi.json")[1]
    assert schema["info"]["title"] == "serve.py" and "/v1/chat/completions" in schema["paths"]
    assert schema["paths"]["/health"].keys() == {"get"}
    assert [each for each in recwarn if "Duplicate" in str(each.message)] == []


TOM = {"input": "Tom"}


def test_a_dead_engine_is_503(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        paths = ("/health", "/v1/models")
        assert [client.get(path)[0] for path in paths] == [200, 200]
        stop_engine(client)
        (status, _), (other, answer) = map(client.get, paths)
        assert (status, other, answer["error"]["type"]) == (503, 503, "server_error")


def test_monitors_ask_with_head(client):
    for path in ("/health", "/", "/player.js", "/metrics", "/v1/models", "/v1/models/small"):
        with client.send("GET", path) as whole, client.send("HEAD", path) as head:
            assert (head.status, head.read()) == (whole.status, b"") == (200, b"")
            assert head.headers["Content-Type"] == whole.headers["Content-Type"]
    refused = dict.fromkeys(["/v1/completions", "/v1/chat/completions", "/live"], 405)
    for path, status in (refused | {"/v1/models/other": 404}).items():
        with client.send("HEAD", path) as head:
            assert head.status == status

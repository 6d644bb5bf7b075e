"""What a server serves, whether it is well, and what it does not know, over a real socket."""

import pytest
from serving import check_refused, serving, small_engine, stop_engine


def test_models(client):
    status, found = client.get("/v1/models")
    assert status == 200 and found["object"] == "list"
    (model,) = found["data"]
    created = model.pop("created")
    assert isinstance(created, int)
    known = {"id": "small", "object": "model", "owned_by": "serve.py", "root": "somewhere/small"}
    known |= {"parent": None, "max_model_len": 64, "chat_roles": ["user", "assistant"]}
    assert model == known
    assert client.get("/v1/models/small") == (200, model | {"created": created})


@pytest.mark.parametrize("name", ["other", "org/other", "x" * 5000])
def test_another_model_is_not_found(client, name):
    answer = client.get(f"/v1/models/{name}")
    check_refused(answer, "model", f"{name[:100]} small", 404, "model_not_found")


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_another_model_writes_nothing(client, path):
    body = {"messages": [{"role": "user", "content": "a"}]} if path[:4] == "chat" else {}
    body |= {"input": "a"} if path == "responses" else {}
    answer = client.post(f"/v1/{path}", body | {"model": "gpt-4"})
    check_refused(answer, "model", "gpt-4 small", 404, "model_not_found")


def test_unknown_paths_and_methods(client):
    for path in ("/v1/nothing", "/docs", "/redoc"):
        check_refused(client.get(path), None, "", 404)
    assert client.get("/openapi.json")[1]["info"]["title"] == "serve.py"
    check_refused(client.post("/v1/models", {}), None, "", 405)
    with client.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_dead_engine_is_503(tiny_llama, path):
    with serving(lambda: small_engine(tiny_llama)) as client:
        assert client.get(path)[0] == 200
        stop_engine(client)
        status, answer = client.get(path)
        assert status == 503
        assert path == "/health" or answer["error"]["type"] == "server_error"


PAGES = ["/health", "/", "/player.js", "/metrics", "/v1/models", "/v1/models/small"]


@pytest.mark.parametrize("path", PAGES)
def test_monitors_ask_with_head(client, path):
    with client.send("GET", path) as whole, client.send("HEAD", path) as head:
        assert (head.status, head.read()) == (whole.status, b"") == (200, b"")
        assert head.headers["Content-Type"] == whole.headers["Content-Type"]


def test_what_has_a_body_or_no_end_is_not_for_head(client):
    refused = dict.fromkeys(["/v1/completions", "/v1/chat/completions", "/live"], 405)
    for path, status in (refused | {"/v1/models/other": 404}).items():
        with client.send("HEAD", path) as head:
            assert head.status == status


def test_the_schema_of_the_api_names_each_operation_once(client, recwarn):
    paths = client.get("/openapi.json")[1]["paths"]
    assert paths["/health"].keys() == {"get"} and "/v1/chat/completions" in paths
    assert [each for each in recwarn if "Duplicate" in str(each.message)] == []

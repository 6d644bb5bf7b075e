"""What a server serves, whether it is well, and what it does not know, over a real socket."""

from serving import check_refused, serving, small_engine, stop_engine


def test_models(client):
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


TOM = {"input": "Tom"}


def test_unknown_paths_and_methods(client, recwarn):
    for path in ("/v1/nothing", "/docs", "/redoc"):
        check_refused(client.get(path), None, "", 404)
    check_refused(client.post("/v1/models", {}), None, "", 405)
    with client.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"
    schema = client.get("/openapi.json")[1]
    assert schema["info"]["title"] == "serve.py" and "/v1/chat/completions" in schema["paths"]
    assert schema["paths"]["/health"].keys() == {"get"}
    assert [each for each in recwarn if "Duplicate" in str(each.message)] == []


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

"""What a server serves, whether it is well, and what it does not know, over a real socket."""

import pytest
from serving import refusal, serving, small_engine


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
    message = f"the model {name[:100]!r} does not exist; this server has 'small'"
    error = refusal(message, "model", "model_not_found")
    assert client.get(f"/v1/models/{name}") == (404, error)


def test_unknown_paths_and_methods(client):
    for path in ("/v1/nothing", "/docs", "/redoc"):
        assert client.get(path) == (404, refusal("Not Found"))
    assert client.get("/openapi.json")[1]["info"]["title"] == "serve.py"
    assert client.post("/v1/models", {}) == (405, refusal("Method Not Allowed"))
    with client.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"


def test_health_of_a_dead_engine(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        assert client.get("/health") == (200, None)

        def die():
            raise MemoryError("no more")

        client.thread.commands.put(die)
        client.thread.thread.join(60)
        assert client.get("/health") == (503, None)


@pytest.mark.parametrize(
    "path", ["/health", "/", "/player.js", "/metrics", "/v1/models", "/v1/models/small"]
)
def test_monitors_ask_with_head(client, path):
    with client.send("GET", path) as whole, client.send("HEAD", path) as head:
        assert (head.status, head.read()) == (whole.status, b"") == (200, b"")
        assert head.headers["Content-Type"] == whole.headers["Content-Type"]


def test_what_has_a_body_or_no_end_is_not_for_head(client):
    for path in ("/v1/completions", "/v1/chat/completions", "/live"):
        with client.send("HEAD", path) as head:
            assert head.status == 405
    with client.send("HEAD", "/v1/models/other") as head:
        assert head.status == 404


def test_the_schema_of_the_api_names_each_operation_once(client, recwarn):
    paths = client.get("/openapi.json")[1]["paths"]
    assert paths["/health"].keys() == {"get"} and "/v1/chat/completions" in paths
    assert [each for each in recwarn if "Duplicate" in str(each.message)] == []

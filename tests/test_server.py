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


def test_unknown_paths_and_methods(client):
    for path in ("/v1/nothing", "/docs", "/redoc"):
        check_refused(client.get(path), None, "", 404)
    assert client.get("/openapi.json")[1]["info"]["title"] == "serve.py"
    check_refused(client.post("/v1/models", {}), None, "", 405)
    with client.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"


def test_a_dead_engine_is_503(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as client:
        assert client.get("/health") == (200, None)
        stop_engine(client)
        assert client.get("/health")[0] == 503

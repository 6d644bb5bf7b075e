"""Engines on Ray write what one engine writes."""

from on_ray import Server
from replicas import check_texts

pytest_plugins = ["ray_fixtures"]
PATH = "/v1/completions"


def test_texts_are_those_of_one_engine(servers):
    client, _, one = servers
    check_texts(client, one, clients=8)


def test_what_an_engine_refuses_is_told(servers):
    client, _, one = servers
    body = {"prompt": [10**6]}
    assert client.post(PATH, body) == one.post(PATH, body)
    assert client.get("/v1/nothing")[0] == 404


def test_what_replicas_cannot_make_is_a_line(model, tmp_path):
    with Server(model, tmp_path, "--num-pages", 10**15) as server:
        code, said = server.result()
    assert (code, server.out.read_text()) == (2, "")
    line = said.partition("error: ")[2]
    assert line.endswith("\n") and f"num_pages {10**15}, page_size 4: a cache of " in line

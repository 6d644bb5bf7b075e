"""An app whose engines are elsewhere writes what an app with one of its own writes."""

import argparse
import functools
import importlib
import threading

import pytest
from conftest import CHECKPOINTS
from replicas import Handle, check_texts, make_engine, parse, save_small, serving_replicas
from serving import ENDLESS, PATH, check_refused, connect, is_free, request_of, serving, until

from constraints import compiler
from server import replicas


@pytest.fixture(scope="module")
def model(tiny_llama, tmp_path_factory):
    return save_small(tiny_llama, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(model):
    """A Client to three engines, these, and a Client to one."""
    args = parse(model, "--max-num-seqs", 4, "--max-waiting", 20)
    with serving_replicas(args, 3) as (client, replicas):
        with serving(lambda: make_engine(args), max_waiting=20) as one:
            yield client, replicas, one


def test_texts_are_those_of_one_engine_and_each_has_some(servers):
    client, replicas, one = servers
    check_texts(client, one, clients=4)
    assert all(replica.thread.engine.steps for replica in replicas)


def test_what_an_engine_refuses_is_told(servers):
    client, _, one = servers
    for body in ({"prompt": [10**6]}, {"prompt": ["a"] * 25}, {"temperature": -1}):
        answer = client.post(PATH, body)
        assert answer == one.post(PATH, body) and answer[0] == 400


def test_no_engine_compiles_a_constraint_where_streams_wait(servers, monkeypatch):
    """The ingress process has done it, but an engine elsewhere finds nothing of that."""
    compiled = []
    compile_source = compiler.compile_source.__wrapped__

    def compile_and_tell(constraint, source, vocabulary):
        compiled.append((vocabulary, threading.current_thread().name))
        return compile_source(constraint, source, vocabulary)

    cached = functools.lru_cache(8)(compile_and_tell)
    monkeypatch.setattr(compiler, "compile_source", cached)
    client, replicas, _ = servers
    body = {"structured_outputs": {"regex": "(a|b){3}"}, "seed": 1, "n": 2}
    answers = [client.post(PATH, body) for _ in replicas]
    assert {answer[0] for answer in answers} == {200}
    assert len({own for own, _ in compiled}) == len(compiled) == 1 + len(replicas)
    assert not any(name == "engine" for _, name in compiled)


def test_a_full_engine_is_429(servers):
    client, replicas, _ = servers
    many = ENDLESS | {"prompt": ["Tom"] * 24, "max_tokens": 10**4, "stream": True}
    answers = [client.send("POST", PATH, many) for _ in replicas]
    assert [answer.status for answer in answers] == [200] * 3
    check_refused(client.post(PATH, ENDLESS), None, "24", 429, "rate_limit_exceeded")
    for answer in answers:
        answer.close()
    until(lambda: all(map(is_free, replicas)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(servers, stream):
    client, replicas, _ = servers
    with connect(client, request_of(PATH, ENDLESS | {"stream": stream})):
        until(lambda: any(replica.thread.generations for replica in replicas))
    until(lambda: all(map(is_free, replicas)))


def test_engines_elsewhere_are_not_seen_at_work(servers):
    check_refused(servers[0].get("/live"), None, "engines other processes", 404)


def test_an_app_needs_no_engine_to_know_its_model(model):
    assert importlib.util.find_spec("server.replicas")
    with serving_replicas(parse(model), 1) as (client, _):
        (known,) = client.get("/v1/models")[1]["data"]
        assert (known["id"], known["max_model_len"]) == (model.name, 64)
        assert known["root"] == str(model)
        assert client.post(PATH, {"model": "gpt2"})[0] == 404
        assert client.post("/v1/chat/completions", {"messages": []})[0] == 400
        assert client.get("/health") == (200, None)


def test_keys_queues_and_hosts_are_those_of_the_command_line(model):
    options = "--api-key", "secret", "--max-waiting-tokens", 20, "--allowed-host", "door.lan"
    with serving_replicas(parse(model, *options), 1) as (client, _):
        known = {"Authorization": "Bearer secret"}
        assert client.post(PATH, {"prompt": "Tom"})[0] == 401
        assert client.post(PATH, {"prompt": "Tom"}, known)[0] == 200
        check_refused(client.post(PATH, {"prompt": [1] * 21}, known), None, "21 20")
        for host, status in (("door.lan:80", 200), ("localhost", 200), ("evil.example", 403)):
            assert client.ask("GET", "/v1/models", None, known | {"Host": host})[0] == status


def test_a_salt_reaches_the_engine(model):
    with serving_replicas(parse(model), 1) as (client, (replica,)):
        for cache_salt, shared in (("x", 0), ("x", 8), ("y", 8)):
            assert client.post(PATH, {"prompt": [7] * 9, "cache_salt": cache_salt})[0] == 200
            assert replica.thread.engine.scheduler.prefix_cache_hits == shared


def test_the_ingress_process_collects_no_garbage_of_its_imports(monkeypatch):
    frozen = []
    monkeypatch.setattr(replicas, "freeze", lambda: frozen.append(True))
    options = {"host": "127.0.0.1", "api_key": None, "allow_origin": [], "allowed_host": []}
    options |= {"lora_modules": [], "chat_template": None, "generation_config": "auto"}
    args = argparse.Namespace(model=CHECKPOINTS / "stories-llama", **options)
    replicas.Ingress(args, Handle([])).__serve_build_asgi_app__()
    assert frozen == [True]

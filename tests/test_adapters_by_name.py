"""Lesson 149: to clients an adapter is a model by a name of its own. Oracle: `generate`."""

import concurrent.futures
import runpy
import sys
from types import SimpleNamespace

import pytest
from conftest import CHECKPOINTS, ROOT, is_one_line, save_speaking
from lora_files import random_tensors, save_adapter, with_adapters
from replicas import parse, serving_replicas
from serving import SMALL, refusal, serving, small_encoding, small_engine

import serve
import serve_ray
from infer import generate
from loading.load import load_model
from sampling import SamplingParams
from server.backend import GenerateInput

FROGS = CHECKPOINTS / "stories-frogs"
LLAMA = ["--model", CHECKPOINTS / "stories-llama"]
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
NAMES = (None, "small", "a", "b")


def adapted_engine(tiny_llama, **options):
    engine = small_engine(tiny_llama, **options)
    with_adapters(engine.model)
    return engine


@pytest.fixture
def client(tiny_llama):
    """A Client to a server of a random model with the adapters a and b."""
    adapters = {"a": "somewhere/a", "b": "somewhere/b"}
    with serving(lambda: adapted_engine(tiny_llama), adapters=adapters) as client:
        yield client


def own_text(model, prompt: str, adapter: str, **params) -> str:
    """What `generate` writes with this adapter, "" for none, without EOS."""
    encoding = small_encoding()
    steps = generate(model, [encoding.encode(prompt)], SamplingParams(**params), adapter=adapter)
    tokens = [token for (token,) in steps]
    return encoding.decode(tokens[:-1] if tokens[-1] == 4095 else tokens)


def test_each_model_writes_its_own_texts(client, tiny_llama):
    model = adapted_engine(tiny_llama).model
    bodies = [
        {"prompt": prompt, "model": name, "max_tokens": 12, "seed": seed, "stream": stream}
        for seed in (1, 2)
        for prompt in ("Tom", "The sun")
        for name in NAMES
        for stream in (False, True)
    ]

    def ask(body):
        if body["stream"]:
            events = client.events(PATH, body)
            text = "".join(event["choices"][0]["text"] for event in events)
            return {event["model"] for event in events}, text
        status, found = client.post(PATH, body)
        assert status == 200, found
        return {found["model"]}, found["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(ask, bodies))
    texts = set()
    for body, (names, text) in zip(bodies, found):
        name = body["model"] or "small"
        params = {"max_new_tokens": 12, "temperature": 1.0, "seed": body["seed"]}
        adapter = "" if name == "small" else name
        assert text == own_text(model, body["prompt"], adapter, **params)
        assert names == {name}
        texts.add(text)
    assert len(texts) == 12


def test_replies_to_messages(client, tiny_llama):
    model = adapted_engine(tiny_llama).model
    messages = [{"role": "user", "content": "cat"}]
    found = {}
    for name in NAMES:
        body = {"messages": messages, "model": name, "max_tokens": 9, "temperature": 0}
        status, answer = client.post(CHAT, body)
        assert (status, answer["model"]) == (200, name or "small")
        found[name] = answer["choices"][0]["message"]["content"]
        events = client.events(CHAT, body | {"stream": True})
        assert {event["model"] for event in events} == {name or "small"}
    assert found[None] == found["small"]
    assert len(set(found.values())) == 3
    (prompt,) = [small_encoding().encode("Words: cat\n\n")]

    params = SamplingParams(9)
    steps = generate(model, [[4095, *prompt]], params, adapter="b")
    tokens = [token for (token,) in steps if token != 4095]
    assert found["b"] == small_encoding().decode(tokens)


def test_models_are_listed(client):
    status, found = client.get("/v1/models")
    assert status == 200
    listed = [(each["id"], each["root"], each["parent"]) for each in found["data"]]
    assert listed == [
        ("small", "somewhere/small", None),
        ("a", "somewhere/a", "small"),
        ("b", "somewhere/b", "small"),
    ]
    assert client.get("/v1/models/b") == (200, found["data"][2])
    message = "the model 'c' does not exist; this server has 'small', 'a', 'b'"
    missing = (404, refusal(message, "model", "model_not_found"))
    assert client.get("/v1/models/c") == missing
    assert client.post(PATH, {"model": "c"}) == missing
    assert (
        client.post(CHAT, {"model": "c", "messages": [{"role": "user", "content": "x"}]}) == missing
    )
    assert client.post(PATH, {"model": "", "max_tokens": 1})[0] == 200  # the model itself
    assert client.post(PATH, {"model": ["a"]})[0] == 400


def test_engines_in_other_processes(compiled):
    args = parse(SMALL, "--lora-modules", f"frogs={FROGS}", "again=" + str(FROGS))
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    with serving_replicas(args, 2) as (client, _):
        for name, word in (("stories-llama", "girl"), ("frogs", "frog"), ("again", "frog")):
            status, found = client.post(PATH, body | {"model": name})
            assert (status, found["model"]) == (200, name)
            assert f"a little {word} named" in found["choices"][0]["text"]
        found = client.get("/v1/models")[1]["data"]
        assert [each["id"] for each in found] == ["stories-llama", "frogs", "again"]


def test_calls_with_different_adapters_have_no_prefix_in_common(monkeypatch):
    names = ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica")
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**dict.fromkeys(names, object)))
    router = runpy.run_path(str(ROOT / "server" / "router.py"))
    assert "prompts_and_salt" in router
    calls = [
        (GenerateInput([[1]], [SamplingParams()], cache_salt, "name", adapter),)
        for cache_salt in "xy"
        for adapter in ("", "a")
    ]
    found = [router["prompts_and_salt"](SimpleNamespace(args=args)) for args in calls]
    assert [prompts for prompts, _ in found] == [[[1]]] * 4
    assert found[0][1] == "x" and len({cache_salt for _, cache_salt in found}) == 4


def test_the_server_reads_its_adapters(run_main):
    def serve_with(*words) -> tuple:
        return run_main(serve.main, "--port", 0, *LLAMA, "--lora-modules", *words)

    assert is_one_line(serve_with("frogs"), "--lora-modules frogs: must be NAME=DIR")
    error = "--lora-modules: stories-llama is the name of the model itself"
    assert is_one_line(serve_with(f"a={FROGS}", f"stories-llama={FROGS}"), error)
    assert is_one_line(serve_with("a=nowhere"), "nowhere/adapter_config.json: No such file")
    large = serve_with(f"a={FROGS}", "--model", CHECKPOINTS / "stories")
    assert is_one_line(large, "is not lora_A or lora_B of a linear layer of this model")


def test_replicas_are_not_begun_with_a_wrong_one(run_main, monkeypatch, tiny_llama, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    model = save_speaking(tiny_llama, tmp_path, eos_token_id=4095)
    head = save_adapter(tmp_path / "a", random_tensors(load_model(model), ("lm_head",)))
    words = ["--port", 0, "--cpus", 0.1, "--model", model, "--lora-modules", f"x={head}"]
    result = run_main(serve_ray.main, *words)
    assert is_one_line(result, "adapter 'x' changes lm_head: merge it")
    for words in (["--adapter", "nowhere"], ["--lora-modules", f"a={FROGS}", "b=nowhere"]):
        result = run_main(serve_ray.main, "--port", 0, "--cpus", 0.1, *LLAMA, *words)
        assert is_one_line(result, "nowhere/adapter_config.json: No such file")

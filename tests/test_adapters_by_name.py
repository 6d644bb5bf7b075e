"""To clients an adapter is a model by a name of its own. Oracle: `generate`."""

import itertools
import sys

import pytest
from conftest import CHECKPOINTS, is_one_line, save_speaking
from lora_files import random_tensors, save_adapter, with_adapters
from serving import refusal, serving, small_encoding, small_engine

import serve
import serve_ray
from infer import generate
from loading.load import load_model
from sampling import SamplingParams

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
    adapters = {"a": "somewhere/a", "b": "somewhere/b"}
    with serving(lambda: adapted_engine(tiny_llama), adapters=adapters) as client:
        yield client


def own_text(model, prompt: str, adapter: str, **params) -> str:
    encoding = small_encoding()
    ids = encoding.encode(prompt, allowed_special="all")
    steps = generate(model, [ids], SamplingParams(**params), adapter=adapter)
    return encoding.decode([token for (token,) in steps if token != 4095])


def test_each_model_writes_its_own_texts(client, tiny_llama):
    model = adapted_engine(tiny_llama).model
    texts = set()
    for prompt, name in itertools.product(("Tom", "The sun"), NAMES):
        body = {"prompt": prompt, "model": name, "max_tokens": 12, "seed": 1}
        status, found = client.post(PATH, body)
        text = found["choices"][0]["text"]
        adapter = "" if name in (None, "small") else name
        params = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
        assert text == own_text(model, prompt, adapter, **params)
        events = client.events(PATH, body | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert {event["model"] for event in events} == {found["model"]} == {name or "small"}
        texts.add(text)
    assert len(texts) == 6


def test_replies_to_messages(client, tiny_llama):
    body = {"messages": [{"role": "user", "content": "cat"}], "max_tokens": 9, "temperature": 0}
    found = {}
    for name in NAMES:
        status, answer = client.post(CHAT, body | {"model": name})
        assert (status, answer["model"]) == (200, name or "small")
        found[name] = answer["choices"][0]["message"]["content"]
        events = client.events(CHAT, body | {"model": name, "stream": True})
        assert {event["model"] for event in events} == {name or "small"}
    assert found[None] == found["small"] and len(set(found.values())) == 3
    model = adapted_engine(tiny_llama).model
    prompt = "<|endoftext|>Words: cat\n\n"
    assert found["b"] == own_text(model, prompt, "b", max_new_tokens=9)


def test_models_are_listed(client):
    status, found = client.get("/v1/models")
    listed = [(each["id"], each["root"], each["parent"]) for each in found["data"]]
    adapters = [(name, f"somewhere/{name}", "small") for name in "ab"]
    assert (status, listed) == (200, [("small", "somewhere/small", None), *adapters])
    assert client.get("/v1/models/b") == (200, found["data"][2])
    message = "the model 'c' does not exist; this server has 'small', 'a', 'b'"
    missing = (404, refusal(message, "model", "model_not_found"))
    assert client.get("/v1/models/c") == client.post(PATH, {"model": "c"}) == missing
    messages = [{"role": "user", "content": "x"}]
    assert client.post(CHAT, {"model": "c", "messages": messages}) == missing
    assert client.post(PATH, {"model": ["a"]})[0] == 400


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
    for words, error in (
        (["--model", model, "--lora-modules", f"x={head}"], "'x' changes lm_head: merge it"),
        ([*LLAMA, "--adapter", "nowhere"], "nowhere/adapter_config.json: No such file"),
        ([*LLAMA, "--lora-modules", f"a={FROGS}", "b=no"], "no/adapter_config.json: No such file"),
    ):
        result = run_main(serve_ray.main, "--port", 0, "--cpus", 0.1, *words)
        assert is_one_line(result, error)

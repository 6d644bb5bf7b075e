"""A replica that is killed, one whose engine fails, and what each engine counts."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from replicas import make_engine, parse, save_small, serving_replicas, streamed_texts
from serving import ENDLESS, PATH, metric_families, serving, until


def check_ended(answer: dict) -> None:
    """A text ends with an error because its process has ended."""
    assert answer["error"]["type"] == "server_error"
    assert answer["error"]["message"].endswith("RuntimeError")


@pytest.fixture
def servers(tiny_llama, tmp_path):
    """A Client to two engines, these, and a Client to one."""
    args = parse(save_small(tiny_llama, tmp_path))
    with serving_replicas(args, 2) as (client, replicas), serving(lambda: make_engine(args)) as one:
        yield client, replicas, one


def test_of_a_killed_replica_texts_end_with_an_error_and_others_go_on(servers):
    client, replicas, one = servers
    body = {"prompt": "Tom", "seed": 5, "max_tokens": 500, "ignore_eos": True}
    with client.send("POST", PATH, ENDLESS | {"stream": True}) as killed:
        killed.readline()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(streamed_texts, client, body)
            until(lambda: replicas[1].thread.generations)
            replicas[0].killed = True
            *_, error, done, empty = killed.read().split(b"\n\n")
            assert other.result() == streamed_texts(one, body)
    check_ended(json.loads(error.strip().removeprefix(b"data: ")))
    assert (done, empty) == (b"data: [DONE]", b"")


def test_a_text_that_is_awaited_is_503(servers):
    client, replicas, _ = servers
    replicas[0].killed = True
    status, answer = client.post(PATH, ENDLESS)
    assert status == 503
    check_ended(answer)
    assert client.post(PATH, {"prompt": "Tom"})[0] == 200


def test_a_replica_is_well_until_its_engine_fails(servers, capfd):
    client, (first, second), _ = servers
    assert hasattr(first, "check_health")
    first.check_health()

    def fail():
        raise ValueError("a bug")

    first.thread.engine.step = fail
    status, answer = client.post(PATH, ENDLESS)
    assert status == 503
    assert answer["error"]["message"].endswith("ValueError: a bug")
    with pytest.raises(Exception, match="ValueError: a bug"):
        first.check_health()
    second.check_health()
    assert "ValueError: a bug" in capfd.readouterr().err


@pytest.fixture
def three(tiny_llama, tmp_path):
    """A Client to three engines, and these."""
    args = parse(save_small(tiny_llama, tmp_path))
    with serving_replicas(args, 3) as (client, replicas):
        yield client, replicas


def read_metrics(client) -> tuple[list, dict]:
    """The names of what /metrics has, and of each sample its values by engine."""
    families = metric_families(client)
    values = {}
    for family in families:
        for name, labels, value, *_ in family.samples:
            engine = labels.pop("engine")
            assert labels.pop("model_name")
            key = name.removeprefix("vllm:") + "".join(f"{{{label}}}" for label in labels.values())
            values.setdefault(key, {})[engine] = value
    return [family.name for family in families], values


def test_each_engine_counts_for_itself(three):
    client, replicas = three
    for tokens in (3, 5, 7, 2):  # in turns, so that the first one writes twice
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
        assert client.post(PATH, body)[0] == 200
    names, values = read_metrics(client)
    own = {family.name for family in replicas[0].metrics.registry.collect()}
    assert len(set(names)) == len(names)
    assert {name.removesuffix("_created") for name in names} == own
    assert read_metrics(client) == (names, values)  # to ask again adds nothing
    engines = {replica.name for replica in replicas}
    assert len(engines) == 3 and all(set(found) == engines for found in values.values())
    by_engine = [values["generation_tokens_total"][replica.name] for replica in replicas]
    assert by_engine == [3 + 2, 5, 7]
    assert sum(values["request_success_total{length}"].values()) == 4
    assert sum(values["prompt_tokens_total"].values()) == 4 * 3
    assert sum(values["time_to_first_token_seconds_bucket{+Inf}"].values()) == 4
    hits = [values["prefix_cache_hits_total"][replica.name] for replica in replicas]
    assert hits == [0, 0, 0]  # a page of 4 is never full here

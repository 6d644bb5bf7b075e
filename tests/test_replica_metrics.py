"""/metrics of several engines: the samples of each, with its name."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from replicas import parse, save_small, serving_replicas
from serving import PATH


@pytest.fixture(scope="module")
def servers(tiny_llama, tmp_path_factory):
    """A Door to three engines, and these."""
    args = parse(save_small(tiny_llama, tmp_path_factory.mktemp("model")))
    with serving_replicas(args, 3) as (door, replicas):
        yield door, replicas


def read(door) -> tuple[list, dict]:
    """The names of what /metrics has, and of each sample its values by engine."""
    with door.send("GET", "/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    values = {}
    for family in families:
        for name, labels, value, *_ in family.samples:
            engine = labels.pop("engine")
            assert labels.pop("model_name")
            key = name.removeprefix("vllm:") + "".join(f"{{{label}}}" for label in labels.values())
            values.setdefault(key, {})[engine] = value
    return [family.name for family in families], values


def test_each_engine_counts_for_itself(servers):
    door, replicas = servers
    for tokens in (3, 5, 7, 2):  # in turns, so that the first one writes twice
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
        assert door.post(PATH, body)[0] == 200
    names, values = read(door)
    assert len(set(names)) == len(names)
    engines = {replica.name for replica in replicas}
    assert len(engines) == 3 and all(set(found) == engines for found in values.values())
    by_engine = [values["generation_tokens_total"][replica.name] for replica in replicas]
    assert by_engine == [3 + 2, 5, 7]
    assert sum(values["request_success_total{length}"].values()) == 4
    assert sum(values["prompt_tokens_total"].values()) == 4 * 3
    assert sum(values["time_to_first_token_seconds_bucket{+Inf}"].values()) == 4
    hits = [values["prefix_cache_hits_total"][replica.name] for replica in replicas]
    assert hits == [0, 0, 0]  # a page of 4 is never full here


def test_asking_again_adds_nothing(servers):
    door, _ = servers
    names, values = read(door)
    assert (names, values) == read(door)


def test_they_have_the_names_of_one_engine(servers):
    door, replicas = servers
    own = {family.name for family in replicas[0].metrics.registry.collect()}
    names, _ = read(door)
    assert {name.removesuffix("_created") for name in names} == own

"""/metrics of several engines: the samples of each, with its name."""

import pytest
from replicas import parse, save_small, serving_replicas
from serving import PATH, metric_families


@pytest.fixture
def servers(tiny_llama, tmp_path):
    """A Door to three engines, and these."""
    args = parse(save_small(tiny_llama, tmp_path))
    with serving_replicas(args, 3) as (door, replicas):
        yield door, replicas


def read(door) -> tuple[list, dict]:
    """The names of what /metrics has, and of each sample its values by engine."""
    families = metric_families(door)
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
    own = {family.name for family in replicas[0].metrics.registry.collect()}
    assert len(set(names)) == len(names)
    assert {name.removesuffix("_created") for name in names} == own
    assert read(door) == (names, values)  # to ask again adds nothing
    engines = {replica.name for replica in replicas}
    assert len(engines) == 3 and all(set(found) == engines for found in values.values())
    by_engine = [values["generation_tokens_total"][replica.name] for replica in replicas]
    assert by_engine == [3 + 2, 5, 7]
    assert sum(values["request_success_total{length}"].values()) == 4
    assert sum(values["prompt_tokens_total"].values()) == 4 * 3
    assert sum(values["time_to_first_token_seconds_bucket{+Inf}"].values()) == 4
    hits = [values["prefix_cache_hits_total"][replica.name] for replica in replicas]
    assert hits == [0, 0, 0]  # a page of 4 is never full here

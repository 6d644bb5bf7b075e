"""/metrics of engines on Ray."""

from on_ray import samples

pytest_plugins = ["ray_fixtures"]


def test_each_engine_counts_for_itself(servers):
    door, _, _ = servers
    before = samples(door, "generation_tokens_total")
    for tokens in (3, 5, 7, 2):
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
        assert door.post("/v1/completions", body)[0] == 200
    for _ in range(2):
        found = samples(door, "generation_tokens_total")
        assert len(found) == 2 and found.keys() == before.keys()
        assert sum(found.values()) - sum(before.values()) == 3 + 5 + 7 + 2

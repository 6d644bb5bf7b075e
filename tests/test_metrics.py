"""What /metrics says is what was asked for, and what the engine did."""

import math
import threading

from conftest import random_tokens
from engines import finish, greedy, make_engine
from serving import in_turns, metric_families, until

from engine.drafter import PromptLookupDrafter
from server.metrics import Metrics

COUNTERS = """num_preemptions prefix_cache_queries prefix_cache_hits spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens prompt_tokens generation_tokens request_success""".split()
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
    request_prompt_tokens request_generation_tokens""".split()


def families(client) -> dict:
    return {family.name.removeprefix("vllm:"): family for family in metric_families(client)}


def counts(client) -> dict[str, float]:
    """The value of each sample, with its labels except the model's name."""
    values = {}
    for family in families(client).values():
        for name, labels, value, *_ in family.samples:
            assert labels.pop("model_name") == "small"
            shown = "".join(f"{{{label}}}" for label in labels.values())
            values[name.removeprefix("vllm:") + shown] = value
    return values


def write(client, *prompts, tokens=4, **fields) -> None:
    """Have texts written, to prompts of ids."""
    body = {"prompt": list(prompts), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = client.post("/v1/completions", body | fields)
    assert status == 200, answer


def test_names_types_and_label_are_those_of_vllm(start):
    client = start()
    kinds = {name: family.type for name, family in families(client).items()}
    created = {name for name in kinds if name.endswith("_created")}
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    expected |= dict.fromkeys(HISTOGRAMS, "histogram")
    assert {name: kind for name, kind in kinds.items() if name not in created} == expected
    before = counts(client)
    assert {value for name, value in before.items() if "_created" not in name} == {0.0}
    ends = {name for name in before if name.startswith("request_success_total")}
    reasons = ("stop", "length", "abort", "error")
    assert ends == {f"request_success_total{{{reason}}}" for reason in reasons}


def test_buckets_end_at_1_2_and_5_of_each_power_of_ten(start):
    found = families(start())
    least = dict.fromkeys(HISTOGRAMS, 0) | {"e2e_request_latency_seconds": -2}
    least |= {"time_to_first_token_seconds": -3, "inter_token_latency_seconds": -3}
    for name, first in least.items():
        samples = found[name].samples
        ends = [float(sample.labels["le"]) for sample in samples if "le" in sample.labels]
        powers = range(first, first + 5)
        expected = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
        assert ends == [*expected, math.inf]


def test_tokens_and_requests_are_counted(start):
    """By each server for itself, and nothing is kept of texts that are over."""
    client = start()
    write(client, random_tokens(5), random_tokens(9, seed=1), tokens=4)
    write(client, random_tokens(2, seed=2), tokens=7, stream=False)
    write(client, random_tokens(3), tokens=0)  # is not counted
    found = counts(client)
    assert found["prompt_tokens_total"] == 5 + 9 + 2
    assert found["generation_tokens_total"] == 4 + 4 + 7
    assert found["request_success_total{length}"] == 3
    assert found["request_success_total{stop}"] == 0
    assert found["request_prompt_tokens_sum"] == 5 + 9 + 2
    assert found["request_prompt_tokens_bucket{5.0}"] == 2
    assert found["request_generation_tokens_sum"] == 4 + 4 + 7
    assert found["request_generation_tokens_count"] == 3
    assert found["inter_token_latency_seconds_count"] == 3 + 3 + 6
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == 0
    assert counts(start())["generation_tokens_total"] == 0
    assert counts(client)["generation_tokens_total"] == 4 + 4 + 7
    (metrics,) = (each for each in client.thread.observers if isinstance(each, Metrics))
    assert metrics.last_token_time == {}


def test_a_stop_is_no_length(start, tiny):
    model = tiny(eos_token_ids=tuple(range(61)))
    client = start(model)
    write(client, random_tokens(5), ignore_eos=False)
    found = counts(client)
    assert found["request_success_total{stop}"] == found["generation_tokens_total"] == 1
    assert found["request_success_total{length}"] == 0


def test_times_are_those_of_the_passes(start, clock):
    """On the fixture's clock a pass takes a second for each position."""
    client = start()
    write(client, random_tokens(5), tokens=4)
    found = counts(client)
    assert found["time_to_first_token_seconds_sum"] == 5
    assert found["time_to_first_token_seconds_bucket{5.0}"] == 1
    assert found["time_to_first_token_seconds_bucket{2.0}"] == 0
    assert found["inter_token_latency_seconds_sum"] == 3
    assert found["inter_token_latency_seconds_bucket{1.0}"] == 3
    assert found["e2e_request_latency_seconds_sum"] == 8
    write(client, random_tokens(3, seed=1), random_tokens(4, seed=2), tokens=3)
    found = counts(client)
    assert found["time_to_first_token_seconds_sum"] == 5 + 7 + 7
    assert found["inter_token_latency_seconds_sum"] == 3 + 4 * 2
    assert found["e2e_request_latency_seconds_sum"] == 8 + 11 + 11
    assert found["e2e_request_latency_seconds_count"] == 3


def test_a_chunk_is_no_token(start, clock):
    client = start(max_num_batched_tokens=4)
    write(client, random_tokens(10), tokens=2)
    found = counts(client)
    assert found["time_to_first_token_seconds_sum"] == 10
    assert found["inter_token_latency_seconds_sum"] == 1
    assert found["prompt_tokens_total"] == 10


def test_found_pages_are_hits_in_tokens(start):
    client = start(page_size=4)
    prompt = random_tokens(11)
    for expected in ((11, 0), (22, 8)):
        write(client, prompt, tokens=1)
        found = counts(client)
        names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
        assert tuple(found[name] for name in names) == expected


def test_preemptions_and_drafts_are_the_engines(start):
    client = start(num_pages=6, page_size=4, drafter=PromptLookupDrafter())
    write(client, [7] * 8, [3] * 8, random_tokens(6), tokens=9)
    engine = client.thread.engine
    found = counts(client)
    assert found["num_preemptions_total"] == engine.scheduler.num_preemptions > 0
    assert found["prefix_cache_hits_total"] == engine.scheduler.prefix_cache_hits
    assert found["spec_decode_num_draft_tokens_total"] == engine.num_draft_tokens > 0
    assert found["spec_decode_num_accepted_tokens_total"] == engine.num_accepted_tokens
    assert found["generation_tokens_total"] == 27
    assert found["prompt_tokens_total"] == 22  # once each, however often they were computed


def test_what_runs_and_waits_is_seen_while_it_does(start):
    client = start(max_num_seqs=2, num_pages=8, page_size=4)
    turn = threading.Semaphore(1)
    in_turns(client.thread.engine, turn)
    body = {"prompt": [random_tokens(5), random_tokens(6, seed=1), random_tokens(3, seed=2)]}
    body |= {"max_tokens": 2**16, "ignore_eos": True, "stream": True}
    with client.send("POST", "/v1/completions", body) as answer:
        assert answer.status == 200  # one step is made, and no other begins
        found = counts(client)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 1)
        assert found["kv_cache_usage_perc"] == 4 / 8
        assert found["prompt_tokens_total"] == 11
        assert found["request_success_total{abort}"] == 0
    turn.release(10**6)
    # They do not end by themselves.
    until(lambda: counts(client)["request_success_total{abort}"] == 3)
    found = counts(client)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
    assert found["kv_cache_usage_perc"] == found["e2e_request_latency_seconds_count"] == 0


def test_an_error_is_no_success_and_has_no_latency(start, tiny):
    model = tiny()
    model.wte.weight.data[7] = float("nan")
    client = start(model)
    assert client.post("/v1/completions", {"prompt": [[1], [10**6]]})[0] == 400  # is no abort
    assert sum(value for name, value in counts(client).items() if "_created" not in name) == 0
    assert client.post("/v1/completions", {"prompt": [7, 7], "max_tokens": 3})[0] == 500
    found = counts(client)
    assert found["request_success_total{error}"] == 1
    assert found["prompt_tokens_total"] == found["e2e_request_latency_seconds_count"] == 0
    assert found["time_to_first_token_seconds_count"] == 0


def test_what_is_looked_up_past_the_window_is_the_window(tiny):
    """The last 12 of 20 tokens, in a window of 16 that moves by 8."""
    engine, _ = make_engine(tiny(), [random_tokens(20)], greedy(1), page_size=4)
    finish(engine)
    assert engine.scheduler.prefix_cache_queries == 12

"""What /metrics says is what was asked for, and what the engine did."""

import math
import threading

from conftest import random_tokens
from serving import in_turns, metric_families, until

from engine.drafter import PromptLookupDrafter
from server.metrics import Metrics

COUNTERS = """num_preemptions prefix_cache_queries prefix_cache_hits spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens prompt_tokens generation_tokens request_success""".split()
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
HISTOGRAMS = {  # name -> the power of ten at which its buckets begin
    "time_to_first_token_seconds": -3,
    "inter_token_latency_seconds": -3,
    "e2e_request_latency_seconds": -2,
    "request_prompt_tokens": 0,
    "request_generation_tokens": 0,
}


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


def check_counts(client, **expected: float) -> None:
    found = counts(client)
    assert {name: found[name] for name in expected} == expected


def write(client, *prompts, tokens=4, **fields) -> None:
    body = {"prompt": list(prompts), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = client.post("/v1/completions", body | fields)
    assert status == 200, answer


def test_names_types_labels_and_buckets_are_those_of_vllm(start):
    client = start()
    found = families(client)
    kinds = {name: each.type for name, each in found.items() if not name.endswith("_created")}
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    assert kinds == expected | dict.fromkeys(HISTOGRAMS, "histogram")
    before = counts(client)
    assert {value for name, value in before.items() if "_created" not in name} == {0.0}
    ends = {name for name in before if name.startswith("request_success_total")}
    reasons = ("stop", "length", "abort", "error")
    assert ends == {f"request_success_total{{{reason}}}" for reason in reasons}
    for name, first in HISTOGRAMS.items():
        labels = [sample.labels for sample in found[name].samples]
        powers = [float(f"{digit}e{first + more}") for more in range(5) for digit in (1, 2, 5)]
        assert [float(own["le"]) for own in labels if "le" in own] == [*powers, math.inf]


def test_tokens_and_requests_are_counted(start, tiny):
    client = start()
    write(client, random_tokens(5), random_tokens(9, seed=1), tokens=4)
    write(client, random_tokens(2, seed=2), tokens=7, stream=False)
    write(client, random_tokens(3), tokens=0)  # is not counted
    names = ["request_success_total{length}", "request_success_total{stop}"]
    names += ["request_prompt_tokens_bucket{5.0}"]
    check_counts(client, **dict(zip(names, (3, 0, 2))))
    check_counts(
        client,
        prompt_tokens_total=5 + 9 + 2,
        generation_tokens_total=4 + 4 + 7,
        request_prompt_tokens_sum=5 + 9 + 2,
        request_generation_tokens_sum=4 + 4 + 7,
        request_generation_tokens_count=3,
        inter_token_latency_seconds_count=3 + 3 + 6,
        num_requests_running=0,
        num_requests_waiting=0,
        kv_cache_usage_perc=0,
    )
    (metrics,) = (each for each in client.thread.observers if isinstance(each, Metrics))
    assert metrics.last_token_time == {}
    other = start(tiny(eos_token_ids=tuple(range(61))))
    write(other, random_tokens(5), ignore_eos=False)
    check_counts(other, generation_tokens_total=1, **dict(zip(names, (0, 1))))
    check_counts(client, generation_tokens_total=4 + 4 + 7)


def test_times_are_those_of_the_passes(start, clock):
    client = start()
    write(client, random_tokens(5), tokens=4)
    first, between = "time_to_first_token_seconds", "inter_token_latency_seconds"
    buckets = {f"{first}_bucket{{5.0}}": 1, f"{first}_bucket{{2.0}}": 0}
    buckets |= {f"{between}_bucket{{1.0}}": 3, "e2e_request_latency_seconds_sum": 8}
    check_counts(client, **buckets, **{f"{first}_sum": 5, f"{between}_sum": 3})
    write(client, random_tokens(3, seed=1), random_tokens(4, seed=2), tokens=3)
    check_counts(client, **{f"{first}_sum": 5 + 7 + 7, f"{between}_sum": 3 + 4 * 2})
    check_counts(client, e2e_request_latency_seconds_sum=8 + 11 + 11)
    client = start(max_num_batched_tokens=4)
    write(client, random_tokens(10), tokens=2)  # a chunk is no token
    check_counts(client, **{f"{first}_sum": 10, f"{between}_sum": 1}, prompt_tokens_total=10)


def test_hits_preemptions_and_drafts_are_the_engines(start):
    client = start(page_size=4)
    for queries, hits in ((11, 0), (22, 8)):
        write(client, random_tokens(11), tokens=1)
        check_counts(client, prefix_cache_queries_total=queries, prefix_cache_hits_total=hits)
    client = start(num_pages=6, page_size=4, drafter=PromptLookupDrafter())
    write(client, [7] * 8, [3] * 8, random_tokens(6), tokens=9)
    engine = client.thread.engine
    assert min(engine.scheduler.num_preemptions, engine.num_draft_tokens) > 0
    check_counts(
        client,
        num_preemptions_total=engine.scheduler.num_preemptions,
        spec_decode_num_draft_tokens_total=engine.num_draft_tokens,
        spec_decode_num_accepted_tokens_total=engine.num_accepted_tokens,
        generation_tokens_total=27,
        prompt_tokens_total=22,  # once each, however often they were computed
    )


def test_what_runs_and_waits_is_seen_while_it_does(start):
    client = start(max_num_seqs=2, num_pages=8, page_size=4)
    turn = threading.Semaphore(1)
    in_turns(client.thread.engine, turn)
    body = {"prompt": [random_tokens(5), random_tokens(6, seed=1), random_tokens(3, seed=2)]}
    body |= {"max_tokens": 2**16, "ignore_eos": True, "stream": True}
    abort = "request_success_total{abort}"
    with client.send("POST", "/v1/completions", body) as answer:
        assert answer.status == 200  # one step is made, and no other begins
        check_counts(client, num_requests_running=2, num_requests_waiting=1)
        check_counts(client, kv_cache_usage_perc=4 / 8, prompt_tokens_total=11, **{abort: 0})
    turn.release(10**6)
    until(lambda: counts(client)[abort] == 3)  # they do not end by themselves
    check_counts(client, num_requests_running=0, num_requests_waiting=0)
    check_counts(client, kv_cache_usage_perc=0, e2e_request_latency_seconds_count=0)


def test_an_error_is_no_success_and_has_no_latency(start, tiny):
    model = tiny()
    model.wte.weight.data[7] = float("nan")
    client = start(model)
    assert client.post("/v1/completions", {"prompt": [[1], [10**6]]})[0] == 400  # is no abort
    assert sum(value for name, value in counts(client).items() if "_created" not in name) == 0
    assert client.post("/v1/completions", {"prompt": [7, 7], "max_tokens": 3})[0] == 500
    check_counts(client, **{"request_success_total{error}": 1}, prompt_tokens_total=0)
    check_counts(client, e2e_request_latency_seconds_count=0, time_to_first_token_seconds_count=0)

"""What a server shows: its page, /live with a frame for each step, and /metrics."""

import asyncio
import base64
import collections
import hashlib
import json
import math
import re
import signal
import threading

import anyio
import pytest
from conftest import ROOT, random_tokens
from drafting import knowing
from serving import Script, in_turns, metric_families, until

from engine.drafter import PromptLookupDrafter
from server import live
from server.metrics import Metrics


def fetch(client, path: str) -> tuple[str, str]:
    with client.send("GET", path) as answer:
        assert answer.status == 200
        return answer.read().decode(), answer.headers["Content-Type"]


def test_the_page_and_its_script_are_served(client, monkeypatch):
    # While a page is sent to a client that does not read, no file is open.
    monkeypatch.setattr(anyio, "open_file", None)
    files = (("/", "page.html", "text/html"), ("/player.js", "player.js", "text/javascript"))
    for path, name, kind in files:
        text, given = fetch(client, path)
        assert text == (ROOT / "server" / name).read_text("utf-8")
        assert given.startswith(kind)
        # Nothing is asked from elsewhere.
        assert re.findall(r"https?:|//[\w.-]+\.\w|@import|url\(", text) == []


def test_the_page_may_run_and_ask_nothing_but_its_server(client):
    """By a policy that browsers hold it to, also if a text became a script or a link."""
    with client.send("GET", "/") as answer:
        page = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    rules = {name: values for name, *values in map(str.split, policy.split(";"))}
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["default-src"] == ["'none'"] and rules["connect-src"] == ["'self'"]
    assert rules["script-src"] == ["'self'", f"'sha256-{digest}'"]
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    # Such a policy lets no attribute run, so there must be none.
    assert not re.search(r"<\w[^>]*\son\w+=", page)


PROMPT = random_tokens(5)
EMPTY = {"running": [], "waiting": [], "over": [], "preempted": [], "queued": 0}


def post(client, prompts, tokens, **fields) -> dict:
    body = {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = client.post("/v1/completions", body | fields)
    assert status == 200, answer
    return answer


def listen(client):
    """The events of /live. Close it to leave."""
    with client.send("GET", "/live") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))


def watch(client):
    frames = listen(client)
    next(frames), next(frames)
    return frames


def monitor_of(client):
    return next(found for found in client.thread.observers if hasattr(found, "frame"))


def until_over(frames, count: int) -> list[dict]:
    seen = []
    while sum(len(frame["over"]) for frame in seen) < count or seen[-1]["running"]:
        seen.append(next(frames))
    return seen


def rows_of(frames) -> list[dict]:
    kinds = ("running", "waiting", "over")
    return [row for frame in frames for kind in kinds for row in frame[kind]]


def works_of(frames) -> list[int]:
    return [sum(column) for column in zip(*(row["work"] for row in rows_of(frames)))]


def in_loop(client, work):
    return asyncio.run_coroutine_threadsafe(work, client.thread.loop).result(60)


def test_nothing_is_done_while_nobody_watches_and_first_comes_what_the_engine_is(start):
    client = start()
    monitor = monitor_of(client)
    made = []
    frame = monitor.frame
    monitor.frame = lambda now: made.append(now) or frame(now)
    post(client, [[1, 2]], 3)
    assert made == []
    frames = watch(client)
    assert len(made) == 1
    # Who watches takes no room of requests.
    assert (client.thread.num_open_requests, client.thread.waiting_tokens) == (0, 0)
    frames.close()
    until(lambda: not monitor.num_subscribers)  # the server hears of it by itself
    assert client.thread.generations == monitor.subscribers == set()
    made.clear()
    post(client, [[1, 2]], 3)
    assert made == []
    sizes = {"max_num_seqs": 3, "num_pages": 20, "page_size": 4, "max_num_batched_tokens": 17}
    frames = listen(start(**sizes))
    own = {"period": 0.02, "block_size": 16, "model": "small", "gamma": 0}
    assert next(frames) == sizes | own
    frame = next(frames)
    assert (EMPTY | {"steps": 0, "positions": 0, "cached": []}).items() <= frame.items()


def test_the_stream_ends_with_the_engine_and_with_the_server(start, tmp_path):
    client = start()
    frames = watch(client)
    client.thread.engine.step = lambda: 1 / 0
    assert client.post("/v1/completions", {"prompt": [1], "max_tokens": 3})[0] == 503
    assert list(frames) == []
    assert client.get("/live")[0] == 503
    client = start()
    frames = watch(client)
    client.thread.loop.call_soon_threadsafe(monitor_of(client).close)
    assert list(frames) == []
    assert list(listen(client)) == []  # who comes now
    with Script(tmp_path) as server:
        frames = listen(server.client())
        next(frames)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0  # sooner than a text would have to end
        frames.close()


def test_frames_show_the_pools_pages(start, tiny_windows):
    model = tiny_windows(sliding_windows=(3, 5), block_size=16)
    client = start(model, num_pages=9, page_size=4, max_num_seqs=3)
    scheduler = client.thread.engine.scheduler
    pool = scheduler.pool
    seen = []

    class Check:
        """After each step, the frame that was made of it against the engine itself."""

        def on_step(self, events):
            monitor = monitor_of(client)
            monitor.reset()
            frame = monitor.frame(0.0)
            owners = collections.Counter()
            for row, request in zip(frame["running"], scheduler.running, strict=True):
                own = (request.pages, request.num_computed_tokens, request.start)
                assert (row["pages"], row["computed"], row["start"]) == own
                assert row["tokens"] == len(request.tokens)
                owners.update(set(row["pages"]) - {None})
            assert owners == pool.ref_counts
            cached = {page for page in pool.page_to_hash if page not in pool.ref_counts}
            assert set(frame["cached"]) == cached and len(frame["cached"]) == len(cached)
            assert frame["queued"] == len(frame["waiting"]) == len(scheduler.waiting)
            seen.append(frame)

    client.thread.observers.append(Check())
    post(client, [random_tokens(8) + random_tokens(2, seed=seed) for seed in range(4)], 9)
    tables = [[page for row in frame["running"] for page in row["pages"]] for frame in seen]
    held = [[page for page in pages if page is not None] for pages in tables]
    assert any(len(set(pages)) < len(pages) for pages in held)  # some are shared
    assert any(None in pages for pages in tables)
    assert any(frame["waiting"] for frame in seen)
    assert seen[-1]["running"] == [] and seen[-1]["cached"]


def test_frames_add_up_to_all_that_was_done(start, tiny, monkeypatch):
    monkeypatch.setattr(live, "PERIOD", 0)  # a frame for each step
    monkeypatch.setattr(live, "MAX_TIME_SHARE", 1e9)
    drafter = knowing(tiny(), wrong=range(0, 40, 3))
    client = start(num_pages=8, page_size=4, drafter=drafter, gamma=3)
    frames = watch(client)
    post(client, [random_tokens(length, seed=length) for length in (6, 9, 3)], 12)
    seen = until_over(frames, 3)
    engine = client.thread.engine
    last = seen[-1]
    positions, drafts, accepted, tokens = works_of(seen)
    assert positions == engine.num_computed_tokens == last["positions"]
    assert drafts == engine.num_draft_tokens == last["drafted"] > 0
    assert accepted == engine.num_accepted_tokens == last["accepted"] > 0
    assert tokens == 3 * 12
    preempted = [number for frame in seen for number in frame["preempted"]]
    assert len(preempted) == engine.scheduler.num_preemptions == last["preemptions"] > 0
    for frame in seen:  # who was preempted waits, and has nothing
        waiting = {row["number"]: row for row in frame["waiting"]}
        assert all(waiting[number]["computed"] == 0 for number in frame["preempted"])
    assert last["steps"] == engine.steps and last["shared"] == engine.scheduler.prefix_cache_hits
    assert [row["reason"] for frame in seen for row in frame["over"]] == ["length"] * 3


def test_accepted_drafts_are_named_by_their_places(start, tiny):
    # All drafts are right except at places 4 and 9; each step has two drafts.
    client = start(drafter=knowing(tiny(), wrong=(4, 9)), gamma=2, num_pages=100)
    frames = watch(client)
    answer = post(client, [PROMPT], 12)
    rows = rows_of(until_over(frames, 1))
    # A step ends with a token of the model itself: 0, 3, 4 (its draft was wrong), 7, 9, 11 (the
    # last one comes without a draft).
    assert [place for row in rows for place in row["drafts"]] == [1, 2, 5, 6, 8, 10]
    assert {row["name"] for row in rows} == {f"{answer['id']}-0"}
    counts = ("number", "prompt", "tokens", "start", "computed")
    for row in rows:
        assert row.keys() - {"pages", "reason"} == {"name", "work", "drafts", *counts}
        assert all(isinstance(row[name], int) for name in counts)


def test_frames_show_aborted_and_failed_requests(start, tiny):
    model = tiny()
    model.wte.weight.data[7] = float("nan")
    client = start(model)
    frames = watch(client)
    assert client.post("/v1/completions", {"prompt": [7, 7], "max_tokens": 3})[0] == 500
    ((over,),) = [frame["over"] for frame in until_over(frames, 1)]
    assert over["reason"] == "error" and over["work"] == [2, 0, 0, 0]
    client = start()
    frames = watch(client)
    body = {"prompt": [[1, 2], [3]], "max_tokens": 2**16, "ignore_eos": True, "stream": True}
    with client.send("POST", "/v1/completions", body) as answer:
        answer.readline()
    seen = until_over(frames, 2)
    assert [row["reason"] for frame in seen for row in frame["over"]] == ["abort"] * 2
    assert EMPTY.items() <= (seen[-1] | {"over": []}).items()


@pytest.mark.parametrize("limits", [{"PERIOD": 1e6}, {"PERIOD": 0.0, "MAX_TIME_SHARE": 1e-12}])
def test_frames_are_limited_but_for_the_last(start, monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(live, name, value)
    client = start()
    frames = watch(client)
    post(client, [[1, 2]], 9)
    (last,) = until_over(frames, 1)  # when the engine comes to rest
    assert last["steps"] == 9 and last["over"][0]["work"] == [10, 0, 0, 9]


def test_who_does_not_read_is_cut_off(start, monkeypatch):
    monkeypatch.setattr(live, "MAX_QUEUED_FRAMES", 3)
    client = start()
    monitor = monitor_of(client)

    async def fall_behind():
        frames = monitor.subscribe()
        await anext(frames)
        for number in range(5):
            monitor.broadcast({"steps": number})
        assert monitor.subscribers == set()
        return [frame async for frame in frames]

    kept = in_loop(client, fall_behind())
    assert kept == [b'data: {"steps":%d}\n\n' % number for number in range(3)]
    # Nor does a stream wait in a send, where it would never hear that the client is late.
    monkeypatch.setattr(live, "SEND_TIMEOUT", 0.01)
    sent = []

    async def send(message):
        sent.append((message["type"], len(monitor.subscribers)))
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = live.FrameStream(monitor.subscribe())
    in_loop(client, stream({"type": "http"}, asyncio.Event().wait, send))
    assert sent == [("http.response.start", 0), ("http.response.body", 1)]
    assert monitor.subscribers == client.thread.generations == set()


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

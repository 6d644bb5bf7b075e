"""What the frames of /live say is how the engine stands, and what it did."""

import pytest
from conftest import random_tokens
from drafting import knowing
from test_live import listen, monitor_of, post, watch

EMPTY = {"running": [], "waiting": [], "over": [], "preempted": [], "queued": 0}


@pytest.fixture
def each_step(monkeypatch):
    """There is a frame for each step."""
    monkeypatch.setattr("server.live.PERIOD", 0)
    monkeypatch.setattr("server.live.MAX_TIME_SHARE", 1e9)


def until_over(frames, count: int) -> list[dict]:
    """Frames up to the one in which `count` requests have ended."""
    seen = []
    while sum(len(frame["over"]) for frame in seen) < count or seen[-1]["running"]:
        seen.append(next(frames))
    return seen


def rows_of(frame) -> list[dict]:
    return frame["running"] + frame["waiting"] + frame["over"]


def check_pages(frame, engine) -> None:
    """Each page of a frame is where the pool has it."""
    pool = engine.scheduler.pool
    owners = {}
    for row in frame["running"]:
        for page in set(row["pages"]) - {None}:
            owners.setdefault(page, []).append(row["number"])
    assert {page: len(rows) for page, rows in owners.items()} == pool.ref_counts
    tables = [request.pages for request in engine.scheduler.running]
    assert [row["pages"] for row in frame["running"]] == tables
    cached = {page for page in pool.page_to_hash if page not in pool.ref_counts}
    assert sorted(frame["cached"]) == sorted(cached)


def test_at_first_it_says_what_the_engine_is_and_how_it_stands(start):
    client = start(max_num_seqs=3, num_pages=20, page_size=4, max_num_batched_tokens=17)
    frames = listen(client)
    first = next(frames)
    assert first.pop("period") == 0.02
    limits = {
        "max_num_seqs": 3,
        "num_pages": 20,
        "page_size": 4,
        "max_num_batched_tokens": 17,
        "block_size": 16,
    }
    assert first == limits | {"model": "small", "gamma": 0}
    frame = next(frames)
    assert EMPTY.items() <= frame.items()
    assert frame["steps"] == frame["positions"] == 0 and frame["cached"] == []


@pytest.mark.parametrize("sliding_windows", [(), (3, 5)], ids=str)
def test_frames_show_the_pools_pages(start, tiny, tiny_windows, sliding_windows):
    model = (
        tiny_windows(sliding_windows=sliding_windows, block_size=16) if sliding_windows else tiny()
    )
    client = start(model, num_pages=9, page_size=4, max_num_seqs=3)
    engine = client.thread.engine
    seen = []

    class Check:
        """After each step, the frame that was made of it against the engine itself."""

        def on_step(self, events):
            monitor = monitor_of(client)
            monitor.reset()
            frame = monitor.frame(0.0)
            check_pages(frame, engine)
            scheduler = engine.scheduler
            for row, request in zip(frame["running"], scheduler.running, strict=True):
                assert (
                    row["computed"] == request.num_computed_tokens and row["start"] == request.start
                )
                assert row["tokens"] == len(request.tokens)
            assert frame["queued"] == len(frame["waiting"]) == len(scheduler.waiting)
            seen.append(frame)

    client.thread.observers.append(Check())
    common = random_tokens(8)
    prompts = [common + random_tokens(2, seed=seed) for seed in range(4)]
    post(client, prompts, 9)
    tables = [[page for row in frame["running"] for page in row["pages"]] for frame in seen]
    held = [[page for page in pages if page is not None] for pages in tables]
    assert any(len(set(pages)) < len(pages) for pages in held)  # some are shared
    assert any(None in pages for pages in tables) == bool(sliding_windows)
    assert any(frame["waiting"] for frame in seen)
    assert seen[-1]["running"] == [] and seen[-1]["cached"]


def test_frames_add_up_to_all_that_was_done(start, tiny, each_step):
    drafter = knowing(tiny(), wrong=range(0, 40, 3))
    client = start(num_pages=8, page_size=4, drafter=drafter, gamma=3)
    frames = listen(client)
    assert next(frames)["gamma"] == 3
    next(frames)
    prompts = [random_tokens(length, seed=length) for length in (6, 9, 3)]
    post(client, prompts, 12)
    seen = until_over(frames, 3)
    engine = client.thread.engine
    last = seen[-1]
    works = [row["work"] for frame in seen for row in rows_of(frame)]
    positions, drafts, accepted, tokens = (sum(column) for column in zip(*works))
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
    """All drafts are right except at places 4 and 9; each step has two drafts.

    Of the text a frame tells only counts: other clients' texts are theirs.
    """
    client = start(drafter=knowing(tiny(), wrong=(4, 9)), gamma=2, num_pages=100)
    frames = watch(client)
    answer = post(client, [random_tokens(5)], 12)
    seen = until_over(frames, 1)
    rows = [row for frame in seen for row in rows_of(frame)]
    places = [place for row in rows for place in row["drafts"]]
    # A step ends with a token of the model itself: 0, 3, 4 (its draft was wrong), 7, 9, 11 (the
    # last one comes without a draft).
    assert places == [1, 2, 5, 6, 8, 10]
    assert {row["name"] for row in rows} == {f"{answer['id']}-0"}
    counts = ("number", "prompt", "tokens", "start", "computed")
    for row in rows:
        assert row.keys() - {"pages", "reason"} == {"name", "work", "drafts", *counts}
        assert all(isinstance(row[name], int) for name in counts)


def test_frames_show_preemption_and_readmission_in_one_step(start, each_step):
    client = start(num_pages=4, page_size=4, max_num_batched_tokens=9)
    frames = watch(client)
    prompt = random_tokens(8)
    post(client, [prompt, prompt], 3)
    seen = until_over(frames, 2)
    assert seen[1]["preempted"] == [2] == [row["number"] for row in seen[1]["running"]][1:]
    told = [number for frame in seen for number in frame["preempted"]]
    assert len(told) == client.thread.engine.scheduler.num_preemptions


def test_frames_show_aborted_requests(start):
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
        monkeypatch.setattr(f"server.live.{name}", value)
    client = start()
    frames = watch(client)
    post(client, [[1, 2]], 9)
    (last,) = until_over(frames, 1)  # when the engine comes to rest
    assert last["steps"] == 9 and last["over"][0]["work"] == [10, 0, 0, 9]

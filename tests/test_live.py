"""What /live says of the engine is how it stands, and what it did."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, random_tokens
from drafting import knowing, own_run
from serving import Door, serving, small_encoding

from sampling import SamplingParams

PROMPT = random_tokens(5)
EMPTY = {"running": [], "waiting": [], "over": [], "preempted": [], "queued": 0}


def post(door, prompts, tokens, **fields) -> dict:
    body = {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = door.post("/v1/completions", body | fields)
    assert status == 200, answer
    return answer


def listen(door):
    """The events of /live, parsed. Close it to leave."""
    with door.send("GET", "/live") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.strip():
                assert line.startswith(b"data: ")
                yield json.loads(line.removeprefix(b"data: "))


def until_over(frames, count: int) -> list[dict]:
    """Frames up to that in which so many requests have ended."""
    seen = []
    while sum(len(frame["over"]) for frame in seen) < count or seen[-1]["running"]:
        seen.append(next(frames))
    return seen


def in_loop(door, work):
    """What a coroutine returns that runs in the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, door.thread.loop).result(10)


def live_of(door):
    return next(found for found in door.thread.observers if hasattr(found, "frame"))


def rows_of(frame) -> list[dict]:
    return frame["running"] + frame["waiting"] + frame["over"]


def check_pages(frame, engine) -> None:
    """Each page of a frame is where the pool has it."""
    pool = engine.scheduler.pool
    owners = {}
    for row in frame["running"]:
        for page in row["pages"]:
            owners.setdefault(page, []).append(row["number"])
    assert {page: len(rows) for page, rows in owners.items()} == pool.holders
    tables = [request.pages for request in engine.scheduler.running]
    assert [row["pages"] for row in frame["running"]] == tables
    cached = {page for page in pool.digest_of if page not in pool.holders}
    assert sorted(frame["cached"]) == sorted(cached)


@pytest.fixture
def start(tiny):
    """A function that starts a server of a tiny model."""
    from engine.engine import Engine

    with contextlib.ExitStack() as stack:

        def enter(model=None, app_options=None, **options):
            def make():
                return Engine(model or tiny(), encoding=small_encoding(), **options)

            return stack.enter_context(serving(make, app_options=app_options))

        yield enter


def test_at_first_it_says_what_the_engine_is_and_how_it_stands(start):
    door = start(max_rows=3, num_pages=20, page_size=4, budget=17)
    frames = listen(door)
    first = next(frames)
    assert first.pop("period") == 0.02
    limits = {"max_rows": 3, "num_pages": 20, "page_size": 4, "budget": 17, "block_size": 16}
    assert first == limits | {"model": "small", "gamma": 0}
    frame = next(frames)
    assert EMPTY.items() <= frame.items()
    assert frame["steps"] == frame["positions"] == 0 and frame["cached"] == []


def test_each_page_is_where_the_pool_has_it(start):
    door = start(num_pages=9, page_size=4, max_rows=3)
    engine = door.thread.engine
    seen = []

    class Check:
        """After each step, the frame that was made of it against the engine itself."""

        def stepped(self, events):
            live = live_of(door)
            live.clear()
            frame = live.frame(0.0)
            check_pages(frame, engine)
            scheduler = engine.scheduler
            for row, request in zip(frame["running"], scheduler.running, strict=True):
                assert row["computed"] == request.computed and row["start"] == request.start
                assert row["tokens"] == len(request.tokens)
            assert frame["queued"] == len(frame["waiting"]) == len(scheduler.waiting)
            seen.append(frame)

        def aborted(self, request):
            pass

    door.thread.observers.append(Check())
    common = random_tokens(8)
    prompts = [common + random_tokens(2, seed=seed) for seed in range(4)]
    post(door, prompts, 9)
    assert any(len(row["pages"]) for frame in seen for row in frame["running"])
    shared = [page for frame in seen for page in shared_pages(frame)]
    assert shared and any(frame["waiting"] for frame in seen)
    assert seen[-1]["running"] == [] and seen[-1]["cached"]


def shared_pages(frame) -> list[int]:
    pages = [page for row in frame["running"] for page in row["pages"]]
    return [page for page in set(pages) if pages.count(page) > 1]


def test_frames_add_up_to_all_that_was_done(start, tiny, monkeypatch):
    from server import live

    monkeypatch.setattr(live, "PERIOD", 0)  # so that there is a frame for each step
    monkeypatch.setattr(live, "SHARE", 1e9)
    drafter = knowing(tiny(), wrong=range(0, 40, 3))
    door = start(num_pages=8, page_size=4, drafter=drafter, gamma=3)
    frames = listen(door)
    assert next(frames)["gamma"] == 3
    next(frames)
    prompts = [random_tokens(length, seed=length) for length in (6, 9, 3)]
    post(door, prompts, 12)
    seen = until_over(frames, 3)
    engine = door.thread.engine
    last = seen[-1]
    works = [row["work"] for frame in seen for row in rows_of(frame)]
    positions, drafts, accepted, tokens = (sum(column) for column in zip(*works))
    assert positions == engine.positions == last["positions"]
    assert drafts == engine.drafted == last["drafted"] > 0
    assert accepted == engine.accepted == last["accepted"] > 0
    assert tokens == 3 * 12
    preempted = [number for frame in seen for number in frame["preempted"]]
    assert len(preempted) == engine.scheduler.preemptions == last["preemptions"] > 0
    for frame in seen:  # who was preempted waits, and has nothing
        waiting = {row["number"]: row for row in frame["waiting"]}
        assert all(waiting[number]["computed"] == 0 for number in frame["preempted"])
    assert last["steps"] == engine.steps and last["shared"] == engine.scheduler.shared
    assert [row["reason"] for frame in seen for row in frame["over"]] == ["length"] * 3


def test_accepted_drafts_are_named_by_their_places(start, tiny):
    """All drafts are right, but for those of places 4 and 9: each step has two of them."""
    door = start(drafter=knowing(tiny(), wrong=(4, 9)), gamma=2, num_pages=100)
    frames = listen(door)
    next(frames), next(frames)
    answer = post(door, [random_tokens(5)], 12)
    seen = until_over(frames, 1)
    places = [place for frame in seen for row in rows_of(frame) for place in row["drafts"]]
    # A step ends with a token of the model itself: 0, 3, 4 (its draft was wrong), 7, 9, 11 (the
    # last one comes without a draft).
    assert places == [1, 2, 5, 6, 8, 10]
    names = {row["name"] for frame in seen for row in rows_of(frame)}
    assert names == {f"{answer['id']}-0"}


def test_accepted_drafts_after_the_end_are_none_of_the_text(start, tiny):
    """All of the four drafts are right, and the second of them is EOS."""
    text = own_run(tiny(), PROMPT, SamplingParams(9, ignore_eos=True))
    drafter = knowing(tiny())
    eos = text[2]
    assert eos not in text[:2]
    door = start(tiny(eos_token_ids=(eos,)), drafter=drafter, gamma=4)
    frames = listen(door)
    next(frames), next(frames)
    post(door, [PROMPT], 9, ignore_eos=False)
    seen = until_over(frames, 1)
    engine = door.thread.engine
    works = [row["work"] for frame in seen for row in rows_of(frame)]
    assert [sum(column) for column in zip(*works)] == [len(PROMPT) + 5, 4, 2, 3]
    assert engine.drafted == engine.accepted == 4


def test_a_text_that_fails_is_counted_too(start, tiny):
    model = tiny()
    model.wte.weight.data[7] = float("nan")
    door = start(model)
    frames = listen(door)
    next(frames), next(frames)
    assert door.post("/v1/completions", {"prompt": [7, 7], "max_tokens": 3})[0] == 500
    ((over,),) = [frame["over"] for frame in until_over(frames, 1)]
    assert over["reason"] == "error" and over["work"] == [2, 0, 0, 0]


def test_who_is_preempted_and_runs_again_in_the_same_step_is_told(start, monkeypatch):
    """The second text has two pages and nothing in them, which the first has computed meanwhile."""
    from server import live

    monkeypatch.setattr(live, "PERIOD", 0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    door = start(num_pages=4, page_size=4, budget=9)
    frames = listen(door)
    next(frames), next(frames)
    prompt = random_tokens(8)
    post(door, [prompt, prompt], 3)
    seen = until_over(frames, 2)
    assert seen[1]["preempted"] == [2] == [row["number"] for row in seen[1]["running"]][1:]
    told = [number for frame in seen for number in frame["preempted"]]
    assert len(told) == door.thread.engine.scheduler.preemptions


def test_who_was_computed_and_waits_is_in_the_frame(start, monkeypatch):
    """However few of the queue are."""
    from server import live

    monkeypatch.setattr(live, "PERIOD", 1e6)
    monkeypatch.setattr(live, "MOST_WAITING", 0)
    door = start(num_pages=8, page_size=4)
    frames = listen(door)
    next(frames), next(frames)
    waited = []

    class Check:
        def stepped(self, events):
            if door.thread.engine.busy:
                frame = live_of(door).frame(0.0)
                works = [row["work"][0] for row in rows_of(frame)]
                assert sum(works) == door.thread.engine.positions
                waited.extend(frame["waiting"])

    door.thread.observers.append(Check())
    post(door, [random_tokens(length, seed=length) for length in (6, 9, 3)], 12)
    assert any(row["work"][0] for row in waited)


def test_a_client_that_leaves_is_seen_to(start):
    door = start()
    frames = listen(door)
    next(frames), next(frames)
    body = {"prompt": [[1, 2], [3]], "max_tokens": 2**16, "ignore_eos": True, "stream": True}
    with door.send("POST", "/v1/completions", body) as answer:
        answer.readline()
    seen = until_over(frames, 2)
    assert [row["reason"] for frame in seen for row in frame["over"]] == ["abort"] * 2
    assert EMPTY.items() <= (seen[-1] | {"over": []}).items()


def test_numbers_only(start):
    """Of a text nothing is told but counts: other clients' texts are theirs."""
    door = start()
    frames = listen(door)
    next(frames), next(frames)
    post(door, [random_tokens(5)], 3)
    for frame in until_over(frames, 1):
        for row in rows_of(frame):
            assert row.keys() - {"pages", "reason"} == {
                *("number", "name", "prompt", "tokens", "start", "computed", "work", "drafts")
            }
            assert isinstance(row["tokens"], int) and isinstance(row["prompt"], int)


def test_nothing_is_done_while_nobody_watches(start):
    door = start()
    live = live_of(door)
    made = []
    frame = live.frame
    live.frame = lambda now: made.append(now) or frame(now)
    post(door, [[1, 2]], 3)
    assert made == []
    frames = listen(door)
    next(frames), next(frames)
    assert len(made) == 1
    frames.close()
    end = time.monotonic() + 30
    while live.watched:  # the server hears of it by itself
        assert time.monotonic() < end
    assert door.thread.calls == live.watchers == set()
    made.clear()
    post(door, [[1, 2]], 3)
    assert made == []


@pytest.mark.parametrize("limits", [{"PERIOD": 1e6}, {"PERIOD": 0.0, "SHARE": 1e-12}])
def test_frames_are_so_far_apart_but_for_the_last(start, monkeypatch, limits):
    from server import live

    for name, value in limits.items():
        monkeypatch.setattr(live, name, value)
    door = start()
    frames = listen(door)
    next(frames), next(frames)
    post(door, [[1, 2]], 9)
    (last,) = until_over(frames, 1)  # when the engine comes to rest
    assert last["steps"] == 9 and last["over"][0]["work"] == [10, 0, 0, 9]


def test_a_pass_that_fails_leaves_no_works(tiny):
    from engine.engine import Engine

    engine = Engine(tiny())
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=4))
    engine.step()
    assert [work.tokens for work in engine.works] == [[1, 2, 3]]

    def fail(works):
        raise MemoryError

    engine.compute = fail
    (event,) = engine.step()
    assert event.error and engine.works == []


def test_who_does_not_read_is_cut_off(start, monkeypatch):
    from server import live

    monkeypatch.setattr(live, "MOST_LATE", 3)
    door = start()
    found = live_of(door)

    async def fall_behind():
        frames = found.watch()
        await anext(frames)
        for number in range(5):
            found.send({"steps": number})
        assert found.watchers == set()
        return [frame async for frame in frames]

    kept = in_loop(door, fall_behind())
    assert kept == [b'data: {"steps":%d}\n\n' % number for number in range(3)]


def test_who_takes_nothing_is_cut_off(start, monkeypatch):
    """Also where he waits in vain to send, and would never hear that he is late."""
    from server import live

    monkeypatch.setattr(live, "PATIENCE", 0.01)
    door = start()
    found = live_of(door)
    sent = []

    async def send(message):
        sent.append((message["type"], len(found.watchers)))
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = live.LiveStream(found.watch())
    in_loop(door, stream({"type": "http"}, asyncio.Event().wait, send))
    assert sent == [("http.response.start", 0), ("http.response.body", 1)]
    assert found.watchers == door.thread.calls == set()


def test_the_stream_ends_with_the_engine(start):
    door = start()
    frames = listen(door)
    next(frames), next(frames)
    door.thread.engine.step = lambda: 1 / 0
    body = {"prompt": [1], "max_tokens": 3}
    assert door.post("/v1/completions", body)[0] == 503
    assert list(frames) == []
    assert door.get("/live")[0] == 503


def test_time_is_that_of_the_clock(start):
    door = start()
    frames = listen(door)
    next(frames)
    before = time.perf_counter()
    first = next(frames)["time"]
    post(door, [[1, 2]], 3)
    times = [frame["time"] for frame in until_over(frames, 1)]
    assert first <= times[0] and times == sorted(times)
    assert before - 60 < first and times[-1] <= time.perf_counter()


def test_a_key_guards_it_too(start):
    door = start(app_options={"api_key": "secret"})
    assert door.get("/live")[0] == 401
    with door.send("GET", "/live", headers={"Authorization": "Bearer secret"}) as answer:
        assert answer.status == 200


def test_a_server_that_ends_does_not_wait_for_who_watches(start):
    door = start()
    frames = listen(door)
    next(frames), next(frames)
    door.thread.loop.call_soon_threadsafe(live_of(door).close)
    assert list(frames) == []
    assert list(listen(door)) == []  # who comes now


def test_the_script_ends_though_somebody_watches():
    command = [sys.executable, "serve.py", "--port", "0", "--device", "cpu", "--backend", "torch"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            frames = listen(Door(port, None, server))
            next(frames)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0  # sooner than a text would have to end
        finally:
            server.kill()

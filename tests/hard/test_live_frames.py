"""Frames of the live view where texts fail, leave or are preempted, and clients do not read."""

import asyncio

from conftest import random_tokens
from drafting import knowing
from engines import alone
from test_frames import rows_of, until_over
from test_live import PROMPT, monitor_of, post, watch

from engine.engine import Engine
from sampling import SamplingParams
from server import live


def in_loop(client, work):
    """What a coroutine returns that runs in the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, client.thread.loop).result(60)


def test_accepted_drafts_after_the_end_are_none_of_the_text(start, tiny):
    """All of the four drafts are right, and the second of them is EOS."""
    text = alone(tiny(), PROMPT, SamplingParams(9, ignore_eos=True))
    drafter = knowing(tiny())
    eos = text[2]
    assert eos not in text[:2]
    client = start(tiny(eos_token_ids=(eos,)), drafter=drafter, gamma=4)
    frames = watch(client)
    post(client, [PROMPT], 9, ignore_eos=False)
    seen = until_over(frames, 1)
    engine = client.thread.engine
    works = [row["work"] for frame in seen for row in rows_of(frame)]
    assert [sum(column) for column in zip(*works)] == [len(PROMPT) + 5, 4, 2, 3]
    assert engine.num_draft_tokens == engine.num_accepted_tokens == 4


def test_frames_count_failed_requests(start, tiny):
    model = tiny()
    model.wte.weight.data[7] = float("nan")
    client = start(model)
    frames = watch(client)
    assert client.post("/v1/completions", {"prompt": [7, 7], "max_tokens": 3})[0] == 500
    ((over,),) = [frame["over"] for frame in until_over(frames, 1)]
    assert over["reason"] == "error" and over["work"] == [2, 0, 0, 0]


def test_who_was_computed_and_waits_is_in_the_frame(start, monkeypatch):
    monkeypatch.setattr(live, "PERIOD", 1e6)
    monkeypatch.setattr(live, "MAX_WAITING", 0)
    client = start(num_pages=8, page_size=4)
    frames = watch(client)
    waited = []

    class Check:
        def on_step(self, events):
            if client.thread.engine.busy:
                frame = monitor_of(client).frame(0.0)
                works = [row["work"][0] for row in rows_of(frame)]
                assert sum(works) == client.thread.engine.num_computed_tokens
                waited.extend(frame["waiting"])

    client.thread.observers.append(Check())
    post(client, [random_tokens(length, seed=length) for length in (6, 9, 3)], 12)
    frames.close()
    assert any(row["work"][0] for row in waited)


def test_a_pass_that_fails_leaves_no_works(tiny):
    engine = Engine(tiny())
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=4))
    engine.step()
    assert [entry.tokens for entry in engine.scheduled] == [[1, 2, 3]]

    def fail(scheduled):
        raise MemoryError

    engine.compute = fail
    (event,) = engine.step()
    assert event.error and engine.scheduled == []


def test_who_does_not_read_is_cut_off(start, monkeypatch):
    monkeypatch.setattr(live, "MAX_QUEUED_FRAMES", 3)
    client = start()
    found = monitor_of(client)

    async def fall_behind():
        frames = found.subscribe()
        await anext(frames)
        for number in range(5):
            found.broadcast({"steps": number})
        assert found.subscribers == set()
        return [frame async for frame in frames]

    kept = in_loop(client, fall_behind())
    assert kept == [b'data: {"steps":%d}\n\n' % number for number in range(3)]


def test_who_takes_nothing_is_cut_off(start, monkeypatch):
    """Its stream waits in a send, where it would never hear that the client is late."""
    monkeypatch.setattr(live, "SEND_TIMEOUT", 0.01)
    client = start()
    found = monitor_of(client)
    sent = []

    async def send(message):
        sent.append((message["type"], len(found.subscribers)))
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = live.FrameStream(found.subscribe())
    in_loop(client, stream({"type": "http"}, asyncio.Event().wait, send))
    assert sent == [("http.response.start", 0), ("http.response.body", 1)]
    assert found.subscribers == client.thread.generations == set()

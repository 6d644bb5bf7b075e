"""Pictures of the server: who computes, waits, reads and is refused at which step."""

import pytest
from scenes import drawn, forms, written

import pictures
from pictures import loads, replicas, runs
from pictures.scene import Bars, Cells, Lanes, Lines, Tokens

NAME = "stories-llama"
PROMPT = "Once upon a time"


def texts_are_generated(clients) -> None:
    """Each client has read what `generate` writes, or the beginning of it."""
    for client in clients:
        tokens = sum((tokens for _, tokens in client.reads), [])
        repeated = len(client.ids) // len(runs.encode(PROMPT, 20))
        own = written(PROMPT * repeated, NAME, max_new_tokens=client.count, ignore_eos=True)
        assert runs.texts_of(tokens) == own[: len(tokens)]
        assert len(tokens) == client.count or client.error


def test_a_busy_reader_misses_nothing():
    clients, scene = drawn("engine-thread")
    texts_are_generated(clients)
    a, b = ([(after, len(tokens)) for after, tokens in client.reads] for client in clients)
    assert a == [(after, 1) for after in range(1, 9)]
    assert b == [(2, 1), (3, 1), (4, 1), (7, 3), (8, 1), (9, 1)]
    assert "one update of 3 tokens" in scene.caption
    _, reader_a, engine_b, reader_b = forms(scene, Lanes)[0].lanes
    assert [span.text for span in reader_b.spans] == ["1", "1", "1", "3", "1", "1", "busy"]
    assert [span.start for span in engine_b.spans] == list(range(1, 9))  # it did not wait
    assert [len(line.tokens) for line in forms(scene, Tokens)[0].lines] == [1, 1, 1, 3, 1, 1]


def test_two_bounds_of_the_queue():
    clients, scene = drawn("full-queue")
    texts_are_generated(clients[:5])
    refused = {client.name: client.error for client in clients if client.error}
    assert refused == {
        "E": "the queue is full, with 4 texts: try again",
        "F, long": "the queue is full, with 4 tokens of prompts: try again",
    }
    shown = {lane.name: [span[:3] for span in lane.spans] for lane in forms(scene, Lanes)[0].lanes}
    assert shown == {
        "A": [(0, 4, "first")],
        "B": [(0, 8, "first")],
        "C": [(1, 4, "second"), (4, 10, "first")],
        "D": [(2, 8, "second"), (8, 13, "first")],
        "E": [(3, 3, "bad")],
        "F, long": [(5, 5, "bad")],
        "F, again": [(9, 10, "second"), (10, 14, "first")],
    }


def test_a_drain_ends_at_its_limit():
    (signal, limit, clients), scene = drawn("draining")
    texts_are_generated(clients)
    assert {client.name for client in clients if client.error} == {"B", "D"}
    assert all(client.end <= limit for client in clients) and signal < limit
    values = [lane.value for lane in forms(scene, Lanes)[0].lanes]
    assert values[1:] == [
        "6 of 6 tokens",
        "12 of 16 tokens",
        "4 of 4 tokens",
        "2 of 8 tokens",
        "no connection",
    ]
    assert "2 of them end in time" in scene.caption


def test_engines_side_by_side():
    one_and_two, scene = drawn("replicas")
    prompt = pictures.PICTURES["replicas"].prompt
    own = [
        written(prompt, NAME, max_new_tokens=length, ignore_eos=True, temperature=1.0, seed=seed)
        for seed, length in enumerate(replicas.LENGTHS)
    ]
    for count, side in enumerate(one_and_two, 1):
        assert side.texts == own and len(side.steps) == count
        cells = [owner for steps in side.steps for step in steps for owner in step if owner]
        assert [cells.count(number) for number in range(1, 7)] == list(replicas.LENGTHS)
        for engine, steps in enumerate(side.steps):  # in turn
            assert {owner % count for step in steps for owner in step if owner} == {
                (engine + 1) % count
            }
    assert [panel.title for panel in scene.panels] == ["1 engine: 18 steps", "2 engines: 11 steps"]


def test_where_requests_find_their_beginning():
    record, scene = drawn("prefix-routing")
    beginnings = [pictures.PICTURES["prefix-routing"].prompt, *replicas.OTHERS]
    full = [len(runs.encode(text, 30)) // replicas.PAGE * replicas.PAGE for text in beginnings]
    for way, sent in record.items():
        there = set()
        for each in sent:  # a beginning is found where it has been before, in whole pages
            known = (each.engine, each.beginning) in there
            assert each.found == (full[each.beginning] if known else 0)
            there.add((each.engine, each.beginning))
        assert len(there) == (3 if way == "by prefix" else 7)
    assert [each.engine for each in record["in turn"]] == [
        at % replicas.ENGINES for at in range(12)
    ]
    shown = [
        (row, column)
        for row, cells in enumerate(forms(scene, Cells)[1].rows)
        for column, cell in enumerate(cells.cells)
        if cell.text
    ]
    assert sorted(shown, key=lambda place: place[1]) == [
        (each.engine, column) for column, each in enumerate(record["by prefix"])
    ]
    assert [bar.parts[0][0] for bar in forms(scene, Bars)[0].rows] == [60, 108]


def test_engines_follow_the_load():
    record, scene = drawn("scaling")
    seconds = record.seconds
    assert [second.requests for second in seconds] == replicas.CLIENTS  # a closed loop
    assert set(record.lengths) == {replicas.TOKENS} and len(record.lengths) > 40
    for now, second in enumerate(seconds):
        lately = replicas.CLIENTS[max(0, now - 4) : now + 1]
        assert second.wanted == -(-sum(lately) // (4 * len(lately)))
        if now and second.target != seconds[now - 1].target:
            assert {each.wanted for each in seconds[now - 5 : now + 1]} != {seconds[now - 1].target}
    assert [second.target for second in seconds] == [1] * 16 + [3] * 25 + [1] * 19
    requests, rows = forms(scene, Lines)[0].curves
    assert requests.points[::2] == list(enumerate(replicas.CLIENTS))
    assert {y for _, y in rows.points} == {4, 12}
    spans = [[span[:3] for span in lane.spans] for lane in forms(scene, Lanes)[0].lanes]
    assert spans == [
        [(0, 60, "first")],
        [(16, 41, "first"), (41, 44, "second")],  # it finishes its texts
        [(16, 41, "first")],
    ]


def test_gaps_that_averages_hide():
    record, scene = drawn("closed-loop")
    lanes = forms(scene, Lanes)[0].lanes
    assert len(lanes) == loads.CLIENTS
    gaps = sorted(
        1000 * (after - before)
        for answer in record.answers
        for before, after in zip(answer.times, answer.times[1:])
    )
    usual, *means, high, most = (bar.parts[0][0] for bar in forms(scene, Bars)[0].rows)
    assert usual == pytest.approx(loads.CLIENTS) and most == pytest.approx(gaps[-1])
    assert usual < means[0] < means[1] < high / 3 and gaps[-len(gaps) // 50] <= high <= most
    for lane in lanes:  # a client asks as soon as it has its answer
        assert [span.end for span in lane.spans[:-1]] == pytest.approx(
            [span.start for span in lane.spans[1:]]
        )
        assert all((span.end - span.start > 2 * usual) for span in lane.spans if span.kind == "bad")
    waits = [span for lane in lanes for span in lane.spans if span.kind == "second"]
    assert len(waits) == len(record.answers)
    begins = [span.start for span in waits if span.start]
    held = [span for lane in lanes for span in lane.spans if span.kind == "bad"]
    assert all(any(span.start <= begin + 1 <= span.end for span in held) for begin in begins)


def test_a_stall_seen_by_two_loops():
    record, scene = drawn("open-loop")
    begin, end = loads.STALL
    for answer in record.open.answers:  # a step takes 10 ms, and one may have just begun
        expected = 1000 * (end - answer.due) * (begin <= answer.due < end)
        assert expected <= answer.ttft <= expected + 20.001
    late = [answer.due for answer in record.closed.answers if answer.ttft > 100]
    assert len(late) <= 2 and all(begin - 0.01 <= due <= begin + 0.01 for due in late)
    assert all(begin <= answer.due < end for answer in record.open.answers if answer.ttft > 100)
    assert "counts 1 of 84 requests as late" in scene.caption and "15 of 100" in scene.caption
    for form, load in zip(forms(scene, Lines), record, strict=True):
        assert form.curves[0].points == [(each.due, each.ttft) for each in load.answers]

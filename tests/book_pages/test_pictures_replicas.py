"""The pictures of lessons 82 to 84 show what crossed to engines, who wrote what, and counts."""

import json
import os
import pickle
import re
import subprocess
import time

import pytest
from conftest import run_rows
from drawings import (
    caption_of,
    cells,
    drawn,
    of_class,
    text_of,
    tokens_of,
    tree_of,
    widths,
    words_of,
)

LESSONS = "engines-elsewhere", "replicas", "replica-metrics"
SHOWN = "Tom saw a"
TOKENS = 7, 5, 3, 5, 4, 3, 3  # of the texts of A, B, ...


@pytest.fixture(scope="module")
def model():
    from book import recordings

    return recordings.load("stories-llama")


@pytest.fixture(scope="module")
def ids():
    from book import recordings

    return recordings.encoding().encode(SHOWN)


def test_a_picture_is_the_same_each_time(monkeypatch):
    from book import replicating
    from book.pictures import PICTURES, recorded

    kept = {slug: recorded(PICTURES[slug], SHOWN) for slug in LESSONS}
    again = replicating.runs.__wrapped__(SHOWN)
    monkeypatch.setattr(replicating, "runs", {SHOWN: again}.__getitem__)
    for slug, record in kept.items():
        assert PICTURES[slug].record(SHOWN) == record, slug


# 82


def messages(ids: list[int], written: list[int], asked: int, stays: bool) -> list[tuple]:
    """What crosses for a text: direction, HTTP, its bytes, the handle, its bytes, the engine."""
    from server.engine_thread import Update
    from server.protocol import CompletionRequest

    body = {"prompt": SHOWN, "max_tokens": asked, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    params = CompletionRequest(**body).params(asked, None, 1)
    call = [ids], params, "", "cmpl-" + 32 * "0"
    numbers = " ".join(map(str, ids))
    given = "in", f"POST {SHOWN}", len(json.dumps(body)), f"generate {numbers}", size_of(call)
    found = [(*given, "a new text")]
    for place, id in enumerate(written):
        reason = "length" if stays and place == len(written) - 1 else None
        update = {0: Update((id,), text_of(id), (), reason)}
        choice = {"index": 0, "text": text_of(id), "logprobs": None, "finish_reason": reason}
        event = {"id": "cmpl-" + 32 * "0", "object": "text_completion", "created": 10**9}
        event |= {"model": "stories-llama", "choices": [choice]}
        size = len("data: \n\n") + len(json.dumps(event, separators=(",", ":")))
        outside = "out", f"event {text_of(id)}", size, f"update {id} {text_of(id)}"
        positions = "1 position" if place else f"{len(ids)} positions"
        found.append((*outside, size_of(update), f"computes {positions}"))
    if stays:
        end = "out", "event [DONE]", len("data: [DONE]\n\n"), "end"
    else:
        end = "in", "leaves", 0, "cancel"
    reason = "length" if stays else "abort"
    return [*found, (*end, 0, f"ends: {reason}; 0 rows in use")]


def size_of(value) -> int:
    return len(pickle.dumps(value))


def test_what_crosses(model, ids):
    """Two texts, message by message, with bytes of the same values made here."""
    _, tree = drawn("engines-elsewhere")
    (written,) = run_rows(model, [ids], max_new_tokens=4, ignore_eos=True)
    stays = messages(ids, written, 4, True)
    leaves = messages(ids, written[:2], 40, False)
    rows = list(of_class(tree, "table", "lanes")[0].find("tbody"))
    titles = [row for row in rows if row.get("class") == "does"]
    assert cells(titles[0]) + cells(titles[1]) == [
        "A client that stays: engine 1",
        "One that leaves in the middle: engine 2",
    ]
    assert [rows.index(title) for title in titles] == [0, len(stays) + 1]
    assert len(rows) == len(stays) + len(leaves) + 2
    for engine, (start, expected) in enumerate(((1, stays), (len(stays) + 2, leaves))):
        own = rows[start : start + len(expected)]
        (app,) = of_class(own[0], "td", "app")
        assert int(app.get("rowspan")) == len(expected)
        for row, (way, outside, size, inside, inner, work) in zip(own, expected, strict=True):
            first, *_, middle, last = row
            assert row.get("class") == way and len(row) == 3 + (row is own[0])
            for cell, words, count in ((first, outside, size), (middle, inside, inner)):
                (arrow,) = of_class(cell, "div", "arrow")
                shown = [words_of(part).strip() for part in arrow]
                amount = [f"{count} bytes"] * bool(count)
                assert [re.sub(" +", " ", part) for part in shown] == [
                    re.sub(" +", " ", part) for part in (words, *amount)
                ]
            assert words_of(last) == work and last.get("class") == f"tint{engine}"
    sizes = [row[4] for row in stays if row[5].startswith("computes")]
    caption = caption_of("engines-elsewhere")
    assert f"an update has {min(sizes)} to {max(sizes)} bytes" in words_of(tree)
    assert "leaves is a cancel: 2 of 40 tokens are computed" in caption
    assert "without Ray" in words_of(tree)


# 83


def simulate(clients: list[int], length: int, rows: int = 2) -> tuple[dict, set]:
    """So many rows, who comes first is first: of (client, step) what is computed, and who waits."""
    work = {}
    waits = set()
    waiting = list(clients)
    running = {}  # tokens left
    step = 0
    while waiting or running:
        while waiting and len(running) < rows:
            client = waiting.pop(0)
            running[client] = TOKENS[client]
        for client, left in running.items():
            work[client, step] = length if left == TOKENS[client] else 1
        waits |= {(client, step) for client in waiting}
        running = {client: left - 1 for client, left in running.items() if left > 1}
        step += 1
    return work, waits


def test_who_writes_what(model, ids):
    """Each engine's steps are those of a simulation, and each text is that of `generate`."""
    record, tree = drawn("replicas")
    several, one = of_class(tree, "div", "panel")
    everybody = list(range(len(TOKENS)))
    own = [everybody[engine::3] for engine in range(3)]
    rows = list(several.find(".//tbody"))
    names = [words_of(row).strip() for row in rows if len(row) == 1]
    assert names == ["engine 1", "engine 2", "engine 3"]
    groups = []
    for row in rows:
        if len(row) == 1:
            groups.append([])
        else:
            groups[-1].append(row)
    lengths = []
    alone = list(one.find(".//tbody"))
    for shown, clients, tint in (
        *zip(groups, own, ("tint0", "tint1", "tint2"), strict=True),
        (alone, everybody, "tint5"),
    ):
        work, waits = simulate(clients, len(ids))
        lengths.append(1 + max(step for _, step in work))
        for client, row in zip(clients, shown, strict=True):
            name, *steps = row
            assert words_of(name) == "ABCDEFG"[client] and len(steps) == 15
            (letter,) = of_class(name, "b", "letter")
            assert f"tint{client % 3}" in letter.get("class").split()
            for step, cell in enumerate(steps):
                at = client, step
                assert words_of(cell) == str(work.get(at, ""))
                kind = tint if at in work else "idle" if at in waits else ""
                assert cell.get("class", "") == kind
    assert lengths == [8, 5, 3, 15]
    titles = [words_of(of_class(panel, "p", "title")[0]) for panel in (several, one)]
    assert titles == ["3 engines, each in a process of its own: 8 steps", "One engine: 15 steps"]
    (table,) = of_class(tree, "table", "written")
    for client, row in enumerate(table.find("tbody")):
        (text,) = run_rows(
            model,
            [ids],
            max_new_tokens=TOKENS[client],
            temperature=1,
            seed=client,
            ignore_eos=True,
        )
        name, engine, _, mark = cells(row)
        assert (name, engine, mark) == ("ABCDEFG"[client], str(client % 3 + 1), "\u2713")
        assert tokens_of(row, "new") == [text_of(id) for id in text]
        assert record.texts[client] == text_of(*text)  # what its client got
    caption = caption_of("replicas")
    assert (
        "7 texts on 3 replicas, engines of 2 rows each" in caption
        and "7 of 7 texts are what" in caption
    )
    assert "after 8 steps all are done; one such engine takes 15" in caption
    work, _ = simulate(everybody, len(ids), 6)
    large = 1 + max(step for _, step in work)
    assert f"One engine with 6 rows takes {large} steps" in words_of(one)
    assert "without Ray" in words_of(tree)


def test_a_wrong_text_shows():
    from book import replicating

    record, _ = drawn("replicas")
    wrong = [list(text) for text in record.written]
    wrong[3][1] += 1
    changed = record._replace(written=wrong)
    tree = tree_of(replicating.draw_texts(changed).body)
    rows = of_class(tree, "table", "written")[0].find("tbody")
    assert [cells(row)[-1] for row in rows] == [*3 * ["\u2713"], "\u2715", *3 * ["\u2713"]]
    assert "6 of 7 texts are" in caption_of("replicas", changed)


# 84


def test_numbers_of_all_engines():
    """They are those of the steps in the picture before, counted from the lengths."""
    record, tree = drawn("replica-metrics")
    own = [TOKENS[engine::3] for engine in range(3)]
    assert own == [(7, 5, 3), (5, 4), (3, 3)]
    lines = of_class(tree, "code", "text-box")
    assert len(set(record.names)) == 3
    for engine, (line, lengths) in enumerate(zip(lines, own, strict=True)):
        name = record.names[engine]
        assert re.fullmatch("[0-9a-f]{8}", name)
        labels = f'engine="{name}",model_name="stories-llama"'
        total = f"{sum(lengths)}.0"
        assert words_of(line) == f"vllm:generation_tokens_total{{{labels}}} {total}"
        (shown,) = line.iter("b")
        assert words_of(shown) == name and f"tint{engine}" in shown.get("class").split()
    now, made, buckets = of_class(tree, "div", "panel")
    totals = [sum(lengths) for lengths in own]
    started = [lengths[:2] for lengths in own]  # as many as there are rows
    early = [sum(min(3, length) for length in lengths) for lengths in started]
    running = [sum(length > 3 for length in lengths) for lengths in started]
    expected = (
        (now, 7, {"running": running, "waiting": [1, 0, 0]}),
        (
            made,
            sum(TOKENS),
            {
                "after step 3": early,
                "all texts over": totals,
                "engine 2 gone": [totals[0], None, totals[2]],
            },
        ),
        (
            buckets,
            7,
            {
                f"\u2264 {most} tokens": [sum(n <= most for n in lengths) for lengths in own]
                for most in (2, 5, 10)
            },
        ),
    )
    assert running == [2, 2, 0] and early == [6, 6, 6]
    kinds = ["bar first", "bar second", "bar good"]
    for panel, whole, values in expected:
        rows = list(panel.iter("tr"))
        for row, (name, counts) in zip(rows, values.items(), strict=True):
            there = [count for count in counts if count is not None]
            sums = " + ".join("\u2013" if count is None else str(count) for count in counts)
            assert cells(row)[::2] == [name, f"{sums} = {sum(there)}"]
            shares = [100 * count / whole for count in there if count]
            assert widths(row) == pytest.approx(shares, abs=0.006)
            assert [bar.get("class") for bar in row.iter("i")] == [
                kind for kind, count in zip(kinds, counts) if count
            ]
    caption = caption_of("replica-metrics")
    assert "4 texts run" in caption and "two engines compute 2 each and one 0" in caption
    assert "falls from 30 to 21:" in words_of(made) and "without Ray" in words_of(tree)


# What starts engines


def use_engines(file) -> dict:
    """In a process of its own: engines that go on by themselves, one of which is killed."""
    from book import engines
    from book.door import PATH

    found = {}
    body = {"prompt": SHOWN, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with engines.open_engines(2) as front:
        found["processes"] = [os.getpid(), *(front.on(each, process_of) for each in range(2))]
        file.write_text(" ".join(map(str, found["processes"])))
        front.on(1, be_slow)
        found["texts"] = [front.write(body)["choices"][0]["text"] for _ in range(2)]
        kinds = "generate", "update", "end"
        found["kinds"] = [each[:3:2] for each in front.crossed if each.kind in kinds]
        front.on(1, break_engine)
        try:
            front.on(1, "check_health")
        except Exception as error:
            found["error"] = repr(error)
        front.kill(0)
        found["gone"] = [front.ask("POST", PATH, body).status for _ in range(2)]
    return found


def process_of(replica) -> int:
    return os.getpid()


def be_slow(replica) -> None:
    """What is new comes late, and yet not two steps at once."""
    deliver = replica.thread.deliver
    replica.thread.deliver = lambda news: (time.sleep(0.01), deliver(news))


def break_engine(replica) -> None:
    replica.thread.error = "it is broken"


def goes_on(process: str) -> bool:
    """Whether it is there, and is not what is left of one until somebody asks for its end."""
    command = ["ps", "-o", "stat=", "-p", process]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    return shown.strip()[:1] not in ("", "Z")


def test_engines_in_processes(model, ids, tmp_path):
    from book import processes

    found = processes.fresh(use_engines, tmp_path / "found")
    (written,) = run_rows(model, [ids], max_new_tokens=60, ignore_eos=True)
    assert found["texts"] == 2 * [text_of(*written)]
    whole = ["generate", *60 * ["update"], "end"]
    assert found["kinds"] == [(engine, kind) for engine in range(2) for kind in whole]
    assert found["error"] == "EngineDead('it is broken')" and found["gone"] == [503, 503]
    assert len(set(found["processes"])) == 3
    while any(goes_on(str(process)) for process in found["processes"]):  # a kill takes its time
        time.sleep(0.05)


@pytest.mark.parametrize(
    "slug, prompt, words",
    [
        ("engines-elsewhere", "", "the prompt has 0 tokens"),
        ("replicas", "a " * 20, "this picture shows 1 to 8"),
        ("replica-metrics", "\udc80", "not UTF-8 text"),
    ],
)
def test_prompts_that_cannot_be_shown(slug, prompt, words):
    from book.pictures import PICTURES
    from errors import UserError

    with pytest.raises(UserError, match=words):
        PICTURES[slug].record(prompt)


def test_a_strange_prompt():
    from book.pictures import page

    for slug in LESSONS:
        shown = page(f"00-{slug}", "<b> &\n")
        tree_of(shown.partition("<main>")[2].partition("</main>")[0])

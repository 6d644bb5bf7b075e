"""Pictures of a server and of its clients show what another run, or another rule, gives."""

import csv
import itertools
import json
import math
import re
import statistics

import numpy
import pytest
import torch
from conftest import ROOT, run
from drawings import drawn, of_class, tokens_of, tree_of, widths, words_of

STEADY = ("disconnects", "full-queue", "draining", "live")


def small(**options):
    """An engine, and a function that adds greedy texts."""
    from book import recordings
    from engine.engine import Engine
    from sampling import SamplingParams

    engine = Engine(recordings.load("stories-llama"), encoding=recordings.encoding(), **options)

    def add(text: str, tokens: int, salt: str = ""):
        ids = recordings.encoding().encode(text)
        return engine.add(ids, SamplingParams(tokens, ignore_eos=True), salt)

    return engine, add


def tinted(element) -> list[int]:
    """The clients whose colours are in it."""
    found = [re.findall(r"\btint(\d)\b", part.get("class", "")) for part in element.iter()]
    return [int(number) for numbers in found for number in numbers]


def cells(row) -> list:
    return list(row.iter("td"))


def test_who_leaves_has_nothing_from_the_next_step_on():
    from book import operating
    from book.recordings import STORY

    record, tree = drawn("disconnects")
    engine, add = small(**operating.SHAPE)
    texts = ["Once upon a time"] * 5
    texts[operating.LONG] = 2 * STORY
    requests = [
        add(text, tokens, str(client))
        for client, (text, tokens) in enumerate(zip(texts, operating.TOKENS.values()))
    ]
    for number, step in enumerate(record.steps, 1):
        engine.step()
        work = {requests.index(work.request): len(work.tokens) for work in engine.works}
        assert step.work == work
        owners = [None] * operating.NUM_PAGES
        for client, request in enumerate(requests):
            for page in request.pages:
                owners[page] = client
        assert step.owners == owners
        assert step.waiting == [requests.index(each) for each in engine.scheduler.waiting]
        for client in operating.LEAVES.get(number, []):
            engine.abort(requests[client])
    assert not engine.busy and record.free == operating.NUM_PAGES
    assert record.ends == [request.finish_reason for request in requests]
    assert record.ends == ["length", "abort", "abort", "abort", "length"]
    left = {client: words for step in record.steps for client, words in step.left.items()}
    assert left == {3: "leaves the queue", 2: "leaves in the prompt", 1: "leaves while writing"}
    rows, pages = tree.findall(".//tbody")
    for client, row in enumerate(rows.iter("tr")):
        *shown, words = cells(row)
        assert words_of(words) == left.get(client, "stays to the end")
        for step, cell in zip(record.steps, shown, strict=True):
            expected = "\u2715" if client in step.left else str(step.work.get(client, ""))
            assert words_of(cell) == expected
            assert tinted(cell) == ([client] if client in step.work else [])
            assert ("idle" in cell.get("class")) is (client in step.waiting)
    for page, row in enumerate(pages.iter("tr")):
        shown = [tinted(cell) for cell in cells(row)[: len(record.steps)]]
        expected = [
            [] if step.owners[page] is None else [step.owners[page]] for step in record.steps
        ]
        assert shown == expected


def test_who_gets_in_is_what_the_two_bounds_say():
    record, tree = drawn("full-queue")
    statuses = []
    for each, before in zip(record.asked, [None, *record.asked]):
        held = [entry for entry in (before.held if before else []) if entry[1]]
        # A step begins the texts that run and ends one: its tokens, and theirs, no longer count.
        if before and each.steps > before.steps:
            held = [entry for entry in held if entry[0] != each.steps - 1]
            begun = [held[0][0]]  # of the two that were computed, the one that goes on
            held = [(c, texts, 0 if c in begun else tokens) for c, texts, tokens in held]
        texts = sum(entry[1] for entry in held) + each.texts
        tokens = sum(entry[2] for entry in held) + each.tokens
        fits = texts <= record.most and tokens <= record.most_tokens
        statuses.append(400 if each.texts > record.most else 200 if fits else 429)
        assert each.retry == ("1" if statuses[-1] == 429 else None)
        new = [(each.client, each.texts, each.tokens)] if fits else []
        assert each.held == sorted(held + new)
    assert statuses == [each.status for each in record.asked]
    assert statuses == [200, 200, 200, 429, 200, 429, 400, 200, 200]
    assert "tokens of prompts" in record.asked[3].message and " texts" in record.asked[5].message
    rows = [row for row in tree.find(".//tbody") if row.get("class") != "between"]
    for each, row in zip(record.asked, rows, strict=True):
        slots, meter, answer = cells(row)
        letters = "".join("ABCDEFG"[client] * texts for client, texts, _ in each.held)
        assert words_of(slots) == letters and len(of_class(slots, "i", "slot")) == record.most
        parts = [float(part.get("style")[6:-1]) for part in of_class(meter, "i", "part")]
        shares = [100 * tokens / record.most_tokens for _, _, tokens in each.held if tokens]
        assert parts == pytest.approx(shares, abs=0.01) and sum(parts) <= 100.01
        assert tinted(meter) == [client for client, _, tokens in each.held if tokens]
        assert words_of(answer).startswith(str(each.status))


def test_how_far_requests_get():
    from book.recordings import encoding, load

    record, tree = drawn("keys-and-origins")
    (token,) = run(load("stories-llama"), [encoding().encode("Once upon a")], max_new_tokens=1)[0]
    word = encoding().decode([token])
    assert [(each.status, each.passed, each.text) for each in record] == [
        (200, ["origin", "key", "body"], word),
        (401, ["origin"], ""),
        (401, ["origin"], ""),
        (200, ["origin", "key"], ""),
        (200, [], ""),
        (400, [], ""),
        (200, ["origin", "key", "body"], word),
        (401, ["origin"], ""),
    ]
    page = "https://page.example"
    assert [each.origin for each in record] == [None] * 4 + [page, None, page, page]
    assert [each.reads for each in record] == [True] * 5 + [False] + [True] * 2
    for each, row in zip(record, tree.find(".//tbody"), strict=True):
        shown = [words_of(cell) for cell in cells(row)[:3]]
        doors = sum(name in each.passed for name in ("origin", "key"))
        assert shown == ["\u2713"] * doors + [str(each.status)] + [""] * (2 - doors)
        assert tokens_of(row) == ([each.text] if each.text else [])


def test_signals():
    from book import operating

    record, tree = drawn("draining")
    for life, limit, code in zip(record, (operating.LIMIT, operating.SECOND), (0, 128 + 15)):
        assert (life.columns, life.code) == (limit, code)
        ends = [(lane.status, lane.end) for lane in life.lanes]
        assert ends[0] == (503, "the model is being loaded")
        assert ends[-1] == (None, "nobody listens")
        steps = [min(tokens, limit) for tokens in operating.LASTING.values()]
        assert [lane.computed for lane in life.lanes[1:3]] == [
            list(range(1, count + 1)) for count in steps
        ]
    assert [lane.end for lane in record[0].lanes[1:3]] == ["length", "the server is shutting down"]
    assert [lane.end for lane in record[1].lanes[1:3]] == ["the process is gone"] * 2
    for life, part in zip(record, of_class(tree, "div", "panel")):
        assert words_of(part).split(",")[0].split("code ")[1].startswith(str(life.code))
        rows = list(part.find(".//tbody"))
        for number, (lane, row) in enumerate(zip(life.lanes, rows, strict=True)):
            *shown, said = cells(row)
            marked = [column for column, cell in enumerate(shown) if tinted(cell) == [number]]
            assert marked == lane.computed
            signs = {column: words_of(cell) for column, cell in enumerate(shown) if words_of(cell)}
            assert signs == {lane.last: "\u2713" if lane.end == "length" else "\u2715"}
            after = [n for n, cell in enumerate(shown) if "after" in cell.get("class").split()]
            assert after == life.signals
            assert words_of(said).startswith(str(lane.status or "no connection"))


def test_buckets_have_the_texts_of_the_buckets_before_them():
    from book import operating

    record, tree = drawn("metrics")
    engine, add = small(max_rows=2)
    requests = [add("Once upon a time", tokens) for tokens in operating.OUTPUTS]
    first = {}
    while engine.busy:
        for event in engine.step():
            first.setdefault(event.request, engine.positions / 1000)
    times = [first[request] for request in requests]
    assert sorted(record.seen) == pytest.approx(sorted(times))
    for limit, count in record.buckets:
        assert count == sum(moment <= limit for moment in times)
    assert len(record.lines) == len(record.buckets) == 16
    rows = [words_of(row.find("th")) for row in tree.find(".//tbody")]
    limits = [float(name.removeprefix('{le="').removesuffix('"}')) for name in rows]
    counts = dict(record.buckets)
    before = 0
    for limit, row in zip(limits, tree.find(".//tbody")):
        value, boxes = cells(row)
        old = of_class(boxes, "i", "old")
        assert int(words_of(value)) == counts[limit] and len(old) == before
        new = [box for box in of_class(boxes, "i", "one") if box not in old]
        ordered = sorted(1000 * moment for moment in times)[before : counts[limit]]
        assert [float(words_of(box)) for box in new] == pytest.approx(ordered)
        before = counts[limit]
    assert before == len(times)
    finite = [limit for limit, _ in record.buckets[:-1]]
    ranks = [count for _, count in record.buckets[:-1]]
    value = numpy.interp(len(times) / 2, ranks, finite)
    said = words_of(of_class(tree, "p", "worked")[0])
    assert [float(number) for number in re.findall(r"([\d.]+) ms", said)] == pytest.approx(
        [1000 * value, 1000 * statistics.median(times)], abs=0.06
    )


def test_a_frame_is_how_the_engine_stands():
    from book.recordings import STORY

    record, tree = drawn("live")
    engine, add = small(max_rows=2, num_pages=16, page_size=4, budget=16)
    texts = ["Once upon a time", STORY, "Once upon a time"]
    requests = [add(text, 9, str(number)) for number, text in enumerate(texts)]
    engine.step()
    engine.step()
    frame = record.frame
    assert (frame["steps"], frame["positions"], frame["queued"]) == (2, engine.positions, 1)
    work = {work.request: len(work.tokens) for work in engine.works}
    rows = frame["running"] + frame["waiting"]
    for request, row in zip(requests, rows, strict=True):
        counts = (len(request.tokens), request.computed, work.get(request, 0))
        assert (row["tokens"], row["computed"], row["work"][0]) == counts
        assert row.get("pages", []) == request.pages
    assert [row["number"] for row in rows] == [1, 2, 3]
    (table,) = of_class(tree, "table", "live-rows")
    for request, row in zip(requests, table.iter("tr"), strict=True):
        kinds = [len(of_class(row, "i", kind)) for kind in ("kept", "first", "hollow")]
        now = work.get(request, 0)
        lacking = len(request.tokens) - request.computed
        assert kinds == [request.computed - now, now, lacking]
    pages = of_class(tree, "i", "page")
    assert [words_of(page) for page in pages] == [str(number) for number in range(16)]
    owners = [[n for n, each in enumerate(requests) if page in each.pages] for page in range(16)]
    assert [tinted(page) for page in pages] == owners
    (sent,) = of_class(tree, "pre", "frame")
    for row, span in zip(rows, sent.iter("span"), strict=True):
        shown = json.loads(words_of(span))
        assert shown | {"name": row["name"]} == row
    assert not re.search("Once|Lily", words_of(sent))


def test_the_page_s_text_and_its_colours():
    from book import recordings
    from book.recordings import encode, encoding, next_logits, text_of
    from infer import generate
    from sampling import SamplingParams

    record, tree = drawn("page")
    ids = encode(record.prompt, 20)
    params = SamplingParams(48, temperature=0.8, top_p=0.95, seed=1)
    written = [t for (t,) in generate(recordings.load("stories-llama"), [ids], params)]
    assert [text for text, _ in record.tokens] == [text_of(id) for id in written]
    for place in (0, 20, 47):
        probs = next_logits(ids + written[:place], "stories-llama").softmax(dim=-1)
        assert record.tokens[place][1] == pytest.approx(probs[written[place]].item(), rel=1e-3)
        best = [(text_of(id), probs[id].item()) for id in probs.topk(5).indices.tolist()]
        own = record.others[place][:5]
        assert [text for text, _ in own] == [text for text, _ in best]
        assert [p for _, p in own] == pytest.approx([p for _, p in best], rel=1e-3)
    assert encoding().decode(ids) == record.prompt
    (page,) = of_class(tree, "p", "page-text")
    assert words_of(page) == record.prompt + "".join(text for text, _ in record.tokens)
    spans = of_class(page, "span", "written")
    for (_, p), span in zip(record.tokens, spans, strict=True):
        shade = 0 if p >= 0.9 else 1 if p >= 0.5 else 2 if p >= 0.2 else 3 if p >= 0.05 else 4
        assert f"p{shade}" in span.get("class").split()
    least = min(range(48), key=lambda place: record.tokens[place][1])
    assert [n for n, span in enumerate(spans) if "at" in span.get("class").split()] == [least]
    _, instead = of_class(tree, "div", "panel")
    assert tokens_of(instead.find("table")) == [text for text, _ in record.others[least]]
    largest = record.others[least][0][1]
    shares = [100 * p / largest for _, p in record.others[least]]
    assert widths(instead) == pytest.approx(shares, abs=0.01)


def test_clients_of_a_closed_loop():
    """Times as an engine gives them whose steps take 4 ms and 2 for each position."""
    from book import loading

    record, tree = drawn("closed-loop")
    engine, add = small(max_rows=3)
    sizes = iter(loading.SIZES)
    asked, times, now = {}, {}, 0
    for _ in range(3):
        asked[add(loading.PROMPT, next(sizes))] = now
    while engine.busy:
        before = engine.positions
        events = engine.step()
        now += 4 + 2 * (engine.positions - before)
        for event in events:
            times.setdefault(event.request, []).append(now)
        for event in events:
            if event.finish_reason and now < record.ends:
                asked[add(loading.PROMPT, next(sizes))] = now
    assert [text.due for text in record.texts] == pytest.approx(list(asked.values()))
    for text, own in zip(record.texts, times.values(), strict=True):
        assert text.times == pytest.approx(own)
        assert text.ttft == pytest.approx(own[0] - text.due)
        assert text.tpot == pytest.approx((own[-1] - own[0]) / (len(own) - 1))
    lanes = of_class(tree, "div", "lane")
    end = now
    for number, lane in enumerate(lanes):
        own = [text for text in record.texts if text.client == number]
        assert all(a.times[-1] == pytest.approx(b.due) for a, b in itertools.pairwise(own))
        marks = [float(mark.get("style")[5:-1]) for mark in lane.iter("b")]
        expected = [100 * moment / end for text in own for moment in text.times]
        assert marks == pytest.approx(expected, abs=0.01)
        waits = [part.get("style") for part in of_class(lane, "i", "wait")]
        assert [float(re.search(r"width:([\d.]+)", style)[1]) for style in waits] == pytest.approx(
            [100 * text.ttft / end for text in own], abs=0.01
        )
    gaps = [numpy.diff(text.times) for text in record.texts]
    text = record.texts[max(range(len(gaps)), key=lambda place: max(gaps[place]))]
    (sums,) = of_class(tree, "table", "sums")
    values = [float(words_of(cell).split()[0]) for cell in of_class(sums, "td", "value")]
    expected = [text.ttft, max(numpy.diff(text.times)), text.tpot]
    assert values == pytest.approx(expected, abs=0.06)
    assert tokens_of(tree) == text.tokens


def test_a_stall_seen_by_two_loops():
    import benchmark_client
    from book import loading

    record, tree = drawn("open-loop")
    begins, ends = record.stall
    closed, opened = record.closed, record.open
    assert len(closed.spans) == len(opened.spans) == 112
    late = [span for span in closed.spans if span[1] - span[0] > 0.3]
    assert len(late) == 1 and late[0][0] == pytest.approx(begins, abs=0.1)
    assert late[0][1] == pytest.approx(ends + loading.STEP, abs=1e-6)
    assert all(b[0] == pytest.approx(a[1]) for a, b in itertools.pairwise(closed.spans))
    moments = benchmark_client.arrivals(112, 112 / loading.LASTS, "0")
    assert [due for due, _ in opened.spans] == pytest.approx(moments)
    # Who is due in the stall gets a token in the first step after it, but for those that were
    # before its last step.
    late = [span for span in opened.spans if span[1] - span[0] > 0.3]
    in_it = [due for due, _ in opened.spans if begins + loading.STEP < due < ends - 0.2]
    assert {due for due, _ in late} >= set(in_it)
    assert all(first == pytest.approx(ends + loading.STEP, abs=0.11) for _, first in late)
    for seen, part in zip((closed, opened), of_class(tree, "div", "panel")):
        waits = [1000 * (first - due) for due, first in seen.spans]
        p99 = float(numpy.percentile(waits, 99))
        assert seen.values["ttft, ms, p99"] == pytest.approx(p99)
        count = sum(wait > 300 for wait in waits)
        assert f"{count} late of 112; p99 says {p99:,.0f} ms" in words_of(part)
        bars = [box for kind in ("first", "bad") for box in of_class(part, "rect", kind)]
        assert len(bars) == 112 and len(of_class(part, "rect", "bad")) == count
        bars.sort(key=lambda box: float(box.get("y")))
        end = max(last for span in (closed, opened) for _, last in span.spans)
        sizes = [float(box.get("width")) for box in bars]
        assert sizes == pytest.approx([max(300 * wait / 1000 / end, 1) for wait in waits], rel=1e-3)


def test_shares_of_a_capacity_and_committed_pairs():
    from book import loading

    record, tree = drawn("benchmark-serving")
    with (ROOT / "benchmark_results" / "serving_cpu.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    for pair in record.pairs:
        own = [row for row in rows if row[0] == pair.mode and row[2] in ("tokens/s",)]
        served = {row[4]: row[3] for row in own if row[1] == "32 clients"}
        alone = {row[4]: row[3] for row in own if row[1] == "engine alone"}
        found = [(float(alone[repeat]), float(served[repeat])) for repeat in served]
        assert (pair.alone, pair.served) in found
        assert pair.ratio == pytest.approx(pair.served / pair.alone, abs=1e-3)
    assert len(set(record.pairs)) == 9 and all(row[-1] == record.commit for row in rows[1:])
    measured, chart = of_class(tree, "div", "panel")
    largest = 1.03 * max(max(pair.alone, pair.served) for pair in record.pairs)
    shares = [100 * pair.served / largest for pair in record.pairs]
    assert widths(measured) == pytest.approx(shares, abs=0.01)
    ticks = [float(tick.get("style")[5:-1]) for tick in of_class(measured, "b", "tick")]
    assert ticks == pytest.approx([100 * pair.alone / largest for pair in record.pairs], abs=0.01)
    # Four rows and a step of 50 ms: 80 tokens a second, but for the prompts' answers that end.
    assert 0.8 * 80 < record.capacity <= 80
    below, above = record.loads
    for load in record.loads:
        tokens = sum(itertools.islice(itertools.cycle(loading.LENGTHS), load.requests))
        wanted = load.share * record.capacity * loading.SECONDS
        assert wanted <= tokens < wanted + max(loading.LENGTHS)
        assert load.present[-1][1] == 0 and load.present[-1][0] >= loading.SECONDS
    most = [max(count for _, count in load.present) for load in record.loads]
    assert most[0] < most[1] and below.ttft < above.ttft
    for kind, load in zip(("first", "second"), record.loads):
        (line,) = of_class(chart, "polyline", kind)
        heights = [float(point.split(",")[1]) for point in line.get("points").split()][1::2]
        counts = [most[1] * (1 - (height - 8) / 130) for height in heights]
        assert counts == pytest.approx([count for _, count in load.present], abs=0.02)


@pytest.mark.parametrize("slug", STEADY)
def test_a_server_s_picture_is_the_same_each_time(slug):
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    again = picture.record(picture.prompt)
    assert picture.draw(again) == picture.draw(recorded(picture, picture.prompt))


SLUGS = ("disconnects", "full-queue", "keys-and-origins", "draining", "metrics", "live", "page")
SLUGS += ("closed-loop", "open-loop", "benchmark-serving")


@pytest.mark.parametrize("slug", SLUGS)
def test_prompts_that_no_server_gets(slug):
    from book.pictures import PICTURES
    from errors import UserError

    for prompt in ("", "word " * 100, "\udcff"):
        with pytest.raises(UserError):
            PICTURES[slug].record(prompt)


def test_an_error_of_a_load_is_not_drawn():
    """No picture of clients has a request that failed."""
    from book.pictures import PICTURES, recorded

    for slug in ("closed-loop", "open-loop"):
        record = recorded(PICTURES[slug], PICTURES[slug].prompt)
        values = [record.values] if slug == "closed-loop" else [record.closed.values]
        assert all(each["failed"] == 0 for each in values)
    assert math.isfinite(torch.tensor(record.closed.spans).sum())
    assert tree_of(PICTURES["open-loop"].draw(record).body) is not None

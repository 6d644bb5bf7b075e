"""Pictures of a server and of its clients show what another run, or another rule, gives."""

import itertools
import json
import math
import re

import numpy
import pytest
import torch
from conftest import run
from drawings import drawn, of_class, tokens_of, tree_of, widths, words_of

STEADY = ("disconnects", "full-queue", "draining", "live", "page")


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


def caption_of(slug: str) -> str:
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    return picture.draw(recorded(picture, picture.prompt)).caption


def cells(row) -> list:
    return list(row.iter("td"))


def test_who_vanishes_is_missed_only_by_who_listens():
    from book import operating

    record, tree = drawn("disconnects")
    assert [run.heard for run in record] == [["http.request"], ["http.request", "http.disconnect"]]
    tables = of_class(tree, "table", "batch")
    columns = len(record[0].work)
    for each, table, listens in zip(record, tables, (False, True), strict=True):
        engine, add = small(max_rows=2)
        requests = [
            add("Once upon a time", tokens, str(tokens)) for tokens in operating.TOKENS.values()
        ]
        handler, engine_rows = table.findall(".//tbody")
        _, text, receives = handler
        assert [words_of(row[0]) for row in (text, receives)] == ["the text", "receive()"]
        _, *rows = engine_rows
        heard = cells(receives)[-1]
        assert words_of(heard) == ("http.disconnect" if listens else "nobody calls it")
        assert len(cells(receives)) - 1 == (operating.LEAVES if listens else 0)
        assert int(heard.get("colspan")) + len(cells(receives)) - 1 == columns
        for number in range(columns):
            if listens and number == operating.LEAVES:
                engine.abort(requests[operating.GONE])
            engine.step()
            work = {requests.index(work.request): len(work.tokens) for work in engine.works}
            waiting = [requests.index(request) for request in engine.scheduler.waiting]
            assert (each.work[number:] or [{}])[0] == work
            awaited = cells(text)[number].get("class").split()
            assert ("tint0" in awaited) is (0 in work and number < operating.LEAVES)
            assert ("lost" in awaited) is (0 in work and number >= operating.LEAVES)
            assert (each.waiting[number:] or [[]])[0] == waiting
            for client, row in enumerate(rows):
                cell = cells(row)[number]
                lost = client == 0 and number >= operating.LEAVES and client in work
                assert words_of(cell) == str(work.get(client, ""))
                assert tinted(cell) == ([client] if client in work and not lost else [])
                kinds = cell.get("class").split()
                assert ("lost" in kinds) is lost and ("idle" in kinds) is (client in waiting)
                assert ("after" in kinds) is (number == operating.LEAVES - 1)
        assert not engine.busy and each.ends == [request.finish_reason for request in requests]
    assert [run.ends[0] for run in record] == ["length", "abort"]
    wasted = len(of_class(tables[0], "td", "lost"))
    assert wasted == 2 * (11 - 3) and not of_class(tables[1], "td", "lost")
    words = words_of(tree)
    assert "In 8 steps A is computed for nobody, and C begins in step 8." in words
    assert "C begins in step 4." in words
    assert caption_of("disconnects").endswith("C begins in step 4 instead of 8.")


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
    names = [words_of(row.find("th"))[0] for row in rows]
    colours = {name: tuple(tinted(row.find("th"))) for name, row in zip(names, rows)}
    assert len(set(colours.values())) == len(set(names)) == 7
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
    shown_in_order = record[4:6] + record[:4] + record[6:]  # a browser asks first
    for each, row in zip(shown_in_order, tree.find(".//tbody"), strict=True):
        assert words_of(row.find("th")) == each.who + each.what
        shown = [words_of(cell) for cell in cells(row)[:3]]
        why = each.who == "page.example" and each.status == 401
        assert ("may see the error" in words_of(row)) is (why and each.reads)
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
            failed = lane.status == 200 and lane.end != "length"
            assert (f"200, then an error: {lane.end}" == words_of(said)) is failed


def test_two_kinds_of_metrics():
    """By an engine without a server, whose positions are the milliseconds."""
    from book import operating

    record, tree = drawn("metrics")
    engine, add = small(max_rows=2)
    requests = [add("Once upon a time", tokens) for tokens in operating.OUTPUTS]
    times, gaps, last = [], [], {}
    firsts = {}
    (table,) = of_class(tree, "table", "noted")
    *rows, clock = table.find(".//tbody")
    while engine.busy:
        before = set(last)
        events = engine.step()
        times.append(engine.positions)
        work = {work.request: len(work.tokens) for work in engine.works}
        for request, row in zip(requests, rows, strict=True):
            cell = cells(row)[len(times) - 1]
            kind = "kept" if request in before else "first"
            waits = request in engine.scheduler.waiting
            kind = kind if request in work else "idle" if waits else ""
            assert words_of(cell) == str(work.get(request, ""))
            after = " after" * (len(times) == operating.LOOKED)
            assert cell.get("class") == kind + after
        for event in events:
            if event.request in last and len(times) <= operating.LOOKED:
                gaps.append(times[-1] - last[event.request])
            firsts.setdefault(event.request, times[-1])
            last[event.request] = times[-1]
        if len(times) == operating.LOOKED:
            scheduler = engine.scheduler
            stands = len(scheduler.running), len(scheduler.waiting), scheduler.preemptions
            usage = len(scheduler.pool.holders) / scheduler.pool.num_pages
            seen = list(firsts.values())
            ends = sum(request.finish_reason == "length" for request in requests)
    assert [words_of(cell) for cell in cells(clock)] == [str(moment) for moment in times]
    now, noted = (
        {words_of(row[0][0]): (row[0][1], words_of(row[1])) for row in table.find("tbody")}
        for table in of_class(tree, "table", "metrics")
    )
    numbers = {name: float(value) for name, (_, value) in (now | noted).items()}
    assert stands == (2, 1, 0) and len(seen) == 3 and ends == 1
    assert list(numbers.items())[:4] == [
        ("vllm:num_requests_running", stands[0]),
        ("vllm:num_requests_waiting", stands[1]),
        ("vllm:kv_cache_usage_perc", usage),
        ("vllm:num_preemptions_total", stands[2]),
    ]
    first, gap = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    buckets = {name: value for name, value in numbers.items() if "bucket" in name}
    assert len(buckets) == 2
    for name, value in buckets.items():
        limit = float(name.removeprefix(f'{first}_bucket{{le="').removesuffix('"}'))
        assert value == sum(moment <= 1000 * limit for moment in seen)
    assert numbers[f"{first}_count"] == len(seen) and numbers[f"{gap}_count"] == len(gaps)
    assert numbers[f"{first}_sum"] == pytest.approx(sum(seen) / 1000)
    assert numbers[f"{gap}_sum"] == pytest.approx(sum(gaps) / 1000)
    assert numbers['vllm:request_success_total{finished_reason="length"}'] == ends
    sums = [words_of(noted[f"{name}_sum"][0]) for name in (first, gap)]
    assert sums == [" + ".join(map(str, own)) + " ms" for own in (seen, gaps)]


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
    assert json.loads(words_of(sent)) == frame == json.loads(record.sent)
    assert f"as it is sent: {len(words_of(sent))} bytes of JSON" in words_of(tree)
    for row, span in zip(rows, sent.iter("span"), strict=True):
        assert json.loads(words_of(span)) == row and tinted(span) == [row["number"] - 1]
    assert not re.search("Once|Lily", words_of(sent))


def test_the_page_s_text_and_the_engine_s_work():
    from book import operating, recordings
    from book.recordings import encode, encoding, next_logits, text_of
    from infer import generate
    from sampling import SamplingParams

    record, tree = drawn("page")
    ids = encode(record.prompt, 20)
    params = SamplingParams(12, True, temperature=0.8, top_p=0.95, seed=1)
    written = [t for (t,) in generate(recordings.load("stories-llama"), [ids], params)]
    assert [moment.token for moment in record.moments] == [text_of(id) for id in written]
    for place, (moment, id) in enumerate(zip(record.moments, written)):
        probs = next_logits(ids + written[:place], "stories-llama").softmax(dim=-1)
        assert moment.p == pytest.approx(probs[id].item(), rel=1e-3)
    engine, add = small(**operating.SHAPE)
    own = engine.add(ids, params)
    for step, moment in enumerate(record.moments):
        if step in operating.OTHERS:
            add(*operating.OTHERS[step])
        engine.step()
        work = {work.request: len(work.tokens) for work in engine.works}
        pool = engine.scheduler.pool
        counts = (work[own], sum(work.values()), len(work), pool.num_pages - pool.available)
        assert counts == (moment.own, moment.all, moment.texts, moment.pages)
        frame = record.run.frames[step]  # of the player, which shows the same run
        rows = frame["running"] + frame["over"]
        work = {row["number"]: row["work"][0] for row in rows}
        assert (work[1], sum(work.values()), len(work)) == counts[:3]
        pages = {page for row in frame["running"] for page in row["pages"]}
        assert len(pages) == moment.pages
    assert len(record.run.frames) == len(record.moments)
    assert encoding().decode(ids) == record.prompt
    (page,) = of_class(tree, "p", "page-text")
    assert words_of(page) == record.prompt + "".join(map(text_of, written))
    (bars,) = of_class(tree, "table", "bars")
    spans = of_class(page, "span", "written")
    largest = max(moment.all for moment in record.moments)
    for moment, span, row in zip(record.moments, spans, bars.iter("tr"), strict=True):
        p = moment.p
        shade = 0 if p >= 0.9 else 1 if p >= 0.5 else 2 if p >= 0.2 else 3 if p >= 0.05 else 4
        (again,) = of_class(row, "span", "written")
        assert span.get("class") == again.get("class") == f"written p{shade}"
        assert words_of(again) == moment.token
        counts = [count for count in (moment.own, moment.all - moment.own) if count]
        assert widths(row) == pytest.approx([100 * n / largest for n in counts], abs=0.01)
        kinds = [bar.get("class") for bar in of_class(row, "i", "bar")]
        assert kinds == ["bar ", "bar other"][: len(counts)]
        assert words_of(of_class(row, "td", "value")[0]) == f"{moment.all}, {moment.pages} pages"
    assert record.moments[-1].pages == 0 and "all pages are given back" in words_of(tree)
    assert "token 6 it computed 41 positions: 1 for you, 40 for 2 other" in caption_of("page")


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
    (axis,) = of_class(tree, "div", "times")
    for mark, side, moment in zip(axis, ("left", "right"), (text.due, text.times[-1]), strict=True):
        assert words_of(mark) == f"{moment:.0f} ms"
        place = 100 * moment / end if side == "left" else 100 - 100 * moment / end
        found = re.fullmatch(side + r":([\d.]+)%", mark.get("style"))
        assert float(found[1]) == pytest.approx(place, abs=0.01)


def test_a_stall_seen_by_two_loops():
    from benchmarks import client as benchmark_client
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
        assert f"{count} late of 112; 99th percentile: {p99:,.0f} ms" in words_of(part)
        bars = [box for kind in ("first", "bad") for box in of_class(part, "rect", kind)]
        assert len(bars) == 112 and len(of_class(part, "rect", "bad")) == count
        bars.sort(key=lambda box: float(box.get("y")))
        end = max(last for span in (closed, opened) for _, last in span.spans)
        sizes = [float(box.get("width")) for box in bars]
        assert sizes == pytest.approx([max(300 * wait / 1000 / end, 1) for wait in waits], rel=1e-3)


@pytest.mark.parametrize("slug", STEADY)
def test_a_server_s_picture_is_the_same_each_time(slug):
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    again = picture.record(picture.prompt)
    assert picture.draw(again) == picture.draw(recorded(picture, picture.prompt))


SLUGS = ("disconnects", "full-queue", "keys-and-origins", "draining", "metrics", "live", "page")
SLUGS += ("closed-loop", "open-loop")


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

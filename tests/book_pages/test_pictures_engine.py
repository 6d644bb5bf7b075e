"""Pictures of engine, server and ranks: runs against `generate`, scenes against the runs."""

import itertools
from collections import Counter

import pytest
from scenes import drawn, forms, lengths, written

import pictures
from pictures import loads, replicas, runs
from pictures.scene import Bars, Cells, Lanes, Lines, Player, Tokens

RUNS = {  # slug -> the runs in its record
    "paged-cache": lambda record: [record.run],
    "preemption": lambda record: [record],
    "prefix-sharing": lambda record: [record.run],
    "chunked-prefill": lambda record: record.runs,
}


@pytest.mark.parametrize("slug", RUNS)
def test_runs_of_the_engine(slug):
    """Texts are those of `generate`, and pages of several requests hold the same."""
    record, shown = drawn(slug)
    for run in RUNS[slug](record):
        texts = [request.tokens for request in run.requests]
        size = run.setup["page_size"]
        for request in run.requests:
            prompt = "".join(runs.token_texts(request.tokens[: request.prompt_length]))
            assert runs.token_texts(request.output) == written(prompt, **vars(request.params))
        for frame in run.frames:
            held = {}
            for row in frame["running"]:
                assert len(row["pages"]) * size >= row["computed"]
                for place, page in enumerate(row["pages"]):
                    text = texts[row["number"] - 1][: row["computed"]]
                    held.setdefault(page, set()).add(tuple(text[: size * (place + 1)]))
            assert all(len(found) == 1 for found in held.values())
    (player,) = forms(shown, Player)
    assert player.frames[-1]["running"] == [] and 0 <= player.first < len(player.frames)


@pytest.mark.parametrize("slug, common", [("paged-cache", set()), ("prefix-sharing", {0, 1, 2})])
def test_pages_and_block_tables(slug, common):
    """A text is on the pages of its table, in order."""
    record, shown = drawn(slug)
    pool, tables = forms(shown, Cells)
    used = set()
    for row in record.run.frames[record.at]["running"]:
        number = row["number"]
        (table,) = (each for each in tables.rows if each.name == f"request {number}")
        pages = [int(cell.text) for cell in table.cells]
        assert pages == row["pages"]
        cells = [cell for page in pages for cell in pool.rows[page].cells]
        text = record.run.token_texts()[number - 1][: row["computed"]]
        assert [cell.text for cell in cells if cell.text] == [word.strip() for word in text]
        kinds = ["kept" if page in common else f"owner{number}" for page in pages]
        assert [cell.kind for cell in table.cells] == [cell.kind for cell in cells[::4]] == kinds
        used |= set(pages)
    for page, row in enumerate(pool.rows):
        assert (row.value == "free") == (page not in used) == (row.cells[0].kind == "idle")


def test_prefix_sharing_saves_pages():
    record, shown = drawn("prefix-sharing")
    last = record.run.frames[-1]
    # 12 tokens fill three pages; the last one is computed, so that its logits are there.
    assert last["shared"] == 3 * 8 and last["positions"] == 12 + 3 * 4 + 4 * 8
    assert shown.caption.endswith("4 requests need 11 pages instead of 20.")
    assert "found 8 of 12 prompt tokens in the cache and computed 4." in shown.panels[1].note


def test_preempted_requests_compute_their_text_again():
    record, shown = drawn("preemption")
    last = record.frames[-1]
    again = last["positions"] - sum(len(request.tokens) - 1 for request in record.requests)
    assert again > 0 and last["preemptions"] == 2
    assert f"happens 2 times, and {again} positions are computed twice." in shown.caption
    (lanes,), (pages,) = forms(shown, Lanes), forms(shown, Cells)
    for at, frame in enumerate(record.frames):
        for number, lane in enumerate(lanes.lanes, 1):
            kinds = [span.kind for span in lane.spans if span.start <= at < span.end]
            computes = runs.num_scheduled_tokens(frame, number) > 0
            is_bad = number in frame["preempted"]
            assert kinds == ["bad"] if is_bad else (kinds in (["first"], ["second"])) == computes
        held = sum(bool(row.cells[at].kind) for row in pages.rows)
        assert held == sum(len(row["pages"]) for row in frame["running"])


def test_a_budget_bounds_each_step():
    record, shown = drawn("chunked-prefill")
    prompts = [len(runs.encode(text, 99)) for text in ("Lily", "The dog", runs.STORY)]
    for budget, form in zip(record.budgets, forms(shown, Bars)):
        steps = [[int(length) for length, _ in row.parts] for row in form.rows]
        assert all(0 < sum(step) <= budget for step in steps)
        assert [sum(of) for of in zip(*steps)] == [length + 11 for length in prompts]
        assert all(step[0] and step[1] for step in steps[:12])  # they never wait
    assert "step 9 instead of 3" in shown.caption
    assert "more than 8 tokens instead of 41" in shown.caption


def test_page_groups_count_what_attention_reads():
    record, shown = drawn("page-groups")
    pages = [-(-length // 4) for length in record.lengths]
    groups = {}
    for text, count in enumerate(pages):
        groups.setdefault(count.bit_length(), []).append(text)
    assert sorted(members for _, members in record.groups) == sorted(groups.values())
    read = [len(pages) * max(pages)]
    read.append(sum(len(own) * max(pages[text] for text in own) for own in groups.values()))
    for count, form in zip(read, forms(shown, Cells)):
        assert sum(bool(cell.kind) for row in form.rows for cell in row.cells) == count
    assert f"{read[0]} here." in shown.caption and f"reads {read[1]}." in shown.caption


NAME = "stories-llama"
PROMPT = "Once upon a time"


def outputs_are_generated(clients) -> None:
    """Each client has read what `generate` writes, or the beginning of it."""
    for client in clients:
        tokens = sum((tokens for _, tokens in client.reads), [])
        repeated = len(client.ids) // len(runs.encode(PROMPT, 20))
        own = written(PROMPT * repeated, NAME, max_new_tokens=client.count, ignore_eos=True)
        assert runs.token_texts(tokens) == own[: len(tokens)]
        assert len(tokens) == client.count or client.error


def test_a_busy_reader_misses_nothing():
    clients, scene = drawn("engine-thread")
    outputs_are_generated(clients)
    a, b = ([(step, len(tokens)) for step, tokens in client.reads] for client in clients)
    assert a == [(after, 1) for after in range(1, 9)]
    assert b == [(2, 1), (3, 1), (4, 1), (7, 3), (8, 1), (9, 1)]
    assert "one update of 3 tokens" in scene.caption
    _, _, engine_b, reader_b = forms(scene, Lanes)[0].lanes
    assert [span.text for span in reader_b.spans] == ["1", "1", "1", "3", "1", "1", "busy"]
    assert [span.start for span in engine_b.spans] == list(range(1, 9))  # it did not wait


def test_two_bounds_of_the_queue():
    clients, scene = drawn("full-queue")
    outputs_are_generated(clients[:5])
    assert {client.name: client.error for client in clients if client.error} == {
        "E": "the queue is full (4 sequences): try again",
        "F, long": "the queue is full (4 prompt tokens): try again",
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
    outputs_are_generated(clients)
    assert {client.name for client in clients if client.error} == {"B", "D"}
    assert all(client.end <= limit for client in clients) and signal < limit
    values = [lane.value for lane in forms(scene, Lanes)[0].lanes[1:]]
    counts = ["6 of 6 tokens", "12 of 16 tokens", "4 of 4 tokens", "2 of 8 tokens"]
    assert values == [*counts, "no connection"]


def test_engines_side_by_side():
    one_and_two, scene = drawn("replicas")
    prompt = pictures.PICTURES["replicas"].prompt
    common = {"ignore_eos": True, "temperature": 1.0}
    own = [
        written(prompt, NAME, max_new_tokens=length, seed=seed, **common)
        for seed, length in enumerate(replicas.LENGTHS)
    ]
    for count, side in enumerate(one_and_two, 1):
        assert side.texts == own and len(side.steps) == count
        for engine, steps in enumerate(side.steps):
            cells = [owner for step in steps for owner in step if owner]
            mine = range(engine + 1, 7, count)  # in turn
            assert Counter(cells) == {number: replicas.LENGTHS[number - 1] for number in mine}
    assert [panel.title for panel in scene.panels] == ["1 engine: 18 steps", "2 engines: 11 steps"]


def test_where_requests_find_their_beginning():
    record, scene = drawn("prefix-routing")
    beginnings = [pictures.PICTURES["prefix-routing"].prompt, *replicas.OTHERS]
    full = [len(runs.encode(text, 30)) // replicas.PAGE * replicas.PAGE for text in beginnings]
    for way, sent in record.items():
        there = set()
        for each in sent:  # a beginning is found where it has been before, in whole pages
            known = (each.engine, each.prefix_id) in there
            assert each.cache_hits == (full[each.prefix_id] if known else 0)
            there.add((each.engine, each.prefix_id))
        assert len(there) == (3 if way == "by prefix" else 7)
    turns = [at % replicas.ENGINES for at in range(12)]
    assert [each.engine for each in record["in turn"]] == turns
    columns = zip(*(row.cells for row in forms(scene, Cells)[1].rows))
    shown = [[bool(cell.text) for cell in column].index(True) for column in columns]
    assert shown == [each.engine for each in record["by prefix"]]
    assert lengths(forms(scene, Bars)[0]) == [60, 108]


def test_engines_follow_the_load():
    record, scene = drawn("scaling")
    seconds = record.seconds
    assert [second.requests for second in seconds] == replicas.CLIENTS  # a closed loop
    assert set(record.lengths) == {replicas.TOKENS} and len(record.lengths) > 40
    for now, second in enumerate(seconds):
        lately = replicas.CLIENTS[max(0, now - 4) : now + 1]
        assert second.desired == -(-sum(lately) // (4 * len(lately)))
        before = seconds[now - 1].target
        if now and second.target != before:
            assert {each.desired for each in seconds[now - 5 : now + 1]} != {before}
    assert [second.target for second in seconds] == [1] * 16 + [3] * 25 + [1] * 19
    requests, rows = forms(scene, Lines)[0].curves
    assert requests.points[::2] == list(enumerate(replicas.CLIENTS))
    assert {y for _, y in rows.points} == {4, 12}
    assert [[span[:3] for span in lane.spans] for lane in forms(scene, Lanes)[0].lanes] == [
        [(0, 60, "first")],
        [(16, 41, "first"), (41, 44, "second")],  # it finishes its texts
        [(16, 41, "first")],
    ]


def test_a_stall_seen_by_two_loops():
    record, scene = drawn("load-generator")
    begin, end = loads.STALL
    for output in record.open.outputs:  # a step takes 10 ms, and one may have just begun
        expected = 1000 * (end - output.arrival_time) * (begin <= output.arrival_time < end)
        assert expected <= output.ttft <= expected + 20.001
    late = [output.arrival_time for output in record.closed.outputs if output.ttft > 100]
    assert len(late) <= 2 and all(begin - 0.01 <= time <= begin + 0.01 for time in late)
    assert "counts 1 of 84 requests as late" in scene.caption and "15 of 100" in scene.caption
    for form, load in zip(forms(scene, Lines), (record.closed, record.open), strict=True):
        assert form.curves[0].points == [(each.arrival_time, each.ttft) for each in load.outputs]


@pytest.mark.parametrize(
    "slug", ["tensor-parallel", "split-heads", "split-vocabulary", "row-parallel"]
)
def test_cuts_are_the_whole_model(slug):
    record, scene = drawn(slug)
    assert [record.following] == written(pictures.PICTURES[slug].prompt, NAME, max_new_tokens=1)
    assert record.off["gather"] < 1e-4 and record.off.get("reduce", 0) < 1e-4
    whole = {name.split(".")[-2]: weight for name, weight in runs.load(NAME).named_parameters()}
    whole["lm_head"] = whole["embed_tokens"]
    for stage in itertools.chain(*record.parallel_modes.values()):
        if stage.kind:
            assert sum(stage.widths) == whole[stage.name].shape[stage.kind == "columns"]
        elif stage.name == "gather":
            assert stage.sent == [0, 4 * stage.widths[1]]  # rank 0 has its own
        else:  # a ring of two sends a part to the other, or two halves of the sums
            assert stage.sent == [4 * width for width in stage.widths]
    kinds = {cell.kind for row in forms(scene, Cells)[0].rows for cell in row.cells}
    assert {"owner1", "owner2", "idle"} <= kinds


def test_what_row_parallel_saves():
    record, scene = drawn("row-parallel")
    gather, reduce = record.parallel_modes.values()
    C, inner = 192, 512
    assert sum(stage.sent[0] for stage in gather if stage.sent) == 4 * (3 * C + inner) // 2
    assert [stage.sent for stage in reduce if stage.sent] == [[4 * C] * 2] * 2
    assert "1,536 bytes per token in each layer instead of 2,176" in scene.caption


def test_the_rank_of_each_token():
    record, scene = drawn("split-vocabulary")
    ids = runs.encode(pictures.PICTURES["split-vocabulary"].prompt, 20)
    ranks = [id // 2048 for id in ids]
    (line,) = forms(scene, Tokens)[0].lines
    shown = [(token.kind, token.number) for token in line.tokens]
    assert shown == [(f"owner{rank + 1}", str(rank)) for rank in ranks] and set(ranks) == {0, 1}


def test_weights_in_memory():
    record, scene = drawn("shard-loading")
    weights = dict(runs.load(NAME).named_parameters())
    norms = sum(weight.nbytes for name, weight in weights.items() if "norm" in name)
    whole = sum(weight.nbytes for weight in weights.values())
    assert record[1] == [whole] and sum(record[2]) == whole + norms  # each rank has the norms
    assert record[2][0] == record[2][1] and sum(record[3]) > whole + 2 * norms  # and keys twice
    assert lengths(forms(scene, Bars)[0]) == list(itertools.chain(*record.values()))

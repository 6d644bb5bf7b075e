"""Pictures of engine, server and ranks: runs against `generate`, scenes against the runs."""

import itertools
from collections import Counter

import pytest
from scenes import drawn, forms, written

import pictures
from pictures import replicas, runs
from pictures.scene import Cells, Lanes, Player, Tokens

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


def test_engines_follow_the_load():
    record, scene = drawn("scaling")
    assert [second.requests for second in record.seconds] == replicas.CLIENTS  # a closed loop
    assert set(record.lengths) == {replicas.TOKENS}
    assert [second.target for second in record.seconds] == [1] * 16 + [3] * 25 + [1] * 19
    assert [[span[:3] for span in lane.spans] for lane in forms(scene, Lanes)[0].lanes] == [
        [(0, 60, "first")],
        [(16, 41, "first"), (41, 44, "second")],  # it finishes its texts
        [(16, 41, "first")],
    ]


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


def test_the_rank_of_each_token():
    record, scene = drawn("split-vocabulary")
    ids = runs.encode(pictures.PICTURES["split-vocabulary"].prompt, 20)
    ranks = [id // 2048 for id in ids]
    (line,) = forms(scene, Tokens)[0].lines
    shown = [(token.kind, token.number) for token in line.tokens]
    assert shown == [(f"owner{rank + 1}", str(rank)) for rank in ranks] and set(ranks) == {0, 1}

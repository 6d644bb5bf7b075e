"""Pictures of the engine, lessons 39 to 43: runs against `generate`, scenes against the runs."""

import pytest
from scenes import drawn, forms, written

from pictures import runs
from pictures.scene import Bars, Cells, Lanes, Player

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
            prompt = "".join(runs.texts_of(request.tokens[: request.prompt_length]))
            params = vars(request.params)
            assert runs.texts_of(request.output) == written(prompt, **params)
        for frame in run.frames:
            held = {}
            for row in frame["running"]:
                assert len(row["pages"]) * size >= row["computed"]
                for place, page in enumerate(row["pages"]):
                    text = texts[row["number"] - 1][: row["computed"]]
                    held.setdefault(page, set()).add(tuple(text[: size * (place + 1)]))
            assert all(len(found) == 1 for found in held.values())
        last = run.frames[-1]
        hidden = {"preemption": "preemptions", "sharing": "shared", "drafts": "drafted"}
        for part, name in hidden.items():  # nothing happens that the page does not speak of
            assert part in run.setup["shows"] or last[name] == 0
    (player,) = forms(shown, Player)
    assert player.frames[-1]["running"] == [] and 0 <= player.first < len(player.frames)


@pytest.mark.parametrize("slug, common", [("paged-cache", set()), ("prefix-sharing", {0, 1, 2})])
def test_pages_and_block_tables(slug, common):
    """A text is on the pages of its table, in order."""
    record, shown = drawn(slug)
    pool, tables = forms(shown, Cells)
    words = {}
    for row in record.run.frames[record.at]["running"]:
        number = row["number"]
        (table,) = (each for each in tables.rows if each.name == f"request {number}")
        pages = [int(cell.text) for cell in table.cells]
        assert pages == row["pages"]
        cells = [cell for page in pages for cell in pool.rows[page].cells]
        text = record.run.texts()[number - 1][: row["computed"]]
        assert [cell.text for cell in cells if cell.text] == [word.strip() for word in text]
        kinds = ["kept" if page in common else f"owner{number}" for page in pages]
        assert [cell.kind for cell in table.cells] == [cell.kind for cell in cells[::4]] == kinds
        words[number] = pages
    assert len(words) == (4 if common else 3)
    used = {page for pages in words.values() for page in pages}
    for page, row in enumerate(pool.rows):
        assert (row.value == "free") == (page not in used) == (row.cells[0].kind == "idle")


def test_prefix_sharing_saves_pages():
    record, shown = drawn("prefix-sharing")
    last = record.run.frames[-1]
    # 12 tokens fill three pages; the last one is computed, so that its logits are there.
    assert last["shared"] == 3 * 8 and last["positions"] == 12 + 3 * 4 + 4 * 8
    assert shown.caption.endswith("4 texts need 11 pages instead of 20.")
    assert "found 8 of 12 prompt tokens in the cache and computed 4." in shown.panels[1].note


def test_preempted_requests_compute_their_text_again():
    record, shown = drawn("preemption")
    last = record.frames[-1]
    least = sum(len(request.tokens) - 1 for request in record.requests)
    again = last["positions"] - least
    assert again > 0 and last["preemptions"] == 2
    assert f"happens 2 times, and {again} positions are computed twice." in shown.caption
    (lanes,) = forms(shown, Lanes)
    for number, lane in enumerate(lanes.lanes, 1):
        kinds = {at: span.kind for span in lane.spans for at in range(span.start, span.end)}
        for at, frame in enumerate(record.frames):
            kind = kinds.get(at)
            assert (kind == "bad") == (number in frame["preempted"])
            assert (kind in ("first", "second")) == (
                runs.work_of(frame, number) > 0 and kind != "bad"
            )
        assert list(kinds.values()).count("second") == list(kinds.values()).count("bad")
    (pages,) = forms(shown, Cells)
    for at, frame in enumerate(record.frames):
        column = [row.cells[at].kind for row in pages.rows]
        assert sum(map(bool, column)) == sum(len(row["pages"]) for row in frame["running"])


def test_a_budget_bounds_each_step():
    record, shown = drawn("chunked-prefill")
    lengths = [len(runs.encode(text, 99)) for text in ("Lily", "The dog", runs.STORY)]
    for budget, form in zip(record.budgets, forms(shown, Bars)):
        steps = [[int(length) for length, _ in row.parts] for row in form.rows]
        assert all(0 < sum(step) <= budget for step in steps)
        assert [sum(of) for of in zip(*steps)] == [length + 11 for length in lengths]
        assert all(step[0] and step[1] for step in steps[:12])  # they never wait
    assert record.first == [3, 9] and "step 9 instead of 3" in shown.caption
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
    for count, form, panel in zip(read, forms(shown, Cells), shown.panels):
        assert sum(bool(cell.kind) for row in form.rows for cell in row.cells) == count
        assert panel.title.endswith(f": {count} pages read")
    assert f"{read[0]} here." in shown.caption and f"reads {read[1]}." in shown.caption

"""The pictures of lessons 74 to 81 show what several processes computed, and what crossed."""

import os
import re
import subprocess
import time

import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, run_rows
from drawings import (
    caption_of,
    cells,
    drawn,
    number,
    of_class,
    text_of,
    tokens_of,
    tree_of,
    widths,
    words_of,
)

LESSONS = (
    "leader tensor-parallel split-heads split-vocabulary row-parallel shard-loading "
    "exact-int8-sums rank-failures"
).split()
KINDS = ["first", "second", "good"]
SHOWN = "The lonely knight"


@pytest.fixture(scope="module")
def model():
    from book import recordings

    return recordings.load("stories-llama")


@pytest.fixture(scope="module")
def ids():
    from book import recordings

    return recordings.encoding().encode(SHOWN)


def inputs(model, ids, name: str) -> torch.Tensor:
    """What a layer of one process is given at all positions, (T, n), and what it gives."""
    seen = []
    layer = model.get_submodule(name)
    hook = layer.register_forward_hook(lambda _, given, out: seen.extend([given[0][0], out[0]]))
    try:
        with torch.inference_mode():
            model(torch.tensor([ids]))
    finally:
        hook.remove()
    return seen


def test_a_picture_is_the_same_each_time(monkeypatch):
    from book import spreading
    from book.pictures import PICTURES, recorded

    kept = {slug: recorded(PICTURES[slug], PICTURES[slug].prompt) for slug in LESSONS}
    again = spreading.runs.__wrapped__(SHOWN)
    monkeypatch.setattr(spreading, "runs", {SHOWN: again}.__getitem__)
    for slug, record in kept.items():
        assert PICTURES[slug].record(PICTURES[slug].prompt) == record, slug


def test_what_rank_1_is_told(model, ids):
    """Ids and positions are those of both texts as `generate` writes them; so are the logits."""
    record, tree = drawn("leader")
    dog = [396, 497]
    assert text_of(*dog) == "The dog"
    (a,) = run_rows(model, [ids], max_new_tokens=4, ignore_eos=True)
    (b,) = run_rows(model, [dog], max_new_tokens=3, temperature=0.8, seed=1, ignore_eos=True)
    texts = {"A": (ids, a), "B": (dog, b)}
    steps = [[("A", 0)], [("A", 1)], [("A", 2), ("B", 0)], [("A", 3), ("B", 1)], [("B", 2)]]
    (table,) = of_class(tree, "table", "lanes")
    rows = list(table.find("tbody"))
    owners = {}
    for step, row, heard in zip(steps, rows, record, strict=True):
        left, middle, right = row
        asked = [words_of(line) for line in left if "asks" in words_of(line)]
        new = [name for name, count in step if count == 0]
        assert asked == [f"{name} asks {text_of(*texts[name][0])}" for name in new]
        lines = [words_of(line) for line in left][len(asked) :]
        told = [words_of(line) for line in of_class(middle, "div", "arrow")[0]]
        largest = [float(words_of(line)) for line in right]
        for (name, count), line, words, logit in zip(step, lines, told, largest, strict=True):
            prompt, written = texts[name]
            text = prompt + written[:count]
            own = text if count == 0 else text[-1:]
            first = len(text) - len(own)
            at = f"{first}" if len(own) == 1 else f"{first}\u2013{len(text) - 1}"
            found = re.fullmatch(r"([\d ]+) at ([\d\u2013]+), pages? ([\d, ]+)", words)
            assert found[1] == " ".join(map(str, own)) and found[2] == at
            pages = found[3].split(", ")
            assert len(pages) == -(-len(text) // 4)
            assert all(owners.setdefault(page, name) == name for page in pages)
            with torch.inference_mode():
                logits = model(torch.tensor([text]))[0, -1]
            assert logit == pytest.approx(logits.max().item(), abs=2e-3)
            token = written[count]
            assert line == f"{name} {logit:.3f}, {text_of(token)}\u00a0{token}"
        spans = [list(span) for span in heard.spans]
        data = [(pages, start, ids) for _, ids, start, pages in spans]
        from cache import Span

        work = [Span(*each) for each in data], [1] * len(data)
        size = torch.distributed.distributed_c10d._object_to_tensor(work, "cpu", None)[1].item()
        assert words_of(of_class(middle, "p", "note")[0]) == f"{size} bytes"
    assert "Logits are equal in 5 of 5 passes" in caption_of("leader")
    assert "a page has 4 positions" in words_of(tree)  # `len(text) // 4` above


@pytest.mark.parametrize(
    "slug, inner, sizes, words, last",
    [
        (
            "tensor-parallel",
            512,
            [192, 160, 160],
            ["192 numbers", "160 numbers", "160 numbers"],
            "mlp.down_proj",
        ),
        (
            "split-heads",
            192,
            [64, 64, 64],
            ["heads 0, 1; keys 0", "heads 2, 3; keys 0, 1", "heads 4, 5; keys 1"],
            "self_attn.o_proj",
        ),
    ],
)
def test_columns(model, ids, slug, inner, sizes, words, last):
    """Who has which heads and outputs; a whole bar is made of the parts; sums of one process."""
    record, tree = drawn(slug)
    table, figures = of_class(tree, "div", "panel")
    rows = list(table.find(".//tbody"))
    assert [row.get("class") for row in rows] == ["does", None] + ["does", None, "meets", None] * 2
    parts = {2: (inner, sizes, words), 6: (192, [64, 64, 64], ["64 outputs"] * 3)}
    for at, (total, sizes, words) in parts.items():
        assert cells(rows[at + 1]) == words
        for rank, cell in enumerate(rows[at + 1]):
            bars = [bar.get("class") for bar in cell.iter("i")]
            gaps = [sum(sizes[:rank]), sum(sizes[rank + 1 :])]
            expected = [gaps[0], sizes[rank], gaps[1]]
            kinds = ["bar gap", f"bar {KINDS[rank]}", "bar gap"]
            assert bars == [kind for kind, size in zip(kinds, expected) if size]
            shares = [100 * size / total for size in expected if size]
            assert widths(cell) == pytest.approx(shares, abs=0.006)
        each = 4 * len(ids) * max(sizes) * 2  # to two others, in float32
        filled = ", parts filled up to the widest" if len(set(sizes)) > 1 else ""
        assert words_of(rows[at + 2]) == (
            f"exchange (all gather): all get {total} numbers a position, each rank sends "
            f"{each:,} bytes, for {len(ids)} positions, to 2 others{filled}"
        )
        for cell in rows[at + 3]:
            assert [bar.get("class") for bar in cell.iter("i")] == [f"bar {k}" for k in KINDS]
            assert widths(cell) == pytest.approx([100 * s / total for s in sizes], abs=0.006)
    _, outputs = inputs(model, ids, f"layers.0.{last}")
    shown = [cells(row) for row in figures.find(".//tbody")]
    assert [row[0] for row in shown] == ["0", "64", "128"]
    for own, here, alone in shown:
        assert number(alone) == pytest.approx(outputs[-1, int(own)].item(), abs=1e-8)
        assert number(here) == pytest.approx(number(alone), abs=1e-6)
    assert record.total == 8 * len(ids) * (inner + 192)
    words = f"Of the {record.total:,} numbers that are exchanged there in this pass "
    words += f"{record.same:,} have"
    assert words in words_of(figures) and record.same > record.total / 2
    exact = record.same == record.total
    assert all(row[1] == row[2] for row in shown) or not exact
    assert "torch computes in float32" in words_of(figures)
    assert "bit" not in caption_of(slug)  # who asks for the same bits must say of what


def test_gathered_numbers_are_counted(monkeypatch):
    """One wrong bit shows."""
    from book import spreading

    found = spreading.runs(SHOWN)
    kept = spreading.record_half("MLP", SHOWN)
    rank = list(found["gather"][0])
    for at in (3, 5):  # of the MLP of the first layer, of the attention of the second
        wrong = rank[at].whole.clone()
        wrong[0, 0, 0] += 1
        rank[at] = rank[at]._replace(whole=wrong)
    changed = found | {"gather": [rank, *found["gather"][1:]]}
    monkeypatch.setattr(spreading, "runs", lambda prompt: changed)
    record = spreading.record_half("MLP", SHOWN)
    assert record.same == kept.same - 1
    words = words_of(tree_of(spreading.draw_columns(record).body))
    assert f"in this pass {record.same:,} have the bits of one process" in words


def test_vocabulary(model, ids):
    record, tree = drawn("split-vocabulary")
    own = [range(1376), range(1376, 2752), range(2752, 4096)]
    rows_in, rows_out = of_class(tree, "div", "panel")
    head, *rows = rows_in.iter("tr")
    names = [f"rank {rank}{part[0]}\u2013{part[-1]}" for rank, part in enumerate(own)]
    assert cells(head) == ["token", *names, "sum"]
    owners = []
    for id, row in zip(ids, rows, strict=True):
        assert words_of(row[0]) == f"{text_of(id)}{id}"
        owner = next(rank for rank, part in enumerate(own) if id in part)
        owners.append(owner)
        weights = model.embed_tokens.weight[id, :2].tolist()
        shown = "".join(f"{weight:.3f}".replace("-", "\u2212") for weight in weights)
        expected = [shown if rank == owner else "00" for rank in range(3)]
        assert cells(row)[1:] == [*expected, shown]
        kinds = [f"tint{rank}" if rank == owner else "none" for rank in range(3)]
        assert [cell.get("class") for cell in row[1:]] == [*kinds, f"tint{owner}"]
    assert owners == [0, 1, 2]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]))[0, -1]
    expected = []
    for rank, part in enumerate(own):
        top = logits[part.start : part.stop].topk(2)
        for value, place in zip(top.values.tolist(), top.indices.tolist()):
            expected.append((f"rank {rank} {text_of(part.start + place)}", value))
    lines = [cells(row) for row in rows_out.iter("tr")]
    assert [line[0] for line in lines] == [name for name, _ in expected]
    assert [number(line[2]) for line in lines] == pytest.approx([v for _, v in expected], abs=6e-3)
    largest = max(value for _, value in expected)
    shares = [100 * value / largest for _, value in expected]
    assert widths(rows_out) == pytest.approx(shares, abs=0.02)
    chosen = text_of(logits.argmax().item())
    assert tokens_of(rows_out, "new") == [chosen, chosen] and record.chosen == chosen
    assert f"{4 * 1376:,} bytes each (filled up to the widest)" in words_of(rows_out)


def test_ways(model, ids):
    """Meetings and bytes by formula; parts by columns of the weight."""
    from book import spreading

    record, tree = drawn("row-parallel")
    by_columns, by_rows, worked = of_class(tree, "div", "panel")
    T = len(ids)
    sent = 2 * 4 * T * (64 + 64 + 192 + 64), 2 * (2 * 2 * 4 * T * 192 // 3)
    for panel, count, traffic in zip((by_columns, by_rows), (4, 2), sent):
        words = f"{count} exchanges a layer, {traffic:,} bytes sent by each rank."
        assert words_of(panel).endswith(words)
    weights = []
    for panel in (by_columns, by_rows):
        boxes = [box for kind in KINDS for box in of_class(panel, "rect", kind)]
        large = [box for box in boxes if min(float(box.get(s)) for s in ("width", "height")) > 20]
        weights.append(large)
        assert [box.get("class") for box in weights[-1]] == KINDS
    assert len({box.get("x") for box in weights[0]}) == len({box.get("y") for box in weights[1]})
    assert len({box.get("y") for box in weights[0]}) == len({box.get("x") for box in weights[1]})
    attended, outputs = inputs(model, ids, "layers.0.self_attn.o_proj")
    weight = model.layers[0].self_attn.o_proj.weight[record.output]
    lines = {words_of(row[0]): number(words_of(row[1])) for row in worked.iter("tr")}
    names = [f"rank {rank}" for rank in range(3)]
    assert list(lines) == [*names, "added up", "one process"]
    for rank, name in enumerate(names):
        part = slice(64 * rank, 64 * rank + 64)
        product = (attended[-1, part].double() @ weight[part].double()).item()
        assert lines[name] == pytest.approx(product, abs=1e-6)
    assert lines["added up"] == pytest.approx(sum(lines[name] for name in names), abs=1e-6)
    alone = outputs[-1, record.output].item()
    assert lines["one process"] == pytest.approx(alone, abs=1e-9)
    marks = [words_of(mark) for mark in worked.iter("mark")]
    assert bool(marks) == (lines["added up"] != lines["one process"])
    added = spreading.runs(SHOWN)["reduce"][0][1].whole[0, -1]
    count = int((added != outputs[-1]).sum())
    words = f"{count} of 192 such outputs differ"
    assert words in words_of(worked) and record.error < 1e-4
    assert (added != outputs[-1])[record.output] or count == 0
    assert "2 exchanges a layer instead of 4" in caption_of("row-parallel")


@pytest.mark.parametrize("size", [2, 3, 6])
def test_loading(model, size):
    """Each row is with one rank at least, and memory is that of the plan."""
    from book import spreading
    from loading.load import architecture_of
    from parallel.shards import Plan, cut

    record = spreading.record_loading(str(size))
    tree = tree_of(spreading.draw_loading(record).body)
    left, right = of_class(tree, "div", "panel")
    sizes = []
    plans = []
    for rank in range(size):
        ranks = type("", (), {"rank": rank, "size": size, "way": "gather"})()
        with torch.device("meta"):
            part = architecture_of(model.config).model(model.config)
        plans.append(Plan(part, ranks))
        cut(part, plans[-1])
        sizes.append(sum(weight.numel() for weight in part.parameters()) * 4)
    shared = "so some rows of k_proj and v_proj are on several."  # of two keys
    assert (shared in words_of(left)) == (size > 2)
    names = [key for key, _ in model.named_parameters() if "norm" not in key and "." in key]
    names = [key for key in names if "layers." not in key or "layers.0." in key]
    rows = list(left.iter("tr"))
    for key, row in zip(names, rows, strict=True):
        weight = model.get_parameter(key)
        name, strips, bytes = row
        assert words_of(name) == key.split(".")[-2]
        assert words_of(bytes) == f"{weight.numel() * 2 / 1000:,.1f} kB"
        for rank, strip in enumerate(of_class(strips, "span", "strip")):
            rows_of_rank = plans[rank].parts[key].rows
            expected = []
            for own in rows_of_rank:
                expected += [100 * own.start / len(weight), 100 * len(own) / len(weight)]
            found = [
                float(value)
                for bar in strip
                for value in re.fullmatch(
                    r"left:([\d.]+)%;width:([\d.]+)%", bar.get("style")
                ).groups()
            ]
            assert found == pytest.approx(expected, abs=0.006)
            assert {bar.get("class") for bar in strip} == {spreading.COLOURS[rank]}
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    lines = [cells(row) for row in right.iter("tr")]
    block = 2 * model.embed_tokens.weight.numel()
    assert lines[0][2] == f"{whole / 1e6:.1f} MB"
    assert [line[2] for line in lines[1:]] == [
        f"{own / 1e6:.1f} MB + {block / 1e6:.1f} MB" for own in sizes
    ]
    bars = [[own, block] for own in sizes]
    shares = [100 * each / (whole + block) for each in [whole, *sum(bars, [])]]
    assert widths(right) == pytest.approx(shares, abs=0.006)
    assert (
        f"at most {max(sizes) / 1e6:.1f} MB and a block of "
        in spreading.draw_loading(record).caption
    )


def test_sums(ids):
    """Whole numbers by the weights of one process; floats in numpy, in each order."""
    from book import spreading
    from int8 import int8_product, quantize
    from loading.load import load_model

    record, tree = drawn("exact-int8-sums")
    model = load_model(CHECKPOINTS / "stories-llama", torch.int8)
    attended, _ = inputs(model, ids, "layers.0.self_attn.o_proj")
    layer = model.layers[0].self_attn.o_proj
    parts = [slice(64 * rank, 64 * rank + 64) for rank in range(3)]
    largest = [attended[-1, part].abs().max().item() for part in parts]
    scales, added = of_class(tree, "div", "panel")
    lines = [cells(row) for row in scales.iter("tr")]
    assert [line[2] for line in lines] == [f"{value:.4f}" for value in largest]
    shares = [100 * value / max(largest) for value in largest]
    assert widths(scales) == pytest.approx(shares, abs=0.006)
    assert f"{max(largest):.4f} / 127 = {max(largest) / 127:.6f}" in words_of(scales)
    values, _ = quantize(attended[-1])
    rows = [cells(row) for row in added.find(".//tbody")]
    numbers = [
        int8_product(values[part], layer.weight[record.output, part][None]).item() for part in parts
    ]
    assert [number(row[2]) for row in rows] == [*numbers, *[sum(numbers)] * 3]
    floats = [np.float32(value) for value in record.floats]
    assert [number(row[1]) for row in rows[:3]] == pytest.approx(record.floats, abs=1e-10)
    shown = [number(row[1]) for row in rows[3:]]
    sums = []
    for row in rows[3:]:
        first, second, third = (floats[int(rank)] for rank in row[0].split(" + "))
        sums.append(float((first + second) + third))
    assert shown == pytest.approx(sums, abs=1e-10)
    assert {row[0][-1] for row in rows[3:]} == {"0", "1", "2"}  # each one comes last once
    marks = [words_of(mark) for mark in added.iter("mark")]
    different = len({f"{value:.10f}" for value in sums})
    assert different > 1 and f"in three orders gives {different} different sums" in caption_of(
        "exact-int8-sums"
    )
    assert len(marks) == sum(value != sums[0] for value in sums)
    assert record.same["int8"] == record.logits == 4096 > record.same["float32"]
    assert "one scale for all ranks" in caption_of("exact-int8-sums")
    assert "In int8 4,096 of 4,096 logits at the end are those of one process" in words_of(added)
    assert f"in float32 {record.same['float32']:,} are" in words_of(added)
    whole = [rank[2].whole[0, -1, record.output].item() for rank in spreading.runs(SHOWN)["int8"]]
    assert whole == [sum(numbers)] * 3


def test_failures(model, ids):
    """Two tokens, then one rank fails: what all say is one line, and all end."""
    from parallel import ranks

    record, tree = drawn("rank-failures")
    (written,) = run_rows(model, [ids], max_new_tokens=2)
    assert {case.text for case in record.values()} == {text_of(*ids, *written)}
    assert f"The text that breaks off: {text_of(*ids, *written)}" in words_of(tree)
    closed = "a connection is closed: "
    one = "one says why, the other is silent"
    memory = "rank 2: the texts of this step do not fit in memory"
    expected = {
        "Rank 2 is killed": (closed + one, "", ["2", "2", "killed"], ranks.ENDED),
        "Rank 2 has no memory": (closed + "both are silent", "says why", ["2"] * 3, memory),
        "Rank 2 stands still": (
            "no answer until the limit: " + one,
            "",
            ["2", "2", "killed"],
            ranks.ENDED,
        ),
    }
    for panel, (title, words) in zip(of_class(tree, "div", "panel"), expected.items(), strict=True):
        assert words_of(of_class(panel, "p", "title")[0]) == title
        others, own, ends, line = words
        rows = [list(row) for row in panel.find(".//tbody")]
        assert [words_of(row[0]) for row in rows] == ["rank 0", "rank 1", "rank 2"]
        kinds = [[cell.get("class") for cell in row[1:4]] for row in rows]
        assert kinds == [["computed", "computed", kind] for kind in ("wait", "wait", "gone")]
        assert words_of(rows[0][4]) == others and rows[0][4].get("rowspan") == "2"
        assert words_of(rows[2][4]) == own and [words_of(row[-1]) for row in rows] == ends
        assert words_of(of_class(panel, "p", "note")[0]) == f"error: {line}"
    assert [case.codes for case in record.values()] == [[2, 2, -9], [2, 2, 2], [2, 2, -9]]


def fail(file) -> None:
    """In a process of its own: note it and its ranks, and let one of these fail."""
    from book import processes

    found = [os.getpid(), *processes.on_ranks(2, os.getpid)]
    found += [process.pid for process, _ in processes.start(1, time.sleep, 1000)]
    file.write_text(" ".join(map(str, found)))
    processes.on_ranks(2, int, "a mistake")


def goes_on(process: str) -> bool:
    """Whether it is there, and is not what is left of one until somebody asks for its end."""
    command = ["ps", "-o", "stat=", "-p", process]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    return shown.strip()[:1] not in ("", "Z")


def test_what_fails_is_one_line_and_nothing_goes_on(tmp_path):
    from book import processes
    from errors import UserError

    with pytest.raises(UserError, match="processes of this picture have failed: "):
        processes.fresh(fail, tmp_path / "found")
    found = (tmp_path / "found").read_text().split()
    assert len(found) == 4
    while any(goes_on(process) for process in found):  # a kill takes its time
        time.sleep(0.05)


@pytest.mark.parametrize(
    "slug, prompt, words",
    [
        ("leader", "", "the prompt has 0 tokens"),
        ("tensor-parallel", "a " * 20, "this picture shows 1 to 8"),
        ("rank-failures", "\udc80", "not UTF-8 text"),
        ("shard-loading", "7", "the prompt is '7'; here it is a number of processes, 2 to 6"),
        ("shard-loading", "Tom", "a number of processes, 2 to 6"),
    ],
)
def test_prompts_that_cannot_be_shown(slug, prompt, words):
    from book.pictures import PICTURES
    from errors import UserError

    with pytest.raises(UserError, match=words):
        PICTURES[slug].record(prompt)


def test_a_strange_prompt():
    from book.pictures import PICTURES, page

    prompt = "--chat <b>"
    for slug in LESSONS:
        if PICTURES[slug].prompt == SHOWN:
            tree_of(page(f"00-{slug}", prompt).partition("<main>")[2].partition("</main>")[0])

"""Pictures of several processes: rows of a benchmark, and what is printed of larger machines."""

import csv
import re
import statistics

import pytest
from conftest import ROOT
from drawings import caption_of, cells, number, of_class, tree_of, widths, words_of

FILE = ROOT / "benchmark_results" / "scaling_cpu.csv"
RATIO = (
    "tokens/s, predicted / measured"  # in each repeat: a median of ratios is no ratio of medians
)
MADE = [  # mode, processes, measure, value of the first repeat, and of two others
    ("one process", 1, "tokens/s", 900, 1100),
    ("gather", 1, "tokens/s", 600, 700),
    *[("busy gather", 2, f"{part}, ms", 10, 12) for part in ("leader", "each", "attention")],
    ("busy gather", 2, "products, ms", 20, 24),
    ("gather", 2, "tokens/s", 400, 500),
    ("gather", 2, "tokens/s, predicted", 500, 540),
    ("gather", 2, RATIO, 1.25, 1.08),  # 8 % more
    ("gather", 2, "in collectives, ms a step", 30, 31),
    ("gather", 2, "in collectives, ms a step, predicted", 40, 42),
    ("gather", 4, "tokens/s", 200, 200),
    ("gather", 4, "tokens/s, predicted", 250, 230),
    ("gather", 4, RATIO, 1.15, 1.3),
    ("gather", 4, "in collectives, ms a step", 1000, 2000.5),
    ("gather", 4, "in collectives, ms a step, predicted", 90, 92),
]
REPLICAS = [
    ("replicas", 1, "tokens/s", 300, 500),
    ("replicas", 2, "tokens/s", 700, 900),
    ("replicas", 2, "tokens/s, predicted", 725, 725),
    ("replicas", 2, RATIO, 1.04, 0.806),
]


def write(file, made: list[tuple], other_model: bool = False) -> str:
    """A file of a benchmark with these rows. other_model: then those of another one."""
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(
            ["mode", "processes", "measure", "value", "repeat", "model", "commit", "rows"]
        )
        for repeat, which in enumerate((3, 4, 4)):
            rows.writerows([*row[:3], row[which], repeat, "a", "abc", 8] for row in made)
        if other_model:
            rows.writerows([*row[:3], 10**6, 0, "b", "abc", 9] for row in made * 4)
    return str(file)


def shown(name: str):
    """The record of such a file, and its picture."""
    from book.pictures import PICTURES

    picture = PICTURES["benchmark-scaling"]
    record = picture.record(name)
    return record, picture.draw(record)


def medians_of(file) -> dict[tuple, float]:
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    found = {}
    for row in rows:
        if row["model"] == rows[0]["model"]:
            place = row["mode"], int(row["processes"]), row["measure"]
            found.setdefault(place, []).append(float(row["value"]))
    return {place: statistics.median(values) for place, values in found.items()}


def name_of(mode: str, size: int) -> str:
    if mode in ("one process", "replicas"):
        return mode if mode == "one process" else f"{size} replica{'s' * (size > 1)}"
    return f"{mode}, {size} rank{'s' * (size > 1)}"


def check_bars(part, expected: dict[str, tuple], digits: int) -> None:
    """expected: name -> what is measured, what was predicted or None."""
    assert [cells(row)[0] for row in part.iter("tr")] == list(expected)
    values = [tuple(each for each in both if each is not None) for both in expected.values()]
    words = [words_of(cell) for cell in of_class(part, "td", "value")]
    assert words == [
        " ".join(["{:,.{n}f}", "({:,.{n}f})"][: len(both)]).format(*both, n=digits)
        for both in values
    ]
    largest = max(max(both) for both in values)
    assert widths(part) == pytest.approx([100 * both[0] / largest for both in values], abs=0.01)
    for row, both in zip(part.iter("tr"), values, strict=True):
        ticks = [float(tick.get("style")[5:-1]) for tick in of_class(row, "b", "tick")]
        assert ticks == pytest.approx([100 * each / largest for each in both[1:]], abs=0.01)


@pytest.mark.parametrize("case", ["of the book", "replicas", "no replicas", "one replica"])
def test_measured_and_predicted(case, tmp_path):
    """Bars, marks and the title, from medians of whatever rows there are."""
    file = FILE
    if case != "of the book":
        more = {"replicas": 3, "no replicas": 0, "one replica": 1}[case]
        file = tmp_path / "rows.csv"
        write(file, MADE + REPLICAS[:more], other_model=True)
    _, drawing = shown(str(file))
    found = medians_of(file)
    rates = {}
    for mode, size, measure in found:
        if measure == "tokens/s":
            predicted = found.get((mode, size, "tokens/s, predicted"))
            rates[mode, size] = found[mode, size, measure], predicted
    left, right = of_class(tree_of(drawing.body), "div", "panel")
    check_bars(left, {name_of(*place): both for place, both in rates.items()}, 0)
    times = {}
    alone = {}
    for join in ("gather", "reduce"):
        whole = [value for (mode, *_), value in found.items() if mode == f"busy {join}"]
        ranks = [size for mode, size in rates if mode == join and size > 1]
        assert len(whole) == (4 if ranks else 0)
        if ranks:
            alone[join] = sum(whole)
            times[f"{join}, 1 rank"] = alone[join], None
        for size in ranks:
            what = "in collectives, ms a step"
            both = tuple(found[join, size, name] for name in (what, f"{what}, predicted"))
            times[name_of(join, size)] = both
    check_bars(right, times, 1)
    ratios = [value for (*_, name), value in found.items() if name.startswith(RATIO)]
    close = sum(0.8 <= ratio <= 1.2 for ratio in ratios)
    caption = words_of(tree_of(drawing.caption))
    words = f"; by medians of ratios, {close} of {len(ratios)} are within 20\xa0%. "
    assert words in words_of(left)
    texts = 32 if case == "of the book" else 8
    assert words_of(left).startswith(f"Tokens a second, with {texts} texts an engine")
    several = {place: rates[place][0] for place in rates if place[0] in alone and place[1] > 1}
    one = max(rate for (mode, size), (rate, _) in rates.items() if mode != "replicas" and size == 1)
    more = sum(rate > one for rate in several.values())
    assert ("Several processes (ranks) make less than one here:" in caption) == (more == 0)
    words = f"{more} of {len(several)} groups of ranks make more than one. The slowest,"
    assert (words in caption) == (more > 0)
    join, size = min(several, key=several.get)
    spent = times[name_of(join, size)][0]
    assert caption.endswith(
        f" {size} ({join}) spend {spent:,.1f} ms a step exchanging numbers; one rank computes all "
        f"of a step in {alone[join]:,.1f}."
    )
    for name, both in rates.items():
        assert f"{name_of(*name)}: {both[0]:,.0f}" in drawing.text


def test_medians_and_the_title_by_hand(tmp_path):
    _, drawing = shown(write(tmp_path / "rows.csv", MADE + REPLICAS))
    words = words_of(tree_of(drawing.body))
    assert "gather, 2 ranks500 (540)" in words and "gather, 4 ranks200 (230)" in words
    assert "2 replicas900 (725)" in words and "gather, 4 ranks2,000.5 (92.0)" in words
    assert "gather, 1 rank60.0" in words and "commit abc" in words
    assert drawing.caption == (
        "Several processes (ranks) make less than one here: 4 (gather) spend 2,000.5 ms a step "
        "exchanging numbers; one rank computes all of a step in 60.0."
    )


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (1101, "1 of 2 groups of ranks make more than one. The slowest, 4 (gather) spend"),
        (1099, "Several processes (ranks) make less than one here: 4 (gather) spend"),
    ],
)
def test_ranks_that_are_faster_are_counted(rate, words, tmp_path):
    """Than the best that is alone, here the one process without ranks."""
    changed = ("gather", 2, "tokens/s")
    made = [(*changed, rate, rate) if row[:3] == changed else row for row in MADE]
    _, drawing = shown(write(tmp_path / "rows.csv", made))
    assert words in drawing.caption


@pytest.mark.parametrize(
    "made", [None, [], MADE[1:], MADE[:3], MADE[:2] + MADE[3:], [("gather", 2, "tokens/s", 0, 0)]]
)
def test_rows_of_another_benchmark(made, tmp_path):
    from errors import UserError

    file = tmp_path / "rows.csv"
    if made is not None:
        write(file, made)
    with pytest.raises(UserError, match="cannot be read" if made is None else "no rows"):
        shown(str(file))
    file.write_text("mode,measure\n1,2\n")
    with pytest.raises(UserError, match="no rows"):
        shown(str(file))


@pytest.fixture(scope="module")
def machines():
    """Two prompts, and what is drawn of each: of each panel its cells and its bars."""
    from book.pictures import PICTURES, recorded

    picture = PICTURES["larger-machines"]
    found = {}
    for prompt in (picture.prompt, "1024 64"):
        record = recorded(picture, prompt)
        found[prompt] = record, picture.draw(record)
    return found


def printed(texts: int, capsys) -> list[list[str]]:
    """The lines of the script of the lesson that fit, and those that do not, by ranks."""
    from benchmarks import larger_machines

    larger_machines.main(["--texts", str(texts)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines[1:] if line[1] in ("-", "gather", "reduce")]


def test_machines_are_those_of_the_lesson_s_own_run(machines, capsys):
    """Each number of ranks has the faster of two ways, as the script prints it by itself."""
    for prompt, (record, drawing) in machines.items():
        panels = of_class(tree_of(drawing.body), "div", "panel")
        steps = {}
        for texts, panel in zip(map(int, prompt.split()), panels, strict=True):
            assert words_of(panel).startswith(f"{texts} texts at once: ms a step (bar)")
            lines = printed(texts, capsys)
            fit = [line for line in lines if "fit" not in line]
            best = max(fit, key=lambda line: number(line[-1]))
            assert f"{texts} texts" in drawing.caption and len(record[texts]) == 4
            for row, way in zip(panel.iter("tr"), record[texts], strict=True):
                name, _, value = cells(row)
                replicas, _, ranks, _ = name.split(" ")
                assert int(replicas) * int(ranks) == 8
                own = [line for line in fit if line[0] == ranks]
                assert bool(own) == bool(way.parts) == bool(widths(row))
                if not own:
                    line = next(line for line in lines if line[0] == ranks)
                    assert value == f"does not fit: {float(line[3]):.0f} GB"
                    continue
                line = min(own, key=lambda line: float(line[4]))
                assert line[1] == "reduce" and value == f"{line[6]} each, all {line[7]}"
                assert bool(list(row.iter("b"))) == (line == best)
                steps[texts, ranks] = float(line[4]), widths(row)
                assert sum(way.parts) == pytest.approx(float(line[4]), abs=0.006)
                assert way.parts[2] == pytest.approx(float(line[5]), abs=0.006)
                assert way.parts[3] == pytest.approx(1 + 80 * 10 * 0.003)
        largest = max(step for step, _ in steps.values())
        for step, parts in steps.values():  # one scale for both panels
            assert sum(parts) == pytest.approx(100 * step / largest, abs=0.1)


def test_what_more_ranks_save(machines):
    """The reading of weights, and nothing else, while meetings take longer."""
    for record, _ in machines.values():
        for texts, ways in record.items():
            products, attention, meetings, rest = zip(*[way.parts for way in ways if way.parts])
            assert attention == pytest.approx([attention[0]] * len(attention))
            assert rest == pytest.approx([rest[0]] * len(rest))
            assert list(meetings) == sorted(meetings) and len(set(meetings)) == len(meetings)
            multiplied = 2 * 69.5e9 * texts / 8 / (9.9e14 * 0.7) * 1000
            sizes = [way.case.ranks for way in ways if way.parts]
            read = [2 * 69.5e9 / size / (4.8e12 * 0.7) * 1000 for size in sizes]
            assert products == pytest.approx([max(each, multiplied) for each in read], rel=0.01)


def test_the_title_has_the_best_numbers_of_ranks(machines):
    record, _ = machines["512 8"]
    best = [
        min((way for way in ways if way.parts), key=lambda way: sum(way.parts)).case.ranks
        for ways in record.values()
    ]
    assert best == [4, 8]
    assert caption_of("larger-machines").startswith(
        "Predicted for 8 GPUs: 512 texts are fastest with 4 GPUs working as one, 8 texts with 8. "
    )


def test_a_thousand_machines(machines, capsys):
    """As many as the script has by itself, with the larger number of texts of both."""
    from benchmarks import larger_machines

    for prompt, (_, drawing) in machines.items():
        most = max(map(int, prompt.split()))
        larger_machines.main(["--texts", str(most)])
        (line,) = re.findall(r"^1000 machines: (\S+)", capsys.readouterr().out, re.MULTILINE)
        words = (
            f"1,000 such machines, each with {most} texts, make {number(line) / 1e6:.1f} million"
        )
        assert words in words_of(tree_of(drawing.body))


def test_assumptions_are_those_of_the_lesson(machines):
    _, drawing = machines["512 8"]
    assert re.search(
        r"2,000 positions .* join by reduce, .* 141 GB .* 4\.8 TB .* 70\xa0%",
        words_of(tree_of(drawing.body)),
    )


@pytest.mark.parametrize("prompt", ["", "Tom", "512", "8 8", "512 8 16", "7 512", "0 8", "8 1032"])
def test_prompts_are_numbers_of_texts(prompt):
    from book.pictures import PICTURES
    from errors import UserError

    words = "two numbers of texts, multiples of 8 up to 1,024, as '512 8'"
    with pytest.raises(UserError, match=words):
        PICTURES["larger-machines"].record(prompt)

"""Pictures of lessons 18, 19 and 29: what the rows of a benchmark say, and what they do not."""

import csv
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import lessons as course
from book import draw
from book.draw import Drawing, Picture, bars, escape, key, label, panel, panels, stacks, svg
from errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "benchmark_results"
RATE = "decode_tokens_per_s"
COLUMNS = {"mode", "prompt", "repeat", "commit", "batch_size", "new_tokens", RATE}


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of a benchmark, in their order. name: of a file, here or of this repository.

    Those of the first model, dtype and temperature only. Raises UserError if it has none.
    """
    path = Path(name)
    try:
        if not path.exists():
            path = ROOT / name
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows or not COLUMNS <= rows[0].keys():
            raise UserError(f"{name!r} has no rows of this benchmark")
        same = [(row["model"], row["temperature"]) == first_of(rows) for row in rows]
        rows = [row for row, alike in zip(rows, same) if alike]
        for row in rows:
            row[RATE] = float(row[RATE])
            row["batch_size"] = int(row["batch_size"])
            row["new_tokens"] = int(row["new_tokens"])
            row["temperature"] = float(row["temperature"])
        if min(row[RATE] for row in rows) <= 0:
            raise ValueError(RATE)
    except OSError as error:
        raise UserError(f"{name!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, csv.Error):
        raise UserError(f"{name!r} has no rows of this benchmark") from None
    return rows


def first_of(rows: list[dict]) -> tuple[str, str]:
    return rows[0]["model"], rows[0]["temperature"]


def source(rows: list[dict], name: str) -> str:
    later = ", with the code of later lessons" if name.startswith(FOLDER) else ""
    return f"{name}, measured at commit {rows[0]['commit']}{later}"


class Turn(NamedTuple):
    """Two runs of the same repeat."""

    rate: float  # of the baseline, tokens a second
    other: float

    @property
    def ratio(self) -> float:
        return self.other / self.rate


class Turns(NamedTuple):
    mode: str  # what is compared with the baseline
    turns: list[Turn]
    conditions: str  # of all of them
    source: str


def turns_of(rows: list[dict], baseline: str, mode: str) -> list[Turn]:
    """What both modes made in the same repeat of the same prompt."""
    found = {}
    for row in rows:
        place = row["new_tokens"], row["batch_size"], row["prompt"], row["repeat"]
        found.setdefault(place, {})[row["mode"]] = row[RATE]
    pairs = (each for each in found.values() if {baseline, mode} <= each.keys())
    return [Turn(each[baseline], each[mode]) for each in pairs]


def record_turns(name: str, baseline: str = "target", mode: str = "gamma 3") -> Turns:
    rows = read_rows(name)
    turns = turns_of(rows, baseline, mode)
    if not turns:
        raise UserError(f"{name!r} has no rows of {baseline} and of {mode}")
    return Turns(mode, turns, conditions(rows), source(rows, name))


def conditions(rows: list[dict]) -> str:
    temperature = rows[0]["temperature"]
    sizes = sorted({row["batch_size"] for row in rows})
    words = f"At temperature {temperature:g}" if temperature else "Greedily"
    texts = "one text" if sizes == [1] else f"{' or '.join(map(str, sizes))} texts"
    place = "CPU" if (rows[0].get("device") or "").startswith("cpu") else "device"
    return f"{words}, {texts} at a time, on this {place}"


def draw_turns(record: Turns) -> Drawing:
    turns = sorted(record.turns, key=lambda turn: turn.rate)
    slowest, fastest = turns[0], turns[-1]
    others = [turn.other for turn in turns]
    middle = statistics.median(turn.ratio for turn in turns)
    low = min(others) / fastest.rate
    high = max(others) / slowest.rate
    ratios = sorted(turn.ratio for turn in turns)
    claims = [
        ("the worst pair", low, f"{min(others):.0f} / {fastest.rate:.0f} = {low:.2f}", "bad"),
        ("the best pair", high, f"{max(others):.0f} / {slowest.rate:.0f} = {high:.2f}", "bad"),
        ("<b>median of the turns</b>", middle, f"<b>{middle:.2f}</b>", "good"),
    ]
    body = panels(
        panel(
            f"{len(turns)} turns: the target alone, then with drafts",
            dumbbells(turns) + key(first="target alone", second=f"with drafts, {record.mode}"),
            "A line a turn, with its ratio: two runs of the same repeat, close in time, so both "
            "share what disturbs them. Gamma: so many tokens are drafted at once.",
        ),
        panel(
            "How many times as fast? Three answers",
            bars(claims),
            f"Rows of {escape(record.source)}.",
        ),
    )
    caption = (
        f"{record.conditions}: with drafts of {record.mode.removeprefix('gamma ')} tokens the "
        f"target is {middle:.2f} times as fast, the median of {len(turns)} pairs of runs, from "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}. Who picks two runs can say {low:.2f} or {high:.2f}."
    )
    text = (
        f"{len(turns)} turns with the rates of the target and of {record.mode}: "
        + "; ".join(f"{turn.rate:g} and {turn.other:g}" for turn in turns)
        + f". The ratios have the median {middle:.2f}."
    )
    return Drawing(body, caption, text)


def dumbbells(turns: list[Turn], width: int = 330, row: int = 19) -> str:
    """A line a turn from one rate to the other, on one axis from 0."""
    largest = max(max(turn.rate, turn.other) for turn in turns)
    room = width - 52

    def place(rate: float) -> float:
        return round(8 + rate / largest * (room - 16), 1)

    body = ""
    for number, turn in enumerate(turns):
        y = 12 + number * row
        ends = [(place(turn.rate), y), (place(turn.other), y)]
        body += draw.path(ends, "rod") + draw.dot(*ends[0], "first") + draw.dot(*ends[1], "second")
        body += label(width - 2, y + 4, f"\u00d7 {turn.ratio:.2f}", "end")
    y = 12 + len(turns) * row
    step = 10 ** (len(str(int(largest))) - 1)
    for mark in range(0, int(largest) + 1, step):
        body = draw.path([(place(mark), 2), (place(mark), y - 6)], "grid") + body
        body += label(place(mark), y + 8, str(mark), "middle")
    body += label(place(0), y + 24, "tokens a second")
    return svg(width, y + 28, body, "chart")


class Lengths(NamedTuple):
    """Milliseconds a token of each run: mode -> tokens of the text -> runs."""

    modes: dict[str, dict[int, list[float]]]
    source: str


PLAIN = "no cache"


def record_lengths(name: str) -> Lengths:
    rows = [row for row in read_rows(name) if row["batch_size"] == 1]
    modes = {}
    for row in rows:
        runs = modes.setdefault(row["mode"], {}).setdefault(row["new_tokens"], [])
        runs.append(1000 / row[RATE])
    if PLAIN not in modes or "cache" not in modes:
        raise UserError(f"{name!r} has no rows with a cache and without one")
    return Lengths(modes, source(rows, name))


COLOURS = "second", "first", "good", "other"
PEER = "transformers"
LIBRARY = f"{PEER}, Hugging Face\u2019s library"


def draw_lengths(record: Lengths) -> Drawing:
    modes = dict(zip([PLAIN, *sorted(set(record.modes) - {PLAIN})], COLOURS))
    medians = {mode: medians_of(record.modes[mode]) for mode in modes}
    plain = medians[PLAIN]
    cached = medians["cache"]
    shortest, longest = (pick(plain) for pick in (min, max))
    body = panel(
        "Milliseconds a token, for so many new tokens",
        chart_of(record, modes)
        + key(**{kind: LIBRARY if mode == PEER else mode for mode, kind in modes.items()}),
        "A dot a run, lines through the medians. "
        + f"{PEER} has a cache of its own. " * (PEER in modes)
        + f"Rows of {escape(record.source)}.",
    )
    grows = " longer as the text grows" * (plain[longest] > plain[shortest])
    caption = (
        f"Without the cache a token takes{grows}: {plain[shortest]:.0f} ms each for {shortest} new "
        f"tokens, {plain[longest]:.0f} for {longest}. With it {cached[shortest]:.1f} and "
        f"{cached[longest]:.1f}."
    )
    text = "Median milliseconds a token: " + "; ".join(
        f"{mode} " + ", ".join(f"{ms:.1f} at {length}" for length, ms in each.items())
        for mode, each in medians.items()
    )
    return Drawing(body, caption, text + ".")


def medians_of(runs: dict[int, list[float]]) -> dict[int, float]:
    return {length: statistics.median(each) for length, each in sorted(runs.items())}


def chart_of(record: Lengths, modes: dict[str, str], size: int = 320) -> str:
    height = 190
    left = 26
    lengths = sorted({length for runs in record.modes.values() for length in runs})
    most = max(ms for runs in record.modes.values() for each in runs.values() for ms in each)

    def place(length: float, ms: float) -> tuple[float, float]:
        x = left + length / lengths[-1] * (size - left - 16)
        return round(x, 1), round(height - ms / most * (height - 10), 1)

    body = ""
    step = 10 if most > 20 else max(1, round(most / 4))
    for ms in range(0, int(most) + 1, step):
        body += draw.path([place(0, ms), (size, place(0, ms)[1])], "grid")
        body += label(left - 4, place(0, ms)[1] + 4, str(ms), "end")
    for length in lengths:
        body += label(place(length, 0)[0], height + 16, str(length), "middle")
    for mode, kind in modes.items():
        runs = record.modes[mode]
        body += draw.path([place(*point) for point in medians_of(runs).items()], kind)
        body += "".join(
            draw.dot(*place(length, ms), kind) for length, each in runs.items() for ms in each
        )
    return svg(size, height + 22, body, "chart")


class Shares(NamedTuple):
    """engine -> texts in its batch -> tokens a second of each run, of all texts together."""

    engines: dict[str, dict[int, list[float]]]
    source: str


NAMES = {"cache": "torch", "native": "C", "native int8": "int8 in C"}
ENGINES = tuple(NAMES)
OWN = "benchmark-batching"  # the lesson whose Try prints rows of its own code


def printed_rows() -> list[tuple[str, int, float]]:
    """Engine, texts in its batch and tokens a second, as the message of the lesson has them."""
    try:
        _, all_lessons = course.read_main()
        message = course.message(course.find(all_lessons, OWN))
    except course.LessonError as error:
        raise UserError(str(error)) from None
    found = re.findall(r"  batch (\d+)  .*  repeat \d+  (.+): ([\d.]+)/s$", message, re.MULTILINE)
    return [(mode, int(size), float(rate)) for size, mode, rate in found]


def record_shares(name: str) -> Shares:
    """name: of a file with rows, or that of the lesson."""
    if name == OWN:
        found = printed_rows()
        said = (
            "One run of each, by this lesson&rsquo;s own code, as its message prints them: too few "
            "to say how many times as fast (lesson 18)."
        )
    else:
        rows = read_rows(name)
        found = [(row["mode"], row["batch_size"], row[RATE]) for row in rows]
        said = f"Medians of the rows of {escape(source(rows, name))}."
    runs = {}
    for mode, size, rate in found:
        runs.setdefault(mode, {}).setdefault(size, []).append(rate)
    engines = {mode: dict(sorted(runs[mode].items())) for mode in ENGINES if mode in runs}
    if not engines:
        raise UserError(f"{name!r} has no rows of {', '.join(ENGINES)}")
    return Shares(engines, said)


def draw_shares(record: Shares) -> Drawing:
    medians = {engine: medians_of(runs) for engine, runs in record.engines.items()}
    largest = max(max(rates.values()) for rates in medians.values())
    rows = []
    for engine, rates in medians.items():
        for size, rate in rates.items():
            own = rate / size
            parts = [(own, "second"), (rate - own, "kept")]
            name = f"{escape(engine)}, " + ("1 text" if size == 1 else f"{size} texts")
            each = f", each {own:,.0f}" if size > 1 else ""
            rows.append((name, parts, f"{rate:,.0f}{each}"))
    body = stacks(rows, largest)
    body += key(second="what one reader gets, tokens a second", kept="what all others get")
    body += (
        '<p class="note">cache: torch, with lesson 14&rsquo;s cache; native: C, lesson 28; native '
        f"int8: C with int8 weights. {record.source}</p>"
    )
    sizes = sorted({size for rates in medians.values() for size in rates})
    few, many = sizes[0], sizes[-1]
    found = [
        f"{rates[many]:,.0f} instead of {rates[few]:,.0f} with {NAMES[engine]}"
        for engine, rates in medians.items()
        if len(rates) == len(sizes) > 1
    ]
    ends = ", ".join(found[:: len(found) - 1 or 1])
    numbers = f": {many} make {ends} (tokens a second, for all readers)" if found else ""
    caption = (
        "Texts of a batch share one reading of the weights, until arithmetic takes longer"
        f"{numbers}."
    )
    text = "Tokens a second of all texts: " + "; ".join(
        f"{engine} " + ", ".join(f"{rate:.0f} for {size}" for size, rate in rates.items())
        for engine, rates in medians.items()
    )
    return Drawing(body, caption, text + ".")


PICTURES = {  # slug of a lesson -> its picture
    "benchmark-speculative": Picture(
        f"{FOLDER}/speculative_cpu.csv", record_turns, draw_turns, rows=True
    ),
    "benchmark-kv-cache": Picture(
        f"{FOLDER}/kv_cache_cpu.csv", record_lengths, draw_lengths, rows=True
    ),
    "benchmark-batching": Picture(
        OWN,
        record_shares,
        draw_shares,
        rows=True,
        own="Of your own rows: in place of the name the .csv file that the benchmark writes",
    ),
}

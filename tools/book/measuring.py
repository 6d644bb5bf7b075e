"""Pictures of lessons 18, 19 and 29: what the rows of a benchmark say, and what they do not."""

import csv
import statistics
from pathlib import Path
from typing import NamedTuple

from book import draw
from book.draw import Drawing, Picture, bars, escape, key, label, panel, panels, stacks, svg
from errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
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
    return f"{name}, measured at commit {rows[0]['commit']}"


class Turn(NamedTuple):
    """Two neighbouring runs."""

    rate: float  # of the baseline, tokens a second
    other: float

    @property
    def ratio(self) -> float:
        return self.other / self.rate


class Turns(NamedTuple):
    mode: str  # what is compared with the baseline
    turns: list[Turn]
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
    return Turns(mode, turns, source(rows, name))


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
            dumbbells(turns)
            + key(first="target alone, tokens a second", second=f"with drafts, {record.mode}"),
            "A line a turn, with its ratio; the slowest target first. Gamma: so many tokens are "
            "drafted at once.",
        ),
        panel(
            "How many times as fast? Three answers from the same runs",
            bars(claims),
            f"Rows of {escape(record.source)}.",
        ),
    )
    caption = (
        f"With drafts the target is {middle:.2f} times as fast: the median of {len(turns)} turns, "
        f"from {ratios[0]:.2f} to {ratios[-1]:.2f}. Who picks two runs can say {low:.2f} or "
        f"{high:.2f}, because the target alone makes {slowest.rate:.0f} tokens a second in one "
        f"turn and {fastest.rate:.0f} in another. Neighbours share what disturbs them."
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
    return svg(width, y + 12, body, "chart")


class Lengths(NamedTuple):
    """Milliseconds a token of each run: mode -> tokens of the text -> runs."""

    modes: dict[str, dict[int, list[float]]]
    length: int  # where the runs without a cache differ most
    turns: list[Turn]  # there
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
    length = max(modes[PLAIN], key=lambda at: max(modes[PLAIN][at]) / min(modes[PLAIN][at]))
    turns = turns_of([row for row in rows if row["new_tokens"] == length], PLAIN, "cache")
    return Lengths(modes, length, turns, source(rows, name))


COLOURS = "second", "first", "good", "other"


def draw_lengths(record: Lengths) -> Drawing:
    modes = dict(zip([PLAIN, *sorted(set(record.modes) - {PLAIN})], COLOURS))
    rates = [turn.rate for turn in record.turns]
    ratios = [turn.ratio for turn in record.turns]
    rows = ""
    for number, turn in enumerate(record.turns):
        cells = f"<td>{turn.rate:.1f}</td><td>{turn.other:.1f}</td><td>{turn.ratio:.2f}</td>"
        odd = ' class="odd"' if turn.rate == min(rates) else ""
        rows += f'<tr{odd}><th scope="row">turn {number + 1}</th>{cells}</tr>'
    for words, of in (("mean", statistics.mean), ("median", statistics.median)):
        columns = rates, [turn.other for turn in record.turns], ratios
        cells = "".join(
            f"<td>{of(column):.{digits}f}</td>" for column, digits in zip(columns, (1, 1, 2))
        )
        rows += f'<tr class="sum"><th scope="row">{words}</th>{cells}</tr>'
    head = f"<th></th><th>{PLAIN}</th><th>cache</th><th>ratio</th>"
    table = f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    medians = {mode: medians_of(record.modes[mode]) for mode in modes}
    shortest, longest = (pick(record.modes[PLAIN]) for pick in (min, max))
    body = panels(
        panel(
            "Milliseconds a token, for texts of so many tokens",
            chart_of(record, modes) + key(**{kind: mode for mode, kind in modes.items()}),
            "A dot a run, lines through the medians.",
        ),
        panel(
            f"Tokens a second, in texts of {record.length}",
            table,
            "A turn is a run of each, one right after the other. A run that is far off moves "
            f"the mean, the median hardly. Rows of {escape(record.source)}.",
        ),
    )
    plain = medians[PLAIN]
    cached = medians["cache"]
    caption = (
        f"With the cache a text of {record.length} tokens is made "
        f"{statistics.median(ratios):.2f} times as fast, the median of {len(ratios)} turns from "
        f"{min(ratios):.2f} to {max(ratios):.2f}. A token takes {cached[shortest]:.1f} ms in texts "
        f"of {shortest} and {cached[longest]:.1f} in texts of {longest}; without the cache "
        f"{plain[shortest]:.0f} and {plain[longest]:.0f}."
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


ENGINES = "cache", "native", "native int8"


def record_shares(name: str) -> Shares:
    rows = read_rows(name)
    runs = {}
    for row in rows:
        runs.setdefault(row["mode"], {}).setdefault(row["batch_size"], []).append(row[RATE])
    engines = {mode: dict(sorted(runs[mode].items())) for mode in ENGINES if mode in runs}
    if not engines:
        raise UserError(f"{name!r} has no rows of {', '.join(ENGINES)}")
    return Shares(engines, source(rows, name))


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
        '<p class="note">cache: torch, with lesson 13&rsquo;s cache; native: C. Medians of the '
        f"rows of {escape(record.source)}.</p>"
    )
    best = max(medians, key=lambda engine: max(medians[engine].values()))
    rates = medians[best]
    many = max(rates, key=rates.get)
    few = min(rates)
    runs = record.engines[best][many]
    caption = (
        f"{escape(best)} makes most: {rates[many]:,.0f} tokens a second for {many} texts at once, "
        f"in {len(runs)} runs {min(runs):,.0f} to {max(runs):,.0f}. That is "
        f"{rates[many] / rates[few]:.1f} times as many as for {few}, and each reader, the orange "
        f"part, gets {rates[many] / many:,.0f} instead of {rates[few] / few:,.0f}."
    )
    text = "Tokens a second of all texts: " + "; ".join(
        f"{engine} " + ", ".join(f"{rate:.0f} for {size}" for size, rate in rates.items())
        for engine, rates in medians.items()
    )
    return Drawing(body, caption, text + ".")


FOLDER = "benchmark_results"
PICTURES = {  # slug of a lesson -> its picture
    "benchmark-speculative": Picture(
        f"{FOLDER}/speculative_cpu.csv", record_turns, draw_turns, rows=True
    ),
    "benchmark-kv-cache": Picture(
        f"{FOLDER}/kv_cache_cpu.csv", record_lengths, draw_lengths, rows=True
    ),
    "benchmark-batching": Picture(
        f"{FOLDER}/batching_cpu.csv", record_shares, draw_shares, rows=True
    ),
}

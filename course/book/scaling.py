"""Pictures of lessons 88 and 89: several processes, measured and predicted."""

import csv
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks import larger_machines, predict
from benchmarks.common import ROOT
from benchmarks.larger_machines import ASSUMED, Assumed, Case
from benchmarks.predict import Step
from book.draw import Drawing, Picture, bars, escape, key, panel, panels, stacks
from errors import UserError

# 88

RATE = "tokens/s"
MEETING = "in collectives, ms a step"
MODES = {"one process": "other", "gather": "first", "reduce": "second", "replicas": "good"}
CLOSE = 0.2  # of what is measured


class Group(NamedTuple):
    """Processes that work together: medians of all repeats."""

    mode: str
    size: int
    rate: tuple[float, float | None]  # tokens a second, and as it was predicted
    ratio: float | None  # of the second to the first
    meeting: tuple[float | None, float | None]  # milliseconds of a step in collectives

    @property
    def name(self) -> str:
        if self.mode == "one process":
            return self.mode
        what = "replica" if self.mode == "replicas" else f"{self.mode}, {self.size} rank"
        size = f"{self.size} " * (self.mode == "replicas")
        return f"{size}{what}{'s' * (self.size > 1)}"


class Scaling(NamedTuple):
    groups: list[Group]
    alone: dict[str, float]  # how ranks join -> milliseconds that one computes in a step
    texts: int  # of an engine at once
    file: str
    commit: str


def record_scaling(name: str) -> Scaling:
    """Those of the first model in the rows of a file, here or of this repository."""
    try:
        with (Path(name) if Path(name).exists() else ROOT / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        values = {}
        for row in rows:
            if row["model"] == rows[0]["model"]:
                place = row["mode"], int(row["processes"]), row["measure"]
                values.setdefault(place, []).append(float(row["value"]))
        medians = {place: statistics.median(each) for place, each in values.items()}
        groups = []
        for mode, size, measure in medians:
            if measure == RATE and mode in MODES:
                rate, meeting = (
                    tuple(medians.get((mode, size, of)) for of in (each, f"{each}, predicted"))
                    for each in (RATE, MEETING)
                )
                ratio = medians.get((mode, size, f"{RATE}, predicted / measured"))
                groups.append(Group(mode, size, rate, ratio, meeting))
        alone = {}
        for mode in dict.fromkeys(group.mode for group in groups if group.meeting[0]):
            most = max(size for of, size, _ in medians if of == f"busy {mode}")
            parts = (medians[f"busy {mode}", most, f"{part}, ms"] for part in Step._fields)
            alone[mode] = sum(parts)
        rates = [medians["one process", 1, RATE], *(group.rate[0] for group in groups)]
        if not alone or min(rates) <= 0:
            raise ValueError
        return Scaling(groups, alone, int(rows[0]["rows"]), name, rows[0]["commit"])
    except OSError as error:
        raise UserError(f"{name!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, csv.Error):
        raise UserError(f"{name!r} has no rows of this benchmark") from None


def line(name: str, found: tuple[float, float | None], kind: str, digits: int = 0) -> tuple:
    """A row of `bars`: what is measured, and a mark at what was predicted."""
    measured, predicted = found
    words = f"{measured:,.{digits}f}"
    if predicted is None:
        return name, measured, words, kind
    return name, measured, f"{words} ({predicted:,.{digits}f})", kind, predicted


def draw_scaling(record: Scaling) -> Drawing:
    rates = [line(group.name, group.rate, MODES[group.mode]) for group in record.groups]
    ranks = [group for group in record.groups if group.meeting[0]]
    times = []
    for mode, alone in record.alone.items():
        times.append((f"{mode}, 1 rank", alone, f"{alone:,.1f}", "other"))
        own = (group for group in ranks if group.mode == mode)
        times += [line(group.name, group.meeting, MODES[mode], 1) for group in own]
    errors = [abs(group.ratio - 1) for group in record.groups if group.ratio]
    close = sum(error <= CLOSE for error in errors)
    body = panels(
        panel(
            f"Tokens a second, with {record.texts} texts an engine",
            bars(rates),
            "Bar: measured. Mark, and in brackets: predicted, for ranks from what one computes and "
            "what exchanges take by themselves, for replicas from one; "
            f"by medians of ratios, {close} of {len(errors)} are within {100 * CLOSE:.0f}\u00a0%. "
            "One process, without "
            "ranks, computes on all cores, a rank on one. Ranks together are one engine, and only "
            "compute steps; each replica is an engine, and answers clients.",
        ),
        panel(
            "Milliseconds of a step spent exchanging, in collectives",
            bars(times),
            "Grey, to compare: all that one rank computes in a step, while others do so. Time of "
            "exchanges has "
            f"waiting for others in it. Rows of {escape(record.file)}, commit "
            f"{escape(record.commit)}.",
        ),
    )
    one = max(group.rate[0] for group in record.groups if group.size == 1 and group not in ranks)
    more = sum(group.rate[0] > one for group in ranks)
    slowest = min(ranks, key=lambda group: group.rate[0])
    caption = (
        f"{make_more(more, len(ranks))} {slowest.size} ({slowest.mode}) spend "
        f"{slowest.meeting[0]:,.1f} ms a step exchanging numbers; one rank computes all of a step "
        f"in {record.alone[slowest.mode]:,.1f}."
    )
    text = "; ".join(f"{name}: {words} tokens a second" for name, _, words, *_ in rates)
    text += ". Milliseconds of a step in exchanges: "
    return Drawing(body, caption, text + "; ".join(f"{each[0]}: {each[2]}" for each in times) + ".")


def make_more(groups: int, all_groups: int) -> str:
    if groups:
        return f"{groups} of {all_groups} groups of ranks make more than one. The slowest,"
    return "Several processes (ranks) make less than one here:"


# 89

GPUS = 8
POSITIONS = 2000  # of a text, as larger_machines.py has it
MOST = 1024  # texts
MACHINES = 1000  # as larger_machines.py has it
PARTS = {
    "first": "products with the weights",
    "second": "reading keys and values",
    "bad": "exchanges between GPUs",
    "kept": "the rest: scheduling, draws, time between kernels",
}


class Way(NamedTuple):
    case: Case
    parts: list[float]  # milliseconds of each of PARTS; none if it does not fit


def record_machines(prompt: str) -> dict[int, list[Way]]:
    """Texts of a machine -> ways to divide it, the faster one to join of each number of ranks.

    A prompt is two numbers of texts here.
    """
    numbers = prompt.split(" ")
    allowed = {str(number) for number in range(GPUS, MOST + 1, GPUS)}
    if len(set(numbers) & allowed) != 2 or len(numbers) != 2:
        words = f"two numbers of texts, multiples of {GPUS} up to {MOST:,}, as '512 8'"
        raise UserError(f"the prompt is {prompt!r}; here it is {words}")
    assumed = Assumed(*(value for value, _ in ASSUMED.values()))
    found = {}
    for texts in map(int, numbers):
        fastest = {}
        for case in larger_machines.cases(assumed, GPUS, texts, POSITIONS):
            other = fastest.setdefault(case.ranks, case)
            fastest[case.ranks] = min(case, other, key=lambda each: each.step)
        found[texts] = [Way(case, parts_of(assumed, case)) for case in fastest.values()]
    return found


def parts_of(assumed: Assumed, case: Case) -> list[float]:
    if case.memory > assumed.memory:
        return []
    step = larger_machines.step_of(assumed, case.texts, POSITIONS)
    products, keys = predict.shares(larger_machines.LLAMA, case.ranks, case.way)
    parts = products * step.products, keys * step.attention, case.meeting, step.leader + step.each
    return [1000 * part for part in parts]


def draw_machines(record: dict[int, list[Way]]) -> Drawing:
    fit = {texts: [way.case for way in ways if way.parts] for texts, ways in record.items()}
    largest = max(1000 * case.step for cases in fit.values() for case in cases)
    shown = []
    said = []
    best = {texts: min(cases, key=lambda case: case.step) for texts, cases in fit.items()}
    for texts, ways in record.items():
        rows = []
        for case, parts in ways:
            name = f"{GPUS // case.ranks} \u00d7 {case.ranks} GPU{'s' * (case.ranks > 1)}"
            words = f"does not fit: {case.memory / 1e9:.0f} GB"
            if parts:
                total = GPUS // case.ranks * case.texts / case.step
                words = f"{1 / case.step:.1f} each, all {total:,.0f}"
            lengths = ", ".join(f"{each:.1f}" for each in parts)
            said.append(f"{texts} texts, {name}: {words}" + f" ({lengths} ms)" * bool(parts))
            mark = "<b>{}</b>" if case == best[texts] else "{}"
            rows.append((mark.format(name), list(zip(parts, PARTS)), mark.format(words)))
        title = f"{texts} texts at once: ms a step (bar), tokens a second"
        shown.append(panel(title, stacks(rows, largest)))
    assumed = {name: value for name, (value, _) in ASSUMED.items()}
    joined = {case.way for cases in fit.values() for case in cases if case.ranks > 1}
    whole = max(GPUS // case.ranks * case.texts / case.step for case in fit[max(fit)])
    machines = (
        f"{MACHINES:,} such machines, each with {max(fit)} texts, make "
        f"{MACHINES * whole / 1e6:.1f} million tokens a second."
    )
    note = (
        "2 \u00d7 4 GPUs: two replicas of four GPUs each. In a step each text gets a token. "
        "Products take the longer of two times, of reading the weights and of multiplying. A "
        "replica of more GPUs has more texts, so only the reading of weights gets shorter, until "
        f"multiplying takes longer. {machines} Llama 3 of 70 billion parameters, "
        f"{POSITIONS:,} positions a text, GPUs that join by {' or '.join(sorted(joined))}, the "
        f"faster way. Assumed, among others: a GPU has {assumed['memory'] / 1e9:g} GB and reads "
        f"{assumed['bandwidth'] / 1e12:g} TB a second; kernels reach "
        f"{100 * assumed['reached']:.0f}\u00a0% of that."
    )
    (many, of_many), (few, of_few) = best.items()
    caption = (
        f"Predicted for {GPUS} GPUs: {many} texts are fastest with {of_many.ranks} "
        f"GPUs working as one, {few} texts with {of_few.ranks}. More GPUs read fewer weights each, "
        "but, with many texts, exchange for longer."
    )
    body = f'<div class="machines">{panels(*shown)}</div>{key(**PARTS)}<p class="note">{note}</p>'
    return Drawing(body, caption, f"{'; '.join(said)}. Parts: {', '.join(PARTS.values())}.")


PICTURES = {  # slug of a lesson -> its picture
    "benchmark-scaling": Picture(
        "benchmark_results/scaling_cpu.csv", record_scaling, draw_scaling, rows=True
    ),
    "larger-machines": Picture(
        "512 8",
        record_machines,
        draw_machines,
        own="The same for two other numbers of texts on a machine",
    ),
}

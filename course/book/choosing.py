"""Pictures of lessons 04 to 07: from a distribution to a token."""

import math
from typing import NamedTuple

import torch

from book import recordings
from book.draw import (
    Drawing,
    Picture,
    bars,
    dial,
    dot,
    label,
    panel,
    panels,
    path,
    percent,
    svg,
    token,
)
from sampling import SamplingParams, apply_temperature, sample, top_k_filter, top_p_filter

Share = tuple[str, float]  # a token and its probability


class Draws(NamedTuple):
    """Many draws from one distribution."""

    prompt: str
    likely: list[Share]
    counts: list[int]  # how often each of those was drawn
    drawn: list[str]  # all draws, in order


@torch.inference_mode()
def record_draws(prompt: str, count: int = 1000) -> Draws:
    text = recordings.encode(prompt, 200)
    logits = recordings.next_logits(text)
    params = SamplingParams(temperature=1.0)
    seeds = range(1, count + 1)
    ids = sample(logits.expand(count, -1), params, draws=[(seed, len(text)) for seed in seeds])
    best = logits.topk(10).indices
    counts = (ids[:, None] == best).sum(dim=0)
    likely = recordings.likely(logits.softmax(dim=-1), 10)
    return Draws(prompt, likely, counts.tolist(), [recordings.text_of(id) for id in ids.tolist()])


def draw_draws(record: Draws) -> Drawing:
    count = len(record.drawn)
    rows = [
        (token(text), p, f"{percent(p)}, drawn {times}", "", times / count)
        for (text, p), times in zip(record.likely, record.counts)
    ]
    rest = 1 - sum(p for _, p in record.likely)
    times = count - sum(record.counts)
    rows.append(("4,086 others", rest, f"{percent(rest)}, drawn {times}", "other", times / count))
    chips = " ".join(token(text) for text in record.drawn[:30])
    kinds = len(set(record.drawn))
    body = panels(
        panel(
            f"After <q>{token(record.prompt)}</q>: the probabilities, and how often {count:,} "
            "draws took each",
            bars(rows),
            "Bar: probability. Line: share of the draws.",
        ),
        panel(
            "The first 30 draws",
            f'<p class="draws">{chips}</p>',
            f"Each draw has a seed of its own, 1 to {count:,}; the same seed gives the same draw.",
        ),
    )
    best, p = record.likely[0]
    caption = (
        f"Greedy decoding takes {token(best)} each time. A draw takes it {percent(p)} of the time, "
        f"and each other token as often as the model finds it likely: {kinds} different ones in "
        f"{count:,} draws."
    )
    shown = ", ".join(f"{text!r} {percent(p)}" for text, p in record.likely[:5])
    text = f"Bars of the ten most likely tokens ({shown}, ...) beside how often each was drawn."
    return Drawing(body, caption, text)


def dial_of(prompt: str, **values: float) -> str:
    """Sliders over what the model says after a prompt."""
    logits = recordings.next_logits(recordings.encode(prompt, 200))
    names = [text for text, _ in recordings.likely(logits, 12)]
    ordered = logits.sort(descending=True, stable=True).values.tolist()
    return dial(ordered, names, prompt, **values)


class Shares(NamedTuple):
    """The same tokens under several temperatures."""

    prompt: str
    temperature: float
    likely: list[Share]
    rest: float  # of all others


@torch.inference_mode()
def record_temperatures(prompt: str) -> list[Shares]:
    logits = recordings.next_logits(recordings.encode(prompt, 200))
    found = []
    for temperature in (0.5, 1.0, 2.0):
        probs = apply_temperature(logits, temperature).softmax(dim=-1)
        likely = recordings.likely(probs, 6)
        found.append(Shares(prompt, temperature, likely, 1 - sum(p for _, p in likely)))
    return found


def draw_temperatures(record: list[Shares]) -> Drawing:
    parts = []
    for each in record:
        rows = [(token(text), p, percent(p), "") for text, p in each.likely]
        rows.append(("4,090 others", each.rest, percent(each.rest), "other"))
        words = {0.5: "sharper", 1.0: "as the model says", 2.0: "flatter"}[each.temperature]
        parts.append(panel(f"T = {each.temperature:g}: {words}", bars(rows, 1.0)))
    sharp, plain, flat = record
    best = plain.likely[0][0]
    caption = (
        "A temperature T sharpens or flattens the probabilities and never changes their order: "
        f"{token(best)} has {percent(sharp.likely[0][1])} at T = 0.5 and "
        f"{percent(flat.likely[0][1])} at T = 2."
    )
    shown = "; ".join(
        f"T = {each.temperature:g}: {best!r} {percent(each.likely[0][1])}, all but the first six "
        f"{percent(each.rest)}"
        for each in record
    )
    text = f"Bars of the same tokens three times. {shown}."
    return Drawing(panels(*parts), caption, text, dial_of(plain.prompt, temperature=1))


class Cut(NamedTuple):
    """A distribution before and after top-k."""

    prompt: str
    k: int
    before: list[Share]
    after: list[float]
    kept: float  # the mass that the k tokens had


@torch.inference_mode()
def record_top_k(prompt: str, k: int = 10, shown: int = 14) -> Cut:
    logits = recordings.next_logits(recordings.encode(prompt, 200))
    logits = apply_temperature(logits, 2.0)
    probs = logits.softmax(dim=-1)
    cut = top_k_filter(logits, k).softmax(dim=-1)
    best = probs.topk(shown).indices
    kept = probs[cut > 0].sum().item()
    return Cut(prompt, k, recordings.likely(probs, shown), cut[best].tolist(), kept)


def draw_top_k(record: Cut) -> Drawing:
    rest = 1 - sum(p for _, p in record.before)
    others = f"{4096 - len(record.before):,} others"
    before = []
    for (text, p), left in zip(record.before, record.after):
        kinds = ("", "") if left else ("gone", "off")
        before.append((token(text, kinds[0]), p, percent(p), kinds[1]))
    before.append((others, rest, percent(rest), "off"))
    after = []
    for (text, _), p in zip(record.before, record.after):
        after.append((token(text, "" if p else "gone"), p, percent(p) if p else "0", ""))
    after.append((others, 0.0, "0", ""))
    largest = max(rest, record.after[0])
    body = panels(
        panel("At temperature 2; hatched or struck through: what is cut", bars(before, largest)),
        panel(f"The same, cut to the {record.k} most likely", bars(after, largest)),
    )
    caption = (
        f"Top-k keeps the {record.k} most likely tokens of 4,096. At temperature 2 they had "
        f"{percent(record.kept)} of the probability and now share all of it; the tail, with the "
        f"other {percent(1 - record.kept)}, cannot be drawn."
    )
    text = (
        f"Bars before and after: {record.before[0][0]!r} has {percent(record.before[0][1])}, then "
        f"{percent(record.after[0])}; tokens after the {record.k}th have nothing."
    )
    return Drawing(body, caption, text, dial_of(record.prompt, temperature=2, k=record.k))


BESIDE = ("Once upon a", "She was very", "They went to the")


class Nucleus(NamedTuple):
    """How the mass of the tokens of one distribution adds up."""

    prompt: str
    mass: list[float]  # of the 1, 2, ... most likely tokens
    kept: int  # by top-p
    likely: list[Share]
    own: bool  # the one whose tokens are shown


@torch.inference_mode()
def record_top_p(prompt: str, p: float = 0.9) -> list[Nucleus]:
    """Of a prompt, and of three others beside it."""
    found = []
    for text in dict.fromkeys([BESIDE[0], prompt, *BESIDE[1:]]):
        logits = recordings.next_logits(recordings.encode(text, 200))
        probs = logits.softmax(dim=-1)
        mass = probs.sort(descending=True).values.cumsum(dim=-1).tolist()
        kept = top_p_filter(logits, p).isfinite().sum().item()
        likely = recordings.likely(probs, 8)
        found.append(Nucleus(text, mass, kept, likely, text == prompt))
    return found


LINES = ("first", "good", "second", "other")


def draw_top_p(record: list[Nucleus], p: float = 0.9) -> Drawing:
    width, height, left, top = 250, 180, 46, 10

    def place(rank: int, mass: float) -> tuple[float, float]:
        return left + width * math.log(rank) / math.log(4096), top + height * (1 - mass)

    body = ""
    for mass in (0, 0.5, 1):
        start = place(1, mass)
        body += path([start, place(4096, mass)], "grid")
        body += label(left - 5, start[1] + 4, f"{mass:.0%}".replace("%", " %"), "end")
    for rank in (1, 10, 100, 1000):
        body += label(place(rank, 0)[0], top + height + 16, f"{rank:,}", "middle")
    body += label(left + width / 2, top + height + 32, "tokens, most likely first", "middle")
    body += path([place(1, p), place(4096, p)], "mark")
    body += label(left + width, place(1, p)[1] + 16, f"p = {p:g}", "end")
    names = ""
    for each, kind in zip(record, LINES):
        ranks = sorted({round(4096 ** (step / 120)) for step in range(121)} | {each.kept})
        body += path([place(rank, each.mass[rank - 1]) for rank in ranks], kind)
        body += dot(*place(each.kept, each.mass[each.kept - 1]), kind)
        names += f'<li><i class="{kind}"></i><q>{token(each.prompt)}</q> keeps {each.kept}</li>'
    chart = svg(width + left + 12, height + top + 36, body, "chart")
    (example,) = (each for each in record if each.own)
    rows = []
    total = 0.0
    for rank, (text, share) in enumerate(example.likely, 1):
        total = example.mass[rank - 1]
        kind = "" if rank <= example.kept else "off"
        words = f"{percent(share)}, together {percent(total)}"
        rows.append((token(text, kind and "gone"), share, words, kind))
    best, most = example.likely[0]
    drawn = percent(min(most / example.mass[example.kept - 1], 1))
    body = panels(
        panel(
            "Probability of the most likely tokens, added up",
            chart + f'<ul class="key tall">{names}</ul>',
            "Each dot is where a curve first reaches p. The scale of ranks is logarithmic.",
        ),
        panel(
            f"After <q>{token(example.prompt)}</q>: {example.kept} stay",
            bars(rows),
            f"And {example.kept - len(rows):,} more. "
            * (example.kept > len(rows))
            + f"The last that stays crosses {percent(p)}. Only these are drawn then, {token(best)} "
            f"with {drawn}.",
        ),
    )
    counts = ", ".join(f"{each.kept:,}" for each in record)
    caption = (
        f"Top-p keeps the most likely tokens until they have {percent(p)} together. How many "
        f"that is depends on how sure the model is: {counts} after these prompts. Top-k would keep "
        "the same number after each."
    )
    shown = "; ".join(f"{each.prompt!r} keeps {each.kept}" for each in record)
    text = f"Curves of the mass of the most likely tokens over their number: {shown}."
    live = dial_of(example.prompt, temperature=1, k=0, p=p)
    return Drawing(body, caption, text, live)


PICTURES = {  # slug of a lesson -> its picture
    "multinomial": Picture("The cat", record_draws, draw_draws),
    "temperature": Picture("One day, Tom saw a", record_temperatures, draw_temperatures),
    "top-k": Picture("The cat", record_top_k, draw_top_k),
    "top-p": Picture("One day, a girl named", record_top_p, draw_top_p),
}

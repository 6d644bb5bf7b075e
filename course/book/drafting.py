"""Pictures of lessons 44, 45 and 54: drafts in the engine."""

import statistics
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

from book import recordings
from book.draw import Drawing, Picture, bars, key, panel, panels, percent, token
from book.playing import Arrival, Run, play, player, row_of
from engine.drafter import TRIAL, LookupDrafter, PagedDrafter, Trial, Trials
from engine.engine import Engine
from sampling import SamplingParams, noise_of

OTHER = "The dog was very happy. He had a big bag with a"


def record_lookup(prompt: str) -> Run:
    """Two texts, each with drafts from itself."""
    params = SamplingParams(16, ignore_eos=True)
    prompts = [recordings.encode(prompt, 120), recordings.encode(OTHER, 20)]
    engine = Engine(recordings.load(), max_rows=2, num_pages=30, drafter=LookupDrafter())
    return play(engine, [Arrival(0, ids, params) for ids in prompts], "pages", "drafts")


class Verdict(NamedTuple):
    """What a step did to a text."""

    drafts: list[str]
    accepted: int
    own: list[str]  # the target's token after those that were accepted


def verdict_of(run: Run, step: int, number: int) -> Verdict | None:
    """None if a step has done nothing to a text."""
    row = row_of(run.frames[step], number)
    if row is None or not row["work"][3]:
        return None
    _, _, accepted, count = row["work"]
    shown = recordings.text_of
    new = run.requests[number - 1].tokens[row["tokens"] - count : row["tokens"]]
    drafts = [shown(id) for id in run.drafts[step].get(number, [])]
    return Verdict(drafts, accepted, [shown(id) for id in new[accepted:]])


def chips_of(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    chips = ""
    for index, draft in enumerate(verdict.drafts):
        later = "out" if index == verdict.accepted else "gone"
        chips += token(draft, "new" if index < verdict.accepted else later)
    return chips + "".join(token(text, "own") for text in verdict.own)


LEGEND = (
    '<ul class="key"><li><code class="tok new">accepted</code></li>'
    '<li><code class="tok out">refused</code></li>'
    '<li><code class="tok gone">not looked at</code></li>'
    '<li><code class="tok own">the model&rsquo;s own</code></li></ul>'
)


def draw_lookup(record: Run) -> Drawing:
    numbers = range(1, len(record.requests) + 1)
    rows = ""
    steps = [0 for _ in numbers]
    for step in range(len(record.frames)):
        verdicts = [verdict_of(record, step, number) for number in numbers]
        steps = [before + (each is not None) for before, each in zip(steps, verdicts)]
        cells = "".join(f"<td>{chips_of(each)}</td>" for each in verdicts)
        rows += f'<tr><th scope="row">{step + 1}</th>{cells}</tr>'
    heads = "".join(f'<th><b class="owner{number}">text {number}</b></th>' for number in numbers)
    table = f'<table class="verdicts"><thead><tr><th>step</th>{heads}</tr></thead>{rows}</table>'
    last = record.frames[-1]
    counts = " and ".join(map(str, steps))
    length = len(record.requests[0].output)
    caption = (
        "Each text drafts from what it has said before, and a step checks that: "
        f"{length} tokens each, in {counts} steps, the same texts as without drafts."
    )
    note = (
        '<p class="note">A draft is what followed the same tokens before, in the same text. '
        f"{last['accepted']} of {last['drafted']} were accepted, where the model chooses the "
        "same.</p>"
    )
    text = (
        f"A table with a line for each of {len(record.frames)} steps and a column for each of "
        f"{len(steps)} texts: drafts accepted or refused, and the token that the model adds."
    )
    return Drawing(table + LEGEND + note, caption, text, player(record, first=1))


class Race(NamedTuple):
    """Draws of two models with the same noise, in the place of one draft."""

    place: tuple[int, int]  # number of the text, which is its seed too, and position
    after: str  # the end of the text before it
    rows: list[tuple[str, float, float, float]]  # tokens with p, q and noise
    drawn: str  # by the target
    draft: str
    chance: float  # sum of p * q: what two draws that know nothing of each other have in common
    most: float  # sum of min(p, q): what lesson 17 accepts


class Coupled(NamedTuple):
    run: Run
    races: list[Race]  # each draft that was looked at


TEMPERATURE = 0.8


def record_coupled(prompt: str) -> Coupled:
    """Texts with a draft model, and the distributions of both models behind each draft."""
    prompts = [recordings.encode(text, 20) for text in (prompt, "Lily", "The dog")]
    target = recordings.load()
    draft = recordings.load("stories-draft")
    engine = Engine(target, 3, 9, drafter=PagedDrafter(draft, target, 3))
    arrivals = [
        Arrival(0, ids, SamplingParams(24, True, temperature=TEMPERATURE, seed=seed))
        for seed, ids in enumerate(prompts, 1)
    ]
    run = play(engine, arrivals)
    races = []
    for number, request in enumerate(run.requests, 1):
        text = request.tokens
        p, q = (probs_of(text, name) for name in ("stories", "stories-draft"))
        for step, frame in enumerate(run.frames):
            drafts = run.drafts[step].get(number)
            if not drafts:
                continue
            _, _, accepted, count = row_of(frame, number)["work"]
            first = row_of(frame, number)["tokens"] - count
            for place, each in enumerate(drafts[: accepted + 1], first):
                if place < len(text):
                    pair = (p[place - 1], q[place - 1])
                    races.append(race(*pair, text[: place + 1], each, number))
    return Coupled(run, races)


@torch.inference_mode()
def probs_of(text: list[int], name: str) -> torch.Tensor:
    """What a model gives each token after each place of a text, (T, vocab_size), float64."""
    logits = recordings.load(name)(torch.tensor([text]))[0]
    return (logits.double() / TEMPERATURE).softmax(dim=-1)


def race(p: torch.Tensor, q: torch.Tensor, text: list[int], draft: int, seed: int) -> Race:
    """text: up to the token that the target drew there. p, q: (vocab_size,)."""
    drawn = text[-1]
    ids = torch.maximum(p, q).argsort(descending=True)[:4].tolist()
    ids += [id for id in dict.fromkeys((drawn, draft)) if id not in ids]
    place = (seed, len(text) - 1)
    noise = noise_of(torch.tensor([ids]), [place])[0].tolist()
    shown = recordings.text_of
    rows = [(shown(id), p[id].item(), q[id].item(), e) for id, e in zip(ids, noise)]
    after = recordings.encoding().decode(text[-7:-1])
    most = torch.minimum(p, q).sum().item()
    return Race(place, after, rows, shown(drawn), shown(draft), (p @ q).item(), most)


def plain(found: Race) -> tuple[bool, float]:
    """How much a race can show: its winners are likely ones, but not the likeliest of both."""
    chances = {word: (p, q) for word, p, q, _ in found.rows}
    best = [max(pair[which] for pair in chances.values()) for which in (0, 1)]
    won = [chances[found.drawn][0], chances[found.draft][1]]
    return won != best, min(*chances[found.drawn], *chances[found.draft])


def draw_coupled(record: Coupled) -> Drawing:
    races = record.races
    right = [each for each in races if each.draft == each.drawn]
    if races:
        shares = {
            "the same random numbers": (len(right) / len(races), "good"),
            "lesson 17&rsquo;s rule": (sum(each.most for each in races) / len(races), ""),
            "numbers of their own": (sum(each.chance for each in races) / len(races), "other"),
        }
        rows = [(name, share, percent(share), kind) for name, (share, kind) in shares.items()]
        body = panels(
            race_table(max(right or races, key=plain)),
            panel(
                f"How many of {len(races)} drafts are accepted",
                bars(rows, 1),
                f"The first line is counted: {len(right)} of these {len(races)} drafts. The others "
                "are worked out from p and q of the same drafts: how many are accepted on average. "
                "Lesson 17 accepts as many as any rule can on average, but writes another text "
                "than without drafts. Here it is luck if the first line is as long as the second.",
            ),
        )
        caption = (
            "With the same random numbers both models often draw the same token: "
            f"{len(right)} of {len(races)} drafts are right, and the text is the one without "
            "drafts."
        )
    else:
        body = ""
        caption = "No draft was made in this text."
    text = (
        "A table of probabilities, random numbers and their quotients for a draft; of "
        f"{len(races)} drafts that were looked at {len(right)} were right."
    )
    return Drawing(body, caption, text)


def small_percent(p: float) -> str:
    """With a digit that is not 0."""
    return percent(p) if p >= 0.001 else f"{100 * p:.1g}\u00a0%"


def race_table(found: Race) -> str:
    """Five numbers of each token, and who wins."""
    speeds = [(p / e, q / e) for _, p, q, e in found.rows]
    fastest = [max(pair[which] for pair in speeds) for which in (0, 1)]
    rows = ""
    for (text, p, q, e), pair in zip(found.rows, speeds):
        cells = "".join(
            f'<td class="{"win" if speed == best else ""}">{speed:.2f}</td>'
            for speed, best in zip(pair, fastest)
        )
        numbers = f"<td>{small_percent(p)}</td><td>{small_percent(q)}</td><td>{e:.2g}</td>"
        rows += f'<tr><th scope="row">{token(text)}</th>{numbers}{cells}</tr>'
    names = ("large model: p", "small model: q", "random number: e", "p / e", "q / e")
    heads = "".join(f"<th>{name}</th>" for name in ("", *names))
    table = f'<table class="figures coupled"><thead><tr>{heads}</tr></thead>{rows}</table>'
    if found.drawn == found.draft:
        words = f"{token(found.drawn)} wins for both models: the draft is accepted."
    else:
        words = f"{token(found.draft)} is drafted, {token(found.drawn)} drawn: it is refused."
    note = (
        f"{words} Each token of the vocabulary has a random number of its own here; the one with "
        "the largest quotient is drawn."
    )
    return panel(f"After &ldquo;&hellip;{token(found.after)}&rdquo;", table, note)


class Tried(NamedTuple):
    """An engine on a clock that counts."""

    clock: str
    steps: list[tuple[bool, int, float]]  # of each: with drafts? tokens, and time, as Trials has it
    # When it is decided, of steps with drafts and without, as Trials has them:
    took: tuple[float, float]  # medians
    rates: tuple[float, float]  # tokens per unit


STEPS = 3 * TRIAL
KINDS = {True: "good", False: "soft"}  # CSS classes of steps with drafts and without
CLOCKS = {  # what takes the time: title, note
    "weights": (
        "Reading the weights takes the time",
        "A pass over four tokens takes as long as a pass over one.",
    ),
    "products": (
        "The multiplications take the time",
        "A pass over four tokens takes four times as long.",
    ),
}


def record_trials(prompt: str) -> list[Tried]:
    """The same text on two clocks: a pass takes what it reads, or what it computes."""
    ids = recordings.encode(prompt, 20)
    return [tried(ids, clock) for clock in CLOCKS]


def tried(ids: list[int], clock: str) -> Tried:
    """A pass of the target over one token takes 1."""
    target = recordings.load()
    draft = recordings.load("stories-draft")
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (target, draft)]
    trials = Trials()
    trial = trials.trials.setdefault(1, Trial())  # of one row
    drafter = PagedDrafter(draft, target, 1)
    engine = Engine(target, 1, 20, drafter=drafter, trials=trials)
    engine.add(ids, SamplingParams(230, True, temperature=0.8, seed=1))
    steps = []
    with recordings.watch(target) as large, recordings.watch(draft) as small:

        def now() -> float:
            return sum(
                size / sizes[0] * (1 if clock == "weights" else len(each.tokens))
                for size, passes in zip(sizes, (large, small))
                for each in passes
            )

        timer = SimpleNamespace(perf_counter=now)
        with mock.patch("engine.drafter.time", timer):
            while len(steps) < STEPS:
                counted = trial.steps
                drafted = len(small)
                (event,) = engine.step()
                if trial.steps != counted:
                    way = len(small) > drafted
                    steps.append((way, len(event.tokens), trial.seconds[way][-1]))
                    if len(steps) == 2 * TRIAL:
                        took = tuple(statistics.median(trial.seconds[way]) for way in KINDS)
                        rates = tuple(trial.rate(way) for way in KINDS)
    return Tried(clock, steps, took, rates)


def draw_trials(record: list[Tried]) -> Drawing:
    longest = max(sum(took for _, _, took in each.steps) for each in record)
    highest = max(tokens / took for each in record for _, tokens, took in each.steps)
    parts = []
    for each in record:
        blocks = "".join(
            f'<i class="{KINDS[drafted]}" style="width:{100 * took / longest:.3f}%;'
            f'height:{100 * tokens / took / highest:.3f}%"></i>'
            for drafted, tokens, took in each.steps
        )
        spans = ""
        for first, words in enumerate(("with", "without", "")):
            part = each.steps[first * TRIAL : (first + 1) * TRIAL]
            width = 100 * sum(took for _, _, took in part) / longest
            words = words or f"then {'with' if part[0][0] else 'without'}"
            spans += f'<span style="width:{width:.3f}%">{words}</span>'
        rows = ""
        for way, kind in enumerate(("with drafts", "without")):
            measured = each.steps[: 2 * TRIAL]
            counts = [tokens for drafted, tokens, _ in measured if drafted == (way == 0)]
            mean = sum(counts) / len(counts)
            win = "win" if each.rates[way] == max(each.rates) else ""
            rows += (
                f'<tr><th scope="row">{kind}</th><td>{mean:.2f}</td><td>{each.took[way]:.2f}</td>'
                f'<td class="{win}">{each.rates[way]:.2f}</td></tr>'
            )
        names = ("a step", "tokens", "time", "tokens / time")
        heads = "".join(f"<th>{name}</th>" for name in names)
        table = f'<table class="figures"><thead><tr>{heads}</tr></thead>{rows}</table>'
        strip = f'<div class="trial">{blocks}</div><div class="thirds">{spans}</div>'
        pays = "pay" if each.rates[0] > each.rates[1] else "do not pay"
        title, note = CLOCKS[each.clock]
        parts.append(panel(f"{title}: drafts {pays}", strip + table, note))
    legend = key(good="a step with drafts", soft="one without")
    caption = (
        "Drafts pay where a step with them makes more tokens in its time. The engine measures "
        f"{TRIAL} steps of each way, and takes the better one."
    )
    text = "; ".join(
        f"on the clock of {each.clock} {each.rates[0]:.2f} tokens with drafts and "
        f"{each.rates[1]:.2f} without in the time of a pass over one token"
        for each in record
    )
    note = (
        '<p class="note">A block is a step: as wide as its time, as high as its tokens / time. '
        "Times are not measured here but counted, by the rule above: 1 is a pass of the large "
        "model over one token; with drafts those of the small model come on top. In the table "
        f"tokens are means, times medians, of the {TRIAL} steps of each way that are measured.</p>"
    )
    return Drawing(panels(*parts) + legend + note, caption, f"Two rows of steps: {text}.")


PICTURES = {  # slug of a lesson -> its picture
    "batched-lookup": Picture(
        f"{recordings.STORY}<|endoftext|>Once upon a time", record_lookup, draw_lookup
    ),
    "batched-speculation": Picture("One day", record_coupled, draw_coupled),
    "drafts-that-pay": Picture("Lily", record_trials, draw_trials),
}

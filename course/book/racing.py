"""Pictures of lessons 48 and 49: which tokens can win the race, and which need a logarithm."""

import math
from typing import NamedTuple
from unittest import mock

import torch

import sampling
from book import recordings
from book.draw import Drawing, Picture, bars, box, key, panel, panels, percent, svg, token
from sampling import FEW, SamplingParams, draw_among_few, sampling_probs, splitmix, states_of

SEED = 7
BLOCK = 256  # that of draw.c


class Runner(NamedTuple):
    """A token in the race."""

    text: str
    p: float
    noise: float
    inside: bool  # the nucleus

    @property
    def speed(self) -> float:
        return self.p / self.noise


class Few(NamedTuple):
    """Who runs for one token."""

    after: str  # the end of the prompt
    size: int  # of the vocabulary
    few: list[int]  # ids that may run
    nucleus: list[int]  # ids that top-p keeps
    held: float  # the mass of the few
    certain: bool  # that no other can win
    numbers: int  # random numbers that were made
    runners: list[Runner]  # the most likely tokens, and the winner
    winner: int  # which of these


P = 0.9


@torch.inference_mode()
def record_few(prompt: str, shown: int = 6) -> Few:
    ids = recordings.encode(prompt, 200)
    logits = recordings.next_logits(ids)[None]
    params = SamplingParams(temperature=0.8, top_p=P, seed=SEED)
    draws = [(SEED, len(ids))]
    made = []
    exponential = sampling.exponential

    def counted(bits):
        made.append(bits.numel())
        return exponential(bits)

    with mock.patch.object(sampling, "exponential", counted):
        chosen = sampling.sample(logits, params, None, draws).item()
    _, certain = draw_among_few(logits, params, draws)
    probs = (logits[0] / params.temperature).softmax(dim=-1)
    few = probs.topk(min(FEW, len(probs))).indices
    kept = sampling_probs(logits, params)[0] > 0
    best = few[:shown].tolist()
    best += [chosen] * (chosen not in best)
    noise = sampling.noise_of(torch.tensor([best]), draws)[0].tolist()
    runners = [
        Runner(recordings.text_of(id), probs[id].item(), own, kept[id].item())
        for id, own in zip(best, noise)
    ]
    return Few(
        recordings.encoding().decode(ids[-4:]),
        len(probs),
        few.tolist(),
        kept.nonzero()[:, 0].tolist(),
        probs[few].sum().item(),
        certain.item(),
        sum(made),
        runners,
        best.index(chosen),
    )


def draw_few(record: Few) -> Drawing:
    rows = ""
    for number, runner in enumerate(record.runners):
        kind = "new" if number == record.winner else "" if runner.inside else "gone"
        speed = f"{runner.speed:#.3g}"
        cells = f"<td>{percent(runner.p)}</td><td>{runner.noise:#.3g}</td>"
        cells += f"<td><b>{speed}</b></td>" if runner.inside else "<td>outside</td>"
        rows += f'<tr><th scope="row">{token(runner.text, kind)}</th>{cells}</tr>'
    head = "<th></th><th>p</th><th>random number</th><th>p / number</th>"
    table = f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    others = record.size - len(record.few)
    missing = f"{100 * max(1 - record.held, 0):.2g}\u00a0%"
    sure = (
        f"They are among the {len(record.few)} most likely, so only those get random numbers."
        if record.certain
        else f"The {len(record.few)} most likely lack {missing} of the probability, too much to "
        f"be certain, so {record.numbers:,} random numbers are made."
    )
    why = (
        f"The {len(record.few)} most likely hold all but {missing} of the probability, so none of "
        f"the {others:,} others can be in the nucleus. {record.numbers} random numbers are made."
    )
    winner = record.runners[record.winner]
    best = max(record.runners, key=lambda runner: runner.p)
    luck = (
        f" {token(winner.text)} is not the likeliest: its random number is small, by chance."
        if winner.p < best.p
        else ""
    )
    body = panels(
        panel(
            f"The vocabulary, {record.size:,} squares in the order of their ids",
            map_of(record)
            + key(
                second=f"{len(record.nucleus)} that can be drawn: top-p\u2019s nucleus",
                first=f"the {len(record.few)} most likely",
                empty="all others",
            ),
            why if record.certain else "",
        ),
        panel(
            f"The draw after {token(record.after)}",
            f'<div class="scroll">{table}</div>',
            f"The token of the nucleus with the largest p / number is drawn (green).{luck} "
            f"Temperature 0.8, top-p {P}.",
        ),
    )
    caption = (
        f"With top-p {P}, {len(record.nucleus)} of {record.size:,} tokens can be drawn here. {sure}"
    )
    text = (
        f"A map of {record.size} tokens with {len(record.few)} marked, {len(record.nucleus)} of "
        "them the nucleus; and a table of p, random number and speed: "
        + ", ".join(f"{each.text!r} {each.speed:.3g}" for each in record.runners)
        + f". {winner.text!r} wins."
    )
    return Drawing(body, caption, text)


def map_of(record: Few, side: int = 6) -> str:
    """A square for each token, in rows from the lowest id to the highest."""
    wide = math.isqrt(record.size)
    nucleus = set(record.nucleus)
    body = box(0, 0, wide * side, math.ceil(record.size / wide) * side, "empty")
    for id in sorted(nucleus.union(record.few)):
        x, y = id % wide * side, id // wide * side
        kind = "second" if id in nucleus else "first"
        body += box(x, y, side - 1, side - 1, kind)
    return svg(wide * side, math.ceil(record.size / wide) * side, body, "chart")


class Entry(NamedTuple):
    """A token in the race in C."""

    text: str
    weight: float  # e to the (logit - largest) / temperature
    rest: float  # 1 - u
    noise: float  # -ln u
    before: float  # the best speed before it ran
    asked: bool  # whether its logarithm is computed
    winner: bool

    @property
    def bound(self) -> float:
        """No speed is above it."""
        return self.weight / self.rest

    @property
    def speed(self) -> float:
        return self.weight / self.noise


class Logarithms(NamedTuple):
    size: int  # of the vocabulary
    entries: list[Entry]  # those that came nearest, in the order in which they run
    best: float  # the winner's speed
    asked: int  # logarithms
    others: float  # the largest bound of all other tokens


@torch.inference_mode()
def record_logarithms(prompt: str, shown: int = 10) -> Logarithms:
    ids = recordings.encode(prompt, 200)
    logits = recordings.next_logits(ids)
    params = SamplingParams(temperature=0.8, seed=SEED)
    (winner,) = recordings.native().runner.draw(logits[None], [params], [len(ids)])
    weights = ((logits - logits.max()) / params.temperature).exp().double()
    state = states_of([(SEED, len(ids))])
    bits = splitmix(state, torch.arange(len(logits)))
    noise = sampling.exponential(bits)
    rest = -torch.expm1(-noise)  # 1 - u
    asked = ran(weights, rest, noise)
    speeds = weights / noise
    first = weights.argmax().item()

    def best_before(id: int) -> float:
        """At the start of its block; the first token runs before all blocks."""
        earlier = speeds[: id // BLOCK * BLOCK].tolist()
        return max([speeds[first].item(), *earlier])

    order = (weights / rest).topk(shown + len(asked) + 1).indices.tolist()
    near = [id for id in order if id not in asked][: max(shown - len(asked), 1)]
    running = [first, *sorted(id for id in {*asked, *near} if id != first)]
    entries = [
        Entry(
            recordings.text_of(id),
            weights[id].item(),
            rest[id].item(),
            noise[id].item(),
            asked[id] if id in asked else best_before(id),
            id in asked,
            id == winner,
        )
        for id in running
    ]
    others = sorted(set(order) - set(running), key=order.index)
    least = (weights / rest)[others[0]].item() if others else 0.0
    return Logarithms(
        len(logits),
        entries,
        (weights[winner] / noise[winner]).item(),
        len(asked),
        least,
    )


def ran(weights: torch.Tensor, rest: torch.Tensor, noise: torch.Tensor) -> dict[int, float]:
    """The ids whose logarithm `fastest` of draw.c computes -> the best speed before it ran.

    It compares with the best of all earlier blocks of so many tokens.
    """
    first = weights.argmax().item()
    found = {first: 0.0}
    best = (weights[first] / noise[first]).item()
    for start in range(0, len(weights), BLOCK):
        block = slice(start, start + BLOCK)
        able = (weights[block] > rest[block] * best).nonzero()[:, 0] + start
        for id in able.tolist():
            found.setdefault(id, best)
        if len(able):
            best = max(best, (weights[able] / noise[able]).max().item())
    return found


def draw_logarithms(record: Logarithms) -> Drawing:
    longest = 1.25 * record.best
    rows = []
    for entry in record.entries:
        kind = "good" if entry.winner else "second" if entry.asked else "kept"
        words = f"{entry.bound:#.3g}"
        words += f" &rarr; <b>{entry.speed:#.3g}</b>" if entry.asked else ""
        name = token(entry.text, "new" if entry.winner else "")
        before = [entry.before] if entry.before else []
        rows.append((name, min(entry.bound, longest), words, kind, *before))
    (winner,) = (entry for entry in record.entries if entry.winner)
    others = record.size - len(record.entries)
    table = bars(rows, longest).replace('"bars"', '"bars lined"')
    title = "The most that each token could reach (bar), and the best so far (line)"
    body = f'<p class="title">{title}</p>{table}'
    body += key(good="the winner", second="logarithm computed", kept="cannot win")
    body += (
        '<p class="note">A draw divides the likelihood of each token by a random number made with '
        "a logarithm, which is slow, and takes the largest quotient (behind the arrow): likelihood "
        "/ &minus;ln u. u is a random number of the token&rsquo;s own, its likelihood e to the "
        "(logit &minus; largest logit) / temperature. 1 &minus; u is never larger than &minus;ln "
        "u, so no quotient is above the bar, likelihood / (1 &minus; u). The line is the best "
        f"quotient before the token&rsquo;s block of {BLOCK} tokens. The most likely token comes "
        "before all blocks, so it has no line. "
        f"The winner: {winner.weight:.4f} / {winner.rest:.5f} = {winner.bound:.3f} at most, and "
        f"{winner.speed:.3f}. The other {others:,} tokens have at most {record.others:.2g}.</p>"
    )
    caption = (
        "A token whose bar does not reach the line cannot win the draw, and needs no logarithm: "
        f"{record.asked} of {record.size:,} tokens needed one."
    )
    text = (
        f"Bars of what {len(record.entries)} tokens can reach at most: "
        + "; ".join(f"{each.text!r} {each.bound:.3g}" for each in record.entries)
        + f". {winner.text!r} wins with {record.best:.3g}; {record.asked} of {record.size} tokens "
        "needed a logarithm."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "fast-draws": Picture("The cat", record_few, draw_few),
    "native-draws": Picture("The cat", record_logarithms, draw_logarithms),
}

"""Pictures of lessons 30 and 31: a query and a key, turned by their positions; slower turns."""

import dataclasses
import math
from typing import NamedTuple
from unittest import mock

import torch

import llama
from book import recordings
from book.draw import Drawing, Picture, box, key, label, panel, panels, path, signed, svg
from infer import generate
from llama import RopeScaling, rotate, rotations
from sampling import SamplingParams

PAIR = 2  # of the numbers of a head: this one turns by 0.32 radians a position


class Turned(NamedTuple):
    """A query and a key at two positions."""

    places: tuple[int, int]  # of the query and of the key
    arrows: tuple[tuple[float, float], tuple[float, float]]  # one pair of each, after turning
    score: float  # the product of both, of all pairs


class Turns(NamedTuple):
    query: str
    key: str
    shown: list[Turned]
    pairs: int  # of numbers in a head


@torch.inference_mode()
def record_turns(prompt: str) -> Turns:
    """Of the last token's query and the key two before it, in the first head."""
    model = recordings.load("stories-llama")
    ids = recordings.encode(prompt, 100)
    seen = []

    def noted(x, cos, sin):
        seen.append(x)
        return rotate(x, cos, sin)

    with mock.patch.object(llama, "rotate", noted):
        model(torch.tensor([ids]))
    last = len(ids) - 1
    other = max(0, last - 2)
    q = seen[0].flatten(0, -3)[last, :1]  # (1, head_dim), not turned yet
    k = seen[1].flatten(0, -3)[other, :1]
    cos, sin = rotations(model.config, torch.float32, torch.device("cpu")).first(64)
    half = q.shape[-1] // 2
    found = []
    for places in (
        (last, other),
        (last + 3, other + 3),
        (last + 8, other + 8),
        (last + 5, other),
    ):
        turned = [rotate(x, cos[at], sin[at])[0] for x, at in zip((q, k), places)]
        arrows = tuple((x[PAIR].item(), x[PAIR + half].item()) for x in turned)
        found.append(Turned(places, arrows, (turned[0] @ turned[1]).item()))
    return Turns(recordings.text_of(ids[last]), recordings.text_of(ids[other]), found, half)


def draw_turns(record: Turns) -> Drawing:
    radius = 62
    parts = []
    for each in record.shown:
        middle = radius + 14
        body = f'<circle class="dial-face" cx="{middle}" cy="{middle}" r="{radius}"/>'
        for (x, y), kind, length in zip(each.arrows, ("first", "second"), (0.95, 0.7)):
            scale = radius * length / math.hypot(x, y)
            end = (middle + x * scale, middle - y * scale)
            body += (
                f'<path class="line {kind}" d="M{middle},{middle} L{end[0]:.1f},{end[1]:.1f}"/>'
                f'<circle class="{kind}" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="4"/>'
            )
        q, k = each.places
        parts.append(
            f'<div class="turn"><p class="title">positions {q} and {k}</p>'
            f"{svg(2 * middle, 2 * middle, body)}<p>{q - k} apart: score {signed(each.score, 3)}"
            "</p></div>"
        )
    legend = key(first=f"query of {record.query!r}", second=f"key of {record.key!r}")
    first, *_, far = record.shown
    distance = first.places[0] - first.places[1]
    caption = (
        "Each position turns query and key a step further, so their score depends only on how far "
        f"apart they are: {signed(first.score, 3)} at {distance}, {signed(far.score, 3)} at "
        f"{far.places[0] - far.places[1]}."
    )
    shown = ", ".join(f"{each.places}: {each.score:.3f}" for each in record.shown)
    text = (
        "Four circles, each with an arrow for a query and one for a key, one pair of their 32 "
        f"numbers; positions and scores: {shown}."
    )
    body = (
        '<p class="note">A query is what a token looks for, a key what a token is found by; the '
        f'score is how well they fit.</p><div class="turns">{"".join(parts)}</div>{legend}'
    )
    note = (
        f"Both have {record.pairs} pairs of numbers; one is drawn, the others turn faster or "
        "slower. Lengths are not to scale. The score is the sum of the products of all numbers "
        "of both. Llama is a family of models; it also has RMSNorm, shared keys, SwiGLU."
    )
    return Drawing(f'{body}<p class="note">{note}</p>', caption, text)


class Slowed(NamedTuple):
    """Angles that the embedded Llama was trained on, and those of a text twice as long."""

    trained: int  # tokens in its window
    long: int
    pairs: list[tuple[float, float]]  # radians a position of each pair, as it is and slowed
    losses: list[tuple[float, float]]  # nats a token, as it is and slowed, by BLOCK positions
    texts: tuple[int, int]  # how many beginnings of stories, and the tokens of each


BLOCK = 64  # positions
SCALING = RopeScaling(2.0, 1.0, 4.0, 256)  # that of the lesson's Try


@torch.inference_mode()
def record_slowed(prompt: str, rows: int = 16) -> Slowed:
    """The loss is that of so many beginnings of stories, which the model drew itself.

    Each of them is once in each place of a long text, so that places can be compared.
    """
    model = recordings.load("stories-llama")
    config = model.config
    trained = config.block_size
    long = 2 * trained
    each = long // rows
    ids = recordings.encode(prompt, each // 2)
    params = [
        SamplingParams(each - 1 - len(ids), ignore_eos=True, temperature=1.0, seed=row)
        for row in range(rows)
    ]
    columns = zip(*generate(model, [ids] * rows, params))
    stories = [[config.bos_token_id, *ids, *row] for row in columns]
    texts = torch.tensor([sum(stories[at:] + stories[:at], []) for at in range(rows)])
    scaled = dataclasses.replace(config, block_size=long, rope_scaling=SCALING)
    losses = []
    frequencies = []
    try:
        for model.config in (dataclasses.replace(scaled, rope_scaling=None), scaled):
            loss = torch.stack([loss_of(model(text[None])[0], text) for text in texts]).mean(dim=0)
            parts = loss[: BLOCK - 1], *loss[BLOCK - 1 :].split(BLOCK)
            losses.append([part.mean().item() for part in parts])
            turns = rotations(model.config, torch.float32, torch.device("cpu"))
            frequencies.append(turns.frequencies.tolist())
    finally:
        model.config = config
    pairs = list(zip(*frequencies))
    return Slowed(trained, long, pairs, list(zip(*losses)), (rows, each))


def loss_of(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Of each token of a text but the first."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), text[1:], reduction="none")


def dial(angle: float, known: float) -> str:
    """A circle with the angles up to this one; those that are not known stand out."""
    middle, radius = 24, 20

    def point(at: float) -> str:
        return f"{middle + radius * math.cos(at):.2f},{middle - radius * math.sin(at):.2f}"

    def sector(start: float, end: float, kind: str) -> str:
        if end - start >= 2 * math.pi:
            return f'<circle class="{kind}" cx="{middle}" cy="{middle}" r="{radius}"/>'
        large = int(end - start > math.pi)
        return (
            f'<path class="{kind}" d="M{middle},{middle} L{point(start)} '
            f'A{radius},{radius} 0 {large} 0 {point(end)} Z"/>'
        )

    body = f'<circle class="dial-face" cx="{middle}" cy="{middle}" r="{radius}"/>'
    body += sector(0, min(angle, known), "kept")
    if known < min(angle, 2 * math.pi):
        body += sector(known, min(angle, 2 * math.pi), "bad")
    return svg(2 * middle, 2 * middle, body)


def draw_slowed(record: Slowed) -> Drawing:
    parts = []
    unknown = [0, 0]
    for which, title in enumerate(("As it is", f"Slowed up to {SCALING.factor:g} times")):
        dials = ""
        for pair in record.pairs:
            known = record.trained * pair[0] * (1 + 1e-6)  # a factor of 2 may round
            angle = record.long * pair[which]
            unknown[which] += known < min(angle, 2 * math.pi)
            wave = f"{2 * math.pi / pair[which]:,.0f}"
            dials += f"<li>{dial(angle, known)}<span>{wave}</span></li>"
        parts.append(panel(f"{title}, read to {record.long}", f'<ol class="dials">{dials}</ol>'))
    legend = key(
        kept=f"angles of {record.trained} positions, those of its training",
        bad="angles that it never saw",
    )
    body = panels(*parts) + legend
    body += (
        f'<p class="note">A circle for each of {len(record.pairs)} pairs of numbers in a head, '
        "below it how many positions make a whole turn. Fast turns tell neighbours apart, and stay "
        f"as they are. Red: in {unknown[0]} circles as it is, in {unknown[1]} slowed.</p>"
        '<p class="title one">Loss of a token, by position</p>'
    )
    legend = key(bad="as it is", first="slowed", empty="the positions of its training")
    count, each = record.texts
    plain, slow = record.losses[record.trained // BLOCK - 1]
    price = f" Just before position {record.trained} slower turns cost a little: {slow:.2f}, not "
    note = (
        "The loss is &minus;ln of the probability that the token had: 0 would be certain. Means of "
        f"{BLOCK} positions.{f'{price}{plain:.2f}.' * (slow > plain)} Measured on {count} texts of "
        f"the same {count} beginnings of stories, of {each} tokens, which the model wrote itself: "
        f"their order differs, so that each is once in each place. The lesson&rsquo;s table is of "
        "other texts."
    )
    body += f'{curves(record)}{legend}<p class="note">{note}</p>'
    plain, slow = record.losses[-1]
    moved = "rises" if plain > record.losses[record.trained // BLOCK - 1][0] else "falls"
    caption = (
        f"Past the {record.trained} positions of its training a model meets angles that it never "
        f"saw, and its loss {moved} to {plain:.2f}. With slower turns it is {slow:.2f}."
    )
    waves = "; ".join(f"{2 * math.pi / a:.1f} to {2 * math.pi / b:.1f}" for a, b in record.pairs)
    losses = "; ".join(f"{plain:.2f} and {slow:.2f}" for plain, slow in record.losses)
    text = (
        f"Positions in a turn of each pair, as it is and slowed: {waves}. Losses of each {BLOCK} "
        f"positions: {losses}. {caption}"
    )
    return Drawing(body, caption, text)


def curves(record: Slowed, wide: int = 320, high: int = 130) -> str:
    """Both losses, from left to right by position, with the first and the last as numbers."""
    top = max(map(max, record.losses))
    left, right, foot = 34, 34, 24
    width = (wide - left - right) / len(record.losses)
    edge = left + width * record.trained / BLOCK
    body = box(left, 4, edge - left, high, "empty")
    for which, kind in enumerate(("bad", "first")):
        losses = [pair[which] for pair in record.losses]
        points = [
            (left + (at + 0.5) * width, 10 + (top - loss) / top * (high - 10))
            for at, loss in enumerate(losses)
        ]
        body += path(points, kind)
        body += label(wide - right + 2, points[-1][1] + 4, f"{losses[-1]:.2f}")
        if not which:
            body += label(left - 4, points[0][1] + 4, f"{losses[0]:.2f}", "end")
    for place in (0, record.trained, record.long):
        at = left + width * place / BLOCK
        body += label(at, high + 20, str(place), "middle")
    return svg(wide, high + foot, body, "chart")


PICTURES = {  # slug of a lesson -> its picture
    "llama-3": Picture("Once upon a time", record_slowed, draw_slowed),
    "llama": Picture("The cat sat on", record_turns, draw_turns),
}

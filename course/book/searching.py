"""Pictures of lessons 20 and 22: a tree of beams, and a race that needs no sorting."""

import math
from typing import NamedTuple
from unittest import mock

import torch

import infer
import sampling
from book import recordings
from book.draw import (
    Drawing,
    Picture,
    escape,
    key,
    label,
    panel,
    panels,
    percent,
    signed,
    svg,
    token,
)
from infer import beam_search
from sampling import apply_temperature, keyed_noise, top_p_filter


class Node(NamedTuple):
    """A text that was a candidate."""

    text: tuple[str, ...]  # its tokens
    parent: int | None  # place among the nodes of the step before
    score: float  # sum of log-probabilities
    kept: bool


class Tree(NamedTuple):
    prompt: str
    steps: list[list[Node]]
    greedy: tuple[str, ...]
    scores: tuple[float, float]  # of the greedy text and of the best beam
    best: tuple[str, ...]


@torch.inference_mode()
def record_tree(prompt: str, beams: int = 2, count: int = 5) -> Tree:
    """The candidates of each step of beam search, those kept and the best ones dropped."""
    model = recordings.load()
    ids = recordings.encode(prompt, 100)
    seen = []
    inner = infer.next_logits

    def noted(model, windows, cache, keep=1):
        logits = inner(model, windows, cache, keep)
        seen.append(([window[len(ids) :] for window in windows], logits[:, 0]))
        return logits

    with mock.patch.object(infer, "next_logits", noted):
        found = beam_search(model, ids, beams, count, ignore_eos=True)
    decode = recordings.text_of
    sums = {(): 0.0}
    steps = []
    texts = []  # of the nodes of the step before
    for texts_in, logits in seen:
        logprobs = logits.double().log_softmax(dim=-1)
        candidates = []
        for tokens, row in zip(texts_in, logprobs):
            best = row.topk(beams)
            for value, id in zip(best.values.tolist(), best.indices.tolist()):
                candidates.append((sums[tuple(tokens)] + value, (*tokens, id)))
        candidates.sort(reverse=True)
        nodes = []
        for rank, (score, text) in enumerate(candidates):
            sums[text] = score
            parent = texts.index(text[:-1]) if len(text) > 1 else None
            nodes.append(Node(tuple(map(decode, text)), parent, score, rank < beams))
        texts = [text for _, text in candidates]
        steps.append(nodes)
    greedy = recordings.write(ids, max_new_tokens=count, ignore_eos=True)
    (alone,) = beam_search(model, ids, 1, count, ignore_eos=True)
    return Tree(
        prompt,
        steps,
        tuple(decode(id) for id in greedy),
        (alone.score, found[0].score),
        tuple(decode(id) for id in found[0].tokens),
    )


def draw_tree(record: Tree) -> Drawing:
    wide, tall = 82, 62
    lines = ""
    words = ""
    for step, nodes in enumerate(record.steps):
        for place, node in enumerate(nodes):
            x = place * wide + wide / 2
            y = step * tall + 14
            if node.parent is not None:
                above = node.parent * wide + wide / 2
                style = "grid"
                if node.text == record.best[: step + 1]:
                    style = "first"
                elif node.text == record.greedy[: step + 1]:
                    style = "second"
                lines += (
                    f'<path class="line {style}" d="M{above:g},{y - 40} '
                    f'C{above:g},{y - 24} {x:g},{y - 28} {x:g},{y - 12}"/>'
                )
            kind = "middle kept-node" if node.kept else "middle gone-node"
            words += label(x, y, node.text[-1].strip() or repr(node.text[-1]), kind)
            words += label(x, y + 15, signed(node.score), "middle soft")
    width = max(map(len, record.steps)) * wide
    chart = svg(width, len(record.steps) * tall - 20, lines + words)
    note = (
        "From top to bottom the steps; below each token the sum of log-probabilities so far "
        "(nearer to 0: more probable). Bold: the two that are kept. Grey: dropped."
    )
    legend = key(first="the text that two beams find", second="greedy decoding, where it differs")
    greedy, best = record.scores
    texts = (
        f'<p class="fork"><b>greedy</b> {signed(greedy)} {escape("".join(record.greedy))}</p>'
        f'<p class="fork"><b>two beams</b> {signed(best)} {escape("".join(record.best))}</p>'
    )
    body = panels(panel("Two beams", chart + legend, note), panel("What each finds", texts))
    found = (
        "Here both find the same text."
        if record.best == record.greedy
        else f"Here it finds one that is {math.exp(best - greedy):.1f} times as probable."
    )
    caption = (
        "Beam search goes on with the two most probable texts of each step, greedy decoding with "
        f"one. {found}"
    )
    text = (
        f"A tree of {len(record.steps)} steps after {record.prompt!r}. The best text is "
        f"{''.join(record.best)!r} with {best:.2f}; greedy's, {''.join(record.greedy)!r}, has "
        f"{greedy:.2f}."
    )
    return Drawing(body, caption, text)


class Runner(NamedTuple):
    """A token that won a round of the race."""

    token: str
    p: float
    mass: float  # of all tokens before it in the order of the filter
    inside: bool  # it wins the race; else it is out, with all behind it


class Race(NamedTuple):
    seed: int
    p: float
    kept: int  # tokens in the nucleus
    vocab: int
    line: list[tuple[str, float]]  # the most likely tokens
    rounds: list[Runner]


@torch.inference_mode()
def record_race(prompt: str, p: float = 0.5) -> Race:
    """The first seed whose race has three rounds, at temperature 1."""
    ids = recordings.encode(prompt, 200)
    logits = apply_temperature(recordings.next_logits(ids), 1.0)
    probs = logits.softmax(dim=-1)
    kept = top_p_filter(logits, p).isfinite().sum().item()
    order = logits.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order))
    mass = probs[order].double().cumsum(dim=0)
    for seed in range(200):
        noise = keyed_noise(logits[None], [(seed, len(ids))])[0]
        winners = rounds_of(logits, probs, probs / noise, p)
        if len(winners) == 3:
            break
    rounds = []
    for id in winners:
        rank = ranks[id].item()
        before = mass[rank - 1].item() if rank else 0.0
        rounds.append(Runner(recordings.text_of(id), probs[id].item(), before, before < p))
    return Race(seed, p, kept, len(probs), recordings.likely(probs, 12), rounds)


def rounds_of(
    logits: torch.Tensor, probs: torch.Tensor, speeds: torch.Tensor, p: float
) -> list[int]:
    """The winner of each round of `fastest_inside`."""
    winners = []

    class Noted(torch.Tensor):
        """Speeds that note who is fastest."""

        def argmax(self, *args, **options):
            found = torch.Tensor.argmax(self.as_subclass(torch.Tensor), *args, **options)
            winners.append(found.item())
            return found

        def masked_fill(self, *args):
            return super().masked_fill(*args).as_subclass(Noted)

    chosen = sampling.fastest_inside(logits, probs, speeds.as_subclass(Noted), p)
    assert winners[-1] == chosen
    return winners


def draw_race(record: Race) -> Drawing:
    lines = ""
    for number, runner in enumerate(record.rounds):
        limit = min(1.0, record.rounds[number - 1].mass) if number else 1.0
        marks = ""
        start = 0.0
        for index, (_, p) in enumerate(record.line):
            share = min(p, max(limit - start, 0))
            marks += f'<i class="bar part{index % 2}" style="width:{100 * share:.2f}%"></i>'
            start += p
        rest = max(limit - start, 0)
        marks += f'<i class="bar other" style="width:{100 * rest:.2f}%"></i>'
        kind = "good" if runner.inside else "bad"
        pin = f'<b class="pin {kind}" style="left:{100 * runner.mass:.2f}%"></b>'
        limit_mark = f'<b class="limit" style="left:{100 * record.p:.2f}%"></b>'
        verdict = "inside: it is drawn" if runner.inside else "outside: struck, with all behind it"
        lines += (
            f'<p class="title">Round {number + 1}: {token(runner.token)} is the fastest, with '
            f"{percent(runner.mass)} before it; {verdict}</p>"
            f'<div class="race"><span class="stack">{marks}</span>{limit_mark}{pin}</div>'
        )
    names = " ".join(f"{token(text)} {percent(p)}" for text, p in record.line[:5])
    last = record.rounds[-1]
    body = (
        f'<div class="panel whole">{lines}<p class="note">A line of length 1: the tokens, each as '
        f"long as its probability, {names}, &hellip;, grey all the others. They are sorted for the "
        "eye only: to know what is before a token, the program adds up all that are more probable. "
        "What is left of the line is still in the race. The mark at the same place of each line: "
        f"top-p, {record.p:g}. Coloured mark: where the fastest token begins. The random numbers "
        "are exponential: with them a token is the fastest as often as its probability says.</p>"
        "</div>"
    )
    rounds = f"{len(record.rounds)} round{'s' * (len(record.rounds) > 1)}"
    caption = (
        f"Each of {record.vocab:,} tokens gets a speed: its probability divided by a random "
        "number. Only the fastest is asked whether it is inside top-p: no sorting. "
        f"After {rounds} {token(last.token)} is."
    )
    shown = "; ".join(f"{each.token!r}, {percent(each.mass)} before it" for each in record.rounds)
    text = f"The rounds of the race with seed {record.seed}: {shown}. The last one is drawn."
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "beam-search": Picture("The cat sat on", record_tree, draw_tree),
    "top-p-without-sorting": Picture("She was very", record_race, draw_race),
}

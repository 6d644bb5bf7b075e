"""Pictures of lessons 21 and 47: what a length does to a score, and how likely each token was."""

import builtins
import math
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch

import infer
from book import recordings
from book.draw import (
    Drawing,
    Picture,
    dot,
    escape,
    key,
    label,
    panel,
    panels,
    path,
    percent,
    signed,
    svg,
    token,
)
from engine.engine import Engine
from infer import beam_search
from sampling import SamplingParams
from tokenizer import EOT


class Hope(NamedTuple):
    """What a search knows after a step, when it asks whether to stop."""

    total: float  # the best sum of a text that goes on
    worst: float | None  # the score of the worst finished text, once there are enough of them


class Lengths(NamedTuple):
    """The texts that beam search finds with penalty 0 and with 1."""

    texts: list[tuple[str, int, float]]  # text, number of tokens, sum of log-probabilities
    won: tuple[int, int]  # which of them is the best one with penalty 0, and with 1
    most: int  # tokens that a text may have
    hopes: tuple[list[Hope], list[Hope]]  # after each step, with penalty 0 and with 1


def record_lengths(prompt: str, beams: int = 4, most: int = 24) -> Lengths:
    model = recordings.load()
    ids = recordings.encode(prompt, 60)
    hopes = []
    found = {}
    winners = []
    for penalty in (0.0, 1.0):
        with watched_search(len(ids), model.config.eos_token_ids, beams) as seen:
            best = beam_search(model, ids, beams, most, length_penalty=penalty)
        hopes.append(seen)
        winners.append(tuple(best[0].tokens))
        found |= {tuple(beam.tokens): beam.score * len(beam.tokens) ** penalty for beam in best}
    order = sorted(found, key=lambda tokens: (len(tokens), -found[tokens]))
    texts = [(recordings.encoding().decode(list(each)), len(each), found[each]) for each in order]
    return Lengths(texts, tuple(map(order.index, winners)), most, tuple(hopes))


@contextmanager
def watched_search(prompt_length: int, eos: tuple[int, ...], beams: int):
    """A list that grows by a `Hope` for each step of a beam search."""
    hopes = []
    sums = {(): 0.0}  # of running texts
    before = {}  # the log-probabilities after each running text
    best = []

    def noted(model, windows, cache, keep=1):
        logits = inner(model, windows, cache, keep)
        logprobs = logits[:, 0].double().log_softmax(dim=-1)
        texts = [tuple(window[prompt_length:]) for window in windows]
        for text in texts:
            if text:
                sums[text] = sums[text[:-1]] + before[text[:-1]][text[-1]].item()
        before.update(zip(texts, logprobs))
        totals = logprobs + torch.tensor([sums[text] for text in texts])[:, None]
        totals[:, list(eos)] = -torch.inf
        best.append(totals.max().item())
        return logits

    def noted_sorted(found, **options):
        ordered = builtins.sorted(found, **options)
        worst = ordered[beams - 1].score if len(ordered) >= beams else None
        hopes.append(Hope(best[-1], worst))
        return ordered

    inner = infer.next_logits
    with (
        mock.patch.object(infer, "next_logits", noted),
        mock.patch.object(infer, "sorted", noted_sorted, create=True),
    ):
        yield hopes


def overtaken(record: Lengths) -> tuple[float, int] | None:
    """The least penalty at which a longer text is as good as the winner at 0, and which text."""
    _, n, total = record.texts[record.won[0]]
    meetings = [
        (math.log(other / total) / math.log(length / n), at)
        for at, (_, length, other) in enumerate(record.texts)
        if length > n
    ]
    return min(meetings, default=None)


def lines_of_scores(record: Lengths) -> str:
    """Scores over penalties. On a logarithmic scale sum / n ** penalty is a straight line."""
    width, height, left, top = 250, 210, 40, 12
    ends = [[total for *_, total in record.texts], [s / n for _, n, s in record.texts]]
    worst = min(map(min, ends)) * 1.1
    best = max(map(max, ends)) / 1.1

    def place(penalty: float, score: float) -> tuple[float, float]:
        share = math.log(score / best) / math.log(worst / best)
        return left + width * penalty, top + height * share

    body = ""
    for score in (-0.5, -1, -2, -5, -10, -20):
        if worst < score < best:
            start = place(0, score)
            body += path([start, place(1, score)], "grid")
            body += label(left - 5, start[1] + 4, signed(score, 1 if score > -1 else 0), "end")
    for penalty in (0, 0.5, 1):
        body += label(place(penalty, worst)[0], top + height + 16, f"{penalty:g}", "middle")
    body += label(left + width / 2, top + height + 32, "length penalty", "middle")
    short, long = record.won
    for at, (_, n, total) in enumerate(record.texts):
        if at not in record.won:
            body += path([place(0, total), place(1, total / n)], "mark")
    for at, kind in ((long, "second"), (short, "first")):
        _, n, total = record.texts[at]
        body += path([place(0, total), place(1, total / n)], kind)
    meeting = overtaken(record)
    if meeting and 0 <= meeting[0] <= 1:
        _, n, total = record.texts[short]
        x, y = place(meeting[0], total / n ** meeting[0])
        body += dot(x, y, "good")
        body += label(x - 4, y - 10, f"{meeting[0]:.2f}", "end")
    return svg(width + left + 30, height + top + 36, body, "chart")


def draw_lengths(record: Lengths) -> Drawing:
    def name(text: str) -> str:
        return token(text.replace(EOT, "\u25a0"))

    head = "".join(f"<th>{words}</th>" for words in ("text", "n", "sum", "sum / n"))
    rows = ""
    for at, (text, n, total) in enumerate(record.texts):
        numbers = [signed(total), signed(total / n)]
        for which in (0, 1):
            if record.won[which] == at:
                kind = ("first", "second")[which]
                numbers[which] = f'<b class="won {kind}">{numbers[which]}</b>'
        rows += f"<tr><td>{name(text)}</td><td>{n}</td><td>{numbers[0]}</td><td>{numbers[1]}</td>"
        rows += "</tr>"
    table = (
        f'<div class="scroll"><table class="figures scores"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    sums, means = record.hopes
    steps = len(sums)
    (total, worst), (mean_total, mean_worst) = sums[-1], means[steps - 1]
    hope = mean_total / record.most
    known = "fewer than four texts are finished"
    of_sums = known if worst is None else f"{signed(worst)}, the worst of four finished texts"
    of_means = known if mean_worst is None else signed(mean_worst)
    stops = "it stops" if steps < record.most else "it has come to its last step"
    goes = f"goes on, to step {len(means)}" if len(means) > steps else "ends here too"
    bounds = (
        f'<p class="fork"><b>penalty 0</b> the best running sum is {signed(total)}, and can only '
        f"fall; against it: {of_sums}: {stops}.</p>"
        f'<p class="fork"><b>penalty 1</b> its sum is {signed(mean_total)}, but with '
        f"{record.most} tokens it might be {signed(mean_total)} / {record.most} = {signed(hope)}; "
        f"against it: {of_means}: it {goes}.</p>"
    )
    legend = key(first="best with penalty 0", second="best with penalty 1")
    body = panels(
        panel(
            "score = sum / n ** penalty: who is on top?",
            lines_of_scores(record) + legend,
            "A line a text, on a logarithmic scale. The longer the text, the faster it rises.",
        ),
        panel(
            "The same texts in numbers",
            table,
            "\u25a0: the end of the text, a token too. n: tokens; sum: of their log-probabilities. "
            "Underlined: the best of a column.",
        ),
        f'<div class="panel whole"><p class="title">May the search stop after step {steps}?</p>'
        f"{bounds}</div>",
    )
    (short, few, total), (long, many, other) = (record.texts[at] for at in record.won)
    meeting = overtaken(record)
    turn = f", and above a penalty of {meeting[0]:.2f} a longer one is better" if meeting else ""
    caption = (
        f"Each token makes a sum smaller, so by its sum {name(short)} wins, a text of {few} "
        f"token{'s' * (few != 1)}. By its mean one of {many} does: {signed(other / many)} a token "
        f"against {signed(total / few)}{turn}."
        if record.won[0] != record.won[1]
        else f"Here one text, {name(short)}, wins by its sum and by its mean: {signed(total)} and "
        f"{signed(total / few)}."
    )
    shown = "; ".join(f"{text!r}: {n} tokens, {total:.2f}" for text, n, total in record.texts)
    text = (
        f"Lines of the scores of {len(record.texts)} texts over the length penalty, and a table of "
        f"their sums: {shown}."
    )
    return Drawing(body, caption, text)


class Chances(NamedTuple):
    """A text with what might have been there instead of each token."""

    prompt: str
    tokens: list[tuple[str, float, list[tuple[str, float]]]]  # token, log-probability, most likely


def record_chances(prompt: str, count: int = 12) -> Chances:
    ids = recordings.encode(prompt, 100)
    engine = Engine(recordings.load(), max_rows=1)
    request = engine.add(ids, SamplingParams(count, temperature=1.0, seed=5, logprobs=5))
    while engine.busy:
        engine.step()
    shown = recordings.text_of
    return Chances(
        prompt,
        [
            (shown(id), own, [(shown(other), each) for other, each in top])
            for id, (own, top) in zip(request.output, request.logprobs)
        ],
    )


def draw_chances(record: Chances) -> Drawing:
    columns = ""
    for text, own, top in record.tokens:
        cells = ""
        rows = top if text in [other for other, _ in top] else [*top[:-1], (text, own)]
        for other, logprob in rows:
            p = math.exp(logprob)
            kind = "taken" if other == text else ""
            cells += (
                f'<li class="{kind}" style="--w:{p:.4f}"><code>{escape(visible(other))}</code>'
                f"<span>{percent(p)}</span></li>"
            )
        columns += f"<li><ol>{cells}</ol><b>{signed(own)}</b></li>"
    values = [own for _, own, _ in record.tokens]
    mean = sum(values) / len(values)
    surprise = min(record.tokens, key=lambda each: each[1])
    terms = " ".join(signed(own) for own in values[:3])
    written = "".join(text for text, *_ in record.tokens)
    body = (
        f'<p class="title">{token(record.prompt)} goes on, at temperature 1:</p>'
        f'<ol class="lattice">{columns}</ol>'
        '<ul class="key"><li><i class="taken"></i>the token that was drawn</li>'
        "<li>the stronger the colour, the more probable</li>"
        "<li>below: its log-probability</li></ul>"
        f'<p class="note">Sum of all {len(values)}: {terms} \u2026 = {signed(sum(values))}; mean '
        f"{signed(mean)}; perplexity exp({signed(-mean)}) = {math.exp(-mean):.2f}: as unsure as "
        "among so many equally likely tokens each time.</p>"
    )
    unsure = surprise[2][0]
    instead = (
        f", where {token(unsure[0])} had {percent(math.exp(unsure[1]))}"
        if unsure[0] != surprise[0]
        else ""
    )
    caption = (
        "Each column is a place in the text: what the model thought of writing there, and, framed, "
        f"what it drew. The least likely is {token(surprise[0])} with "
        f"{percent(math.exp(surprise[1]))}{instead}."
    )
    shown = "; ".join(f"{text!r} {own:.3f}" for text, own, _ in record.tokens)
    text = f"After {record.prompt!r} the model writes {written!r}, with log-probabilities {shown}."
    return Drawing(body, caption, text)


def visible(text: str) -> str:
    return text.replace(" ", "\u00b7").replace("\n", "\\n")


PICTURES = {  # slug of a lesson -> its picture
    "length-penalty": Picture("They went home and slept.", record_lengths, draw_lengths),
    "logprobs": Picture("Once upon a time", record_chances, draw_chances),
}

"""Picture of lesson 21: what a length does to a score."""

from typing import NamedTuple

from book import recordings
from book.draw import (
    Drawing,
    Picture,
    segment,
    signed,
    token,
)
from infer import beam_search
from loading.tokenizer import EOT


class Lengths(NamedTuple):
    """The texts that beam search finds with penalty 0 and with 1."""

    texts: list[tuple[str, int, float]]  # text, number of tokens, sum of log-probabilities
    won: tuple[int, int]  # which of them is the best one with penalty 0, and with 1
    most: int  # tokens of a text


BEAMS = 4


def record_lengths(prompt: str, beams: int = BEAMS, most: int = 24) -> Lengths:
    model = recordings.load()
    ids = recordings.encode(prompt, 60)
    found = {}
    winners = []
    for penalty in (0.0, 1.0):
        best = beam_search(model, ids, beams, most, length_penalty=penalty)
        winners.append(tuple(best[0].tokens))
        found |= {tuple(beam.tokens): beam.score * len(beam.tokens) ** penalty for beam in best}
    order = sorted(found, key=lambda tokens: (len(tokens), -found[tokens]))
    texts = [(recordings.encoding().decode(list(each)), len(each), found[each]) for each in order]
    return Lengths(texts, tuple(map(order.index, winners)), most)


def draw_lengths(record: Lengths) -> Drawing:
    def name(text: str) -> str:
        return token(text.replace(EOT, "\u25a0"))

    scores = [(total, total / n) for _, n, total in record.texts]
    worst = [min(column) for column in zip(*scores)]
    rows = ""
    for at, ((text, n, _), both) in enumerate(zip(record.texts, scores)):
        rows += f"<tr><td>{name(text)}</td><td>{n}</td>"
        for score, longest, winner in zip(both, worst, record.won):
            words = f"<b>{signed(score)} wins</b>" if winner == at else signed(score)
            rows += (
                f"<td>{segment(score / longest, 'good' if winner == at else 'kept')}{words}</td>"
            )
        rows += "</tr>"
    head = "<th>text</th><th>n</th><th>sum</th><th>sum / n</th>"
    body = (
        f'<table class="scores"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        '<p class="note">\u25a0: the end of the text, a token too. n: tokens; sum: of their '
        "log-probabilities, all below 0, so the shortest bar of a column is the best. These are "
        f"the texts that {BEAMS} beams find, of at most {record.most} tokens. sum is length "
        "penalty 0, sum / n is 1. With 1 a text that goes on may still come up to its sum of now / "
        f"{record.most}, so the search ends only when that is too little.</p>"
    )
    (short, few, total), (long, many, other) = (record.texts[at] for at in record.won)
    few_tokens = f"{few} token{'s' * (few != 1)}"
    caption = (
        f"Each token lowers the sum of log-probabilities, so by its sum a text of {few_tokens} "
        f"wins. Divided by its length one of {many} does: {signed(other / many)} a token against "
        f"{signed(total / few)}."
        if record.won[0] != record.won[1]
        else f"Here one text, of {few_tokens}, wins by its sum and by its mean: {signed(total)} "
        f"and {signed(total / few)}."
    )
    shown = "; ".join(f"{text!r}: {n} tokens, {total:.2f}" for text, n, total in record.texts)
    text = (
        f"Bars of the sums of {len(record.texts)} texts, and of these by length: {shown}. Best: "
        f"{short!r} by its sum, {long!r} by sum / n."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "length-penalty": Picture("They went home and slept.", record_lengths, draw_lengths),
}

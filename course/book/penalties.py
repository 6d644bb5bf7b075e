"""Pictures of lessons 09 to 11: what penalties do to logits."""

from typing import NamedTuple

import torch

from book import recordings
from book.draw import (
    Drawing,
    Picture,
    box,
    dot,
    escape,
    panel,
    panels,
    rows_of,
    signed,
    svg,
    token,
)
from sampling import SamplingParams, penalize


class Moved(NamedTuple):
    """The step at which a penalty first changes the choice."""

    prompt: str
    before: str  # the text that was written until then
    rows: list[tuple[str, float, float, int, bool]]  # token, logit before and after, count, seen
    chosen: tuple[str, str]  # without the penalty and with it
    texts: tuple[str, str]  # what follows without it and with it


def record_moved(prompt: str, common: dict, own: dict, count: int = 60) -> Moved:
    """Greedy decoding with the parameters `common`, and with `own` as well."""
    ids = recordings.encode(prompt, 100)
    texts = [
        recordings.write(ids, max_new_tokens=count, **params) for params in (common, common | own)
    ]
    pairs = list(zip(*texts))
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    text = ids + texts[0][:at]
    logits = recordings.next_logits(text)[None]
    with torch.inference_mode():
        rows = [
            penalize(logits, SamplingParams(**params), [text], [len(ids)])[0]
            for params in (common, common | own)
        ]
    best = torch.cat([row.topk(5).indices for row in rows])
    shown = sorted(dict.fromkeys(best.tolist()), key=lambda id: -rows[0][id].item())
    output = text[len(ids) :]
    decode = recordings.encoding().decode
    return Moved(
        prompt,
        decode(output),
        [
            (decode([id]), rows[0][id].item(), rows[1][id].item(), output.count(id), id in text)
            for id in shown
        ],
        tuple(decode([written[at]]) for written in texts),
        tuple(decode(written[at : at + 14]) for written in texts),
    )


def draw_moved(record: Moved, rule: str, seen: str) -> Drawing:
    """rule: what was done to which tokens, as HTML. seen: what makes a token one of them."""
    values = [value for row in record.rows for value in row[1:3]]
    low, high = min(values), max(values)
    width = 150

    def place(value: float) -> float:
        return 8 + (width - 16) * (value - low) / (high - low or 1)

    rows = []
    for text, before, after, count, _ in record.rows:
        in_prompt = not count and before != after
        kind = "new" if text == record.chosen[1] else "out" if text == record.chosen[0] else ""
        x, y = place(before), place(after)
        body = box(0, 8, width, 1, "empty")
        if before != after:
            body += box(min(x, y), 7, abs(x - y), 3, "bad" if after < before else "good")
        body += dot(x, 8.5, "hollow") + dot(y, 8.5, "first")
        times = f", {count} times" if count > 1 else ", once" if count else ""
        times += ", in the prompt" * in_prompt
        words = (
            f"{signed(before, 1)} &rarr; {signed(after, 1)}"
            if before != after
            else signed(before, 1)
        )
        rows.append((token(text, kind), svg(width, 17, body), words + times))
    without, with_it = (escape(text) for text in record.texts)
    before = record.prompt + record.before
    start = before if len(before) <= 60 else f"\u2026{before[-60:].partition(' ')[2]}"
    body = panels(
        panel(
            "The best tokens at the first step that the penalty changes",
            rows_of(rows),
            f"Hollow: the logit before. Full: after the penalty. {seen}",
        ),
        panel(
            "What is written",
            f'<p class="fork"><q>{escape(start)}</q></p>'
            f'<p class="fork"><b>without</b> {token(record.chosen[0], "out")}'
            f"{without.removeprefix(escape(record.chosen[0]))} &hellip;</p>"
            f'<p class="fork"><b>with it</b> {token(record.chosen[1], "new")}'
            f"{with_it.removeprefix(escape(record.chosen[1]))} &hellip;</p>",
        ),
    )
    moved = sum(before != after for _, before, after, _, _ in record.rows)
    turn = f"Here {token(record.chosen[0])} falls behind {token(record.chosen[1])}."
    if record.chosen[0] == record.chosen[1]:
        turn = "In this text no choice changes."
    caption = f"{rule} {turn}"
    text = (
        f"Logits of {len(record.rows)} tokens before and after the penalty, which moves {moved} of "
        f"them; {record.chosen[1]!r} is chosen in place of {record.chosen[0]!r}."
    )
    return Drawing(body, caption, text)


def record_presence(prompt: str) -> Moved:
    return record_moved(prompt, {}, {"presence_penalty": 1.0})


def draw_presence(record: Moved) -> Drawing:
    rule = (
        "Each token of the output loses the penalty, here 1, from its score, the logit, however "
        "often it is there."
    )
    return draw_moved(record, rule, "Those that are not in the output do not move.")


def record_frequency(prompt: str) -> Moved:
    return record_moved(prompt, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5})


def draw_frequency(record: Moved) -> Drawing:
    rule = (
        "Each token of the output loses the penalty, here 0.5, from its score, the logit, for "
        "every time that it is there."
    )
    return draw_moved(record, rule, "A presence penalty of 1 is on in both texts.")


def record_repetition(prompt: str) -> Moved:
    return record_moved(prompt, {}, {"repetition_penalty": 1.3})


def draw_repetition(record: Moved) -> Drawing:
    rule = (
        "Each token of prompt and output has its score, the logit, divided by the penalty, here "
        "1.3 (a negative one is multiplied, so that it falls too)."
    )
    return draw_moved(record, rule, "A large logit loses more than a small one.")


PICTURES = {  # slug of a lesson -> its picture
    "presence-penalty": Picture("The big bear", record_presence, draw_presence),
    "frequency-penalty": Picture("The big bear", record_frequency, draw_frequency),
    "repetition-penalty": Picture("The big bear", record_repetition, draw_repetition),
}

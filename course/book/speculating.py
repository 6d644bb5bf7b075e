"""Pictures of lessons 17 and 23: drafts, and what the target makes of them."""

from typing import NamedTuple
from unittest import mock

import torch

import infer_speculative
from book import recordings
from book.draw import Drawing, Picture, escape, key, panel, panels, percent, stacks, token
from infer_speculative import acceptance, generate_speculative, propose_lookup
from sampling import SamplingParams


class Verdict(NamedTuple):
    """What one pass of the target said."""

    drafts: list[str]
    accepted: int
    tokens: list[str]  # accepted drafts, then the target's own


class Refusal(NamedTuple):
    """The distributions at a draft that was refused."""

    draft: str
    chance: float  # to be accepted
    drawn: str  # in its place
    after: str  # the text before it, or the end of it
    rows: list[tuple[str, float, float]]  # tokens with p and q, those with most of either first
    rest: tuple[float, float, float]  # of all other tokens: min(p, q), q - min, p - min


class Speculation(NamedTuple):
    verdicts: list[Verdict]
    refusal: Refusal | None  # the one where p and q differ most, if there was any


TEMPERATURE = 0.8


def record_speculation(prompt: str, count: int = 40) -> Speculation:
    ids = recordings.encode(prompt, 100)
    models = [recordings.load(), recordings.load("stories-draft")]
    params = SamplingParams(count, temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    verify = infer_speculative.verify
    seen = []

    def noted(p, q, drafts, generator=None):
        result = verify(p, q, drafts, generator)
        seen.append((p.clone(), q.clone(), drafts, result))
        return result

    with mock.patch.object(infer_speculative, "verify", noted):
        passes = list(generate_speculative(*models, ids, params, generator=generator))
    shown = recordings.text_of
    verdicts = [
        Verdict([shown(id) for id in each.drafts], each.accepted, [shown(id) for id in each.tokens])
        for each in passes
    ]
    text = list(ids)
    refused = []  # what both models have in common there, and all about it
    for (p, q, drafts, (accepted, chosen)), each in zip(seen, passes):
        if accepted < len(drafts):
            before = recordings.encoding().decode((text + drafts[:accepted])[-6:])
            pair = (p[accepted], q[accepted])
            common = torch.minimum(*pair).sum().item()
            refused.append((common, (*pair, drafts[accepted], chosen, before)))
        text += each.tokens
    most_apart = min(refused, key=lambda each: each[0]) if refused else None
    return Speculation(verdicts, most_apart and refusal(*most_apart[1]))


def refusal(p: torch.Tensor, q: torch.Tensor, draft: int, drawn: int, after: str) -> Refusal:
    """p, q: (vocab_size,), in the place of the draft."""
    order = torch.maximum(p, q).argsort(descending=True).tolist()
    ids = order[:7]
    ids += [id for id in dict.fromkeys((draft, drawn)) if id not in ids]
    rows = [(recordings.text_of(id), p[id].item(), q[id].item()) for id in ids]
    others = torch.ones_like(p, dtype=torch.bool)
    others[ids] = False
    both = torch.minimum(p, q)
    rest = tuple(part[others].sum().item() for part in (both, q - both, p - both))
    chance = acceptance(p[draft], q[draft]).item()
    return Refusal(recordings.text_of(draft), chance, recordings.text_of(drawn), after, rows, rest)


def lines_of(verdicts: list[Verdict]) -> str:
    """A line a pass, and what its colours mean."""
    lines = ""
    for verdict in verdicts:
        chips = ""
        for index, draft in enumerate(verdict.drafts):
            if index < verdict.accepted:
                kind = "new"
            else:
                kind = "out" if index == verdict.accepted else "gone"
            chips += token(draft, kind)
        chips += "<i>no draft</i>" * (not verdict.drafts)
        own = verdict.tokens[verdict.accepted :]
        chips += "".join(f" &rarr; {token(text, 'own')}" for text in own)
        lines += f"<li>{chips}</li>"
    legend = (
        '<ul class="key"><li><code class="tok new">accepted</code></li>'
        '<li><code class="tok out">refused</code></li>'
        '<li><code class="tok gone">not looked at</code></li>'
        '<li><code class="tok own">the target&rsquo;s own</code></li></ul>'
    )
    return f'<ol class="passes">{lines}</ol>{legend}'


def draw_speculation(record: Speculation) -> Drawing:
    drafts = sum(len(verdict.drafts) for verdict in record.verdicts)
    accepted = sum(verdict.accepted for verdict in record.verdicts)
    count = sum(len(verdict.tokens) for verdict in record.verdicts)
    passes = len(record.verdicts)
    parts = [
        panel(
            f"{passes} passes of the large model, the target: {count} tokens",
            lines_of(record.verdicts),
        )
    ]
    if record.refusal:
        parts.append(refused(record.refusal))
    caption = (
        f"A small model drafted {drafts} tokens, the large one kept {accepted}: {passes} of its "
        f"passes made {count} tokens, with the same probabilities as without drafts."
    )
    text = (
        f"{passes} lines of drafts, {accepted} of {drafts} accepted; and bars that compare both "
        "models' probabilities in the place of a refused draft."
    )
    return Drawing(panels(*parts), caption, text)


def refused(found: Refusal) -> str:
    """Bars of min(p, q), and of what either has more."""
    largest = max(max(p, q) for _, p, q in found.rows)
    rows = []
    for text, p, q in found.rows:
        both = min(p, q)
        sizes = [(both, "good"), (q - both, "bad"), (p - both, "")]
        rows.append((token(text), sizes, f"p {percent(p)}, q {percent(q)}"))
    chance = percent(found.chance)
    p, q = next((p, q) for text, p, q in found.rows if text == found.draft)
    note = (
        "p: the probability that the large model gives, q: the small one, both at temperature "
        f"{TEMPERATURE}. {token(found.draft)} is accepted with chance p / q = {chance}. It was "
        f"refused; one draw from the blue parts, {token(found.drawn)}, takes its place. Over all "
        "tokens red and blue are equal, so green and blue make exactly p."
    )
    legend = key(
        good="kept: min(p, q)", bad="guessed too often", first="guessed too seldom: the residual"
    )
    title = f"A refusal, after <q>&hellip;{escape(found.after)}</q>"
    return panel(title, stacks(rows, largest) + legend, note)


class Copied(NamedTuple):
    """Drafts that were found in the text."""

    text: list[str]  # before the pass
    found: tuple[
        int, int
    ]  # where the newest tokens occurred before: first place, and the one after
    drafts: list[str]
    verdicts: list[Verdict]


def record_copied(prompt: str, count: int = 40) -> Copied:
    """The first pass that has drafts, and all passes."""
    ids = recordings.encode(prompt, 120)
    params = SamplingParams(count)
    asked = []

    def propose(sequence, most, prompt_length):
        drafts, q = propose_lookup(sequence, most, prompt_length)
        asked.append((list(sequence), drafts))
        return drafts, q

    passes = list(generate_speculative(recordings.load(), propose, ids, params))
    shown = recordings.text_of
    verdicts = [
        Verdict([shown(id) for id in each.drafts], each.accepted, [shown(id) for id in each.tokens])
        for each in passes
    ]
    text, drafts = next((pair for pair in asked if pair[1]), asked[-1])
    found = (0, 0)
    for size in (3, 2):
        for start in range(len(text) - size):
            same = text[start : start + size] == text[-size:]
            if same and drafts and found[1] - found[0] in (0, size):
                found = (start, start + size)  # the newest one stays
    return Copied([shown(id) for id in text], found, [shown(id) for id in drafts], verdicts)


def draw_copied(record: Copied) -> Drawing:
    start, end = record.found
    size = end - start
    chips = ""
    for at, text in enumerate(record.text):
        kind = ""
        if start <= at < end or at >= len(record.text) - size > 0 < size:
            kind = "found"
        elif end <= at < end + len(record.drafts):
            kind = "new"
        chips += token(text, kind)
    chips += "".join(token(text, "new") for text in record.drafts)
    drafts = sum(len(each.drafts) for each in record.verdicts)
    accepted = sum(each.accepted for each in record.verdicts)
    count = sum(len(each.tokens) for each in record.verdicts)
    passes = len(record.verdicts)
    legend = (
        f'<ul class="key"><li><code class="tok found">the last {size} tokens, found before</code>'
        '</li><li><code class="tok new">what followed there: the drafts</code></li></ul>'
    ) * (size > 0)
    body = panels(
        panel("The first pass with drafts", f'<p class="flow">{chips}</p>{legend}'),
        panel(f"{passes} passes, {count} tokens", lines_of(record.verdicts)),
    )
    caption = (
        "No draft model: where the text&rsquo;s last three tokens, or two, occurred before, what "
        f"followed them is the guess. {accepted} of {drafts} guessed tokens were accepted."
        if drafts
        else "No draft model: the last tokens did not occur before, so there is no guess."
    )
    text = (
        f"A text of {len(record.text)} tokens with the place marked that its end repeats, and "
        f"{passes} passes with {accepted} of {drafts} drafts accepted."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "speculative-decoding": Picture("One day", record_speculation, draw_speculation),
    "prompt-lookup": Picture(
        f"{recordings.STORY}<|endoftext|>Once upon a time", record_copied, draw_copied
    ),
}

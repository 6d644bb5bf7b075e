"""Pictures of lessons 00 to 03: what a pass computes, and the loop around it."""

import math
from typing import NamedTuple

import torch

from book import recordings
from book.draw import (
    Drawing,
    Picture,
    bars,
    box,
    escape,
    key,
    label,
    panel,
    panels,
    path,
    percent,
    rows_of,
    signed,
    svg,
    token,
)
from cache import KVCache
from infer import next_logits
from loading.tokenizer import EOT
from model import causal_attention


class PassRecord(NamedTuple):
    """A pass over a prompt, and what became of its last position."""

    tokens: list[tuple[str, int]]  # text and id of each
    vectors: torch.Tensor  # what goes into the first layer, (T, C)
    after: list[list[tuple[str, float]]]  # the two tokens of `rivals`, after 0 to n_layer layers
    layer: int  # of the head that is shown, from 1
    head: int
    attention: torch.Tensor  # its weights, (T, T)
    top: list[tuple[str, float]]
    logits: list[float]  # of the tokens in top


@torch.inference_mode()
def record_pass(prompt: str) -> PassRecord:
    """One pass over a prompt, with what it holds after each layer."""
    model = recordings.load()
    ids = recordings.encode(prompt, 10)
    T = len(ids)
    inputs = []
    weights = []  # of each layer: (heads, T, T)

    def attend(layer, q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights.append(scores.masked_fill(later, -torch.inf).softmax(dim=-1)[0])
        return causal_attention(layer, q, k, v)

    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
        for block in model.h
    ]
    x = model.hidden(torch.tensor([ids]), torch.arange(T), attend)[0]
    for hook in hooks:
        hook.remove()
    # What the head would say after each layer.
    logits = model.head(torch.stack([row[-1] for row in [*inputs, x]]))
    probs = logits.softmax(dim=-1)
    best = probs[-1].argmax().item()
    others = probs[1:].index_fill(1, torch.tensor([best]), 0)
    rival = others.amax(dim=0).argmax().item()
    # The head whose last position looks most at one token between the first and itself.
    heads = torch.stack(weights)  # (layers, heads, T, T)
    first = min(1, T - 1)
    looks = heads[:, :, -1, first : max(first + 1, T - 1)].amax(dim=-1)
    layer, head = divmod(looks.argmax().item(), looks.shape[1])
    return PassRecord(
        [(recordings.text_of(id), id) for id in ids],
        inputs[0],
        [[(recordings.text_of(id), row[id].item()) for id in (best, rival)] for row in probs],
        layer + 1,
        head + 1,
        heads[layer, head],
        recordings.likely(probs[-1], 5),
        logits[-1].topk(5).values.tolist(),
    )


def draw_pass(record: PassRecord) -> Drawing:
    body = panels(*(piece.body for piece in pieces(record).values()))
    answer = record.top[0][0]
    last = record.tokens[-1][0]
    row = record.attention[-1]
    seen = most_seen(record)
    rival = record.after[0][1][0]
    turns = any(second > first for (_, first), (_, second) in record.after[1:])
    rises = f"turns from {token(rival)} to {token(answer)}" if turns else f"becomes {token(answer)}"
    caption = (
        "One pass of the model: a text goes in, a score for each token that could come next comes "
        f"out. On the way through the layers {token(last)} looks back at {token(seen)}, and the "
        f"answer {rises}."
    )
    shown = ", ".join(repr(text) for text, _ in record.tokens)
    text = (
        f"A pass over the tokens {shown}: ids, vectors, the attention of one head, "
        f"where {last!r} takes {percent(row.max().item())} from one token, "
        f"probabilities after each layer, and at the end {answer!r} with "
        f"{percent(record.top[0][1])}."
    )
    return Drawing(body, caption, text)


def most_seen(record: PassRecord) -> str:
    """The token that the last position looks at most, but for the first one and itself."""
    row = record.attention[-1]
    return record.tokens[row[1:-1].argmax().item() + 1 if len(row) > 2 else 0][0]


class Piece(NamedTuple):
    """A part of the picture, with words for those who cannot see it."""

    body: str
    text: str


def pieces(record: PassRecord) -> dict[str, Piece]:
    """The parts of the picture, in order, by name."""
    chips = "".join(f"<li>{token(text)}<span>{id}</span></li>" for text, id in record.tokens)
    answer, p = record.top[0]
    last = record.tokens[-1][0]
    share = percent(record.attention[-1].max().item())
    listed = ", ".join(f"{text!r} {id}" for text, id in record.tokens)
    return {
        "tokens": Piece(
            panel(
                "1. The text, cut into tokens; below each its id",
                f'<ol class="chips">{chips}</ol>',
                "A space belongs to the word after it.",
            ),
            f"Tokens and ids: {listed}.",
        ),
        "vectors": Piece(
            panel(
                f"2. A vector of {record.vectors.shape[1]} numbers for each",
                vectors(record),
                f"The first {FIRST} numbers of each, drawn: blue above 0, orange below. "
                f"Then {len(record.after) - 1} layers change these vectors, one after the other; "
                "in each, a token looks back at earlier ones, and is then worked on alone.",
            ),
            "The first numbers of each token's vector, as colours.",
        ),
        "attention": Piece(
            panel(
                f"3. Attention: where {token(last)} looks",
                attention(record),
                f"A head is one way to look back; this is number {record.head} of layer "
                f"{record.layer}. Each row is a token; the stronger a square, the more it takes "
                "from that token. None sees what comes later.",
            ),
            f"The weights of a head, a triangle: {last!r} takes {share} from one token.",
        ),
        "layers": Piece(
            panel(
                f"4. What {token(last)} would say after each layer",
                layers(record),
                "The probability of two tokens, if the layers above were left out; dashed: layer "
                f"{record.layer}.{leads(record)}",
            ),
            f"Lines of the probability of {record.after[0][0][0]!r} and {record.after[0][1][0]!r} "
            "after each layer.",
        ),
        "top": Piece(
            panel(
                "5. The end: a score, the logit, for each of 4,096 tokens",
                bars(
                    (token(text), p, f"logit {signed(logit, 1)}, {percent(p)}", "")
                    for (text, p), logit in zip(record.top, record.logits)
                ),
                "The five largest. Softmax turns all scores into probabilities, the bars. "
                f"{token(answer)} is what lesson 01 takes.",
            ),
            f"Bars of the five most likely tokens; {answer!r} has {percent(p)}.",
        ),
    }


def leads(record: PassRecord) -> str:
    """After which layer the token that is not the answer was ahead for the last time."""
    (answer, _), (rival, _) = record.after[0]
    ahead = [layer for layer, ((_, own), (_, other)) in enumerate(record.after) if other > own]
    if not ahead or not ahead[-1]:
        return ""
    last = ahead[-1]
    return f" After layer {last} {token(rival)} is ahead, from layer {last + 1} on {token(answer)}."


FIRST = 12  # numbers of a vector that are drawn


def vectors(record: PassRecord) -> str:
    """Of each token the first numbers as coloured squares."""
    size = 8
    rows = []
    for (text, _), vector in zip(record.tokens, record.vectors[:, :FIRST].tolist()):
        cells = "".join(
            box(
                x * size,
                0,
                size,
                12,
                "plus" if v > 0 else "minus",
                f"opacity:{min(abs(v) * 6, 1):.2f}",
            )
            for x, v in enumerate(vector)
        )
        first = ", ".join(signed(v) for v in vector[:2])
        rows.append((token(text), svg(FIRST * size, 12, cells), f"{first}, &hellip;"))
    return rows_of(rows)


def attention(record: PassRecord) -> str:
    """The weights of a head, a row a token."""
    size = min(18, 112 // len(record.tokens))  # so that three panels stand side by side
    rows = []
    for at, ((text, _), weights) in enumerate(zip(record.tokens, record.attention.tolist())):
        cells = "".join(
            box(x * size, 1, size - 2, size - 2, "weight", f"--w:{w:.3f}")
            for x, w in enumerate(weights[: at + 1])
        )
        best = max(range(at + 1), key=weights.__getitem__)
        words = f"{percent(weights[best])} {token(record.tokens[best][0])}"
        rows.append((token(text), svg(len(record.tokens) * size, size, cells), words))
    return rows_of(rows)


def layers(record: PassRecord) -> str:
    """Two tokens' probabilities after 0, 1, ... layers."""
    width, height, left, top = 250, 120, 46, 8
    count = len(record.after) - 1

    def place(layer: int, p: float) -> tuple[float, float]:
        return left + layer * (width / count), top + height * (1 - p)

    body = "".join(
        path([place(0, p), place(count, p)], "grid")
        + label(left - 5, place(0, p)[1] + 4, words, "end")
        for p, words in ((0, "0 %"), (0.5, "50 %"), (1, "100 %"))
    )
    names = ""
    for which, kind in ((1, "second"), (0, "first")):
        points = [place(layer, pair[which][1]) for layer, pair in enumerate(record.after)]
        body += path(points, kind)
        names = f'<li><i class="{kind}"></i>{token(record.after[0][which][0])}</li>' + names
    for layer in range(0, count + 1, 4):
        body += label(place(layer, 0)[0], top + height + 16, str(layer), "middle")
    body += label(left + width / 2, top + height + 32, "layers passed", "middle")
    x = place(record.layer, 0)[0]
    body += path([(x, top), (x, top + height)], "mark")
    return (
        svg(width + left + 12, height + top + 36, body, "chart") + f'<ul class="key">{names}</ul>'
    )


class Step(NamedTuple):
    """A turn of the loop."""

    length: int  # of the text that went in
    choices: list[tuple[str, float]]  # the most likely tokens, best first, with their logits
    chosen: str


@torch.inference_mode()
def record_steps(prompt: str, count: int = 8) -> tuple[list[str], list[Step]]:
    """The tokens of a prompt, and the first steps of greedy decoding after it."""
    text = recordings.encode(prompt, 12)
    written = recordings.write(text, max_new_tokens=count)
    steps = []
    for index, id in enumerate(written):
        logits = recordings.next_logits(text + written[:index])
        choices = recordings.likely(logits, 3)
        steps.append(Step(len(text) + index, choices, recordings.text_of(id)))
    return [recordings.text_of(id) for id in text], steps


def draw_steps(record: tuple[list[str], list[Step]]) -> Drawing:
    prompt, steps = record
    rows = ""
    for number, step in enumerate(steps):
        before = [(text, "") for text in prompt] + [(each.chosen, "old") for each in steps[:number]]
        text = "".join(token(word, kind) for word, kind in before)
        best = "".join(
            f"<li>{token(word, 'new' if not rank else '')}<span>{signed(logit, 1)}</span></li>"
            for rank, (word, logit) in enumerate(step.choices)
        )
        rows += (
            f'<tr><th scope="row">{number + 1}</th><td class="text">{text}</td>'
            f'<td><ol class="best">{best}</ol></td></tr>'
        )
    head = "<tr><th>step</th><th>the text that goes in</th><th>best three of 4,096 scores</th></tr>"
    body = (
        f'<table class="loop"><thead>{head}</thead><tbody>{rows}</tbody></table>'
        '<ul class="key"><li><code class="tok new">taken</code></li>'
        '<li><code class="tok old">taken in a step before</code></li></ul>'
        '<p class="note">The number next to a token is its score, the logit.</p>'
    )
    caption = (
        "Each step puts the whole text into the model, takes the token with the largest score and "
        f"appends it: after {len(steps)} steps the text is longer by {len(steps)} tokens."
    )
    chosen = ", ".join(repr(step.chosen) for step in steps)
    text = f"A table of {len(steps)} steps after the prompt {''.join(prompt)!r}; chosen: {chosen}."
    return Drawing(body, caption, text)


class Ends(NamedTuple):
    """How likely EOS was at each place of a text."""

    tokens: list[str]  # generated ones, EOS included if it came
    chances: list[float]  # of EOS in the place of each


@torch.inference_mode()
def record_ends(prompt: str) -> Ends:
    model = recordings.load()
    text = recordings.encode(prompt, 36)
    written = recordings.write(text)
    texts = [text + written[:-1]]  # the last token is not passed
    logits = next_logits(model, texts, KVCache(model), keep=len(written))[0]
    (eos,) = model.config.eos_token_ids
    chances = logits.softmax(dim=-1)[:, eos].tolist()
    return Ends([recordings.text_of(id) for id in written], chances)


def draw_ends(record: Ends) -> Drawing:
    width, height, left, top = 256, 130, 56, 8
    count = len(record.chances)
    body = ""
    for power, words in ((0, "1"), (-3, "1/1,000"), (-6, "1/10\u2076"), (-9, "1/10\u2079")):
        y = top - height * power / 9
        body += path([(left, y), (left + width, y)], "grid")
        body += label(left - 5, y + 4, words, "end")
    step = width / count
    for index, p in enumerate(record.chances):
        tall = round(height * max(0, 1 + math.log10(p) / 9), 1)
        kind = "first" if after_sentence(record.tokens, index) else "kept"
        x = round(left + index * step, 1)
        body += box(x, round(top + height - tall, 1), round(step - 0.2, 2), tall, kind)
    for index in range(0, count, 50):
        body += label(left + index * step, top + height + 16, str(index), "middle")
    body += label(left + width / 2, top + height + 32, "tokens written", "middle")
    chart = svg(width + left + 12, height + top + 38, body, "chart")
    last = range(max(0, count - 9), count)
    rows = [
        (token(record.tokens[at]), record.chances[at], escape(chance(record.chances[at])), "")
        for at in last
    ]
    body = panels(
        panel(
            "The probability of EOS at each step",
            chart + key(first="after the end of a sentence", kept="elsewhere"),
            "The scale is logarithmic.",
        ),
        panel("The last steps: how likely EOS was in the place of each token", bars(rows, 1.0)),
    )
    peaks = [at for at, p in enumerate(record.chances) if p >= 0.001]
    ended = record.tokens[-1] == "<|endoftext|>"
    places = f"a probability of 0.1\u00a0% or more at {len(peaks)} of {count} places"
    if peaks and all(after_sentence(record.tokens, at) for at in peaks):
        places += ", all of them after a sentence"
    last_chance = percent(record.chances[-1])
    end = f" At the last it has {last_chance}, more than any other: the text ends." * ended
    caption = (
        f"The end of a text is a token like any other: EOS, written {token(EOT)}. It has "
        f"{places}.{end}"
    )
    text = (
        f"A chart of the probability of EOS over {count} steps, and bars of the last ones: "
        f"{', then '.join(map(chance, record.chances[-2:]))}."
    )
    return Drawing(body, caption, text)


def chance(p: float) -> str:
    """As `percent`, but nothing that is possible is said to be 0."""
    return percent(p) if p >= 0.0005 else "< 0.1\u00a0%"


def after_sentence(tokens: list[str], at: int) -> bool:
    return at > 0 and tokens[at - 1][-1:] in (".", "!", "?", '"')


class Windows(NamedTuple):
    """The window on a text that outgrows it, at stride 1."""

    size: int  # of the window
    text: list[str]


def record_windows(prompt: str, beyond: int = 3) -> Windows:
    """Greedy decoding by the small draft model, until the window has moved so many times."""
    name = "stories-draft"
    size = recordings.load(name).config.block_size
    text = recordings.encode(prompt, 200)
    count = size + beyond - len(text)
    written = recordings.write(text, name, 1, max_new_tokens=count, ignore_eos=True)
    return Windows(size, [recordings.text_of(id) for id in text + written])


def draw_windows(record: Windows) -> Drawing:
    rows = ""
    for length in range(record.size - 1, len(record.text)):
        start = max(0, length - record.size)
        cells = "".join(
            f"<td>{token(text, 'gone')}<span>out</span></td>" for text in record.text[:start]
        )
        shown = [*range(start, 3), -1, length - 2, length - 1]
        for at in shown:
            if at < 0:
                cells += '<td class="dots">&hellip;</td>'
            else:
                cells += f"<td>{token(record.text[at])}<span>{at - start}</span></td>"
        chosen = f"<td>{token(record.text[length], 'new')}</td>"
        rows += f'<tr><th scope="row">{length}</th>{cells}{chosen}</tr>'
    words = "what the model sees, and where"
    head = f'<th>tokens</th><th colspan="6">{words}</th><th>next</th>'
    body = (
        f'<div class="scroll"><table class="windows"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        '<p class="note">Written by a small model, stories-draft, with '
        "<code>--ignore-eos</code>.</p>"
    )
    first = record.text[1]
    caption = (
        f"The model sees the last {record.size} tokens, its window. In a longer text the first "
        f"ones fall out, and all others move: {token(first)} stands at position 1, then 0, then "
        "nowhere."
    )
    text = (
        f"A table of windows on texts of {record.size - 1} to {len(record.text) - 1} tokens: from "
        f"{record.size + 1} on the first token is out and each other token has a smaller position."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "init": Picture("Lily lost her doll. Lily was very", record_pass, draw_pass),
    "greedy-decoding": Picture("Once upon a time", record_steps, draw_steps),
    "eos-handling": Picture("Once upon a time", record_ends, draw_ends),
    "context-window": Picture("Once upon a time", record_windows, draw_windows),
}

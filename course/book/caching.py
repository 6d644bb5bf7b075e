"""Pictures of lessons 13 to 16: what is computed in each step, and what is kept."""

from typing import NamedTuple

import torch

from book import recordings
from book.draw import (
    Drawing,
    Picture,
    box,
    key,
    label,
    panel,
    panels,
    path,
    rows_of,
    squares,
    svg,
    token,
)
from cache import KVCache
from infer import generate, next_logits
from sampling import SamplingParams

SIZE = 13  # of a square, so that a row of them fits on a phone


class Computed(NamedTuple):
    """The same steps with and without the cache."""

    words: list[str]  # the token that each step gives
    plain: list[list[int]]  # the positions that each step computes, without the cache
    cached: list[list[int]]


def passes(prompts: list[list[int]], count: int, name: str = "stories", **options) -> tuple:
    """The rows of tokens that `generate` gives, and its passes. options: of `generate`."""
    model = recordings.load(name)
    params = SamplingParams(count, ignore_eos=True)
    with recordings.watch(model) as seen:
        steps = list(generate(model, prompts, params, **options))
    return steps, seen


def record_computed(prompt: str, count: int = 10) -> Computed:
    text = recordings.encode(prompt, 6)
    steps, cached = passes([text], count)
    _, plain = passes([text], count, use_cache=False)
    words = [recordings.text_of(token) for (token,) in steps]
    return Computed(words, *([each.positions[0] for each in seen] for seen in (plain, cached)))


def draw_computed(record: Computed) -> Drawing:
    def grid(steps: list[list[int]]) -> str:
        rows = []
        for word, positions in zip(record.words, steps):
            kinds = ["kept"] * positions[0] + ["first"] * len(positions)
            kinds += [""] * (len(record.plain[-1]) - len(kinds))
            rows.append((token(word), squares(kinds, SIZE), str(len(positions))))
        return rows_of(rows)

    plain = sum(map(len, record.plain))
    cached = sum(map(len, record.cached))
    body = panels(
        panel(f"Without a cache: {plain} positions", grid(record.plain)),
        panel(f"With it: {cached} positions", grid(record.cached)),
    ) + key(first="computed", kept="keys and values kept from before")
    body += (
        '<p class="note">Each row is a step, each square a position. Attention finds a token by '
        "its key, and takes its value: two vectors that each layer makes of each token.</p>"
    )
    caption = (
        f"For {len(record.words)} tokens the model computes {plain} positions, or, if it keeps the "
        f"keys and values that attention reads, {cached}. The text is the same."
    )
    text = (
        f"Two grids. Without a cache the steps compute {[len(step) for step in record.plain]} "
        f"positions, with it {[len(step) for step in record.cached]}."
    )
    return Drawing(body, caption, text)


class Storage(NamedTuple):
    """A static cache while a text grows."""

    words: list[str]
    filled: list[int]  # positions of the storage that are not zeros, after each step
    room: int
    bytes: int  # of a position


@torch.inference_mode()
def record_storage(prompt: str, count: int = 10) -> Storage:
    model = recordings.load()
    text = recordings.encode(prompt, 6)
    cache = KVCache(model, 1, len(text) + count - 1)
    words = []
    filled = []
    for _ in range(count):
        chosen = next_logits(model, [text], cache)[0, -1].argmax().item()
        words.append(recordings.text_of(chosen))
        filled.append(int((cache.storage != 0).any(dim=-1).all(dim=(0, 1, 2, 3)).sum()))
        text = text + [chosen]
    room = cache.storage.shape[4]
    return Storage(words, filled, room, cache.storage.untyped_storage().nbytes() // room)


def draw_storage(record: Storage) -> Drawing:
    grown = []
    static = []
    before = 0
    copied = 0
    for word, filled in zip(record.words, record.filled):
        new = ["first"] * (filled - before)
        rest = record.room - filled
        words = str(before)
        grown.append((token(word), squares(["second"] * before + new + [""] * rest, SIZE), words))
        static.append((token(word), squares(["kept"] * before + new + ["empty"] * rest, SIZE), ""))
        copied += before
        before = filled
    size = f"{record.bytes * record.room:,}"
    body = panels(
        panel(f"Joined to a longer array each time (torch.cat): {copied} copied", rows_of(grown)),
        panel(f"One allocation of {size} bytes: none copied", rows_of(static)),
    ) + key(first="written", second="copied", kept="stays where it is", empty="zeros, for later")
    caption = (
        f"A cache that grows copies all that it holds in each step: here {copied} positions of "
        f"{record.bytes:,} bytes. One that is allocated for {record.room} positions at once only "
        "writes the new ones."
    )
    text = (
        f"Two grids of a row a step. In the first all held positions are copied, {copied} in all; "
        f"in the second the filled part of {record.room} positions grows to {record.filled[-1]}."
    )
    return Drawing(body, caption, text)


class Hops(NamedTuple):
    """A run past the window: the positions of the text that each step computes, first and last."""

    stride: int
    spans: list[tuple[int, int]]
    starts: list[int]  # of the window


NAME = "stories-draft"  # small, so that the run at stride 1 takes seconds; its window is as long


def record_hops(prompt: str, count: int = 500) -> list[Hops]:
    text = recordings.encode(prompt, 100)
    size = recordings.load(NAME).config.block_size
    found = []
    for stride in (size // 2, 1):
        _, seen = passes([text], count, NAME, stride=stride)
        spans = []
        starts = []
        for step, each in enumerate(seen):
            (positions,) = each.positions
            start = len(text) + step - 1 - positions[-1]  # of the window, by its last position
            starts.append(start)
            spans.append((start + positions[0], start + positions[-1]))
        found.append(Hops(stride, spans, starts))
    return found


def draw_hops(record: list[Hops]) -> Drawing:
    names = (
        f"Stride {record[0].stride}: the window moves in hops",
        "Stride 1: lesson 03&rsquo;s window, with the cache",
    )
    counts = [sum(last - first + 1 for first, last in each.spans) for each in record]
    parts = [
        panel(
            f"{name}", chart_of(each), f"{total:,} positions, {total / len(each.spans):.1f} a token"
        )
        for name, each, total in zip(names, record, counts)
    ]
    body = panels(*parts) + key(first="computed in this step", kept="kept keys and values")
    body += (
        '<p class="note">Run with the small draft model; positions are those of any model with '
        "this window.</p>"
    )
    caption = (
        "When the window moves, every kept token gets another position, so all of it is computed "
        f"anew. In hops of {record[0].stride} tokens that is seldom: {counts[0]:,} positions "
        f"instead of {counts[1]:,}."
    )
    text = (
        f"Two charts of what each of {len(record[0].spans)} steps computes. With stride "
        f"{record[0].stride} a line of single positions with a few wide hops, {counts[0]:,} "
        f"positions; with stride 1 a wide band, {counts[1]:,} positions."
    )
    return Drawing(body, caption, text)


def chart_of(run: Hops, size: int = 240, left: int = 34, top: int = 30) -> str:
    """Tokens of the text to the right, steps downwards."""
    steps = len(run.spans)
    end = run.spans[-1][1] + 1

    def place(token: int, step: int) -> tuple[float, float]:
        return round(left + token * size / end, 1), round(top + step * size / steps, 1)

    # The window as an area: its left edge downwards, its right edge back up.
    edge = [place(start, step) for step, start in enumerate(run.starts)]
    edge += [place(last + 1, step) for step, (_, last) in enumerate(run.spans)][::-1]
    body = f'<polygon class="kept" points="{" ".join(f"{x},{y}" for x, y in edge)}"/>'
    for step, (first, last) in enumerate(run.spans):
        if last > first:
            x, y = place(first, step)
            width = place(last + 1, step)[0] - x
            body += box(x, y, round(width, 1), 0.6 if run.stride == 1 else 2, "first")
    body += path([place(last, step) for step, (_, last) in enumerate(run.spans)], "first")
    body += label(left + size / 2, 10, "token of the text", "middle")
    body += label(left - 4, top + 6, "step", "end")
    for token_number in range(0, end, 100):
        body += label(place(token_number, 0)[0], top - 8, str(token_number), "middle")
    for step in range(100, steps + 1, 100):
        body += label(left - 4, place(0, step)[1] + 4, str(step), "end")
    return svg(size + left + 12, size + top + 6, body, "chart")


class Ragged(NamedTuple):
    """A batch of texts of different lengths."""

    lengths: list[int]
    prefill: list[list[tuple[str, int]]]  # a row's tokens in the first pass, with their positions
    decode: list[list[list[tuple[str, int]]]]  # the same of each later pass


BESIDE = ("One day, a big dog", "Lily saw")


def record_ragged(prompt: str, count: int = 2) -> Ragged:
    # Of two tokens at least: one makes a pass with those that decode.
    texts = [recordings.encode(text, 8, 2) for text in (prompt, *BESIDE)]
    _, seen = passes(texts, count)
    shown = [
        [
            [(recordings.text_of(token), place) for token, place in zip(*row)]
            for row in zip(each.tokens, each.positions)
        ]
        for each in seen
    ]
    return Ragged([len(text) for text in texts], shown[0], shown[1:])


def draw_ragged(record: Ragged) -> Drawing:
    rows = ""
    width = len(record.prefill[0])
    for row, (length, tokens) in enumerate(zip(record.lengths, record.prefill)):
        cells = "".join(
            f"<td>{token(text, 'pad' if at >= length else '')}<span>{place}</span></td>"
            for at, (text, place) in enumerate(tokens)
        )
        for each in record.decode:
            ((text, place),) = each[row]
            cells += f"<td>{token(text, 'new')}<span>{place}</span></td>"
        rows += f"<tr>{cells}</tr>"
    later = "".join(f"<th>pass {number}</th>" for number in range(2, len(record.decode) + 2))
    first = f'<th colspan="{width}">pass 1: the prompts, {len(record.lengths)} x {width}</th>'
    head = f"<thead><tr>{first}{later}</tr></thead>"
    table = f'<table class="windows">{head}<tbody>{rows}</tbody></table>'
    padding = sum(width - length for length in record.lengths)
    body = f'<div class="scroll">{table}</div>' + (
        '<ul class="key"><li><code class="tok">prompt</code></li>'
        '<li><code class="tok pad">padding</code></li>'
        '<li><code class="tok new">new</code></li></ul>'
        '<p class="note">The number under a token is its position in its text. A hatched box only '
        f"fills the row, here in {padding} places: it is the last token once more, at its own "
        "position. So it writes the same keys and values, and its result is ignored.</p>"
    )
    caption = (
        f"{len(record.lengths)} texts in one pass, each as if it were alone. Shorter ones are "
        "filled up with copies of their last token, whose results are ignored."
    )
    text = (
        f"A table of a batch: rows of {record.lengths} tokens padded to {width}, then one new "
        "token a row in each pass, at positions of its own."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "kv-cache-dynamic": Picture("Once upon a time", record_computed, draw_computed),
    "kv-cache-static": Picture("Once upon a time", record_storage, draw_storage),
    "kv-cache-fix": Picture("Once upon a time", record_hops, draw_hops),
    "variable-batching": Picture("Once upon a time", record_ragged, draw_ragged),
}

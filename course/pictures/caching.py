"""Positions that each step computes, and positions in the KV cache."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from cache import KVCache
from infer import generate, next_logits
from pictures import runs, scene
from pictures.runs import Pass
from pictures.scene import times, word
from sampling import SamplingParams


def passes_of(
    prompts: list[list[int]], count: int, name: str = "stories", **options
) -> tuple[list[list[int]], list[Pass]]:
    """Return the tokens that `generate` yields per step, and its forward passes."""
    model, passes = runs.record_passes(name)
    steps = generate(model, prompts, SamplingParams(count, ignore_eos=True), **options)
    return list(steps), passes


class Computed(NamedTuple):
    """Decoding steps of one sequence, without and with the cache."""

    tokens: list[str]  # token sampled in each step
    full: list[list[int]]  # positions computed in each step
    cached: list[list[int]]


def record_computed(prompt: str, count: int = 10) -> Computed:
    ids = runs.encode(prompt, 6)
    steps, cached = passes_of([ids], count)
    _, full = passes_of([ids], count, use_cache=False)
    tokens = runs.token_texts([token for (token,) in steps])
    return Computed(tokens, *([each.positions[0] for each in seen] for seen in (full, cached)))


def row_of(name: str, width: int, value: str = "", **kinds: int) -> scene.Row:
    """Return a row of squares, padded to its width. kinds: number of squares of each kind."""
    cells = [scene.Cell(kind) for kind, count in kinds.items() for _ in range(count)]
    return scene.Row(word(name), cells + [scene.Cell()] * (width - len(cells)), value)


def draw_computed(record: Computed) -> scene.Scene:
    width = len(record.full[-1])

    def grid(steps: list[list[int]]) -> scene.Cells:
        rows = []
        for name, positions in zip(record.tokens, steps):
            count = len(positions)
            rows.append(row_of(name, width, str(count), kept=positions[0], first=count))
        return scene.Cells(rows)

    full, cached = (sum(map(len, steps)) for steps in (record.full, record.cached))
    key = {"first": "computed", "kept": "cached keys and values"}
    return scene.Scene(
        f"Without a cache, {len(record.tokens)} tokens cost {full} computed positions. With the "
        f"keys and values of earlier positions kept, {cached} are enough. The text is the same.",
        scene.Panel(f"Without a cache: {full} positions", grid(record.full)),
        scene.Panel(f"With a KV cache: {cached} positions", grid(record.cached), key=key),
    )


@torch.inference_mode()
def record_storage(prompt: str, count: int = 10) -> Record:
    """Record how a static cache fills as a sequence grows."""
    model = runs.load()
    ids = runs.encode(prompt, 6)
    given = len(ids)
    cache = KVCache(model, 1, given + count - 1)
    filled = []
    for _ in range(count):
        ids = ids + [next_logits(model, [ids], cache)[0, -1].argmax().item()]
        filled.append(int((cache.storage != 0).any(dim=-1).all(dim=(0, 1, 2, 3)).sum()))
    size = cache.storage.shape[4]
    return Record(
        tokens=runs.token_texts(ids[given:]),
        filled=filled,  # nonzero positions of the storage after each step
        size=size,
        bytes=cache.storage.nbytes // size,  # bytes per position
    )


def draw_storage(record: Record) -> scene.Scene:
    grown = []
    static = []
    before = 0
    copied = 0
    for name, filled in zip(record.tokens, record.filled):
        new = filled - before
        grown.append(row_of(name, record.size, f"{before}", second=before, first=new))
        rest = record.size - filled
        static.append(row_of(name, record.size, "0", kept=before, first=new, idle=rest))
        copied += before
        before = filled
    return scene.Scene(
        f"A cache that grows copies all its contents at each step: here {copied} positions of "
        f"{record.bytes:,} bytes. A cache allocated once for {record.size} positions writes only "
        "the new ones.",
        scene.Panel(
            f"A longer array each step (torch.cat): {copied} positions copied",
            scene.Cells(grown),
            key={"first": "written", "second": "copied"},
        ),
        scene.Panel(
            f"One allocation of {record.bytes * record.size:,} bytes: none copied",
            scene.Cells(static),
            key={"first": "written", "kept": "stays in place", "idle": "reserved"},
        ),
    )


def record_context_shifts(prompt: str, count: int = 400) -> list[Record]:
    """Generate past the context window; the small draft model keeps this to seconds."""
    name = "stories-draft"
    ids = runs.encode(prompt, 100)
    size = runs.load(name).config.block_size
    return [
        Record(
            stride=stride,
            # positions computed in each step
            computed=[
                len(each.positions[0]) for each in passes_of([ids], count, name, stride=stride)[1]
            ],
        )
        for stride in (size // 2, 1)
    ]


def draw_context_shifts(record: list[Record]) -> scene.Scene:
    curves = []
    totals = [sum(each.computed) for each in record]
    for each, total, kind in zip(record, totals, ("first", "second")):
        name = (
            f"stride {each.stride}: {total:,} positions, {total / len(each.computed):.1f} a token"
        )
        points = list(enumerate(each.computed, 1))
        corners = [
            point
            for at, point in enumerate(points)
            if len(
                {each.computed[near] for near in (at - 1, at, at + 1) if 0 <= near < len(points)}
            )
            > 1
        ]
        curves.append(scene.Curve(name, sorted({points[0], *corners, points[-1]}), kind))
    return scene.Scene(
        "When the context window moves, every kept token gets another position, so the whole "
        f"window is recomputed. With context shifts of {record[0].stride} tokens that is rare: "
        f"{totals[0]:,} positions for {len(record[0].computed)} tokens instead of {totals[1]:,}.",
        scene.Panel(
            "Positions that each step computes",
            scene.Lines(curves[::-1], scene.Axis("step"), scene.Axis("positions computed")),
            "Run with the small draft model. Any model with this window computes as many.",
        ),
    )


OTHER_PROMPTS = ("One day, a big dog", "Lily saw")


def record_ragged(prompt: str, count: int = 3) -> Record:
    """Record a batch of prompts of different lengths."""
    # At least two tokens: a prompt of one token would run in the pass of the decoding rows.
    texts = [runs.encode(text, 8, 2) for text in (prompt, *OTHER_PROMPTS)]
    return Record(lengths=[len(text) for text in texts], passes=passes_of(texts, count)[1])


def draw_ragged(record: Record) -> scene.Scene:
    prefill, *decode = record.passes
    lines = []
    padding = 0
    for row, length in enumerate(record.lengths):
        tokens = []
        for each, kind in ((prefill, ""), *((each, "good") for each in decode)):
            texts = map(runs.token_text, each.tokens[row])
            for at, (text, position) in enumerate(zip(texts, each.positions[row])):
                pad = at >= length
                padding += pad
                tokens.append(scene.Token(text, "idle" if pad else kind, str(position)))
        lines.append(scene.Line(tokens, f"sequence {row + 1}"))
    return scene.Scene(
        f"{len(record.lengths)} sequences of different lengths in one batch, each computed as if "
        "it were alone. Shorter ones are padded with copies of their last token.",
        scene.Panel(
            f"A prefill of {len(lines)} sequences, then {times(len(decode), 'decode step')}",
            scene.Tokens(lines),
            "The number under a token is its position in the sequence. Padding, here "
            f"{times(padding, 'token')}, repeats a token at its own position: it writes the same "
            "keys and values again, and its result is ignored.",
            {"idle": "padding", "good": "a new token per sequence in each decode step"},
            wide=True,
        ),
    )


PICTURES = {
    "kv-cache-dynamic": scene.Picture("Once upon a time", record_computed, draw_computed),
    "kv-cache-static": scene.Picture("Once upon a time", record_storage, draw_storage),
    "kv-cache-fix": scene.Picture("Once upon a time", record_context_shifts, draw_context_shifts),
    "variable-batching": scene.Picture("Once upon a time", record_ragged, draw_ragged),
}

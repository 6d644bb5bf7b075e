"""Pictures of lessons 74 to 81: who computes what on which rank, and what crosses between them."""

import contextlib
import functools
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

import engine.cache
import infer_engine
import parallel.ranks
from book import processes, recordings
from book.compiled import differing
from book.door import NAME, check_prompt
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
    segment,
    signed,
    stacks,
    svg,
    token,
)
from command_line import STORIES
from engine.engine import Engine
from errors import UserError
from loading import load
from parallel import shards
from parallel.ranks import Ranks
from parallel.shards import join_vocabulary, keys_of, load_part, split
from sampling import SamplingParams

PROMPT = "The lonely knight"
MOST = 8  # tokens of a prompt
SIZE = 3  # ranks
PAGE = 4  # positions
BESIDE = "The dog"  # the prompt of a second text
COLOURS = ("first", "second", "good", "other", "bad", "soft")  # of ranks, 0 first
LIMIT = timedelta(seconds=4)  # in the place of parallel.ranks.LIMIT, where a rank stands still


def rank_name(rank: int) -> str:
    return f'<b class="who tint{rank}">rank {rank}</b>'


def table(kind: str, head: str, rows: str) -> str:
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


@functools.cache
def runs(prompt: str) -> dict[str, list]:
    """All that pictures show of ranks, of one start of processes: name of a run -> of each rank."""
    check_prompt(prompt, MOST)
    return processes.fresh(make_runs, prompt)


def make_runs(prompt: str) -> dict[str, list]:
    ids = recordings.encode(prompt, MOST)
    with tempfile.TemporaryDirectory() as directory:
        late = break_off("still", prompt, Path(directory))  # it waits while the others compute
        found = {"leader": processes.on_ranks(2, lead, ids)}
        for name, way, dtype in (
            ("gather", "gather", torch.float32),
            ("reduce", "reduce", torch.float32),
            ("int8", "reduce", torch.int8),
        ):
            found[name] = processes.on_ranks(SIZE, meet, way, dtype, ids)
        for name in ("killed", "memory"):
            found[name] = break_off(name, prompt, Path(directory))()
        found["still"] = late()
    return found


class Meeting(NamedTuple):
    """What a rank has of a collective."""

    kind: str  # which method of Ranks
    own: torch.Tensor  # what it gives, (1, T, ...)
    whole: torch.Tensor  # what it has afterwards
    sent: int  # bytes


def meet(way: str, dtype: torch.dtype, ids: list[int]) -> list[Meeting]:
    """On a rank: all its meetings in a pass over a text."""
    meetings = []
    with Ranks(way) as ranks, torch.inference_mode():
        model = load_part(STORIES.with_name(NAME), dtype, ranks=ranks)
        join_vocabulary(model)
        real = {kind: getattr(ranks, kind) for kind in ("all_gather", "gather", "sum", "maximum")}

        def noted(kind: str, x: torch.Tensor, *arguments) -> torch.Tensor:
            own = x.clone()  # a sum is made in place
            before = ranks.traffic
            whole = real[kind](x, *arguments)
            meetings.append(Meeting(kind, own, whole.clone(), ranks.traffic - before))
            return whole

        for kind in real:
            setattr(ranks, kind, functools.partial(noted, kind))
        model(torch.tensor([ids]), logits_to_keep=1)
    return meetings


@torch.inference_mode()
def alone(prompt: str, dtype: torch.dtype = torch.float32) -> tuple[list, torch.Tensor]:
    """What one process has where ranks gather, in each layer four tensors, and its logits."""
    torch.set_num_threads(1)
    model = load.load_model(STORIES.with_name(NAME), dtype)
    seen = []
    for layer in model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.register_forward_hook(lambda _, given, out: seen.extend([given[0], out]))
    ids = recordings.encode(prompt, MOST)
    return seen, model(torch.tensor([ids]), logits_to_keep=1)


# 74


class Heard(NamedTuple):
    """A pass of rank 1, and of rank 0."""

    asked: dict[str, str]  # prompts of texts that are new: name -> prompt
    spans: list[tuple[str, list[int], int, list[int]]]  # name of the text, ids, start, pages
    size: int  # bytes that were told
    largest: list[tuple[float, float]]  # of each span the largest logit, of rank 0 and of rank 1
    same: bool  # whether all logits are
    chosen: list[tuple[str, int]]  # of each span, with its id


def lead(ids: list[int]) -> list[tuple]:
    """On a rank: of each pass what it heard of it, and the logits, and on rank 0 what it chose."""
    heard = []
    with Ranks() as ranks:
        model = recordings.load(NAME)  # the whole of it, as in this lesson
        model.ranks = ranks
        real = engine.cache.pass_logits

        def noted(model, cache, spans, keep):
            logits = real(model, cache, spans, keep)
            heard.append((spans, len(pickle.dumps((spans, keep))), logits.clone()))
            return logits

        with mock.patch.object(engine.cache, "pass_logits", noted):
            if ranks.rank:
                engine.cache.follow(model, engine.cache.PagedCache(model, 12, PAGE))
                return heard
            leader = Engine(model, max_rows=2, num_pages=12, page_size=PAGE)
            texts = [leader.add(ids, SamplingParams(4, ignore_eos=True))]
            while leader.busy:
                if leader.steps == 2:
                    drawn = SamplingParams(3, temperature=0.8, seed=1, ignore_eos=True)
                    texts.append(leader.add(recordings.encode(BESIDE, MOST), drawn))
                leader.step()
                requests = [work.request for work in leader.works]
                chosen = [(texts.index(request), request.tokens[-1]) for request in requests]
                heard[-1] += (chosen,)
            ranks.tell()
    return heard


def record_leader(prompt: str) -> list[Heard]:
    leader, follower = runs(prompt)["leader"]
    passes = []
    known = set()
    for (_, size, logits, chosen), (spans, _, own) in zip(leader, follower, strict=True):
        names = ["AB"[text] for text, _ in chosen]
        asked = {name: prompt if name == "A" else BESIDE for name in names if name not in known}
        known.update(names)
        largest = list(zip(logits.amax(dim=-1).tolist(), own.amax(dim=-1).tolist()))
        shown = [(name, ids, start, pages) for name, (pages, start, ids) in zip(names, spans)]
        words = [(recordings.text_of(id), id) for _, id in chosen]
        passes.append(Heard(asked, shown, size, largest, torch.equal(logits, own), words))
    return passes


def draw_leader(record: list[Heard]) -> Drawing:
    def who(name: str) -> str:
        return f'<b class="who tint{"AB".index(name) + 2}">{name}</b>'

    rows = ""
    lines = []
    for number, heard in enumerate(record, 1):
        asked = "".join(f"<p>{who(a)} asks {token(text)}</p>" for a, text in heard.asked.items())
        chosen = told = computed = ""
        for span, (own, other), (text, id) in zip(
            heard.spans, heard.largest, heard.chosen, strict=True
        ):
            name, ids, start, pages = span
            at = f"{start}" if len(ids) == 1 else f"{start}\u2013{start + len(ids) - 1}"
            many = "page" if len(pages) == 1 else "pages"
            chosen += f"<p>{who(name)} {own:.3f}, {token(text, 'new')}&nbsp;{id}</p>"
            told += f"<p>{' '.join(map(str, ids))} at {at}, {many} {', '.join(map(str, pages))}</p>"
            computed += f"<p>{other:.3f}</p>"
            lines.append(f"pass {number}: ids {ids} at {at}, {many} {pages}, chosen {text!r}")
        rows += (
            f'<tr class="in"><td>{asked}{chosen}</td>'
            f'<td><div class="arrow">{told}</div><p class="note">{heard.size} bytes</p></td>'
            f"<td>{computed}</td></tr>"
        )
    head = (
        "<th>Rank 0: texts, the largest logit, the token it chooses and its id</th>"
        "<th>Told before a pass</th><th>Rank 1: the largest logit</th>"
    )
    same = sum(heard.same for heard in record)
    largest = max(heard.size for heard in record)
    caption = (
        "A rank is a process, numbered from 0. So that ranks can share the work, rank 0, which "
        "alone has the engine, tells rank 1 before each pass what to compute, in at most "
        f"{largest} bytes here. Logits are equal in {same} of {len(record)} passes."
    )
    note = (
        "Here both still do all the work, which the next lessons divide. Told are ids, positions "
        f"and pages; a page has {PAGE} positions."
    )
    body = f'{table("lanes", head, rows)}<p class="note">{note}</p>'
    return Drawing(body, caption, "What rank 0 tells: " + "; ".join(lines) + ".")


# 75, 76


class Shared(NamedTuple):
    """Half of the first layer on several ranks, at the last position."""

    half: str  # of HALVES
    heads: list[tuple[list[int], list[int]]]  # of each rank: queries, keys
    widths: list[list[int]]  # of each gather: numbers that each rank gives
    sent: list[int]  # of each gather: bytes that a rank sends
    positions: int  # of the text
    outputs: list[tuple[int, float, float]]  # the first one of each rank: which, of it, alone
    same: int  # numbers of all such gathers of the pass with the bits of one process
    total: int


HALVES = {  # of a layer: its stages, each with a gather behind it; which numbers a rank gives
    "attention": (
        ("Each rank&rsquo;s heads attend; several heads share their keys and values", ""),
        ("What each rank computes of the product that joins the heads, o_proj", "outputs"),
    ),
    "MLP": (
        ("What each rank computes of the first products, gate_proj and up_proj", "numbers"),
        ("What each rank computes of the last product, down_proj, from all inputs", "outputs"),
    ),
}


def record_half(half: str, prompt: str) -> Shared:
    ranks = runs(prompt)["gather"]
    hidden, _ = alone(prompt)
    config = recordings.load(NAME).config
    group = config.n_head // config.n_kv_head
    heads = [(list(own), keys_of(own, group)) for own in split(config.n_head, SIZE, 1)]
    gathers = [[each for each in rank if each.kind == "all_gather"] for rank in ranks]
    begin = 2 * list(HALVES).index(half)
    first = list(zip(*gathers))[begin : begin + 2]  # of the first layer, of each rank
    widths = [[each.own.shape[-1] for each in meeting] for meeting in first]
    sent = [meeting[0].sent for meeting in first]
    outputs = []
    for rank, part in enumerate(first[1]):
        number = sum(widths[1][:rank])
        other = hidden[begin + 1][0, -1, number].item()
        outputs.append((number, part.own[0, -1, 0].item(), other))
    pairs = list(zip([each.whole for each in gathers[0]], hidden, strict=True))
    pairs = pairs[begin::4] + pairs[begin + 1 :: 4]
    same = sum((own == other).sum().item() for own, other in pairs)
    positions = first[0][0].own.shape[1]
    total = sum(own.numel() for own, _ in pairs)
    return Shared(half, heads, widths, sent, positions, outputs, same, total)


def draw_columns(record: Shared) -> Drawing:
    size = len(record.heads)

    def whole(words: str, kind: str, tag: str) -> str:
        return f'<tr class="{kind}"><{tag} colspan="{size}">{words}</{tag}></tr>'

    def lanes(cells: list[tuple[list[tuple[float, str]], str]]) -> str:
        shown = ""
        for parts, under in cells:
            bar = "".join(segment(share, kind) for share, kind in parts)
            shown += f'<td><span class="stack">{bar}</span>{under}</td>'
        return f"<tr>{shown}</tr>"

    body = whole("x, the same on each rank", "does", "th") + lanes([([(1, "soft")], "")] * size)
    stages = HALVES[record.half]
    for (title, what), widths, sent in zip(stages, record.widths, record.sent, strict=True):
        total = sum(widths)
        own = []
        for rank, width in enumerate(widths):
            queries, keys = (", ".join(map(str, each)) for each in record.heads[rank])
            under = f"{width} {what}" if what else f"heads {queries}; keys {keys}"
            before = sum(widths[:rank])
            after = total - before - width
            bar = (before, "gap"), (width, COLOURS[rank]), (after, "gap")
            own.append(([(count / total, kind) for count, kind in bar], under))
        many = f"{record.positions} position{'s' * (record.positions > 1)}"
        words = f"exchange (all gather): all get {total} numbers a position, "
        words += f"each rank sends {sent:,} bytes"
        words += f", for {many}, to {size - 1} others"
        words += ", parts filled up to the widest" * (len(set(widths)) > 1)
        body += whole(title, "does", "th") + lanes(own) + whole(words, "meets", "td")
        everything = [(width / total, kind) for width, kind in zip(widths, COLOURS)]
        body += lanes([(everything, "")] * size)
    head = "".join(f"<th>{rank_name(rank)}</th>" for rank in range(size))
    rows = "".join(
        f'<tr><th scope="row"><b class="who tint{rank}">{number}</b></th><td>{signed(here, 9)}</td>'
        f"<td>{signed(alone, 9)}</td></tr>"
        for rank, (number, here, alone) in enumerate(record.outputs)
    )
    names = f"<th>output</th><th>{size} processes</th><th>one process</th>"
    body = panels(
        panel(f"The first layer's {record.half}, from top to bottom", table("ranks", head, body)),
        panel(
            "Outputs, each made on one rank: the first of each",
            table("figures", names, rows),
            f"Of the {record.total:,} numbers that are exchanged there in this pass "
            f"{record.same:,} have the bits of one process. In both torch computes in float32, and "
            "it may round a product of another shape in another way; with products in C in both "
            "all bits are the same.",
        ),
    )
    what, does = {
        "attention": (
            "a layer&rsquo;s attention",
            "each has some of the heads, with their keys and values",
        ),
        "MLP": (
            "the part of a layer that works on each token alone, its MLP",
            "each computes some of its numbers",
        ),
    }[record.half]
    caption = (
        f"{size} processes share {what}: {does}, then all exchange what they computed. The "
        "result is that of one process, with torch up to rounding."
    )
    owned = f"Heads and keys of each rank: {record.heads}. " if record.half == "attention" else ""
    text = (
        f"{owned}Numbers that each rank gives to the exchanges: {record.widths}. Outputs here and "
        f"in one process: {record.outputs}."
    )
    return Drawing(body, caption, text)


# 77


class Vocabulary(NamedTuple):
    own: list[tuple[int, int]]  # of each rank: its first and its last token
    rows: list[tuple[str, int, list[list[float]], list[float]]]  # token, id, of each rank, the sum
    best: list[list[tuple[str, float]]]  # of each rank: its tokens with the largest logits
    chosen: str  # of all of them, on rank 0
    sent: int  # bytes of logits that a rank sends


def record_vocabulary(prompt: str, shown: int = 2) -> Vocabulary:
    ranks = runs(prompt)["gather"]
    ids = recordings.encode(prompt, MOST)
    own = split(recordings.load(NAME).config.vocab_size, SIZE)
    rows = []
    for place, id in enumerate(ids):
        parts = [rank[0].own[0, place, :shown].tolist() for rank in ranks]
        whole = ranks[0][0].whole[0, place, :shown].tolist()
        rows.append((recordings.text_of(id), id, parts, whole))
    best = []
    for part, rank in zip(own, ranks):
        top = rank[-1].own[0, -1].topk(2)
        names = [recordings.text_of(part.start + id) for id in top.indices.tolist()]
        best.append(list(zip(names, top.values.tolist())))
    chosen = recordings.text_of(ranks[0][-1].whole[0, -1].argmax().item())
    return Vocabulary(
        [(part.start, part.stop - 1) for part in own], rows, best, chosen, ranks[1][-1].sent
    )


def draw_vocabulary(record: Vocabulary) -> Drawing:
    def numbers(values: list[float]) -> str:
        return "<br>".join(signed(value, 3) if value else "0" for value in values)

    rows = ""
    for text, id, parts, whole in record.rows:
        owner = next(rank for rank, (_, last) in enumerate(record.own) if id <= last)
        cells = "".join(
            f'<td class="{f"tint{rank}" if rank == owner else "none"}">{numbers(part)}</td>'
            for rank, part in enumerate(parts)
        )
        name = f"{token(text)}<span>{id}</span>"
        rows += (
            f'<tr><th scope="row">{name}</th>{cells}'
            f'<td class="tint{owner}">{numbers(whole)}</td></tr>'
        )
    head = "".join(
        f"<th>{rank_name(rank)}<span>{first}\u2013{last}</span></th>"
        for rank, (first, last) in enumerate(record.own)
    )
    lines = [
        (
            f"{rank_name(rank)} {token(text, 'new' if text == record.chosen else '')}",
            max(logit, 0),
            signed(logit),
            COLOURS[rank],
        )
        for rank, best in enumerate(record.best)
        for text, logit in best
    ]
    last = token(record.rows[-1][0])
    full = " (filled up to the widest)" * (len({end - start for start, end in record.own}) > 1)
    body = panels(
        panel(
            "In: the tokens&rsquo; vectors, rows of the embedding",
            table("adding", f"<th>token</th>{head}<th>sum</th>", rows),
            f"The first {len(record.rows[0][3])} numbers of each vector.",
        ),
        panel(
            f"Out: the logits of the token after {last}",
            bars(lines),
            f"The two largest of each rank. Ranks above 0 send theirs, {record.sent:,} bytes "
            f"each{full}, to rank 0, and to nobody else: it takes {token(record.chosen, 'new')}.",
        ),
    )
    caption = (
        "The vocabulary is split. In: the rank that owns a token gives its vector, the others "
        "zeros, and all get the sum. Out: each rank makes the logits of its own tokens, and rank 0 "
        "gets all."
    )
    text = "; ".join(
        f"token {text!r}, id {id}: {parts}, sum {whole}" for text, id, parts, whole in record.rows
    )
    return Drawing(body, caption, f"{text}. Largest logits of each rank: {record.best}.")


# 78


class Ways(NamedTuple):
    meetings: dict[str, tuple[int, int]]  # of each way: meetings in a layer, bytes a rank sends
    output: int  # of o_proj in the first layer, one that differs if there is one
    parts: list[float]  # of each rank
    whole: float  # their sum, as the ranks made it
    alone: float  # in one process
    differing: int  # outputs of o_proj there that are not those of one process
    outputs: int
    error: float  # the largest difference of logits


def record_ways(prompt: str) -> Ways:
    found = runs(prompt)
    hidden, logits = alone(prompt)
    layers = recordings.load(NAME).config.n_layer
    meetings = {}
    for way in parallel.ranks.WAYS:
        inside = found[way][0][1:-1]  # without the vocabulary's
        count = len(inside) // layers
        meetings[way] = count, sum(each.sent for each in inside[:count])
    meeting = [rank[1] for rank in found["reduce"]]
    whole = meeting[0].whole[0, -1]
    other = hidden[1][0, -1]
    differs = whole != other
    output = int(differs.float().argmax())
    return Ways(
        meetings,
        output,
        [each.own[0, -1, output].item() for each in meeting],
        whole[output].item(),
        other[output].item(),
        int(differs.sum()),
        len(other),
        (found["reduce"][0][-1].whole - logits).abs().max().item(),
    )


def draw_way(way: str) -> str:
    """A product: its inputs above, its weight, and its outputs at the right."""
    side = 105
    third = side / SIZE
    left = 48
    right = left + side + 18
    body = label(0, 15, "inputs") + label(0, 85, "weight") + label(right, 15, "outputs")
    for rank, kind in enumerate(COLOURS[:SIZE]):
        along = third * rank
        body += box(left + along, 4, third, 14, kind)
        if way == "gather":
            body += box(left, 28 + along, side, third, kind)
            body += box(right, 28 + along, 14, third, kind)
        else:
            at = right + 26 * rank
            body += box(left + along, 28, third, side, kind) + box(at, 28, 14, side, kind)
            body += label(at + 20, 85, "+" if rank < SIZE - 1 else "=", "middle")
    if way == "reduce":
        body += box(right + 26 * SIZE, 28, 14, side, "soft-box")
    return svg(270, 140, body)


def plain(small: float) -> str:
    """One digit of a small number, without a power of ten."""
    return f"{Decimal(f'{small:.1g}'):f}"


def draw_ways(record: Ways) -> Drawing:
    said = {
        "gather": (
            "gather: some outputs on each rank",
            "A band of the weight needs all inputs, so there are two exchanges for it: of inputs "
            "before, of outputs after.",
        ),
        "reduce": (
            "reduce: some inputs on each rank",
            "A band of the weight needs the inputs above it, which this rank has made. One "
            "exchange after it: each rank has a part of every output, and they are added up.",
        ),
    }
    shown = []
    for way, (name, words) in said.items():
        count, sent = record.meetings[way]
        note = f"{words} <b>{count} exchanges a layer, {sent:,} bytes sent by each rank.</b>"
        shown.append(panel(name, draw_way(way), note))
    texts = [signed(number, 10) for number in (record.whole, record.alone)]
    marked = differing(texts, texts[1])
    lines = [(rank_name(rank), signed(part, 10)) for rank, part in enumerate(record.parts)]
    lines += [("added up", marked[0]), ("one process", texts[1])]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{number}</td></tr>' for name, number in lines
    )
    worked = panel(
        f"Output {record.output} of o_proj in the first layer, by reduce",
        f'<table class="figures">{rows}</table>',
        f"{record.differing} of {record.outputs} such outputs differ from those of one process; "
        f"logits at the end by up to {plain(record.error)}.",
    )
    (many, _), (few, _) = record.meetings.values()
    caption = (
        "Cut a weight the other way, and a rank needs only the inputs that it made itself: "
        f"{few} exchanges a layer instead of {many}. But sums have another order, so last digits "
        "may differ."
    )
    text = (
        f"Exchanges and bytes in a layer: {record.meetings}. Output {record.output}: parts "
        f"{record.parts}, added up {record.whole!r}, in one process {record.alone!r}."
    )
    return Drawing(panels(*shown, worked), caption, text)


# 79


class Kept(NamedTuple):
    """What a rank keeps of a model's file."""

    rows: dict[str, list[tuple[int, int]]]  # name of a tensor -> ranges of its rows
    size: int  # bytes of all that it keeps


class Loading(NamedTuple):
    tensors: dict[str, tuple[int, int]]  # in their order: name -> rows, bytes in the file
    ranks: list[Kept]
    whole: int  # bytes of the whole model
    block: int  # bytes of the largest block that is read at once


def record_loading(prompt: str) -> Loading:
    """A prompt is the number of processes here."""
    if prompt not in map(str, range(2, len(COLOURS) + 1)):
        allowed = f"here it is a number of processes, 2 to {len(COLOURS)}"
        raise UserError(f"the prompt is {prompt!r}; {allowed}")
    tensors = {}
    blocks = []
    kept = {}
    read = load.read_tensors
    places = shards.places

    def noted_read(*arguments):
        for name, rows, block in read(*arguments):
            stop = rows.start + len(block)
            blocks.append((name, rows.start, block.nbytes))
            tensors[name] = stop, stop * block[0].nbytes
            yield name, rows, block

    def noted_places(rows, block):
        found = places(rows, block)
        name, start, _ = blocks[-1]
        kept.setdefault(name, []).extend((start + own.start, start + own.stop) for _, own in found)
        return found

    found = []
    with (
        mock.patch.object(load, "read_tensors", noted_read),
        mock.patch.object(shards, "places", noted_places),
    ):
        for rank in range(int(prompt)):
            kept = {}
            ranks = SimpleNamespace(rank=rank, size=int(prompt), way="gather")
            model = load_part(STORIES.with_name(NAME), ranks=ranks)
            found.append(Kept(kept, sum(weight.nbytes for weight in model.parameters())))
    whole = sum(weight.nbytes for weight in recordings.load(NAME).parameters())
    return Loading(tensors, found, whole, max(size for *_, size in blocks))


def short_name(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def draw_loading(record: Loading) -> Drawing:
    def megabytes(size: int) -> str:
        return f"{size / 1e6:.1f} MB"

    rows = ""
    for name, (count, size) in record.tensors.items():
        if name.startswith("layers.") and "layers.0." not in name or "norm" in name:
            continue
        lanes = ""
        for rank, kept in enumerate(record.ranks):
            parts = ""
            for start, stop in kept.rows[name]:
                place = f"left:{100 * start / count:.2f}%;width:{100 * (stop - start) / count:.2f}%"
                parts += f'<i class="{COLOURS[rank]}" style="{place}"></i>'
            lanes += f'<span class="strip">{parts}</span>'
        rows += (
            f'<tr><th scope="row"><code>{short_name(name)}</code></th><td>{lanes}</td>'
            f'<td class="value">{size / 1000:,.1f} kB</td></tr>'
        )
    wide = [
        short_name(name)
        for name, (count, _) in record.tensors.items()
        if "layers.0." in name
        and "norm" not in name
        and sum(stop - start for kept in record.ranks for start, stop in kept.rows[name]) > count
    ]
    overlap = (
        f"There are fewer keys than ranks, so some rows of {' and '.join(wide)} are on several. "
        if wide
        else ""
    )
    lines = [("whole model", [(record.whole, "soft")], megabytes(record.whole))]
    for rank, kept in enumerate(record.ranks):
        parts = [(kept.size, COLOURS[rank]), (record.block, "kept")]
        words = f"{megabytes(kept.size)} + {megabytes(record.block)}"
        lines.append((rank_name(rank), parts, words))
    together = sum(kept.size for kept in record.ranks)
    body = panels(
        panel(
            "Embedding and first layer: what each rank keeps",
            f'<table class="rows-kept">{rows}</table>',
            "A lane for each rank, over the rows of a tensor as they lie in the file. "
            f"{overlap}All layers are cut like this one; the weights of norms are whole on each "
            "rank.",
        ),
        panel(
            "In memory, at the most: added up, not measured",
            stacks(lines, record.whole + record.block) + key(kept="the largest block of the file"),
            f"{len(record.tensors)} tensors, read block by block. In the file a number has 2 "
            f"bytes, in memory 4. The parts add up to {megabytes(together)}, because what several "
            "ranks have counts several times.",
        ),
    )
    largest = max(kept.size for kept in record.ranks)
    caption = (
        "Each process reads the file block by block, and keeps its own part of each. So none ever "
        f"holds the whole model, {megabytes(record.whole)}, but at most {megabytes(largest)} and a "
        f"block of {megabytes(record.block)}."
    )
    name, (count, _) = next(iter(record.tensors.items()))
    text = (
        f"Of {name}, {count} rows, the ranks keep {[kept.rows[name] for kept in record.ranks]}; of "
        f"all {record.whole} bytes {[kept.size for kept in record.ranks]}."
    )
    return Drawing(body, caption, text)


# 80


class Sums(NamedTuple):
    largest: list[float]  # of each rank: |x| of the inputs that it has
    maximum: float  # of all of them, as the ranks found it
    output: int  # of o_proj in the first layer
    floats: list[float]  # of each rank: its part of that output
    whole_numbers: list[int]  # the same in int8
    sums: list[tuple[float, int]]  # of these, in each order of ORDERS
    same: dict[str, int]  # dtype -> logits with the bits of one process
    logits: int


ORDERS = (0, 1, 2), (0, 2, 1), (1, 2, 0)


def record_sums(prompt: str) -> Sums:
    found = runs(prompt)
    scales, products = ([rank[at] for rank in found["int8"]] for at in (1, 2))
    parts = torch.stack([rank[1].own[0, -1] for rank in found["reduce"]])  # (ranks, outputs)
    sums = torch.stack([parts[a] + parts[b] + parts[c] for a, b, c in ORDERS])
    spread = (sums.amax(dim=0) - sums.amin(dim=0)) / sums.abs().amax(dim=0).clamp(min=1e-9)
    output = int(spread.argmax())  # where the order matters most
    orders = zip(sums, ORDERS)
    numbers = [each.own[0, -1, output].item() for each in products]
    same = {}
    for name, run, dtype in (("int8", "int8", torch.int8), ("float32", "reduce", torch.float32)):
        logits = alone(prompt, dtype)[1]
        same[name] = int((found[run][0][-1].whole == logits).sum())
    return Sums(
        [each.own[0, -1].item() for each in scales],
        scales[0].whole[0, -1].item(),
        output,
        parts[:, output].tolist(),
        numbers,
        [(row[output].item(), sum(numbers[rank] for rank in order)) for row, order in orders],
        same,
        logits.numel(),
    )


def draw_sums(record: Sums) -> Drawing:
    lines = [
        (rank_name(rank), largest, f"{largest:.4f}", COLOURS[rank], record.maximum)
        for rank, largest in enumerate(record.largest)
    ]
    scale = panel(
        "All use one scale: of the largest |x| among each rank&rsquo;s inputs the maximum (mark)",
        bars(lines),
        f"One maximum, {record.maximum:.4f}, so one scale for all: {record.maximum:.4f} / 127 = "
        f"{record.maximum / 127:.6f}. Each rank rounds its inputs to steps of that size.",
    )
    texts = [signed(number, 10) for number, _ in record.sums]
    marked = differing(texts, texts[0])
    rows = "".join(
        f'<tr><th scope="row">{rank_name(rank)}</th><td>{signed(part, 10)}</td>'
        f"<td>{signed(number, 0)}</td></tr>"
        for rank, (part, number) in enumerate(zip(record.floats, record.whole_numbers))
    )
    for order, shown, (_, number) in zip(ORDERS, marked, record.sums):
        name = " + ".join(map(str, order))
        rows += (
            f'<tr class="sum"><th scope="row">{name}</th><td>{shown}</td>'
            f"<td>{signed(number, 0)}</td></tr>"
        )
    head = "<th></th><th>float32</th><th>int8: whole numbers</th>"
    added = panel(
        f"Whole numbers: output {record.output} of o_proj, added up in three orders of ranks",
        table("figures", head, rows),
        f"In int8 {record.same['int8']:,} of {record.logits:,} logits at the end are those of one "
        f"process, bit for bit; in float32 {record.same['float32']:,} are. All compute with torch "
        "here.",
    )
    count = len(set(texts))
    how = f"{count} different sums" if count > 1 else "one sum here"
    caption = (
        f"Floats are rounded at each addition: adding in three orders gives {how}. Whole numbers "
        "have one sum in any order, so with one scale for all ranks int8 gives what one process "
        "computes."
    )
    text = (
        f"Largest inputs {record.largest}, maximum {record.maximum}. Parts as floats "
        f"{record.floats}, as whole numbers {record.whole_numbers}; sums in three orders "
        f"{record.sums}."
    )
    return Drawing(panels(scale, added), caption, text)


# 81


class Case(NamedTuple):
    """What was left of ranks of which the last one could not go on."""

    passes: list[int]  # that each rank has computed
    late: bool  # whether the others noticed by the limit, and not by a closed connection
    first: bool  # whether the one that failed was the first to say so
    line: str  # what was said; without the number of the rank, if it is one of the others
    codes: list[int]  # of each rank's end
    text: str  # that rank 0 has written


def fail(case: str, directory: Path, prompt: str) -> None:
    """On a rank: write a text, until the last rank fails in its third pass."""
    rank = int(os.environ["RANK"])
    for number, name in ((1, "out"), (2, "err")):
        with open(directory / f"{name}{rank}", "w") as file:
            os.dup2(file.fileno(), number)
    real = engine.cache.pass_logits
    leave = Ranks.__exit__
    computed = []

    def passed(*arguments):
        if rank == SIZE - 1 and len(computed) == 2:
            if case == "memory":
                torch.empty(2**60)
            os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        logits = real(*arguments)
        computed.append(1)
        note(str(len(computed)), "passes")
        return logits

    def left(self, kind, error, trace):
        note(str(error.__context__), "cause")
        return leave(self, kind, error, trace)

    def is_first(self):
        first = count(self)
        note(str(first), "first")
        return first

    def note(words: str, name: str) -> None:
        (directory / f"{name}{rank}").write_text(words, "utf-8")

    count = Ranks.is_first
    with contextlib.ExitStack() as held:
        if case == "still":
            held.enter_context(mock.patch.object(parallel.ranks, "LIMIT", LIMIT))
        held.enter_context(mock.patch.multiple(Ranks, __exit__=left, is_first=is_first))
        held.enter_context(mock.patch.object(engine.cache, "pass_logits", passed))
        options = ["--device", "cpu", "--backend", "torch", "--ignore-eos", "--max-rows", "1"]
        model = ["--model", str(STORIES.with_name(NAME)), f"--prompt={prompt}"]
        infer_engine.main([*model, *options, "--max-new-tokens", "9"])


def break_off(case: str, prompt: str, directory: Path) -> Callable[[], Case]:
    """Start ranks of which the last one fails; what is returned waits for their end."""
    directory = directory / case
    directory.mkdir()
    started = [process for process, _ in processes.start(SIZE, fail, case, directory, prompt)]

    def end() -> Case:
        for process in started[: SIZE - (case == "still")]:
            process.join()
        started[-1].kill()  # as torchrun does with one that stands still
        started[-1].join()

        def read(what: str) -> list[str]:
            files = [directory / f"{what}{rank}" for rank in range(SIZE)]
            return [file.read_text("utf-8") if file.exists() else "" for file in files]

        first = read("first").index("True")
        line = "".join(read("err")).partition("error: ")[2].strip()
        if first < SIZE - 1:  # which of them that is, is chance
            line = line.removeprefix(f"rank {first}: ")
        return Case(
            [int(count) for count in read("passes")],
            any("imed out" in cause or "imeout" in cause for cause in read("cause")[:-1]),
            first == SIZE - 1,
            line,
            [process.exitcode for process in started],
            read("out")[0].strip("\n"),
        )

    return end


def record_failures(prompt: str) -> dict[str, Case]:
    found = runs(prompt)
    return {name: found[name] for name in ("killed", "memory", "still")}


def draw_failures(record: dict[str, Case]) -> Drawing:
    last = SIZE - 1
    limit = f"{parallel.ranks.LIMIT.seconds} s, {LIMIT.seconds} s in this run"
    titles = {
        "killed": f"Rank {last} is killed",
        "memory": f"Rank {last} has no memory",
        "still": f"Rank {last} stands still",
    }
    shown = []
    lines = []
    for name, case in record.items():
        notices = "no answer until the limit" if case.late else "a connection is closed"
        says = "both are silent" if case.first else "one says why, the other is silent"
        rows = ""
        for rank, (count, code) in enumerate(zip(case.passes, case.codes, strict=True)):
            cells = '<td class="computed"></td>' * count
            if rank == last:
                said = "says why" if case.first else ""
                cells += f'<td class="gone">\u2715</td><td>{said}</td>'
            else:
                cells += '<td class="wait"></td>'
            if rank == 0:
                cells += f'<td rowspan="{last}">{notices}: {says}</td>'
            how = f"{code}" if code >= 0 else "killed"
            rows += f'<tr><th scope="row">{rank_name(rank)}</th>{cells}<td>{how}</td></tr>'
        head = f'<th></th><th colspan="{case.passes[0] + 1}">passes</th><th>then</th><th>exit</th>'
        note = f"<code>error: {escape(case.line)}</code>"
        shown.append(panel(titles[name], table("ends", head, rows), note))
        lines.append(
            f"{titles[name]} after {case.passes[last]} passes: of the others each notices that "
            f"{notices}; said once: {case.line!r}; ends {case.codes}"
        )
    legend = key(computed="a pass that all have computed", wait="waits for others", gone="fails")
    text = escape(record["killed"].text)
    caption = (
        "Ranks wait for each other: if one cannot go on, all end. The others notice by a closed "
        "connection or a limit of time, and one line says why."
    )
    written = (
        f'<p class="note">The limit is {limit}. One exception: if rank 0&rsquo;s machine vanishes '
        "without closing its connections while nothing is asked of a server, the others wait on. "
        "A rank that stands still is killed at the end, by "
        f"this picture as by torchrun. The text that breaks off: <q>{text}</q></p>"
    )
    return Drawing(panels(*shown) + legend + written, caption, ". ".join(lines) + ".")


PICTURES = {  # slug of a lesson -> its picture
    "leader": Picture(PROMPT, record_leader, draw_leader),
    "tensor-parallel": Picture(PROMPT, functools.partial(record_half, "MLP"), draw_columns),
    "split-heads": Picture(PROMPT, functools.partial(record_half, "attention"), draw_columns),
    "split-vocabulary": Picture(PROMPT, record_vocabulary, draw_vocabulary),
    "row-parallel": Picture(PROMPT, record_ways, draw_ways),
    "shard-loading": Picture(
        str(SIZE), record_loading, draw_loading, own="The same for another number of processes"
    ),
    "exact-int8-sums": Picture(PROMPT, record_sums, draw_sums),
    "rank-failures": Picture(PROMPT, record_failures, draw_failures),
}

"""Pages of the KV cache, and the token budget of a step."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import cache
from engine.cache import PagedCache
from engine.engine import Engine
from engine.pages import page_count
from pictures import runs, scene
from pictures.runs import AddedRequest, Frame, Trace, find_request, num_scheduled_tokens
from pictures.scene import times
from sampling import SamplingParams

PAGE = 4  # positions per page, small enough for several pages in a picture
SMALL = f"A page has {PAGE} positions here, so that several fit on the screen; the default is 16."


def sampled_params(length: int, seed: int) -> SamplingParams:
    return SamplingParams(length, ignore_eos=True, temperature=1.0, seed=seed)


def owners_of(frame: Frame) -> dict[int, list[int]]:
    """Return page -> numbers of the running requests whose page tables contain it."""
    owners = {}
    for state in frame["running"]:
        for page in state["pages"]:
            owners.setdefault(page, []).append(state["number"])
    return owners


def pool(run: Trace, frame: Frame, last: int) -> scene.Cells:
    """Draw the first pages of the pool with their tokens. last: number of the last page."""
    texts = run.token_texts()
    owners = owners_of(frame)
    held = {}
    for state in frame["running"]:
        computed = texts[state["number"] - 1][: state["computed"]]
        for place, page in enumerate(state["pages"]):
            held[page] = computed[PAGE * place : PAGE * (place + 1)]
    rows = []
    for page in range(last + 1):
        numbers = owners.get(page, [])
        kind, value = "idle", "free"
        if len(numbers) == 1:
            kind, value = f"owner{numbers[0]}", f"request {numbers[0]}"
        elif numbers:
            kind, value = "kept", f"{len(numbers)} requests"
        cells = [scene.Cell(kind, text.strip() or text) for text in held.get(page, [])]
        cells += [scene.Cell(kind)] * (PAGE - len(cells))
        rows.append(scene.Row(f"page {page}", cells, value))
    return scene.Cells(rows)


def page_tables(frame: Frame) -> scene.Cells:
    shared = {page for page, numbers in owners_of(frame).items() if numbers[1:]}
    rows = []
    for state in frame["running"]:
        owner_kind = f"owner{state['number']}"
        cells = [
            scene.Cell("kept" if page in shared else owner_kind, str(page))
            for page in state["pages"]
        ]
        rows.append(scene.Row(f"request {state['number']}", cells))
    return scene.Cells(rows)


class Pool(NamedTuple):
    run: Trace
    at: int  # index of the frame to draw


def record_pool(prompt: str) -> Pool:
    """Record four requests with max_num_seqs 3; the last one starts when the first has finished."""
    ids = runs.encode(prompt, 6)
    lengths = (4, 14, 12, 9)
    num_pages = 2 + sum(page_count(len(ids) + length - 1, PAGE) for length in lengths[1:])
    engine = Engine(runs.load(), max_num_seqs=3, num_pages=num_pages, page_size=PAGE)
    arrivals = [  # each with its own cache_salt, so that none shares pages
        AddedRequest(0, ids, sampled_params(length, seed), str(seed))
        for seed, length in enumerate(lengths)
    ]
    run = runs.run_engine(engine, arrivals, "pages")
    last = [find_request(frame, 4) for frame in run.frames]
    return Pool(run, next(at for at, state in enumerate(last) if state and state["computed"] >= 7))


def draw_pool(record: Pool) -> scene.Scene:
    run, at = record
    frame = run.frames[at]
    state = frame["running"][-1]
    place = len(state["pages"]) * PAGE - 3
    entry, offset = divmod(place, PAGE)
    count = run.setup["num_pages"]
    free = count - len(owners_of(frame))
    return scene.Scene(
        "The keys and values of all requests lie in one pool of pages. A request takes any free "
        "page, and its page table lists its pages in order.",
        scene.Panel(
            f"The pool after step {at + 1}: {free} of {count} pages free",
            pool(run, frame, count - 1),
            SMALL,
            {"idle": "free"},
        ),
        scene.Panel(
            "Page tables",
            page_tables(frame),
            f"Position {place} of request {state['number']} is in entry {entry} of its page "
            f"table: page {state['pages'][entry]}, offset {offset}.",
        ),
        scene.Panel("The engine, step by step", runs.player(run, at)),
    )


def record_sharing(prompt: str) -> Pool:
    """Record a request, and after its prefill three more with the same prompt."""
    ids = runs.encode(prompt, 60)
    num_pages = 4 * page_count(len(ids) + 9, PAGE)
    engine = Engine(runs.load(), max_num_seqs=4, num_pages=num_pages, page_size=PAGE)
    arrivals = [AddedRequest(min(seed, 1), ids, sampled_params(9, seed)) for seed in range(4)]
    run = runs.run_engine(engine, arrivals, "pages", "sharing")
    saved = []
    for frame in run.frames:
        owners = owners_of(frame)
        saved.append((sum(map(len, owners.values())) - len(owners), len(owners)))
    return Pool(run, max(range(len(saved)), key=lambda at: (saved[at], at)))


def draw_sharing(record: Pool) -> scene.Scene:
    run, at = record
    frame = run.frames[at]
    owners = owners_of(frame)
    entries = sum(map(len, owners.values()))
    shared = sum(len(numbers) > 1 for numbers in owners.values())
    length = run.requests[0].prompt_length
    found = run.frames[-1]["shared"] // 3
    caption = (
        "Prefix caching: requests with a common prefix share its full pages. "
        f"{len(frame['running'])} requests need {len(owners)} pages instead of {entries}."
        if shared
        else "This prompt does not fill a page, so no page is shared."
    )
    return scene.Scene(
        caption,
        scene.Panel(
            f"Pages after step {at + 1}: {shared} shared, {len(owners) - shared} not",
            pool(run, frame, max(owners)),
            SMALL,
            {"kept": "shared", "idle": "free"},
        ),
        scene.Panel(
            "Page tables",
            page_tables(frame),
            f"Requests 2 to 4 each found {found} of {times(length, 'prompt token')} in the cache "
            f"and computed {length - found}. The last token of a prompt is always computed, "
            "because its logits are needed. A page whose contents become equal to a cached page "
            "is replaced by it.",
            {"kept": "a shared page"},
        ),
        scene.Panel("The engine, step by step", runs.player(run, at)),
    )


def record_preemption(prompt: str) -> Trace:
    """Record four requests that need more pages than the pool has."""
    ids = runs.encode(prompt, 12)
    engine = Engine(runs.load(), max_num_seqs=4, num_pages=10, page_size=PAGE)
    arrivals = [  # each with its own cache_salt, so that none shares pages
        AddedRequest(after, ids, sampled_params(length, seed), str(seed))
        for seed, (after, length) in enumerate(((0, 16), (0, 14), (3, 13), (5, 12)))
    ]
    return runs.run_engine(engine, arrivals, "pages", "preemption", "sharing")


def draw_preemption(record: Trace) -> scene.Scene:
    frames = record.frames
    pages = [[scene.Cell()] * len(frames) for _ in range(record.setup["num_pages"])]
    for at, frame in enumerate(frames):
        for page, (number,) in owners_of(frame).items():
            pages[page][at] = scene.Cell(f"owner{number}")
    lanes = []
    recomputed = 0  # positions computed again
    for number, request in enumerate(record.requests, 1):
        spans = []
        done = 0  # positions of the request computed so far
        for at, frame in enumerate(frames):
            state = find_request(frame, number)
            work = num_scheduled_tokens(frame, number)
            if number in frame["preempted"]:
                kind = "bad"
            elif work:
                start = state["computed"] - work if state in frame["running"] else done
                kind = "second" if start < done else "first"
                recomputed += done - start
                done = start + work
            elif state in frame["waiting"]:
                kind = "idle"
            else:
                continue
            if spans and spans[-1].kind == kind:
                spans[-1] = spans[-1]._replace(end=at + 1)
            else:
                spans.append(scene.Span(at, at + 1, kind))
        lanes.append(scene.Lane(f"request {number}", spans, times(len(request.output), "token")))
    count = frames[-1]["preemptions"]
    caption = (
        "When no page is free, the youngest request is preempted: its pages are freed and it is "
        f"recomputed later. Here that happens {times(count, 'time')}, and "
        f"{times(recomputed, 'position')} are computed twice."
        if count
        else f"The {len(pages)} pages are enough for these requests: none is preempted."
    )
    first = next((at for at, frame in enumerate(frames) if frame["preempted"]), 0)
    return scene.Scene(
        caption,
        scene.Panel(
            f"{len(pages)} pages over {len(frames)} steps",
            scene.Cells([scene.Row(f"page {page}", cells) for page, cells in enumerate(pages)]),
            f"A column is a step. {SMALL}",
            {f"owner{number}": f"request {number}" for number in range(1, len(lanes) + 1)},
        ),
        scene.Panel(
            "Requests",
            scene.Lanes(lanes, scene.Axis("step")),
            "A preempted request waits until enough pages for all its tokens are free. It "
            "reuses its old pages that are still cached. Requests behind it in the queue do not "
            "overtake it.",
            {
                "first": "computes new positions",
                "bad": "preempted",
                "idle": "waits",
                "second": "recomputes",
            },
        ),
        scene.Panel("The engine, step by step", runs.player(record, first)),
    )


SHORT = (2, 3, 7, 9)  # lengths of the other sequences


def record_groups(prompt: str) -> Record:
    """Record the page groups that a decode step gathers for attention."""
    lengths = [len(runs.encode(prompt, 120)), *SHORT]
    counts = [page_count(length, PAGE) for length in lengths]
    paged = PagedCache(runs.load(), sum(counts), PAGE)
    free = iter(range(sum(counts)))
    spans = [
        cache.Span([next(free) for _ in range(count)], length - 1, [0])
        for count, length in zip(counts, lengths)
    ]
    _, _, ends = paged.prepare(spans)
    groups = []
    for part, kv_views in paged.batches:
        ((_, mask),) = kv_views.values()  # all layers have the same mask
        members = [text for text, end in enumerate(ends) if part.start < end <= part.stop]
        groups.append((mask.shape[-1] // PAGE, members))
    return Record(
        lengths=lengths,  # length of each sequence
        groups=groups,  # (pages read per row, sequences)
    )


def draw_groups(record: Record) -> scene.Scene:
    counts = [page_count(length, PAGE) for length in record.lengths]
    one_group = [(max(counts), list(range(len(counts))))]
    key = {"first": "a page of the sequence", "idle": "padding: its last page repeated"}
    parts = []
    sums = []
    for title, groups, note in (
        ("One group", one_group, SMALL),
        (
            "Groups",
            record.groups,
            "The groups have sequences of 1 page, 2 to 3, 4 to 7 and 8 to 15 pages.",
        ),
    ):
        rows = []
        for width, members in sorted(groups, reverse=True):
            for text in sorted(members, key=lambda text: -counts[text]):
                cells = [scene.Cell("first")] * counts[text] + [scene.Cell("idle")] * (
                    width - counts[text]
                )
                cells += [scene.Cell()] * (max(counts) - width)
                rows.append(scene.Row(f"sequence {text + 1}", cells, f"reads {width}"))
        sums.append(sum(width * len(members) for width, members in groups))
        parts.append(scene.Panel(f"{title}: {sums[-1]} pages read", scene.Cells(rows), note, key))
    return scene.Scene(
        f"One batched attention call pads every sequence to the longest one and reads {sums[0]} "
        f"pages here. One call per group of similar lengths reads {sums[1]}. The sequences have "
        f"{times(sum(counts), 'page')}.",
        *parts,
    )


OTHER_PROMPTS = ("Lily", "The dog")
ARRIVAL_STEP = 2  # step at which the long prompt arrives


def record_budgets(prompt: str, budgets: tuple[int, int] = (512, 8)) -> Record:
    """Record a long prompt that arrives while two requests decode, under two token budgets."""
    params = SamplingParams(12, ignore_eos=True)
    arrivals = [AddedRequest(0, runs.encode(text, 20), params) for text in OTHER_PROMPTS]
    arrivals.append(AddedRequest(ARRIVAL_STEP, runs.encode(prompt, 200), params))
    traces = []
    first = []
    for budget in budgets:
        engine = Engine(runs.load(), max_num_seqs=3, num_pages=18, max_num_batched_tokens=budget)
        run = runs.run_engine(engine, arrivals, "pages")
        traces.append(run)
        rows = [find_request(frame, 3) for frame in run.frames]
        first.append(
            next(
                n for n, state in enumerate(rows, 1) if state and state["tokens"] > state["prompt"]
            )
        )
    return Record(
        budgets=budgets,
        runs=traces,
        first=first,  # step that samples the long prompt's first token, from 1
    )


def draw_budgets(record: Record) -> scene.Scene:
    parts = []
    most = []
    for budget, run, first in zip(record.budgets, record.runs, record.first):
        bars = []
        for step, frame in enumerate(run.frames, 1):
            shares = [
                (num_scheduled_tokens(frame, number), f"owner{number}") for number in (1, 2, 3)
            ]
            total = sum(share for share, _ in shares)
            value = f"{total}, first token" if step == first else str(total)
            bars.append(scene.Bar(f"step {step}", shares, value))
        most.append(max(num_scheduled_tokens(frame, 0) for frame in run.frames))
        title = f"Budget {budget}: {len(run.frames)} steps, at most {times(most[-1], 'token')}"
        key = {"owner1": "request 1", "owner2": "request 2", "owner3": "request 3, a long prompt"}
        parts.append(scene.Panel(title, scene.Bars(bars, max(most)), key=key))
    run = record.runs[1]
    budget = record.budgets[1]
    shown = min(4, len(run.frames) - 1)
    parts.append(scene.Panel(f"Budget {budget}, step by step", runs.player(run, shown)))
    early, late = record.first
    price = f" In return, its first token comes in step {late} instead of {early}."
    return scene.Scene(
        f"A long prompt arrives while two requests decode. A budget of {budget} tokens a step "
        f"splits its prefill into chunks: no step computes more than {most[1]} tokens instead of "
        f"{most[0]}, so all steps stay short.{price * (late > early)}",
        *parts,
    )


PICTURES = {
    "paged-cache": scene.Picture("Lily", record_pool, draw_pool),
    "page-groups": scene.Picture(runs.STORY, record_groups, draw_groups),
    "preemption": scene.Picture("Lily", record_preemption, draw_preemption),
    "prefix-sharing": scene.Picture(
        "Once upon a time, there was a little girl named Lily", record_sharing, draw_sharing
    ),
    "chunked-prefill": scene.Picture(runs.STORY, record_budgets, draw_budgets),
}

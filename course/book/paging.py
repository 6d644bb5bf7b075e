"""Pictures of lessons 40 to 42: pages that are read together, taken back, and shared."""

from typing import NamedTuple

from book import recordings
from book.draw import Drawing, Picture, escape, key, panel, panels, rows_of, squares
from book.playing import PAGE, SMALL_PAGES, Arrival, Run, play, player, row_of, work_of
from engine.engine import Engine
from engine.pages import page_count
from sampling import SamplingParams


class Gather(NamedTuple):
    """What a step gathers for attention."""

    lengths: list[int]  # positions of each text
    groups: list[tuple[int, list[int]]]  # pages that each row of a group reads; which texts


SHORT = ("Lily", "The dog", "Tom had a big red ball and", "One day, a girl went to the")


def record_gather(prompt: str) -> Gather:
    """The second step of five texts: each has one new token."""
    ids = recordings.encode(prompt, 120)
    engine = Engine(recordings.load(), max_rows=5, page_size=PAGE)
    params = SamplingParams(3, ignore_eos=True)
    prompts = [ids] + [recordings.encode(text, 20) for text in SHORT]
    requests = [engine.add(ids, params) for ids in prompts]
    engine.step()
    engine.step()
    heads = engine.cache.storage.shape[3]
    tables = [engine.cache.storage.new_tensor(request.pages).int() for request in requests]
    groups = []
    for _, units, mask in engine.cache.groups:
        pages = units.view(len(mask), heads, -1)[:, 0] // heads  # (texts, pages)
        members = [
            next(index for index, table in enumerate(tables) if table[0] == row[0]) for row in pages
        ]
        groups.append((pages.shape[1], members))
    return Gather([request.computed for request in requests], groups)


def draw_gather(record: Gather) -> Drawing:
    count = len(record.lengths)
    own = [page_count(length, PAGE) for length in record.lengths]

    size = 16 if max(own) <= 14 else 9

    def shown(groups: list[tuple[int, list[int]]]) -> str:
        body = ""
        for width, members in sorted(groups, reverse=True):
            rows = "".join(
                f'<tr><th scope="row">text {text + 1}</th><td class="pages">'
                f"{squares(['first'] * own[text] + ['waste'] * (width - own[text]), size)}</td>"
                f'<td class="value">{record.lengths[text]} positions</td></tr>'
                for text in sorted(members, key=lambda text: -own[text])
            )
            body += f'<table class="gather">{rows}</table>'
        return body

    ways = together_and(record)
    sums = [sum(width * len(members) for width, members in groups) for groups in ways]
    needed = sum(own)
    body = panels(
        panel(f"Lesson 39: all as wide as the longest, {sums[0]} pages", shown(ways[0])),
        panel(f"In groups: {sums[1]} pages", shown(ways[1])),
    ) + key(first="a page of the text", waste="its last page once more, so that the row is full")
    body += (
        '<p class="note">What a step copies and reads, in each layer. Texts of 1 page are a group, '
        f"those of 2 to 3, of 4 to 7, of 8 to 15, and so on. {SMALL_PAGES}</p>"
    )
    caption = (
        "Attention to several texts at once reads as many pages of each as the longest has: "
        f"{sums[0]} for these {count}. In groups of similar length only {sums[1]}, and these texts "
        f"have {needed}."
    )
    text = (
        f"Rows of squares for {count} texts of {own} pages. Side by side as one table they take "
        f"{sums[0]} pages, {sums[0] - needed} of them repeated; in {len(record.groups)} groups "
        f"{sums[1]}, {sums[1] - needed} of them repeated."
    )
    return Drawing(body, caption, text)


def together_and(record: Gather) -> list[list[tuple[int, list[int]]]]:
    """All texts as one group, and the groups."""
    widest = max(page_count(length, PAGE) for length in record.lengths)
    return [[(widest, list(range(len(record.lengths))))], record.groups]


def record_preemption(prompt: str) -> Run:
    """Four texts that need more pages than there are."""
    ids = recordings.encode(prompt, 12)
    engine = Engine(recordings.load(), max_rows=4, num_pages=10, page_size=PAGE)
    engine.scheduler.pool.publish = lambda *_: None  # nothing is found again before lesson 42
    arrivals = [
        Arrival(after, ids, SamplingParams(length, True, temperature=1.0, seed=seed))
        for seed, (after, length) in enumerate(((0, 16), (0, 14), (3, 13), (5, 12)))
    ]
    return play(engine, arrivals, "pages", "preemption")


def draw_preemption(record: Run) -> Drawing:
    total = record.setup["num_pages"]
    numbers = range(1, len(record.requests) + 1)
    frames = record.frames
    columns = ""
    for frame in frames:
        parts = "".join(
            f'<i class="owner{row["number"]}" style="height:{100 * len(row["pages"]) / total:g}%">'
            "</i>"
            for row in sorted(frame["running"], key=lambda row: -row["number"])
        )
        columns += f"<span>{parts}</span>"
    tracks = f'<b>pages</b><div class="levels">{columns}</div>'
    for number in numbers:
        cells = "".join(step_of(frame, number) for frame in frames)
        tracks += f'<b class="owner{number}">{number}</b><div class="steps">{cells}</div>'
    computed = frames[-1]["positions"]
    least = sum(len(request.tokens) - 1 for request in record.requests)
    count = frames[-1]["preemptions"]
    steps = (
        f"Steps 1 to {len(frames)}. A column is the pages that texts have when a step is over; the "
        f"line above is the end of the pool, {total} pages. A &times; is a step that needed more "
        "than were free: before it was computed, the text gave back all of its own. To begin again "
        "it needs pages for all of its text at once, and nobody overtakes it."
    )
    legend = (
        '<ul class="key"><li><i class="one"></i>the newest token computed</li>'
        '<li><i class="many"></i>and so many positions before it: a prompt, or again</li>'
        '<li><b class="lost">&times;</b>preempted: gives its pages back</li>'
        '<li><i class="idle"></i>waits</li></ul>'
        f'<p class="note">{SMALL_PAGES}</p>'
    )
    body = f'<div class="tracks">{tracks}<b></b><p>{steps}</p></div>{legend}'
    if count:
        caption = (
            "When too few pages are free, the youngest text gives its own back, and is computed "
            f"once more later: {computed - least} positions more than the {least} needed."
        )
    else:
        caption = f"The {total} pages are enough for these texts: nobody is preempted."
    text = (
        f"The pages of {len(numbers)} texts in {len(frames)} steps, one on the other, up to a "
        f"limit of {total}, and below what each step computed of each text: {computed} positions, "
        f"with {count} preemptions."
    )
    first = next((index for index, frame in enumerate(frames) if frame["preempted"]), 0)
    return Drawing(body, caption, text, player(record, first))


def step_of(frame: dict, number: int) -> str:
    """What a step computed of a text, as a bar: its newest token, and how many before that."""
    if number in frame["preempted"]:
        return '<i class="lost">&times;</i>'
    row = row_of(frame, number)
    work = work_of(frame, number)
    if not work:
        return '<i class="idle"></i>' if row else "<i></i>"
    if work == 1:
        return f'<i class="one owner{number}"></i>'
    return f'<i class="many owner{number}">{work - 1}</i>'


def record_sharing(prompt: str) -> Run:
    """A text, and when its prompt is computed three more that begin with the same."""
    ids = recordings.encode(prompt, 60)
    num_pages = 4 * page_count(len(ids) + 9, PAGE)
    engine = Engine(recordings.load(), max_rows=4, page_size=PAGE, num_pages=num_pages)
    arrivals = [
        Arrival(min(seed, 1), ids, SamplingParams(9, True, temperature=1.0, seed=seed))
        for seed in range(4)
    ]
    return play(engine, arrivals, "pages", "sharing")


def draw_sharing(record: Run) -> Drawing:
    """The pages when most are shared, as a tree: what several have stands once."""
    at = max(range(len(record.frames)), key=lambda index: (count_tables(record, index), index))
    frame = record.frames[at]
    owners = owners_of(frame)
    texts = record.texts()

    def box(row: dict, place: int) -> str:
        held = texts[row["number"] - 1][: row["computed"]][PAGE * place : PAGE * (place + 1)]
        words = "".join(f"<li>{escape(text)}</li>" for text in held)
        words += "<li>&nbsp;</li>" * (PAGE - len(held))
        page = row["pages"][place]
        of = owners[page]
        kind = "common" if len(of) > 1 else f"owner{of[0]}"
        chips = "".join(f'<span class="owner{number}">{number}</span>' for number in of[1:] and of)
        return f'<li class="{kind}"><b>page {page}</b> {chips}<ul>{words}</ul></li>'

    boxes = {}
    for row in frame["running"]:
        for place, page in enumerate(row["pages"]):
            boxes.setdefault(page, box(row, place))
    tables = rows_of(
        (
            f'<b class="owner{row["number"]}">{row["number"]}</b>',
            " ".join(
                f"<code>{f'<b>{page}</b>' if len(owners[page]) > 1 else page}</code>"
                for page in row["pages"]
            ),
            "",
        )
        for row in frame["running"]
    )
    last = record.frames[-1]
    entries = sum(map(len, owners.values()))
    shared = [page for page, of in owners.items() if len(of) > 1]
    if shared:
        caption = (
            f"{len(frame['running'])} texts that begin alike, in {len(owners)} pages instead of "
            f"{entries}: what they have in common is there once."
        )
    else:
        caption = "These texts have no whole page in common, so each has its own."
    later = len(record.requests) - 1
    length = record.requests[0].prompt_length
    found = last["shared"] // later
    sums = (
        f"Each of the {later} later prompts, of {length} tokens, found {found // PAGE} pages: "
        f"{later} &times; {found} = {last['shared']} positions. The other {length - found} tokens "
        "it computed: the last one always is, for its logits (the scores of what may follow), and "
        "with it what is on its page. Where that page is full and equals one that is there, one of "
        "both is kept, and shared too."
    )

    def pool(title: str, pages: list[int]) -> str:
        shown = "".join(boxes[page] for page in pages)
        body = f'<ol class="pool">{shown}</ol>'
        return panel(f"{title}: {len(pages)}", body) if pages else ""

    others = [page for page in boxes if page not in shared]
    body = panels(
        pool("Pages of several texts", shared),
        pool("Pages of one text", others),
        panel("Tables", tables),
    )
    body += f'<p class="note">{sums} {SMALL_PAGES}</p>'
    text = (
        f"{len(owners)} pages with their tokens: {len(shared)} in the tables of several texts, the "
        f"others of one. {last['shared']} positions were found, {last['positions']} computed."
    )
    return Drawing(body, caption, text, player(record, at))


def owners_of(frame: dict) -> dict[int, list[int]]:
    """Page -> numbers of the requests that have it in their tables."""
    owners = {}
    for row in frame["running"]:
        for page in row["pages"]:
            owners.setdefault(page, []).append(row["number"])
    return owners


def count_tables(record: Run, index: int) -> int:
    """Entries of tables beyond one a page."""
    owners = owners_of(record.frames[index])
    return sum(map(len, owners.values())) - len(owners)


PICTURES = {  # slug of a lesson -> its picture
    "page-groups": Picture(recordings.STORY, record_gather, draw_gather),
    "preemption": Picture("Lily", record_preemption, draw_preemption),
    "prefix-sharing": Picture(
        "Once upon a time, there was a little girl named Lily", record_sharing, draw_sharing
    ),
}

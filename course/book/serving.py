"""Pictures of lessons 34, 38, 39 and 43: a message as ids, and many texts in one engine."""

from typing import NamedTuple
from unittest import mock

from book import recordings
from book.draw import Drawing, Picture, escape, key, panel, panels, rows_of, stacks, token
from book.playing import PAGE, SMALL_PAGES, Arrival, Run, play, player, row_of, work_of
from command_line import STORIES
from engine.engine import Engine
from engine.request import Request
from engine.scheduler import Scheduler
from errors import UserError
from loading import chat
from loading.tokenizer import load_encoding
from sampling import SamplingParams


class Boxes(NamedTuple):
    """A message on its way to ids."""

    message: str
    hidden: str  # with stand-ins for what control tokens begin and end with
    rendered: str  # by the template
    tokens: list[tuple[str, bool]]  # text of each, and whether it is a control token
    naive: list[tuple[str, bool]]  # of the template's text, encoded with all control tokens


def record_boxes(prompt: str) -> Boxes:
    name = STORIES.with_name("stories-llama")
    encoding = load_encoding(name, recordings.load().config.vocab_size)
    template = chat.Chat(name)
    said = [{"role": "user", "content": prompt}]
    if len(prompt) > 60:
        raise UserError(f"the prompt has {len(prompt)} characters; this picture shows 60")
    contents = []
    texts = []
    translated = chat.translated
    render = template.render

    def noted(message, table):
        contents.append(translated(message, table)["content"])
        return translated(message, table)

    def noted_render(messages):
        texts.append(render(messages))
        return texts[-1]

    with (
        mock.patch.object(chat, "translated", noted),
        mock.patch.object(template, "render", noted_render),
    ):
        ids = template.encode(said, encoding)
    control = {encoding.encode_single_token(text) for text in encoding.special_tokens_set}
    naive = encoding.encode(template.render(said), allowed_special="all")
    both = ([(encoding.decode([id]), id in control) for id in found] for found in (ids, naive))
    return Boxes(prompt, contents[0], texts[0], *both)


def draw_boxes(record: Boxes) -> Drawing:
    def shown(text: str) -> str:
        """With a sign for each character that no font has."""
        letters = (
            '<b class="stand-in">?</b>' if ord(letter) > 0xFFFF else escape(letter)
            for letter in text.replace("\n", "\\n")
        )
        return f'<code class="text-box">{"".join(letters)}</code>'

    def ids(tokens: list[tuple[str, bool]]) -> str:
        chips = " ".join(token(text, "out" if control else "") for text, control in tokens)
        return f'<p class="draws">{chips}</p>'

    ours, theirs = (sum(control for _, control in each) for each in (record.tokens, record.naive))
    body = panels(
        panel("1. The message of a user", shown(record.message)),
        panel("2. With stand-ins", shown(record.hidden), "A ? is a character that nobody uses."),
        panel(
            "3. What the template writes",
            shown(record.rendered),
            "A template brings messages into the form that the model was trained on.",
        ),
        panel("4. Split, exchanged back, encoded", ids(record.tokens), "Red: control tokens."),
        panel("The same without stand-ins", ids(record.naive), "What the model would read."),
    )
    caption = (
        "What a user types never becomes a control token, such as the end of a text: here there is "
        f"{ours}, the template's own. Encoded as one text, the conversation would have {theirs}."
    )
    text = (
        f"Five boxes from the message {record.message!r} to {len(record.tokens)} tokens, of which "
        f"{ours} are control tokens; without stand-ins there would be {theirs}."
    )
    return Drawing(body, caption, text)


NUM_PAGES = 15  # as many as these texts may need


class Pool(NamedTuple):
    """A pool of pages in the middle of a run."""

    size: int  # of a page
    pages: list[tuple[int | None, list[str]]]  # the request that has it, and its tokens
    tables: dict[int, list[int]]  # running request: its pages
    texts: list[str]
    run: Run
    at: int  # the frame that is drawn


def reserve(scheduler: Scheduler) -> None:
    """Give a text at its beginning all pages that it may need, and keep none, as lesson 39 does."""
    pool = scheduler.pool
    shrink = pool.shrink
    pool.publish = lambda *_: None  # nothing is found again before lesson 42
    pool.shrink = lambda pages, length: length or shrink(pages, 0)  # pages are full before they go

    def admit(request: Request) -> bool:
        longest = len(request.tokens) + request.params.max_new_tokens - 1
        return pool.grow(request.pages, longest)

    scheduler.admit = admit


def record_pool(prompt: str) -> Pool:
    """Four texts in three rows: when the last one runs, the first has left."""
    ids = recordings.encode(prompt, 6)
    engine = Engine(recordings.load(), max_rows=3, num_pages=NUM_PAGES, page_size=PAGE)
    reserve(engine.scheduler)
    arrivals = [
        Arrival(0, ids, SamplingParams(length, True, temperature=1.0, seed=seed))
        for seed, length in enumerate((4, 16, 14, 9))
    ]
    run = play(engine, arrivals, "pages")
    last = [row_of(frame, 4) for frame in run.frames]
    at = next(index for index, row in enumerate(last) if row and row["computed"] >= 7)
    owned = [(None, [])] * NUM_PAGES
    texts = run.texts()
    running = {}
    for row in run.frames[at]["running"]:
        number = row["number"] - 1
        running[number] = row["pages"]
        held = texts[number][: row["computed"]]
        for place, page in enumerate(row["pages"]):
            owned[page] = (number, held[PAGE * place : PAGE * (place + 1)])
    return Pool(PAGE, owned, running, ["".join(text) for text in texts], run, at)


def draw_pool(record: Pool) -> Drawing:
    boxes = ""
    for page, (owner, held) in enumerate(record.pages):
        kind = "free" if owner is None else f"owner{owner + 1}"
        words = "".join(f"<li>{escape(text)}</li>" for text in held)
        words += "<li>&nbsp;</li>" * (record.size - len(held))
        boxes += f'<li class="{kind}"><b>page {page}</b><ul>{words}</ul></li>'
    lines = [
        (
            f'<b class="owner{number + 1}">{number + 1}</b>',
            " ".join(f"<code>{page}</code>" for page in pages),
            "",
        )
        for number, pages in record.tables.items()
    ]
    (owner, pages) = list(record.tables.items())[-1]
    place = min(5, record.size * len(pages) - 1)
    example = (
        f"Position {place} of text {owner + 1}: entry {place // record.size} of its table, page "
        f"{pages[place // record.size]}, place {place % record.size}, all counted from 0."
    )
    body = (
        f'<ol class="pool" start="0">{boxes}</ol>'
        f'<p class="title">Tables: the pages of each request, in the order of its text</p>'
        f"{rows_of(lines)}"
        f'<p class="note">{example} A text takes all pages that it may need when it begins: places '
        "without a word are kept for what it still writes. Pages without a colour are free. They "
        "are taken in the order of this lesson&rsquo;s pool, first those that were given back. "
        f"{SMALL_PAGES}</p>"
    )
    caption = (
        "The keys and values of all texts lie in one pool of pages, wherever one is free; a table "
        "says on which pages a text lies."
    )
    shown = ", ".join(f"{number + 1} has {pages}" for number, pages in record.tables.items())
    text = f"A pool of {len(record.pages)} pages with the tokens in each; tables: {shown}."
    return Drawing(body, caption, text, player(record.run, record.at))


class Budgets(NamedTuple):
    """How many tokens of each request a step computes, for two budgets."""

    budgets: tuple[int, int]
    steps: list[list[list[int]]]  # of each budget, of each step: a count for each request
    first: list[int]  # the step in which the long prompt has its first token
    run: Run  # with the smaller one
    arrives: int  # after this step the long prompt comes


BESIDE = ("Lily", "The dog")


def record_budgets(prompt: str, small: int = 8, arrives: int = 2) -> Budgets:
    """Two short texts are written, and a long prompt arrives."""
    budgets = (512, small)
    params = SamplingParams(12, ignore_eos=True)
    arrivals = [Arrival(0, recordings.encode(text, 20), params) for text in BESIDE]
    arrivals.append(Arrival(arrives, recordings.encode(prompt, 200), params))
    runs = [
        play(Engine(recordings.load(), max_rows=3, num_pages=18, budget=budget), arrivals, "pages")
        for budget in budgets
    ]
    steps = [[[work_of(frame, row) for row in (1, 2, 3)] for frame in run.frames] for run in runs]
    first = [
        next(
            number
            for number, row in enumerate((row_of(frame, 3) for frame in run.frames), 1)
            if row and row["tokens"] > row["prompt"]
        )
        for run in runs
    ]
    return Budgets(budgets, steps, first, runs[1], arrives)


def draw_budgets(record: Budgets) -> Drawing:
    largest = max(sum(step) for run in record.steps for step in run)
    parts = []
    for budget, run, first in zip(record.budgets, record.steps, record.first):
        rows = [
            (
                f"step {number}",
                [(count, f"owner{row}") for row, count in enumerate(step, 1)],
                f"{sum(step)}, first token of 3" if number == first else str(sum(step)),
            )
            for number, step in enumerate(run, 1)
        ]
        most = max(map(sum, run))
        title = f"Budget {budget}: {len(run)} steps of at most {most} tokens"
        parts.append(panel(title, stacks(rows, largest)))
    legend = key(
        owner1="request 1", owner2="request 2", owner3="request 3: a long prompt, then its text"
    )
    long, short = (max(map(sum, run)) for run in record.steps)
    small = record.budgets[1]
    early, late = record.first
    few, many = map(len, record.steps)
    price = f"its first token comes in step {late} instead of {early}, the end after {many} steps"
    end = f"; its own end comes after step {many} instead of {few}" * (late > early)
    caption = f"With a budget of {small} tokens a step nobody waits long for a long prompt{end}."
    note = (
        f"To read a prompt is its prefill. Request 3 comes after step {record.arrives}. The "
        f"more tokens a step has, the longer it takes, for everybody in it: {long} "
        f"at once, {short} in chunks."
    )
    if late > early:
        note += f" The price: {price} instead of {few}."
    text = (
        f"Bars of the tokens in each step. With budget {record.budgets[0]} one of {few} steps has "
        f"{long}; with {small} the prompt is spread over several of {many} steps, of at most "
        f"{short}: {price}."
    )
    live = player(record.run, min(4, len(record.run.frames) - 1))
    body = f'{panels(*parts)}{legend}<p class="note">{note}</p>'
    return Drawing(body, caption, text, live)


PICTURES = {  # slug of a lesson -> its picture
    "chunked-prefill": Picture(recordings.STORY, record_budgets, draw_budgets),
    "chat": Picture("rain<|endoftext|>", record_boxes, draw_boxes),
    "paged-cache": Picture("Lily", record_pool, draw_pool),
}

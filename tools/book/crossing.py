"""Pictures of lessons 55 to 57: what passes between an engine's thread and an event loop."""

import asyncio
import contextlib
import io
import json
import urllib.parse
from typing import NamedTuple

from book import door
from book.draw import Drawing, Picture, escape, panel, panels, token
from command_line import check_text
from errors import UserError
from sampling import SamplingParams

BESIDE = ("The dog", "Tom")  # prompts of those who ask besides the reader


def who(name: str) -> str:
    """A letter in a colour of its own."""
    return f'<b class="who tint{"ABC".index(name)}">{name}</b>'


class Step(NamedTuple):
    """What went into the engine's thread before a step, and what came out after it."""

    asked: dict[str, str]  # the prompt of who asks
    computed: dict[str, int]  # positions of each
    news: dict[str, str]  # of each what is new, all in one call
    read: dict[str, tuple[str, int]]  # what each reader took: text, tokens


class Lanes(NamedTuple):
    steps: list[Step]
    texts: dict[str, str]  # all that each has read
    slow: tuple[int, int]  # the step after which A does not read, and the one after which it does


def record_lanes(prompt: str, count: int = 6) -> Lanes:
    """Two readers; the second comes later, and the first does something else for a while."""
    prompts = {"A": prompt, "B": BESIDE[0]}
    ids = {name: door.check_prompt(text, 20) for name, text in prompts.items()}
    params = SamplingParams(count, ignore_eos=True)
    slow = (2, 5)
    steps = []
    texts = dict.fromkeys(prompts, "")

    async def use(thread, turns) -> None:
        back = asyncio.Event()
        compute = thread.engine.compute
        deliver = thread.deliver

        def noted(works):
            for work in works:
                name = thread.texts[work.request].call.name
                steps[-1].computed[name] = len(work.tokens)
            return compute(works)

        def noted_deliver(news):
            steps[-1].news.update({text.call.name: update.text for text, update, _ in news})
            deliver(news)

        async def read(name: str) -> None:
            async for updates in thread.generate([ids[name]], [params], name=name):
                update = updates[0]
                steps[-1].read[name] = (update.text, len(update.tokens))
                texts[name] += update.text
                if name == "A" and len(steps) == slow[0]:
                    await back.wait()

        thread.engine.compute = noted
        thread.deliver = noted_deliver
        tasks = []
        for number in range(1, count + 2):
            steps.append(Step({}, {}, {}, {}))
            if number <= len(prompts):
                name = "AB"[number - 1]
                steps[-1].asked[name] = prompts[name]
                tasks.append(asyncio.ensure_future(read(name)))
                await door.settle()
            await door.turn(turns)
            if number == slow[1]:
                back.set()
                await door.settle()
        await asyncio.gather(*tasks)

    door.in_loop(use)
    return Lanes(steps, texts, slow)


def draw_lanes(record: Lanes) -> Drawing:
    rows = ""
    for number, step in enumerate(record.steps, 1):
        for name, prompt in step.asked.items():
            rows += (
                f'<tr class="in"><td><p>{who(name)} asks {token(prompt)}</p></td>'
                f'<td><p class="arrow">add {who(name)}</p></td><td></td></tr>'
            )
        work = " ".join(f"<span>{who(name)} {size}</span>" for name, size in step.computed.items())
        news = " ".join(
            f"<span>{who(name)}&nbsp;{token(text)}</span>" for name, text in step.news.items()
        )
        read = ""
        for name, (text, count) in step.read.items():
            joined = f" <b>{count} tokens at once</b>" if count > 1 else ""
            read += f"<p>{who(name)} reads {token(text)}{joined}</p>"
        if record.slow[0] < number < record.slow[1]:
            read += f"<p>{who('A')} is away</p>"
        rows += (
            f'<tr class="out"><td>{read}</td><td><p class="arrow">{news}</p></td>'
            f"<td><p>step {number}</p><p>{work}</p></td></tr>"
        )
    head = "<th>Event loop: readers</th><th>What crosses</th><th>Engine: positions</th>"
    body = f'<table class="lanes"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    tokens = sum(len(step.news) for step in record.steps)
    calls = len(record.steps)
    most = max(count for step in record.steps for _, count in step.read.values())
    caption = (
        "Two threads and no lock. A question goes in between two steps; what a step brings for "
        f"everybody comes out in one call, {calls} calls for {tokens} tokens. Who does not read "
        f"delays nobody: A later finds {most} tokens joined into one."
    )
    lines = []
    for number, step in enumerate(record.steps, 1):
        lines += [f"{name} asks {prompt!r}" for name, prompt in step.asked.items()]
        lines.append(f"step {number} computes {step.computed} positions, one call with {step.news}")
        lines += [f"{name} reads {text!r}" for name, (text, _) in step.read.items()]
    return Drawing(body, caption, "In order: " + "; ".join(lines) + ".")


class State(NamedTuple):
    """How an engine stands between two steps."""

    steps: int  # so far
    running: dict[str, str]  # row after row: the text so far, with its prompt
    waiting: list[str]
    pages: list[str]  # of each page who has it, "" for nobody


class Leaving(NamedTuple):
    before: State
    obeyed: State  # when the command has been obeyed, before the next step
    after: State  # a step later
    commands: list[str]  # that the leaving put into the queue: names of functions
    asked: int  # tokens that each wanted
    written: int  # of A's


def record_leaving(prompt: str, wanted: int = 24, steps: int = 6) -> Leaving:
    """Three texts in two rows, and the reader of the first leaves."""
    prompts = {"A": prompt, "B": BESIDE[0], "C": BESIDE[1]}
    ids = {name: door.check_prompt(text, 12) for name, text in prompts.items()}
    params = SamplingParams(wanted, ignore_eos=True)
    states = []
    commands = []

    async def use(thread, turns) -> None:
        engine = thread.engine
        step = engine.step
        scheduler = engine.scheduler

        def look() -> None:
            names = {request: text.call.name for request, text in thread.texts.items()}
            owners = [""] * scheduler.pool.num_pages
            for request in scheduler.running:
                for page in request.pages:
                    owners[page] = names[request]
            decode = engine.encoding.decode
            running = {names[request]: decode(request.tokens) for request in scheduler.running}
            waiting = [names[request] for request in scheduler.waiting]
            states.append(State(engine.steps, running, waiting, owners))

        def noted():
            look()
            return step()

        async def read(name: str) -> None:
            async for _ in thread.generate([ids[name]], [params], name=name):
                pass

        tasks = {name: asyncio.ensure_future(read(name)) for name in prompts}
        await door.settle()
        for _ in range(steps):
            await door.turn(turns)
        look()
        tasks["A"].cancel()
        await asyncio.wait([tasks["A"]])
        put = [thread.commands.get_nowait() for _ in range(thread.commands.qsize())]
        for command in put:
            commands.append(command.func.__name__)
            thread.commands.put(command)
        engine.step = noted
        await door.turn(turns)
        look()
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())

    door.in_loop(use, max_rows=2, page_size=4, num_pages=10)
    return Leaving(*states, commands, wanted, steps)


def draw_leaving(record: Leaving) -> Drawing:
    def slots(owners: list[str]) -> str:
        cells = ""
        for owner, first in zip(owners, record.before.pages):
            kind = f"tint{'ABC'.index(owner)}" if owner else "idle"
            cells += f'<li class="{kind}{" was" if first == "A" else ""}">{owner}</li>'
        return f'<ol class="slots">{cells}</ol>'

    def state(title: str, shown: State, note: str) -> str:
        lines = [(who(name), f"<q>{escape(text)}</q>") for name, text in shown.running.items()]
        lines += [("&ndash;", "a free row")] * (len(record.before.running) - len(lines))
        rows = "".join(f"<li>{name} {text}</li>" for name, text in lines)
        waiting = " ".join(who(name) for name in shown.waiting) or "nobody"
        free = shown.pages.count("")
        return panel(
            title,
            f'<ol class="places">{rows}</ol><p>waits: {waiting}</p>{slots(shown.pages)}',
            f"{free} of {len(shown.pages)} pages free. {note}",
        )

    before, obeyed, after = record[:3]
    held = before.pages.count("A")
    left = record.asked - record.written
    command = " and ".join(record.commands)
    body = panels(
        state(f"After step {before.steps}", before, "Now the reader of A leaves."),
        state(f"The command: {command} A", obeyed, "No step has been computed in between."),
        state(f"After step {after.steps}", after, "Outlined: the pages that were A&rsquo;s."),
    )
    caption = (
        f"A reader leaves after {record.written} of {record.asked} tokens. Before the next step "
        f"his row and his {held} pages are free, and in it C, who waited, takes the row. Without "
        f"the command A would have kept them for {left} more tokens that nobody reads."
    )
    states = (
        f"after step {shown.steps}: running {shown.running}, waiting {shown.waiting}, pages "
        f"{[owner or 'free' for owner in shown.pages]}"
        for shown in (before, obeyed, after)
    )
    return Drawing(body, caption, "The rows and pages of an engine, " + "; ".join(states) + ".")


class Answered(NamedTuple):
    path: str
    function: str  # of ours, that FastAPI found; "" for none
    status: int
    body: str


class Health(NamedTuple):
    works: list[Answered]
    died: list[Answered]  # the same, when the engine's thread is no more


def record_health(prompt: str, most: int = 40) -> Health:
    """A prompt is the name of a model here, because a server says first what it serves."""
    check_text("--prompt", prompt)
    if not 1 <= len(prompt) <= most:
        raise UserError(
            f"the prompt has {len(prompt)} characters; here it is a name of 1 to {most}"
        )
    paths = ("/health", "/v1/models", f"/v1/models/{urllib.parse.quote(prompt, safe='')}", "/v2")

    def fail():
        raise RuntimeError("a bug")

    with door.open_door() as server, contextlib.redirect_stderr(io.StringIO()):
        asked = []
        for _ in range(2):
            for path in paths:
                status, body, _ = server.ask("GET", path)
                for model in body.get("data", ()) if body else ():
                    model["created"] = 0  # the time, which is another each time
                shown = json.dumps(body, ensure_ascii=False) if body else ""
                asked.append(Answered(path, server.function, status, shown))
            server.thread.commands.put(fail)
            server.thread.thread.join(door.PATIENCE)
            server.ask("GET", "/health")  # the loop has heard of it when it answers again
    return Health(asked[: len(paths)], asked[len(paths) :])


def draw_health(record: Health) -> Drawing:
    def shown(state: str, found: Answered) -> str:
        kind = "new" if found.status == 200 else "out"
        words = escape(found.body).replace("created&quot;: 0", "created&quot;: &hellip;")
        status = f'{state} <b class="tok {kind}">{found.status}</b>'
        words = f'<code class="text-box">{words}</code>' if words else "<i>an empty body</i>"
        return f"<div><p>{status}</p>{words}</div>"

    body = ""
    for works, died in zip(*record):
        path = urllib.parse.unquote(works.path)
        name = f"<code>{works.function}()</code>" if works.function else "no function of ours"
        if works == died:
            answers = shown("either way:", works)
        else:
            answers = shown("engine works:", works) + shown("engine died:", died)
        body += (
            f'<p class="title"><code>GET {escape(path)}</code> &rarr; {name}</p>'
            f'<div class="asked">{answers}</div>'
        )
    before, after = (found[0].status for found in (record.works, record.died))
    caption = (
        "FastAPI finds a function of ours for a path, and makes of its result a status and JSON; "
        f"errors have one form. /health asks about the engine, not the process: {before} while "
        f"texts can be written, {after} when its thread has died, so that the process is replaced."
    )
    text = " ".join(
        f"{state}: "
        + "; ".join(f"GET {each.path} gives {each.status} {each.body}" for each in found)
        for state, found in (("Working", record.works), ("Dead", record.died))
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "engine-thread": Picture("Lily", record_lanes, draw_lanes),
    "early-ends": Picture("Once upon a time, there was a", record_leaving, draw_leaving),
    "server": Picture(
        "gpt-4", record_health, draw_health, own="The same of another model\u2019s name"
    ),
}

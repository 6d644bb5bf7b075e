"""Pictures of lessons 55 to 57: what passes between an engine's thread and an event loop."""

import asyncio
import contextlib
import io
import json
import urllib.parse
from typing import NamedTuple

from book import door
from book.draw import Drawing, Picture, escape, token
from book.playing import PAGE
from command_line import check_text
from errors import UserError
from sampling import SamplingParams
from server.engine_thread import EngineDead

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
    head = (
        "<th>Event loop&rsquo;s thread: readers</th><th>What crosses</th>"
        "<th>Engine&rsquo;s thread: positions computed</th>"
    )
    body = f'<table class="lanes"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    tokens = sum(len(step.news) for step in record.steps)
    calls = len(record.steps)
    most = max(count for step in record.steps for _, count in step.read.values())
    caption = (
        f"What a step brings for all readers crosses in one call, {calls} calls for {tokens} "
        "tokens. A reader who is away delays nobody."
    )
    body += (
        '<p class="note">Two threads and no lock: what is wanted goes in between two steps. When A '
        f"is back, it finds {most} tokens joined into one.</p>"
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
    running: list[str]
    waiting: list[str]
    pages: list[str]  # of each page who has it, "" for nobody


class Ends(NamedTuple):
    """Two ends that come early: a reader's, and the engine's."""

    read: list[dict[str, str]]  # what each reader took of the step before it, and of the one after
    states: list[State]  # after that step, when the command has been obeyed, and a step later
    commands: list[str]  # that the leaving put into the queue: names of functions
    failed: str  # what left the last step
    told: dict[str, str]  # who waited for a text -> what it was raised
    late: str  # what somebody was raised who asked when that was over
    left: int  # tokens that A had still wanted


def record_ends(prompt: str, wanted: int = 24, steps: int = 6) -> Ends:
    """Three texts in two rows: the reader of the first leaves, and later a step fails."""
    prompts = {"A": prompt, "B": BESIDE[0], "C": BESIDE[1]}
    ids = {name: door.check_prompt(text, 12) for name, text in prompts.items()}
    params = SamplingParams(wanted, ignore_eos=True)
    states = []
    commands = []
    taken = []
    told = {}
    late = []
    count = dict.fromkeys(prompts, 0)

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
            running = [names[request] for request in scheduler.running]
            waiting = [names[request] for request in scheduler.waiting]
            states.append(State(engine.steps, running, waiting, owners))

        def noted():
            look()
            return step()

        def fail():
            raise RuntimeError("a bug")

        async def read(name: str) -> None:
            try:
                async for updates in thread.generate([ids[name]], [params], name=name):
                    taken[-1][name] = updates[0].text
                    count[name] += len(updates[0].tokens)
            except EngineDead as error:
                told[name] = f"{type(error).__name__}: {error}"

        tasks = {name: asyncio.ensure_future(read(name)) for name in prompts}
        await door.settle()
        for _ in range(steps):
            taken.append({})
            await door.turn(turns)
        look()
        tasks["A"].cancel()
        await asyncio.wait([tasks["A"]])
        put = [thread.commands.get_nowait() for _ in range(thread.commands.qsize())]
        for command in put:
            commands.append(command.func.__name__)
            thread.commands.put(command)
        engine.step = noted
        taken.append({})
        await door.turn(turns)
        look()
        engine.step = fail
        turns.open()
        await asyncio.wait([tasks["B"], tasks["C"]])
        try:
            async for _ in thread.generate([ids["A"]], [params]):
                pass
        except EngineDead as error:
            late.append(f"{type(error).__name__}: {error}")

    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        door.in_loop(use, max_rows=2, page_size=PAGE, num_pages=10)
    failed = stderr.getvalue().strip().split("\n")[-1]
    told = dict(sorted(told.items()))  # they hear of it in any order
    return Ends(taken[-2:], states, commands, failed, told, *late, wanted - count["A"])


def draw_ends(record: Ends) -> Drawing:
    def row(kind: str, words: list[str], arrow: str, engine: list[str]) -> str:
        crosses = f'<p class="arrow">{arrow}</p>' if arrow else ""
        left, right = ("".join(f"<p>{line}</p>" for line in lines) for lines in (words, engine))
        return f'<tr class="{kind}"><td>{left}</td><td>{crosses}</td><td>{right}</td></tr>'

    def stand(state: State) -> list[str]:
        free = state.pages.count("")
        waits = f", {' '.join(map(who, state.waiting))} waits" * bool(state.waiting)
        return [
            f"{' '.join(map(who, state.running))} run{'s' * (len(state.running) == 1)}{waits}",
            f"{free} of {len(state.pages)} pages free",
        ]

    def stepped(read: dict[str, str], state: State) -> str:
        words = [f"{who(name)} reads {token(text)}" for name, text in read.items()]
        news = " ".join(
            f"<span>{who(name)}&nbsp;{token(text)}</span>" for name, text in read.items()
        )
        return row("out", words, news, [f"step {state.steps}", *stand(state)])

    before, obeyed, after = record.states
    failed = escape(record.failed)
    command = " and ".join(record.commands)
    told = [
        f"{' '.join(who(name) for name in record.told if record.told[name] == error)} get "
        f"<b>{escape(error)}</b>"
        for error in dict.fromkeys(record.told.values())
    ]
    late = "the same" if record.late in record.told.values() else f"<b>{escape(record.late)}</b>"
    rows = stepped(record.read[0], before)
    rows += row("in", [f"{who('A')} leaves"], f"{command} {who('A')}", stand(obeyed))
    rows += stepped(record.read[1], after)
    rows += row("out", told, failed, [f"step {after.steps + 1} fails", "no engine any more"])
    rows += row("", [f"Who asks later gets {late}"], "", [])
    head = "<th>Event loop: readers</th><th>What crosses</th><th>Engine</th>"
    held = before.pages.count("A")
    body = (
        f'<table class="lanes"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f'<p class="note">Two rows, and pages of {PAGE} positions. Before the next step A&rsquo;s '
        f"row and {held} pages are free, and C takes the row. Without the command A would keep "
        f"them for {record.left} more tokens that nobody reads.</p>"
    )
    caption = (
        "When a reader leaves, its text is aborted before the next step. When the engine dies, all "
        "readers are told, and all who ask later."
    )
    states = (
        f"after step {shown.steps}: running {shown.running}, waiting {shown.waiting}, pages "
        f"{[owner or 'free' for owner in shown.pages]}"
        for shown in record.states
    )
    text = (
        f"The rows and pages of an engine, {'; '.join(states)}. Then {record.failed}: told to "
        f"{' and '.join(record.told)}, and later: {record.late}."
    )
    return Drawing(body, caption, text)


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


SINCE = 67  # until this lesson /v1/models answers 200 where the engine has died


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
            since = f" (at this lesson still 200, until {SINCE})" * path.startswith("/v1/models")
            answers = shown("engine works:", works) + shown(f"engine died{since}:", died)
        body += (
            f'<p class="title"><code>GET {escape(path)}</code> &rarr; {name}</p>'
            f'<div class="asked">{answers}</div>'
        )
    before, after = (found[0].status for found in (record.works, record.died))
    caption = (
        f"/health asks about the engine, not the process: {before} while texts can be written, "
        f"{after} when its thread has died. Other paths say in JSON what is served, or what is "
        "wrong."
    )
    body += (
        '<p class="note">FastAPI finds a function of ours for a path, and makes of its result a '
        "status and JSON. All errors with a body have one form.</p>"
    )
    text = " ".join(
        f"{state}: "
        + "; ".join(f"GET {each.path} gives {each.status} {each.body}" for each in found)
        for state, found in (("Working", record.works), ("Dead", record.died))
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "engine-thread": Picture("Lily", record_lanes, draw_lanes),
    "early-ends": Picture("Once upon a time, there was a", record_ends, draw_ends),
    "server": Picture(
        "gpt-4", record_health, draw_health, own="The same for another model\u2019s name"
    ),
}

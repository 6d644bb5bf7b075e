"""Pictures of lessons 82 to 84: an app, and engines in other processes that it asks."""

import functools
import itertools
import json
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from book import door, engines, processes, recordings
from book.door import PATH, check_prompt
from book.draw import Drawing, Picture, escape, panel, panels, stacks, token
from book.operating import LETTERS, NO, YES
from book.spreading import COLOURS, table
from engine.engine import Engine
from server.engine_thread import Update
from server.replicas import Replica

PROMPT = "Tom saw a"
MOST = 8  # tokens of a prompt


@functools.cache
def runs(prompt: str) -> dict[str, Any]:
    """All that pictures show, of one start of processes: name of a run -> what was recorded."""
    check_prompt(prompt, MOST)
    return processes.fresh(make_runs, prompt)


def make_runs(prompt: str) -> dict[str, Any]:
    found = {}
    with engines.open_engines(2, by_turns=True) as front:
        found["stays"] = follow(front, prompt, 4)
        found["leaves"] = follow(front, prompt, 40, leaves=2)
    with engines.open_engines(SIZE, "--max-rows", ROWS, by_turns=True) as front:
        found |= write_texts(front, prompt)
    return found


def engine_name(number: int) -> str:
    """Engines are counted from 1, in a colour of their own."""
    return f'<b class="who tint{number}">engine {number + 1}</b>'


# 82


class Passing(NamedTuple):
    """Something that goes from process to process, and what goes on with it to the next."""

    asks: bool  # on its way from the client to the engine, or back
    outside: tuple[str, str, int]  # HTTP: what, text, bytes
    kind: str  # of the message between app and engine
    ids: list[int]
    text: str
    size: int  # bytes of its value, 0 for none
    work: str  # what the engine does with it, or did for it


class Followed(NamedTuple):
    engine: int
    asked: int  # tokens
    passing: list[Passing]


def computed(replica: Replica) -> int:
    """In the process of an engine: how many positions the last step computed, of one text."""
    (work,) = replica.thread.engine.works
    replica.followed = work.request
    return len(work.tokens)


def ended(replica: Replica) -> tuple[str | None, int]:
    """Why that text has ended, and how many are in the engine's rows."""
    return replica.followed.finish_reason, len(replica.thread.engine.scheduler.running)


def follow(front: engines.Front, prompt: str, tokens: int, leaves: int | None = None) -> Followed:
    """A text in events; its client leaves after so many of them."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    begin = len(front.crossed)
    connection = front.begin(PATH, body)
    asked = front.crossed[begin]
    engine = asked.engine
    sent = "POST", prompt, len(json.dumps(body).encode())
    passing = [Passing(True, sent, "generate", asked.value[0][0], "", asked.size, "a new text")]

    def read_event(answer) -> tuple[str, int]:
        data = answer.readline() + answer.readline()
        return data.decode().removeprefix("data: ").strip(), len(data)

    answer = None
    more = True
    while more and len(passing) - 1 != leaves:
        more = front.step(engine)
        positions = front.on(engine, computed)
        answer = answer or connection.getresponse()
        event, size = read_event(answer)
        outside = "event", json.loads(event)["choices"][0]["text"], size
        update = [each for each in front.crossed if each.kind == "update"][-1]
        ids = list(update.value[0].tokens)
        work = f"computes {positions} position{'s' * (positions > 1)}"
        passing.append(
            Passing(False, outside, "update", ids, update.value[0].text, update.size, work)
        )
    if more:
        answer.close()
        connection.close()
        front.until(lambda: front.count("cancel"))
        front.step(engine)
        outside = "leaves", "", 0
    else:
        outside = "event", *read_event(answer)
    reason, rows = front.on(engine, ended)
    last = next(each for each in reversed(front.crossed) if each.kind in ("end", "cancel"))
    work = f"ends: {reason}; {rows} rows in use"
    passing.append(Passing(more, outside, last.kind, [], "", 0, work))
    return Followed(engine, tokens, passing)


def record_followed(prompt: str) -> list[Followed]:
    found = runs(prompt)
    return [found["stays"], found["leaves"]]


def draw_followed(record: list[Followed]) -> Drawing:
    def message(what: str, shown: str, size: int) -> str:
        amount = f'<p class="note">{size} bytes</p>' if size else ""
        return f'<td><div class="arrow"><p>{what} {shown}</p>{amount}</div></td>'

    rows = ""
    said = []
    titles = "A client that stays", "One that leaves in the middle"
    for title, followed in zip(titles, record, strict=True):
        words = f"{title}: {engine_name(followed.engine)}"
        rows += f'<tr class="does"><th colspan="4">{words}</th></tr>'
        app = f'<td class="app" rowspan="{len(followed.passing)}">the process of the app</td>'
        for each in followed.passing:
            what, text, size = each.outside
            new = token(each.text, "new") if each.kind == "update" else ""
            shown = new and token(text, "new") or (token(text) if what == "POST" else escape(text))
            outside = message(what, shown, size)
            inside = message(each.kind, f"{' '.join(map(str, each.ids))} {new}", each.size)
            way = "in" if each.asks else "out"
            work = f'<td class="tint{followed.engine}">{each.work}</td>'
            rows += f'<tr class="{way}">{outside}{app}{inside}{work}</tr>'
            app = ""  # one cell beside all rows
            said.append(
                f"{what} {text!r}, {size} bytes; {each.kind} {each.ids}, {each.size} bytes; "
                f"{each.work}"
            )
    head = (
        '<th>Client and app: HTTP</th><th class="app"></th><th>App and engine</th>'
        "<th>The engine&rsquo;s process</th>"
    )
    stays, leaves = record
    sizes = [each.size for each in stays.passing if each.kind == "update"]
    updates = sum(each.kind == "update" for each in leaves.passing)
    end = leaves.passing[-1]
    caption = (
        "App and engine are two processes: a prompt crosses as token ids, and text comes back. A "
        f"client that leaves is a {end.kind}: {updates} of {leaves.asked} tokens are computed."
    )
    note = (
        '<p class="note">Bytes are those of bodies in HTTP, and between app and engine of values '
        "as Python writes them (pickle): "
        "generate has the parameters of the text beside its ids, an update has "
        f"{min(sizes)} to {max(sizes)} bytes. "
        "These processes are started without Ray, and a socket joins them. Ray, a program that "
        "starts processes on many machines, does so from the next lesson on; then the same values "
        "cross in envelopes of its own.</p>"
    )
    return Drawing(table("lanes", head, rows) + note, caption, "; ".join(said) + ".")


# 83


SIZE = 3  # engines
ROWS = 2  # of each
TOKENS = (7, 5, 3, 5, 4, 3, 3)  # of the texts of clients A, B, ...
LOOK = 3  # after this step /metrics is read for the first time


class Step(NamedTuple):
    """Of an engine. Clients are numbers, and known by their seeds."""

    work: dict[int, int]  # positions computed
    waiting: list[int]


class Texts(NamedTuple):
    prompt: str
    engine: list[int]  # that each client was given
    written: list[list[int]]  # tokens of each
    texts: list[str]  # as the clients got them
    several: list[list[Step]]  # of each engine
    alone: list[list[int]]  # tokens that one engine writes, in this process
    one: list[Step]  # of that
    large: int  # steps of one engine with as many rows as all of these


def look(engine: Engine) -> Step:
    """What the last step of an engine computed."""
    work = {each.request.params.seed: len(each.tokens) for each in engine.works}
    return Step(work, [request.params.seed for request in engine.scheduler.waiting])


def look_there(replica: Replica) -> Step:
    return look(replica.thread.engine)


def name_of(replica: Replica) -> str:
    return replica.name


def write_texts(front: engines.Front, prompt: str) -> dict[str, Any]:
    """Texts of several clients on several engines, whose /metrics are read three times."""
    names = [front.on(engine, name_of) for engine in range(SIZE)]
    body = {"prompt": prompt, "ignore_eos": True}
    connections = [
        front.begin(PATH, body | {"max_tokens": tokens, "seed": client})
        for client, tokens in enumerate(TOKENS)
    ]
    several = [[] for _ in range(SIZE)]
    moments = []
    busy = list(range(SIZE))
    while busy:
        more = [engine for engine in busy if front.step(engine)]
        for engine in busy:
            several[engine].append(front.on(engine, look_there))
        busy = more
        if len(several[0]) == LOOK:
            moments.append(read_metrics(front, names, f"after step {LOOK}"))
    texts = [door.read(connection).body["choices"][0]["text"] for connection in connections]
    moments.append(read_metrics(front, names, "all texts over"))
    front.kill(1)
    moments.append(read_metrics(front, names, f"{plain_name(1)} gone"))
    calls = [each for each in front.crossed if each.kind == "generate"]
    written = []
    for call in calls:
        updates = [
            each.value[0]
            for each in front.crossed
            if each.kind == "update" and each[:2] == call[:2]  # engine, number of the call
        ]
        written.append(list(Update.join(updates).tokens))
    given = [call.engine for call in calls]
    asked = [(call.value[0][0], call.value[1][0]) for call in calls]
    return {"texts": (given, written, texts, several), "asked": asked, "metrics": (names, moments)}


def record_texts(prompt: str) -> Texts:
    found = runs(prompt)

    def write(rows: int) -> tuple[list[list[int]], list[Step]]:
        engine = door.make_engine(max_rows=rows)
        requests = [engine.add(*asked) for asked in found["asked"]]
        steps = []
        while engine.busy:
            engine.step()
            steps.append(look(engine))
        return [request.output for request in requests], steps

    _, large = write(SIZE * ROWS)
    return Texts(prompt, *found["texts"], *write(ROWS), len(large))


def draw_texts(record: Texts) -> Drawing:
    columns = len(record.one)

    def letter(client: int) -> str:
        return f'<b class="tint{record.engine[client]} letter">{LETTERS[client]}</b>'

    def grid(steps: list[Step], clients: list[int], tint: str) -> str:
        rows = ""
        for client in clients:
            cells = ""
            for number in range(columns):
                step = steps[number] if number < len(steps) else Step({}, [])
                count = step.work.get(client, "")
                kind = tint if count else "idle" if client in step.waiting else ""
                cells += f'<td class="{kind}">{count}</td>'
            rows += f'<tr><th scope="row">{letter(client)}</th>{cells}</tr>'
        return rows

    def batch(rows: str) -> str:
        head = "".join(f"<th>{number}</th>" for number in range(1, columns + 1))
        return (
            f'<table class="batch over-time"><thead><tr><th></th>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table>"
        )

    everybody = range(len(record.engine))
    shared = ""
    for engine, steps in enumerate(record.several):
        shared += f'<tr><th colspan="{columns + 1}">{engine_name(engine)}</th></tr>'
        own = [client for client in everybody if record.engine[client] == engine]
        shared += grid(steps, own, f"tint{engine}")
    several = max(map(len, record.several))
    texts = ""
    said = []
    for client in everybody:
        tokens = [recordings.text_of(id) for id in record.written[client]]
        same = record.written[client] == record.alone[client]
        texts += (
            f"<tr><td>{letter(client)}</td><td>{record.engine[client] + 1}</td>"
            f'<td class="flow">{" ".join(token(text, "new") for text in tokens)}</td>'
            f"<td>{YES if same else NO}</td></tr>"
        )
        said.append(f"{LETTERS[client]}, engine {record.engine[client] + 1}: {''.join(tokens)!r}")
    head = "<th></th><th>engine</th><th>writes</th><th>so does one engine</th>"
    equal = sum(own == other for own, other in zip(record.written, record.alone, strict=True))
    body = panels(
        panel(f"{SIZE} engines, each in a process of its own: {several} steps", batch(shared)),
        panel(
            f"One engine: {columns} steps",
            batch(grid(record.one, list(everybody), "tint5")),
            f"Each engine has {ROWS} rows. A number is how many positions a step computes for a "
            f"text; hatched: it waits for a row. One engine with {SIZE * ROWS} rows takes "
            f"{record.large} steps: replicas are for more cores and machines.",
        ),
    )
    body += (
        f'<p class="title one">All go on from {token(record.prompt)}, each with a seed of its own'
        f"</p>{table('written', head, texts)}"
        '<p class="note">Here the processes are started without Ray, and requests go to them in '
        "turn. Ray Serve, a part of Ray, starts them where there is room, on one machine or many, "
        "watches them, "
        "and chooses one for each request.</p>"
    )
    caption = (
        f"{len(everybody)} texts on {SIZE} replicas, engines of {ROWS} rows each that share "
        f"nothing: after {several} steps all are done; one such engine takes {columns}. {equal} "
        f"of {len(everybody)} texts are what one engine writes."
    )
    return Drawing(body, caption, "; ".join(said) + ".")


# 84


class Moment(NamedTuple):
    """What /metrics has."""

    what: str
    values: dict[tuple[str, str | None], list[float | None]]  # of SHOWN, of each engine
    lines: list[str]  # of TOTAL


RUNNING, WAITING, TOTAL = "num_requests_running", "num_requests_waiting", "generation_tokens_total"
BUCKETS = "request_generation_tokens_bucket"
MOST_TOKENS = ("2.0", "5.0", "10.0")  # of a text, some of the buckets
SHOWN = [(name, None) for name in (RUNNING, WAITING, TOTAL)]
SHOWN += [(BUCKETS, most) for most in MOST_TOKENS]


def plain_name(engine: int) -> str:
    return f"engine {engine + 1}"


def read_metrics(front: engines.Front, names: list[str], what: str) -> Moment:
    text = front.ask("GET", "/metrics").body
    values = {name: [None] * len(names) for name in SHOWN}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:"), sample.labels.get("le")
            if name in values:
                values[name][names.index(sample.labels["engine"])] = sample.value
    lines = [line for line in text.split("\n") if line.startswith(f"vllm:{TOTAL}")]
    return Moment(what, values, lines)


class Joined(NamedTuple):
    names: list[str]  # that the engines have in /metrics
    moments: list[Moment]


def record_joined(prompt: str) -> Joined:
    return Joined(*runs(prompt)["metrics"])


def draw_joined(record: Joined) -> Drawing:
    during, after, later = record.moments

    def line(name: str, values: list[float | None]) -> tuple[str, list, str]:
        parts = [(value or 0, COLOURS[engine]) for engine, value in enumerate(values)]
        numbers = ["\u2013" if value is None else f"{value:g}" for value in values]
        total = sum(value for value in values if value is not None)
        return name, parts, f"{' + '.join(numbers)} = <b>{total:g}</b>"

    now = [
        line(words, during.values[name, None])
        for words, name in (("running", RUNNING), ("waiting", WAITING))
    ]
    over = [line(moment.what, moment.values[TOTAL, None]) for moment in record.moments]
    counts = [
        line(f"&le; {float(most):g} tokens", after.values[BUCKETS, most]) for most in MOST_TOKENS
    ]
    lines = ""
    for each in after.lines:
        shown = escape(each)
        for engine, name in enumerate(record.names):
            shown = shown.replace(name, f'<b class="who tint{engine}">{name}</b>')
        lines += f'<code class="text-box">{shown}</code>'
    names = " ".join(map(engine_name, range(len(record.names))))
    body = (
        f'<p class="title">{names}: GET /metrics has a line of each</p>{lines}'
        '<p class="note">Here the process of the app asks engines that are started without Ray; '
        "with Ray the same call goes to all replicas, the engines that it has then. An "
        "engine&rsquo;s name is made with it, at random; here it is the same each time.</p>"
    )
    everything = sum(after.values[TOTAL, None])
    last = sum(value for value in later.values[TOTAL, None] if value is not None)
    body += panels(
        panel(f"Texts {during.what}", stacks(now, len(TOKENS))),
        panel(
            "Tokens generated",
            stacks(over, everything),
            "An engine that ends takes its counts with it, and the sum falls from "
            f"{everything:g} to {last:g}: so one adds up how much each part grows.",
        ),
        panel(
            "Of all texts at the end, those of so many tokens",
            stacks(counts, len(TOKENS)),
            "Counts of a histogram add up to those of all texts; averages would not.",
        ),
    )
    running = during.values[RUNNING, None]
    caption = (
        "/metrics has each engine&rsquo;s numbers, with a label. The sum says that "
        f"{sum(running):g} texts run; only the parts say that {who_computes(running)}."
    )
    text = "; ".join(
        f"{moment.what}: "
        + ", ".join(
            f"{name}{f' of at most {float(most):g}' if most else ''} {values}"
            for (name, most), values in moment.values.items()
        )
        for moment in record.moments
    )
    return Drawing(body, caption, f"Of the engines {', '.join(record.names)}, {text}.")


def who_computes(counts: list[float]) -> str:
    """How many engines compute how many texts."""
    parts = []
    for count, group in itertools.groupby(sorted(counts, reverse=True)):
        many = len(list(group))
        verb = "" if parts else " engine computes" if many == 1 else " engines compute"
        each = " each" * (many > 1)
        parts.append(f"{('one', 'two', 'three')[many - 1]}{verb} {count:g}{each}")
    return " and ".join(parts)


COUNTED = "The same for your own prompt, with texts as long and so with the same counts"

PICTURES = {  # slug of a lesson -> its picture
    "engines-elsewhere": Picture(PROMPT, record_followed, draw_followed),
    "replicas": Picture(PROMPT, record_texts, draw_texts),
    "replica-metrics": Picture(PROMPT, record_joined, draw_joined, own=COUNTED),
}

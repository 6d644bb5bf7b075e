"""Pictures of lessons 85 to 87: which engine a request goes to, and engines that end and begin."""

import itertools
import json
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import serve_ray
from book import processes, recordings
from book.door import NAME, PATH, PATIENCE, check_prompt, make_engine, read
from book.draw import Drawing, Picture, box, escape, key, panel, panels, rows_of, signed, svg, token
from book.engines import Crossed, Handle, open_engines
from engine.engine import Engine
from engine.request import Request
from sampling import SamplingParams
from server.prefixes import Prefixes
from server.replicas import Replica

PAGE = 4  # positions
COUNT = 3  # engines
COLOURS = ("first", "second", "good", "other")  # of beginnings


def letter(number: int) -> str:
    """The name of a beginning, in its colour."""
    return f'<b class="tint{number} letter">{"ABCD"[number]}</b>'


def table(kind: str, head: str, rows: str, foot: str = "") -> str:
    end = f"<tfoot>{foot}</tfoot>" if foot else ""
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{end}</table>'


ENGINES = "".join(f"<th>engine {number}</th>" for number in range(1, COUNT + 1))


# 85


class Sent(NamedTuple):
    """A request, and which engine it went to."""

    beginning: int
    length: int  # tokens of its prompt
    engine: int
    found: int  # of these, what the engine had already
    scores: list[tuple[int, int]]  # of each engine before: texts, pages of the prompt


class Routing(NamedTuple):
    beginnings: list[list[str]]  # tokens of each
    prefix: list[Sent]  # each to the first of Prefixes.order
    load: list[Sent]  # as Ray does it without a router of one's own
    alone: int  # what one engine finds that gets all of them
    burst: list[Sent]  # by prefix, all with the first beginning, while nobody is done


MOST = 16  # tokens of a prompt
OTHERS = (
    "One day, a boy named Tom and his dog went to",
    "The lonely knight lived in a big castle on a hill,",
    "A little cat liked to sit in the sun and sleep until",
)
ENDS = " and saw then found with who ate ran sat took gave made".split(" ")[1:]
BURST = 8  # requests


def record_routing(prompt: str) -> Routing:
    """Requests of four beginnings, each three times, in an order of chance."""
    ids = [check_prompt(prompt, MOST)] + [recordings.encode(text, MOST) for text in OTHERS]
    order = [number for number in range(len(ids)) for _ in range(3)]
    random.Random(0).shuffle(order)
    ends = [recordings.encode(f" {word}", MOST) for word in ENDS]
    asked = [(number, ids[number] + end) for number, end in zip(order, ends, strict=True)]
    alone = route(asked, 1, True, 2)
    burst = [(0, ids[0] + end) for end in ends[:BURST]]
    return Routing(
        [[recordings.text_of(id) for id in own] for own in ids],
        route(asked, COUNT, True, 2),
        route(asked, COUNT, False, 2),
        sum(each.found for each in alone),
        route(burst, COUNT, True, BURST + 1, one_by_one=False),
    )


def route(
    asked: list[tuple[int, list[int]]],
    count: int,
    by_prefix: bool,
    length: int,
    one_by_one: bool = True,
) -> list[Sent]:
    """Send prompts to so many new engines, each for a text of this length.

    one_by_one: when the one before is over; or else after one step of all engines.
    """
    engines = [make_engine(max_rows=BURST, num_pages=96, page_size=PAGE) for _ in range(count)]
    block_size = engines[0].model.config.block_size
    prefixes = Prefixes(block_size, None, PAGE, 96, BURST)
    prefixes.keep(set(range(count)))
    draws = random.Random(0)
    sent = []
    for call, (beginning, prompt) in enumerate(asked):
        names = prefixes.names([prompt], "", 1)
        texts = [engine_texts(prefixes, number) for number in range(count)]
        pages = [sum(name in own for name in names) for own in prefixes.pages.values()]
        if by_prefix:
            chosen = prefixes.order(list(range(count)), [prompt], "")[0]
        else:
            chosen = min(draws.sample(range(count), 2), key=texts.__getitem__)
        prefixes.sent(chosen, str(call), [prompt], "")
        engine = engines[chosen]
        engine.add(prompt, SamplingParams(length, ignore_eos=True))
        before = engine.scheduler.shared
        for each in engines if not one_by_one else ():
            each.step()
        while one_by_one and engine.busy:
            engine.step()
        if one_by_one:
            prefixes.done(chosen, str(call))
        found = engine.scheduler.shared - before
        sent.append(Sent(beginning, len(prompt), chosen, found, list(zip(texts, pages))))
    return sent


def engine_texts(prefixes: Prefixes, number: int) -> int:
    """How many texts it writes, as far as Prefixes knows."""
    return sum(texts for replica, texts in prefixes.calls.values() if replica == number)


def strip(sent: Sent, beginning: int, longest: int) -> str:
    """The tokens of a prompt: a frame for each page that is found, a block for each computed one.

    beginning: how many are its beginning. longest: tokens for which there is room.
    """
    colour = COLOURS[sent.beginning]
    body = ""
    for place in range(sent.length):
        x = place * 6 + place // PAGE * 2
        if place >= sent.found:
            body += box(x, 1, 5, 11, colour if place < beginning else "own")
        elif place % PAGE == 0:
            body += box(x, 1, PAGE * 6 - 1, 11, f"found {colour}")
    return svg(longest * 6 + longest // PAGE * 2, 13, body)


def lanes(sent: list[Sent], lengths: list[int]) -> str:
    """A column for each engine, a row for each request, in the order of time.

    lengths: of beginnings.
    """
    longest = max(each.length for each in sent)
    rows = ""
    for each in sent:
        cells = ["<td></td>"] * COUNT
        cells[each.engine] = f"<td>{strip(each, lengths[each.beginning], longest)}</td>"
        rows += f'<tr><th scope="row">{letter(each.beginning)}</th>{"".join(cells)}</tr>'
    foot = "<th></th>"
    for engine in range(COUNT):
        own = [each for each in sent if each.engine == engine]
        found = sum(each.found for each in own)
        computed = sum(each.length for each in own) - found
        foot += f"<td>{found} found<br>{computed} computed</td>"
    return table("lanes", f"<th></th>{ENGINES}", rows, f"<tr>{foot}</tr>")


def draw_routing(record: Routing) -> Drawing:
    lengths = [len(tokens) for tokens in record.beginnings]
    starts = []
    for number, tokens in enumerate(record.beginnings):
        pages = [tokens[at : at + PAGE] for at in range(0, len(tokens), PAGE)]
        shown = " ".join(
            f'<span class="{"page" if len(page) == PAGE else ""}">{"".join(map(token, page))}'
            "</span>"
            for page in pages
        )
        starts.append((letter(number), f'<div class="flow">{shown}</div>', ""))
    asked = sum(each.length for each in record.prefix)
    by_prefix, by_load = (sum(each.found for each in way) for way in record[1:3])
    scored = ""
    for number, each in enumerate(record.burst, 1):
        cells = ""
        for engine, (texts, pages) in enumerate(each.scores):
            words = f"{texts} \u2212 {pages} = {signed(texts - pages, 0)}"
            chosen = engine == each.engine
            drawing = strip(each, lengths[0], each.length) if chosen else ""
            cells += f'<td class="{"chosen" if chosen else ""}">{words}{drawing}</td>'
        scored += f'<tr><th scope="row">{number}</th>{cells}</tr>'
    legend = (
        '<ul class="key"><li><i class="first"></i>computed, in the colour of its beginning</li>'
        '<li><i class="found first"></i>found: computed before, by this engine</li>'
        '<li><i class="own"></i>computed: the end of a prompt, its own</li></ul>'
    )
    body = panels(
        panel(
            f"By prefix: {by_prefix} of {asked} positions found",
            lanes(record.prefix, lengths),
            "To the engine that has most pages of the prompt; if several do, to the one that has "
            "fewer pages in all. "
            f"One engine for all finds {record.alone}.",
        ),
        panel(
            f"At random, as by load of idle engines: {by_load} of {asked} found",
            lanes(record.load, lengths),
            "Of two engines at random to the one with fewer requests, as Ray does it by itself. "
            "Here all are idle, so chance alone decides; it has a seed.",
        ),
        panel(
            "&ldquo;Busy with&rdquo; \u2212 &ldquo;knows&rdquo;: the lowest number wins",
            table("lanes scored", f"<th></th>{ENGINES}", scored),
            f"{len(record.burst)} requests that begin with {letter(0)}, one a step, and all "
            "texts go on. Busy with: the texts that an engine writes. Knows: the pages of the "
            "prompt that it has. If several have the lowest, the one that has fewer pages in "
            "all.",
        ),
    )
    body = (
        f'<p class="title">{len(starts)} beginnings; a frame is a full page of {PAGE} tokens</p>'
        f"{rows_of(starts, 'starts')}{legend}{body}"
        '<p class="note">On Ray Serve a router asks <code>Prefixes</code>, which chooses here, '
        "too; here there is no Ray, and the engines are in one process.</p>"
    )
    caption = (
        "A request goes to the engine that has its beginning, unless that has much to do: "
        f"{len(record.prefix)} requests find {by_prefix} positions computed; at random, "
        f"{by_load}."
    )
    ways = [
        f"{name}: " + ", ".join(f"{'ABCD'[each.beginning]} to {each.engine + 1}" for each in way)
        for name, way in (("By prefix", record.prefix), ("by load", record.load))
    ]
    last = ", ".join(f"{each.scores} to {each.engine + 1}" for each in record.burst)
    text = (
        f"{'; '.join(ways)}. While texts go on, of each engine its texts and its pages: {last}. Of "
        f"{asked} positions {by_prefix} and {by_load} are found."
    )
    return Drawing(body, caption, text)


# 86


class Asked(NamedTuple):
    """A request, and what came of it."""

    name: str
    engine: int
    streamed: bool
    before: list[str]  # tokens until an engine is killed
    after: list[str]
    status: int
    read: str  # all of the text of a stream
    reason: str | None  # of its end, None where a process has ended
    lost: list[str]  # what its client reads then, line by line
    alone: bool  # whether all that was written is the beginning of what it is in `generate`


class Failure(NamedTuple):
    steps: int  # of each engine, and then the first is killed
    code: int  # with which its process ended
    asked: list[Asked]
    again: Asked  # the first one, afterwards
    begun: int  # steps of its engine until then


WRITTEN = 9  # tokens of each text that comes to its end
STEPS = 4


class Living(Handle):
    """To those in turn whose process has not ended: Ray tells a router which there are."""

    def choose(self, *call):
        return next(remote for remote in self.turns if not remote.ended)


def record_failure(prompt: str) -> Failure:
    check_prompt(prompt, MOST)
    return processes.fresh(break_engine, prompt)


def break_engine(prompt: str) -> Failure:
    """Two engines, with two texts each; of the last one the client wants no stream."""
    ids = recordings.encode(prompt, MOST)
    fields = {"prompt": prompt, "max_tokens": WRITTEN, "ignore_eos": True, "temperature": 1}
    bodies = [fields | {"seed": seed, "stream": seed != 2} for seed in range(4)]
    with open_engines(2, "--max-rows", 4, by_turns=True, handle=Living) as front:
        connections = [front.begin(PATH, body) for body in bodies]
        for _ in range(STEPS):
            for engine in range(2):
                front.step(engine)
        front.until(lambda: front.count("update") == STEPS * len(bodies))
        seen = len(front.crossed)
        front.kill(0)
        killed = front.handle.remotes[0].process
        killed.join(PATIENCE)
        front.finish()
        replies = [read(connection) for connection in connections]
        begun = front.on(1, count_steps)
        connection = front.begin(PATH, bodies[0])
        front.finish()
        replies.append(read(connection))
        calls = [each for each in front.crossed if each.kind == "generate"]

        def written(call: Crossed, messages: list[Crossed]) -> list[int]:
            return [
                token
                for each in messages
                if (each.engine, each.call, each.kind) == (call.engine, call.call, "update")
                for token in each.value[0].tokens
            ]

        asked = []
        for name, body, call, reply in zip("ABCDA", [*bodies, bodies[0]], calls, replies):
            before = written(call, front.crossed[:seen])
            after = written(call, front.crossed[seen:])
            whole = recordings.write(
                ids, NAME, max_new_tokens=WRITTEN, temperature=1, seed=body["seed"], ignore_eos=True
            )
            text = before + after
            events = reply.body.strip().split("\n\n") if body["stream"] else []
            found = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
            choices = [event["choices"][0] for event in found if "choices" in event]
            got = "".join(choice["text"] for choice in choices)
            reason = choices[-1]["finish_reason"] if choices else None
            lost = [] if reason else events[-2:] or [f"{reply.status}", json.dumps(reply.body)]
            shown = ([recordings.text_of(id) for id in own] for own in (before, after))
            same = whole[: len(text)] == text
            answer = reply.status, got, reason, lost
            asked.append(Asked(name, call.engine, body["stream"], *shown, *answer, same))
    return Failure(STEPS, killed.exitcode, asked[:-1], asked[-1], begun)


def count_steps(replica: Replica) -> int:
    return replica.thread.engine.steps


def draw_failure(record: Failure) -> Drawing:
    lost = [asked for asked in record.asked if asked.engine == 0]
    columns = [*lost, *(asked for asked in record.asked if asked.engine), record.again]
    total = record.begun + len(record.again.after) + 1

    def who(asked: Asked) -> str:
        return f'<b class="tint{"ABCD".index(asked.name)} letter">{asked.name}</b>'

    def cell(asked: Asked, step: int) -> str:
        """What a step writes of a text, or how it ends after it."""
        place = step - (record.begun if asked is record.again else 0)
        tokens = asked.before + asked.after
        if place == len(tokens):
            end = asked.reason or ("error" if asked.status == 200 else asked.status)
            kind = "" if asked.reason else ' class="wrong"'
            return f"<td{kind}>{end}</td>"
        if not 0 <= place < len(tokens):
            return "<td></td>"
        known = record.asked[0].before
        same = asked.name == "A" and tokens[place : place + 1] == known[place : place + 1]
        return f"<td>{token(tokens[place], 'kept' if same else '')}</td>"

    rows = ""
    for step in range(total):
        cells = "".join(cell(asked, step) for asked in columns[len(lost) :])
        if step <= record.steps:
            cells = "".join(cell(asked, step) for asked in lost) + cells
        elif step == record.steps + 1:
            size = f'colspan="{len(lost)}" rowspan="{total - step}"'
            cells = f'<td class="nobody" {size}>no process</td>{cells}'
        number = step + 1 if step < total - 1 else ""
        kind = ' class="killed"' if step == record.steps else ""
        rows += f'<tr{kind}><th scope="row">{number}</th>{cells}</tr>'
    names = [
        f"<th>{who(asked)} {'again' if asked is record.again else ''}</th>" for asked in columns
    ]
    head = (
        f'<th></th><th colspan="{len(lost)}">engine 1</th>'
        f'<th colspan="{len(columns) - len(lost)}">engine 2</th></tr><tr><th>step</th>'
        f"{''.join(names)}"
    )
    answers = ""
    for asked in lost:
        said = "".join(f"<li>{escape(line)}</li>" for line in asked.lost)
        way = "a stream" if asked.streamed else "awaited whole"
        answers += f'<p>{who(asked)} {way}</p><ul class="said">{said}</ul>'
    legend = key(kept="what the client of A had of its text, and the same when it asks again")
    fates = table("fates", head, rows) + legend
    same = sum(asked.alone for asked in [*record.asked, record.again])
    note = (
        f"As far as they came, {same} of {len(columns)} texts are the same as without others. Ray "
        "would also start another engine; here there is no Ray, each engine is a process of this "
        "picture."
    )
    body = panels(
        panel(f"A token a step; engine 1 is killed after {record.steps}", fates, note),
        panel("What the clients of engine 1 read at last", answers),
    )
    caption = (
        "A killed engine loses its texts: a stream ends with an error, a text awaited whole is a "
        "503. Others go on, and who asks again with the same seed gets the same text."
    )
    lines = [
        f"{asked.name} on engine {asked.engine + 1}: {asked.before} and then {asked.after}, "
        f"{asked.reason or asked.lost}"
        for asked in columns
    ]
    text = f"The killed process ends with {record.code}. {'; '.join(lines)}."
    return Drawing(body, caption, text)


# 87


class Second(NamedTuple):
    """A second of a run: each engine computes a step."""

    clients: int
    texts: dict[int, int]  # of each engine that is there: texts that it computes
    leaving: set[int]  # of these, those that get no new requests
    waiting: int  # requests that no engine computes yet
    wanted: int  # engines, by the average until now
    engines: int  # that are to be there from the next second on

    @property
    def requests(self) -> int:
        return sum(self.texts.values()) + self.waiting


class Scaling(NamedTuple):
    settings: dict[str, float]  # those that Ray gets
    rows: int  # of each engine
    seconds: list[Second]
    texts: list[tuple[int, list[int]]]  # all that were asked for: the seed, and tokens that came


OPTIONS = "--replicas 1 --max-replicas 3 --max-rows 2 --scale-seconds 4"
CLIENTS = (1,) * 4 + (6,) * 18 + (2,) * 16  # in each second; each has one request at a time
TOKENS = 6  # of each text


def record_scaling(prompt: str) -> Scaling:
    """Engines that begin and end by the rule of Ray, which is worked out here."""
    ids = check_prompt(prompt, MOST)
    args = serve_ray.make_parser().parse_args(OPTIONS.split())
    settings = serve_ray.scaling(args)
    rows = args.max_rows
    block_size = recordings.load(NAME).config.block_size
    prefixes = Prefixes(block_size, None, PAGE, 96, rows)
    engines: dict[int, Engine] = {}
    leaving: set[int] = set()
    asked: dict[int, tuple[int, Request]] = {}  # of each client that waits: where, for what
    over = []
    counts = deque(maxlen=int(settings["look_back_period_s"]))
    target = settings["min_replicas"]
    since = None  # when another number was wanted first
    seconds = []
    texts = 0
    while len(seconds) < len(CLIENTS) or asked:
        now = len(seconds)
        clients = CLIENTS[now] if now < len(CLIENTS) else 0
        for number in range(target):
            if number not in engines:
                engines[number] = make_engine(max_rows=rows, num_pages=96, page_size=PAGE)
        serving = set(engines) - leaving
        prefixes.keep(serving)
        for client in range(clients):
            if client not in asked:
                chosen = prefixes.order(sorted(serving), [ids], "")[0]
                prefixes.sent(chosen, str(client), [ids], "")
                params = SamplingParams(TOKENS, True, temperature=1.0, seed=texts)
                asked[client] = chosen, engines[chosen].add(ids, params)
                texts += 1
        requests = len(asked)
        computed = {}
        for number, engine in engines.items():
            engine.step()
            computed[number] = len(engine.works)
        for client, (number, request) in list(asked.items()):
            if request.finish_reason:
                del asked[client]
                over.append(request)
                prefixes.done(number, str(client))
        counts.append(requests)
        wanted = decide(counts, settings)
        gone = set(leaving)
        if wanted == target:
            since = None
        elif since is None:
            since = now
        delay = settings["upscale_delay_s" if wanted > target else "downscale_delay_s"]
        if since is not None and now - since >= delay:
            leaving |= set(range(wanted, target))  # the youngest
            target = wanted
            since = None
        waiting = requests - sum(computed.values())
        seconds.append(Second(clients, computed, gone, waiting, wanted, target))
        for number in [number for number in leaving if not engines[number].busy]:
            leaving.remove(number)
            del engines[number]
    return Scaling(settings, rows, seconds, [(each.params.seed, each.output) for each in over])


def decide(counts: Sequence[int], settings: dict[str, float]) -> int:
    """How many replicas Ray wants, of the requests that were not over lately."""
    wanted = math.ceil(sum(counts) / len(counts) / settings["target_ongoing_requests"])
    return min(max(wanted, settings["min_replicas"]), settings["max_replicas"])


def draw_scaling(record: Scaling) -> Drawing:
    settings = record.settings
    seconds = record.seconds
    target = settings["target_ongoing_requests"]
    most = max(second.requests for second in seconds)
    most = max(most, record.rows * settings["max_replicas"])

    def part(kind: str, count: int, of: int) -> str:
        return f'<i class="{kind}" style="height:{100 * count / of:.2f}%"></i>' if count else ""

    columns = ""
    for second in seconds:
        rows = record.rows * (len(second.texts) - len(second.leaving))
        stack = part("kept", second.waiting, most) + part("first", sum(second.texts.values()), most)
        columns += f'<span>{stack}<b style="bottom:{100 * rows / most:.2f}%"></b></span>'
    tracks = f'<b>requests,<br>{most} at most</b><div class="levels">{columns}</div>'
    wanted = ""
    for number, group in itertools.groupby(second.wanted for second in seconds):
        wanted += f'<span class="want{number}" style="flex:{len(list(group))}">{number}</span>'
    tracks += f'<b>wanted</b><div class="wanted">{wanted}</div>'
    for engine in range(settings["max_replicas"]):
        cells = ""
        for second in seconds:
            goes = engine in second.leaving
            texts = part("second" if goes else "first", second.texts.get(engine, 0), record.rows)
            there = "there" if engine in second.texts else ""
            cells += f'<span class="{there}">{texts}</span>'
        tracks += f'<b>engine {engine + 1}</b><div class="engine">{cells}</div>'
    step = 10
    marks = "".join(
        f'<span style="flex:{min(step, len(seconds) - at)}">{at}</span>'
        for at in range(0, len(seconds), step)
    )
    tracks += f'<b>second</b><div class="marks">{marks}</div>'
    legend = (
        '<ul class="key"><li><i class="first"></i>a text is computed</li>'
        '<li><i class="kept"></i>a request waits</li><li><i class="line-key"></i>rows that there '
        'are</li><li><i class="second"></i>the engine goes: it gets no new ones</li></ul>'
    )
    tables = "".join(worked(record, *change) for change in changes(seconds))
    asking = [second.clients for second in seconds if second.clients]
    clients = ", then ".join(str(number) for number, _ in itertools.groupby(asking))
    title = f'<p class="title">{clients} clients, each with one request at a time</p>'
    drained = sum(bool(second.leaving) for second in seconds)
    goes = f", here in {drained} s" if drained else ""
    beside = [
        now
        for now, second in enumerate(seconds)
        if second.waiting
        and any(
            count < record.rows
            for engine, count in second.texts.items()
            if engine not in second.leaving
        )
    ]
    stays = (
        "A request stays with the engine that it was given to, so some wait while others have free "
        f"rows, here in seconds {beside[0]} to {beside[-1]}. "
        if beside
        else ""
    )
    note = (
        f"{stays}An engine has {target:g} rows, so Ray is told to have one for every {target:g} "
        f"requests, averaged over {settings['look_back_period_s']:g} s; when another number has "
        f"been wanted for {settings['upscale_delay_s']:g} s, engines begin or end. One that ends "
        f"gets no new requests, and finishes its texts{goes}. Here there is no Ray: its rule is "
        "worked out beside real engines, which compute a step each second."
    )
    body = f'{title}<div class="tracks">{tracks}</div>{legend}{panels(tables)}'
    body += f'<p class="note">{note}</p>'
    whole = sum(len(tokens) == TOKENS for _, tokens in record.texts)
    caption = (
        f"Engines begin and end, so that there is one for every {target:g} requests on average. "
        f"{whole} of {len(record.texts)} texts are whole."
    )
    text = (
        f"{clients} clients, each with one request at a time, in {len(seconds)} seconds. Of each "
        "second the requests, those of them that wait, engines wanted, engines there: "
        + "; ".join(f"{s.requests}, {s.waiting}, {s.wanted}, {len(s.texts)}" for s in seconds)
        + "."
    )
    return Drawing(body, caption, text)


def changes(seconds: list[Second]) -> list[tuple[int, int]]:
    """When the number of engines changes: the first second that asked for it, and the last."""
    found = []
    before = 1
    since = None
    for now, second in enumerate(seconds):
        if second.wanted == before:
            since = None
        elif since is None:
            since = now
        if second.engines != before:
            found.append((since, now))
            before = second.engines
            since = None
    return found


def worked(record: Scaling, first: int, last: int) -> str:
    """The numbers of some seconds, until the number of engines changes."""
    target = record.settings["target_ongoing_requests"]
    count = int(record.settings["look_back_period_s"])
    rows = ""
    for now in range(first, last + 1):
        recent = [second.requests for second in record.seconds[max(now + 1 - count, 0) : now + 1]]
        average = sum(recent) / len(recent)
        rows += (
            f'<tr><th scope="row">{now} s</th><td>{" ".join(map(str, recent))}</td>'
            f"<td>{average:.2f}</td><td>{average / target:.2f}</td>"
            f"<td><b>{record.seconds[now].wanted}</b></td></tr>"
        )
    head = f"<th></th><th>requests</th><th>average</th><th>/ {target:g}</th><th>wanted</th>"
    before, after = record.seconds[first].engines, record.seconds[last].engines
    title = f"From {before} to {after}: the last {count} counts, and what they ask for"
    return panel(title, table("figures", head, rows))


PICTURES = {  # slug of a lesson -> its picture
    "prefix-routing": Picture(
        "Once upon a time, there was a little girl named Lily", record_routing, draw_routing
    ),
    "replica-failures": Picture("Tom had a big red ball", record_failure, draw_failure),
    "scaling": Picture("Tom had a big red ball", record_scaling, draw_scaling),
}

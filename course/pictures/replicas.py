"""Several engines side by side, without Ray, a step at a time."""

import itertools
import math
import random
from collections import deque
from types import SimpleNamespace as Record

import serve_ray
from engine.engine import Engine
from engine.request import Request
from pictures import runs, scene
from pictures.scene import times
from sampling import SamplingParams
from server.prefixes import Prefixes

NAME = "stories-llama"


# replicas


LENGTHS = (7, 4, 5, 9, 6, 3)  # of texts


def record_sides(prompt: str, rows: int = 2) -> list[Record]:
    ids = runs.encode(prompt, 20)
    return [side_by_side(ids, count, rows) for count in (1, 2)]


def side_by_side(ids: list[int], count: int, rows: int) -> Record:
    """Requests, by number from 1, in one or several engines."""
    engines = [Engine(runs.load(NAME), max_num_seqs=rows) for _ in range(count)]
    requests = [
        engines[seed % count].add(ids, SamplingParams(length, True, temperature=1.0, seed=seed))
        for seed, length in enumerate(LENGTHS)
    ]
    steps = [[] for _ in engines]
    while any(engine.busy for engine in engines):
        for engine, seen in zip(engines, steps):
            engine.step()
            now = [requests.index(entry.request) + 1 for entry in engine.scheduled]
            seen.append(runs.seat(seen[-1] if seen else [None] * rows, now))
    return Record(
        steps=steps,  # of each engine, each step: who has each row
        texts=[runs.texts_of(request.output) for request in requests],
    )


def draw_sides(record: list[Record]) -> scene.Scene:
    panels = []
    for side in record:
        rows = [
            scene.Row(
                f"engine {number}" * (row == 0),
                [scene.Cell(f"owner{owner}" if owner else "idle") for owner in owners],
                "texts " + ", ".join(str(owner) for owner in dict.fromkeys(owners) if owner),
            )
            for number, steps in enumerate(side.steps, 1)
            for row, owners in enumerate(zip(*steps))
        ]
        title = f"{times(len(side.steps), 'engine')}: {len(side.steps[0])} steps"
        panels.append(
            scene.Panel(title, scene.Cells(rows), key={"idle": "no request is left for the row"})
        )
    one, two = (len(side.steps[0]) for side in record)
    return scene.Scene(
        f"A second engine has its own copy of the model and its own rows: {two} steps instead of "
        f"{one} for {times(len(LENGTHS), 'text')}. Requests go to the engines in turn, and each "
        "text is the same as before.",
        *panels,
    )


# prefix-routing


PAGE = 4
ENGINES = 3
OTHERS = (
    "One day, a boy named Tom and his dog went to",
    "The lonely knight lived in a big castle on a hill,",
)
ENDS = " and saw then found with who ate ran sat took gave made".split(" ")[1:]


def record_routing(prompt: str) -> dict[str, list[Record]]:
    """Way -> requests in the order in which they come, each when the one before is over."""
    beginnings = [runs.encode(text, 30) for text in (prompt, *OTHERS)]
    order = [number for number in range(len(beginnings)) for _ in range(4)]
    random.Random(1).shuffle(order)
    ends = [runs.encode(f" {word}", 20) for word in ENDS]
    asked = [(number, beginnings[number] + end) for number, end in zip(order, ends)]
    return {"in turn": route(asked, False), "by prefix": route(asked, True)}


def route(asked: list[tuple[int, list[int]]], by_prefix: bool) -> list[Record]:
    model = runs.load(NAME)
    engines = [Engine(model, max_num_seqs=8, num_pages=96, page_size=PAGE) for _ in range(ENGINES)]
    prefixes = Prefixes(model.config.block_size, None, PAGE, 96, 8)
    prefixes.keep(set(range(ENGINES)))
    sent = []
    for call, (beginning, prompt) in enumerate(asked):
        best = prefixes.order(list(range(ENGINES)), [prompt], "")[0]
        chosen = best if by_prefix else call % ENGINES
        prefixes.sent(chosen, str(call), [prompt], "")
        engine = engines[chosen]
        before = engine.scheduler.prefix_cache_hits
        engine.add(prompt, SamplingParams(2, ignore_eos=True))
        while engine.busy:
            engine.step()
        prefixes.done(chosen, str(call))
        sent.append(
            Record(
                beginning=beginning,
                engine=chosen,
                length=len(prompt),
                found=engine.scheduler.prefix_cache_hits - before,
            )
        )
    return sent


def draw_routing(record: dict[str, list[Record]]) -> scene.Scene:
    panels = []
    bars = []
    for way, sent in record.items():
        rows = []
        for engine in range(ENGINES):
            cells = [
                scene.Cell("good" if each.found else "second", "ABC"[each.beginning])
                if each.engine == engine
                else scene.Cell()
                for each in sent
            ]
            rows.append(scene.Row(f"engine {engine + 1}", cells))
        panels.append(scene.Panel(f"Requests go {way}", scene.Cells(rows), wide=True))
        length = sum(each.length for each in sent)
        found = sum(each.found for each in sent)
        parts = [(found, "good"), (length - found, "second")]
        bars.append(scene.Bar(way, parts, f"{found} of {length} positions found"))
    key = {"good": "its beginning is in the cache", "second": "computed from the start"}
    panels.append(scene.Panel("Positions of all prompts", scene.Bars(bars), key=key))
    found = [sum(each.found for each in sent) for sent in record.values()]
    return scene.Scene(
        "An engine finds only the pages that it computed itself. A request that goes to the "
        f"engine with its beginning, A, B or C, finds them: {found[1]} positions instead of "
        f"{found[0]} when engines take turns.",
        *panels,
    )


# scaling


OPTIONS = "--replicas 1 --max-replicas 3 --max-num-seqs 4 --scale-seconds 5"
CLIENTS = [2] * 10 + [11] * 25 + [2] * 25  # in each second, each with one request at a time
TOKENS = 5


def record_scaling(prompt: str) -> Record:
    ids = runs.encode(prompt, 20)
    args = serve_ray.make_parser().parse_args(OPTIONS.split())
    settings = serve_ray.scaling(args)
    model = runs.load("stories-draft")
    engines = [
        Engine(model, max_num_seqs=args.max_num_seqs) for _ in range(settings["max_replicas"])
    ]
    asked: list[Request] = []
    over = []
    counts = deque(maxlen=int(settings["look_back_period_s"]))
    target = settings["min_replicas"]
    late = 0  # seconds in which another number was wanted
    seconds = []
    for clients in CLIENTS:
        for _ in range(clients - len(asked)):
            engine = min(engines[:target], key=load_of)
            asked.append(engine.add(ids, SamplingParams(TOKENS, ignore_eos=True)))
        counts.append(len(asked))
        for engine in engines:
            engine.step()
        over += [request for request in asked if request.finish_reason]
        asked = [request for request in asked if not request.finish_reason]
        wanted = decide(counts, settings)
        late = late + 1 if wanted != target else 0
        if late > settings["upscale_delay_s"]:
            target = wanted
            late = 0
        seconds.append(
            Record(
                requests=counts[-1],  # that are not over
                wanted=wanted,  # engines, by Ray's rule
                target=target,  # engines that get requests
                # engines that only finish what they have
                leaving=[at for at in range(target, len(engines)) if engines[at].busy],
            )
        )
    return Record(
        settings=settings,
        seconds=seconds,
        lengths=[len(request.output) for request in over],  # of all texts that are over
    )


def load_of(engine: Engine) -> int:
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)


def decide(counts: deque[int], settings: dict) -> int:
    """Ray's rule, worked out here: how many replicas for the requests of the last seconds."""
    wanted = math.ceil(sum(counts) / len(counts) / settings["target_ongoing_requests"])
    return min(max(wanted, settings["min_replicas"]), settings["max_replicas"])


def draw_scaling(record: Record) -> scene.Scene:
    rows = record.settings["target_ongoing_requests"]
    requests = []
    room = []
    for at, second in enumerate(record.seconds):
        requests += [(at, second.requests), (at + 1, second.requests)]
        room += [(at, rows * second.target), (at + 1, rows * second.target)]
    lanes = []
    for engine in range(record.settings["max_replicas"]):
        kinds = [
            "first" if engine < second.target else "second" * (engine in second.leaving)
            for second in record.seconds
        ]
        ends = [at for at, pair in enumerate(zip(["", *kinds], [*kinds, ""])) if pair[0] != pair[1]]
        spans = [scene.Span(*pair, kinds[pair[0]]) for pair in itertools.pairwise(ends)]
        lanes.append(scene.Lane(f"engine {engine + 1}", [span for span in spans if span.kind]))
    delay = record.settings["upscale_delay_s"]
    return scene.Scene(
        f"Engines follow the load, {delay:g} seconds late: one for every {rows:g} requests on "
        f"average. An engine that goes finishes its texts first, so all "
        f"{len(record.lengths)} texts are whole.",
        scene.Panel(
            "Requests, and the rows for them",
            scene.Lines(
                [
                    scene.Curve("requests that are not over", requests, "first"),
                    scene.Curve("rows of the engines that get requests", room, "second"),
                ],
                scene.Axis("second"),
                scene.Axis("requests"),
            ),
        ),
        scene.Panel(
            "The engines",
            scene.Lanes(lanes, scene.Axis("second")),
            "Ray's rule is worked out here beside real engines that take a step each second.",
            {"first": "gets requests", "second": "finishes what it has"},
        ),
    )


PROMPT = "Tom had a big red ball"
PICTURES = {
    "replicas": scene.Picture(PROMPT, record_sides, draw_sides),
    "prefix-routing": scene.Picture(
        "Once upon a time, there was a little girl named Lily", record_routing, draw_routing
    ),
    "scaling": scene.Picture(PROMPT, record_scaling, draw_scaling),
}

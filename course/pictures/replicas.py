"""Several engines that step side by side, without Ray."""

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
from server.prefixes import PrefixIndex

NAME = "stories-llama"


# replicas


LENGTHS = (7, 4, 5, 9, 6, 3)  # new tokens of each request


def record_sides(prompt: str, max_num_seqs: int = 2) -> list[Record]:
    ids = runs.encode(prompt, 20)
    return [side_by_side(ids, count, max_num_seqs) for count in (1, 2)]


def side_by_side(ids: list[int], count: int, max_num_seqs: int) -> Record:
    """Record requests, numbered from 1, on one or more engines."""
    engines = [Engine(runs.load(NAME), max_num_seqs=max_num_seqs) for _ in range(count)]
    requests = [
        engines[seed % count].add(ids, SamplingParams(length, True, temperature=1.0, seed=seed))
        for seed, length in enumerate(LENGTHS)
    ]
    steps = [[] for _ in engines]
    while any(engine.busy for engine in engines):
        for engine, seen in zip(engines, steps):
            engine.step()
            now = [requests.index(entry.request) + 1 for entry in engine.scheduled]
            seen.append(runs.assign_slots(seen[-1] if seen else [None] * max_num_seqs, now))
    return Record(
        steps=steps,  # (engine, step, row) -> request number
        texts=[runs.token_texts(request.output) for request in requests],
    )


def draw_sides(record: list[Record]) -> scene.Scene:
    panels = []
    for side in record:
        rows = [
            scene.Row(
                f"engine {number}" * (row == 0),
                [scene.Cell(f"owner{owner}" if owner else "idle") for owner in owners],
                "requests " + ", ".join(str(owner) for owner in dict.fromkeys(owners) if owner),
            )
            for number, steps in enumerate(side.steps, 1)
            for row, owners in enumerate(zip(*steps))
        ]
        title = f"{times(len(side.steps), 'engine')}: {len(side.steps[0])} steps"
        panels.append(
            scene.Panel(title, scene.Cells(rows), key={"idle": "no request is left for the slot"})
        )
    one, two = (len(side.steps[0]) for side in record)
    return scene.Scene(
        f"A second engine has its own copy of the model and its own batch slots: {two} steps "
        f"instead of {one} for {times(len(LENGTHS), 'request')}. Requests go to the engines "
        "round-robin, and each output is the same as before.",
        *panels,
    )


# prefix-routing


PAGE = 4
ENGINES = 3
OTHERS = (
    "One day, a boy named Tom and his dog went to",
    "The lonely knight lived in a big castle on a hill,",
)
SUFFIXES = " and saw then found with who ate ran sat took gave made".split(" ")[1:]


def record_routing(prompt: str) -> dict[str, list[Record]]:
    """Return routing -> requests in order of arrival, each sent after the previous one finished."""
    prompt_prefixes = [runs.encode(text, 30) for text in (prompt, *OTHERS)]
    order = [number for number in range(len(prompt_prefixes)) for _ in range(4)]
    random.Random(1).shuffle(order)
    ends = [runs.encode(f" {word}", 20) for word in SUFFIXES]
    requests = [(number, prompt_prefixes[number] + end) for number, end in zip(order, ends)]
    return {"round-robin": route(requests, False), "by prefix": route(requests, True)}


def route(requests: list[tuple[int, list[int]]], by_prefix: bool) -> list[Record]:
    model = runs.load(NAME)
    engines = [Engine(model, max_num_seqs=8, num_pages=96, page_size=PAGE) for _ in range(ENGINES)]
    prefix_index = PrefixIndex(model.config.block_size, None, PAGE, 96, 8)
    prefix_index.set_replicas(set(range(ENGINES)))
    sent = []
    for call, (prefix_id, prompt) in enumerate(requests):
        best = prefix_index.rank_replicas(list(range(ENGINES)), [prompt], "")[0]
        chosen = best if by_prefix else call % ENGINES
        prefix_index.add_request(chosen, str(call), [prompt], "")
        engine = engines[chosen]
        before = engine.scheduler.prefix_cache_hits
        engine.add(prompt, SamplingParams(2, ignore_eos=True))
        while engine.busy:
            engine.step()
        prefix_index.finish_request(chosen, str(call))
        sent.append(
            Record(
                prefix_id=prefix_id,
                engine=chosen,
                length=len(prompt),
                cache_hits=engine.scheduler.prefix_cache_hits - before,
            )
        )
    return sent


def draw_routing(record: dict[str, list[Record]]) -> scene.Scene:
    panels = []
    bars = []
    for routing, sent in record.items():
        rows = []
        for engine in range(ENGINES):
            cells = [
                scene.Cell("good" if each.cache_hits else "second", "ABC"[each.prefix_id])
                if each.engine == engine
                else scene.Cell()
                for each in sent
            ]
            rows.append(scene.Row(f"engine {engine + 1}", cells))
        panels.append(scene.Panel(f"Routing: {routing}", scene.Cells(rows), wide=True))
        length = sum(each.length for each in sent)
        cache_hits = sum(each.cache_hits for each in sent)
        parts = [(cache_hits, "good"), (length - cache_hits, "second")]
        bars.append(scene.Bar(routing, parts, f"{cache_hits} of {length} cached"))
    key = {"good": "its prefix is in the cache", "second": "computed from the start"}
    panels.append(scene.Panel("Prompt tokens", scene.Bars(bars), key=key))
    cache_hits = [sum(each.cache_hits for each in sent) for sent in record.values()]
    return scene.Scene(
        "An engine finds only pages that it computed itself. A request sent to the engine that "
        f"holds its prefix, A, B or C, reuses them: {cache_hits[1]} prompt tokens from the "
        f"cache, instead of {cache_hits[0]} with round-robin routing.",
        *panels,
    )


# scaling


OPTIONS = "--replicas 1 --max-replicas 3 --max-num-seqs 4 --scale-seconds 5"
CLIENTS = [2] * 10 + [11] * 25 + [2] * 25  # number per second, each with one request at a time
TOKENS = 5


def record_scaling(prompt: str) -> Record:
    ids = runs.encode(prompt, 20)
    args = serve_ray.make_parser().parse_args(OPTIONS.split())
    settings = serve_ray.autoscaling_config(args)
    model = runs.load("stories-draft")
    engines = [
        Engine(model, max_num_seqs=args.max_num_seqs) for _ in range(settings["max_replicas"])
    ]
    requests: list[Request] = []
    finished = []
    counts = deque(maxlen=int(settings["look_back_period_s"]))
    target = settings["min_replicas"]
    delayed = 0  # consecutive seconds with desired != target
    seconds = []
    for clients in CLIENTS:
        for _ in range(clients - len(requests)):
            engine = min(engines[:target], key=load_of)
            requests.append(engine.add(ids, SamplingParams(TOKENS, ignore_eos=True)))
        counts.append(len(requests))
        for engine in engines:
            engine.step()
        finished += [request for request in requests if request.finish_reason]
        requests = [request for request in requests if not request.finish_reason]
        desired = decide(counts, settings)
        delayed = delayed + 1 if desired != target else 0
        if delayed > settings["upscale_delay_s"]:
            target = desired
            delayed = 0
        seconds.append(
            Record(
                requests=counts[-1],  # unfinished requests
                desired=desired,  # engines by Ray's rule
                target=target,  # engines that get requests
                # draining engines, which only finish their requests
                leaving=[at for at in range(target, len(engines)) if engines[at].busy],
            )
        )
    return Record(
        settings=settings,
        seconds=seconds,
        lengths=[len(request.output) for request in finished],  # of all finished requests
    )


def load_of(engine: Engine) -> int:
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)


def decide(counts: deque[int], settings: dict) -> int:
    """Return the number of replicas by Ray's rule. counts: requests in the last seconds."""
    desired = math.ceil(sum(counts) / len(counts) / settings["target_ongoing_requests"])
    return min(max(desired, settings["min_replicas"]), settings["max_replicas"])


def draw_scaling(record: Record) -> scene.Scene:
    rows = record.settings["target_ongoing_requests"]
    requests = []
    slots = []
    for at, second in enumerate(record.seconds):
        requests += [(at, second.requests), (at + 1, second.requests)]
        slots += [(at, rows * second.target), (at + 1, rows * second.target)]
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
        f"The number of engines follows the load, {delay:g} seconds late: one for every {rows:g} "
        f"requests on average. An engine drains before it stops, so all {len(record.lengths)} "
        "requests complete.",
        scene.Panel(
            "Requests and batch slots",
            scene.Lines(
                [
                    scene.Curve("unfinished requests", requests, "first"),
                    scene.Curve("batch slots of the engines that accept requests", slots, "second"),
                ],
                scene.Axis("second"),
                scene.Axis("requests"),
            ),
        ),
        scene.Panel(
            "The engines",
            scene.Lanes(lanes, scene.Axis("second")),
            "Ray's autoscaling rule is computed here, beside real engines that run one step "
            "per second.",
            {"first": "accepts requests", "second": "drains"},
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

"""Decode steps on the pretend GPU of the tests: their launches, uploads, syncs and shapes."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Record

from engine.device import DeviceRunner
from engine.engine import Engine
from engine.pages import page_count
from engine.static import StaticRunner, plan_step
from errors import UserError
from graphs import eager_step
from model import TorchRunner
from pictures import runs, scene
from pictures.scene import times
from sampling import SamplingParams

TESTS = Path(__file__).parents[2] / "tests"
NAME = "stories-llama"
PAGE = 16  # positions of a page, as by default


def pretend_gpu():
    """Return the module of the pretend GPU, which imports pytest."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    try:
        import pretend_gpu
    except ModuleNotFoundError as error:
        raise UserError(f"this picture needs the tests' packages: {error}") from None
    return pretend_gpu


def add_requests(
    runner: TorchRunner, prompts: list[list[int]], params: dict
) -> tuple[Engine, list]:
    """Return an engine on the pretend GPU and its requests, sampled with seeds 0, 1, ..."""
    model = pretend_gpu().gpu().move(runs.load(NAME))
    engine = Engine(model, page_size=PAGE)
    model.runner = runner  # after the engine, which would replace a TorchRunner
    requests = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(seed=seed, ignore_eos=True, temperature=0.8, **params)
        requests.append(engine.add(prompt, sampling, cache_salt=str(seed)))  # pages of its own
    return engine, requests


# Shapes of attention batches.

SEQUENCES = 5
TOKENS = 30  # of each reply


def watch(runner: TorchRunner, plan: Callable) -> list:
    """Return a list to which each decode step's plan is appended. plan: (cache, spans) -> plan."""
    plans = []
    step = runner.step

    def watched_step(model, cache, spans, *args):
        if all(len(span.tokens) == 1 for span in spans):
            plans.append(plan(cache, spans))
        return step(model, cache, spans, *args)

    runner.step = watched_step
    return plans


def plan_varying(cache, spans: list) -> Record:
    """Record the attention batches of a varying step."""
    starts = [span.start for span in spans]  # all different, so they identify sequences
    plan = cache.plan(spans)
    new_pages, *views = plan.parts[3:]
    batches = [
        Record(numbers=[starts.index(start) for start in views[at]], tables=rows_of(views, at))
        for at in range(0, len(views), 3)
    ]
    return Record(starts=starts, batches=batches, new_pages=new_pages)


def plan_static(cache, spans: list) -> Record:
    """Record the one attention batch of a static step."""
    starts = [span.start for span in spans]
    shape, (_, *views) = plan_step(cache, spans)
    numbers = [starts.index(start) for start in views[0]]
    views = [views[0], *views[2:]]  # without the pages of the new tokens
    return Record(starts=starts, shape=shape, numbers=numbers, tables=rows_of(views, 0))


def rows_of(views: list[list[int]], at: int) -> list[list[int]]:
    """Return the pages that each sequence of a batch reads."""
    starts, _, pages = views[at : at + 3]
    width = len(pages) // len(starts)
    return [pages[first : first + width] for first in range(0, len(pages), width)]


def record_shapes(prompt: str) -> Record:
    """Record each decode step of five sequences, with varying and with static shapes."""
    ids = runs.encode(prompt, 200)
    lengths = [3 + 9 * number for number in range(SEQUENCES)]
    prompts = [(ids * length)[:length] for length in lengths]
    record = Record(prompts=prompts)
    gpu = pretend_gpu().gpu()
    for name, runner, plan in (
        ("varying", DeviceRunner(), plan_varying),
        ("static", StaticRunner(eager_step), plan_static),
    ):
        engine, requests = add_requests(runner, prompts, {"max_new_tokens": TOKENS})
        plans = watch(runner, plan)
        with pretend_gpu().no_inference_mode():
            engine.step()  # the prefills
            plans.clear()
            while engine.busy:
                gpu.reset()
                engine.step()
                plans[-1].launches = gpu.launches.total()
        setattr(record, name, plans)
        setattr(record, f"{name}_outputs", [request.output for request in requests])
    return record


def letter(number: int) -> str:
    return "ABCDE"[number]


def table_row(name: str, start: int, table: list[int], kind: str, value: str = "") -> scene.Row:
    """Draw the pages that a sequence reads: its own, a new one, and its last one as padding."""
    own = page_count(start + 1, PAGE)
    kinds = [kind] * own + ["idle"] * (len(table) - own)
    if start % PAGE == 0:
        kinds[own - 1] = "second"
    return scene.Row(name, [scene.Cell(*each) for each in zip(kinds, map(str, table))], value)


def varying_rows(step: Record, number: int, columns: int) -> list[scene.Row]:
    """Draw the batches of a varying step, with empty cells up to a number of columns."""
    rows = []
    for at, batch in enumerate(step.batches):
        kind = ("owner1", "owner3", "owner4")[at]
        for index, table in zip(batch.numbers, batch.tables):
            value = f"step {number}, batch {at + 1}"
            row = table_row(letter(index), step.starts[index], table, kind, value)
            rows.append(row._replace(cells=row.cells + [scene.Cell()] * (columns - len(table))))
    return rows


def draw_shapes(record: Record) -> scene.Scene:
    most = max(range(len(record.varying)), key=lambda at: len(record.varying[at].batches))
    # The longest sequence starts its fifth page here, so the static step pads to eight.
    late = max(at for at, step in enumerate(record.varying) if step.starts[-1] % PAGE == 0)
    static = record.static[late]
    columns = page_count(static.starts[-1] + 1, PAGE)
    varying = [varying_rows(record.varying[at], at + 1, columns) for at in (most, late)]
    rows = []
    for row, (index, table) in enumerate(zip(static.numbers, static.tables)):
        again = row >= SEQUENCES
        name = letter(index) + " again" * again
        rows.append(table_row(name, static.starts[index], table, "third" if again else "first"))
    launches = [step.launches for step in record.varying]
    (fixed,) = {step.launches for step in record.static}
    used = sum(page_count(start + 1, PAGE) for start in static.starts)
    shapes = sorted({step.shape for step in record.static})
    pages = " or ".join(str(shape.num_pages) for shape in shapes)
    return scene.Scene(
        f"Batches of similar lengths change from step to step, and {SEQUENCES} sequences launch "
        f"{min(launches)} to {max(launches)} kernels. A static step always launches {fixed}, with "
        f"one batch of {static.shape.num_seqs} sequences and {pages} pages each. In step "
        f"{late + 1} it reads {static.shape.num_seqs * static.shape.num_pages} pages; "
        f"the sequences hold {used}.",
        scene.Panel(
            f"Varying: {launches[most]} launches, later {launches[late]}",
            scene.Cells([*varying[0], scene.Row("", [scene.Cell()] * columns), *varying[1]]),
            "A row: the pages that a sequence reads. A batch is as wide as its longest one.",
            {"second": "new page, cleared first", "idle": "padding: its own last page"},
        ),
        scene.Panel(
            f"Static, step {late + 1}: 1 batch, {static.launches} launches",
            scene.Cells(rows),
            f"Rounded up to powers of two: {SEQUENCES} sequences to {static.shape.num_seqs}, and "
            f"the {columns} pages of the longest to {static.shape.num_pages}. E again writes the "
            "same keys and values to the same place.",
            {
                "first": "pages of the sequence",
                "second": "new page, cleared by a mask",
                "third": "the last sequence, repeated",
                "idle": "padding: its own last page",
            },
        ),
        scene.Panel(
            "Launches in each step",
            scene.Lines(
                [
                    scene.Curve("varying", list(enumerate(launches, 1)), "second"),
                    scene.Curve("static", [(1, fixed), (len(launches), fixed)], "first"),
                ],
                scene.Axis("decode step"),
                scene.Axis("launches", [(at, str(at)) for at in (0, 200, 400, 600, 800)]),
                [scene.Mark(f"step {at + 1}", x=at + 1) for at in (most, late)],
            ),
            "Counted by the pretend GPU of the tests, with the newest code of the course. The "
            "message counts with this lesson\u2019s.",
        ),
    )


# A step as the host issues it.

BATCH = 8
RUNNERS = {  # name, for some with the lesson -> how to make the runner
    "TorchRunner": TorchRunner,
    "one upload, 177": DeviceRunner,
    "static, 187": lambda: StaticRunner(eager_step),
    "replayed, 188": lambda: StaticRunner(pretend_gpu().PretendGraph),
}
COUNTERS = ("launches", "uploads", "syncs")


@contextlib.contextmanager
def noted_operations() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names of counters, in order: of the host's operations, and of a graph's."""
    gpu = pretend_gpu().gpu()
    count = gpu.count
    operations = []
    captured = []

    def note(counter: str, operation) -> None:
        count(counter, operation)
        if gpu.capturing and not captured:
            operations.append("launches")  # of the graph
        (captured if gpu.capturing else operations).append(counter)

    gpu.count = note
    try:
        yield operations, captured
    finally:
        del gpu.count  # the method is left


def record_steps(prompt: str) -> list[Record]:
    """Record the operations of one decode step of each runner, in the host's order."""
    prompts = [runs.encode(prompt, 12)] * BATCH
    gpu = pretend_gpu().gpu()
    records = []
    for name, make in RUNNERS.items():
        engine, requests = add_requests(make(), prompts, {"max_new_tokens": 4, "top_p": 0.9})
        with pretend_gpu().no_inference_mode():
            engine.step()  # the prefill
            engine.step()  # captured
            gpu.reset()
            with noted_operations() as (operations, captured):
                engine.step()
            counts = {each: getattr(gpu, each).total() for each in COUNTERS}
            while engine.busy:
                engine.step()
        outputs = [request.output for request in requests]
        records.append(
            Record(
                name=name,
                operations=operations,
                captured=len(captured),
                counts=counts,
                outputs=outputs,
            )
        )
    return records


KINDS = {"launches": "first", "uploads": "good", "syncs": "bad"}


def spans_of(operations: list[str]) -> list[scene.Span]:
    """Draw launches between others as one span, and others as moments."""
    spans = []
    at = 0
    for counter, group in itertools.groupby(operations):
        count = len(list(group))
        if counter == "launches":
            text = str(count) if count > 60 else ""
            spans.append(scene.Span(at, at + count, KINDS[counter], text))
        else:
            spans += [scene.Span(each, each, KINDS[counter]) for each in range(at, at + count)]
        at += count
    return sorted(spans, key=lambda span: span.start == span.end)  # moments above launches


def draw_steps(records: list[Record]) -> scene.Scene:
    before, _, eager, replayed = records
    lanes = [scene.Lane(each.name, spans_of(each.operations)) for each in records]
    counted = [
        scene.Row(each.name, [scene.Cell("", str(each.counts[name])) for name in COUNTERS])
        for each in records
    ]
    host = [
        scene.Span(0, 1, KINDS["uploads"], "upload"),
        scene.Span(1, 2, KINDS["launches"], "replay"),
        scene.Span(2, 3, KINDS["syncs"], "sync"),
    ]
    kernels = scene.Span(1, 3, "first", f"{replayed.captured} kernels")
    return scene.Scene(
        f"With TorchRunner a decode step of {BATCH} requests has {before.counts['launches']} "
        f"launches, {before.counts['uploads']} uploads and {before.counts['syncs']} syncs, for "
        f"which the host waits. A static step has {eager.counts['launches']} launches between "
        f"{times(eager.counts['uploads'], 'upload')} and {times(eager.counts['syncs'], 'sync')}. "
        f"A graph replays them with {times(replayed.counts['launches'], 'launch', 'launches')}.",
        scene.Panel(
            "Operations of a step, in the order in which the host issues them",
            scene.Lanes(lanes, scene.Axis("operation")),
            key={"first": "launches", "good": "upload", "bad": "sync: the host waits for the GPU"},
            wide=True,
        ),
        scene.Panel(
            "Counts of the step",
            scene.Cells(counted, list(COUNTERS)),
            "By the pretend GPU of the tests, with the newest code of the course. The messages "
            "count with the code of their lessons.",
        ),
        scene.Panel(
            "The replayed step, enlarged",
            scene.Lanes(
                [scene.Lane("host", host), scene.Lane("GPU", [kernels])],
                scene.Axis("operation", [(at, str(at)) for at in range(4)]),
            ),
            "The kernels follow each other without the host. Widths are no times: the pretend "
            "GPU measures none.",
        ),
    )


PICTURES = {
    "static-shapes": scene.Picture("Once upon a time", record_shapes, draw_shapes),
    "captured-step": scene.Picture("Once upon a time", record_steps, draw_steps),
}

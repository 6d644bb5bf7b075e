"""Static and continuous batching."""

from types import SimpleNamespace as Record

from engine.engine import Engine
from infer import generate
from pictures import runs, scene
from pictures.runs import AddedRequest, num_scheduled_tokens
from sampling import SamplingParams

LENGTHS = (3, 9, 5, 4, 7, 3)


def record_batches(prompt: str, rows: int = 3) -> Record:
    """Record six requests in three batch slots, with static and with continuous batching."""
    model = runs.load()
    ids = runs.encode(prompt, 20)
    params = [
        SamplingParams(length, ignore_eos=True, temperature=1.0, seed=seed)
        for seed, length in enumerate(LENGTHS)
    ]
    static = []
    for first in range(0, len(params), rows):
        batch = params[first : first + rows]
        for step in generate(model, [ids] * len(batch), batch):
            static.append([None if id is None else first + row for row, id in enumerate(step, 1)])
    run = runs.run_engine(
        Engine(model, max_num_seqs=rows), [AddedRequest(0, ids, each) for each in params]
    )
    continuous = []
    slots = [None] * rows
    for frame in run.frames:
        now = [
            number for number in range(1, len(params) + 1) if num_scheduled_tokens(frame, number)
        ]
        slots = runs.assign_slots(slots, now)
        continuous.append(slots)
    return Record(
        static=static,  # (step, row) -> request number
        continuous=continuous,
        run=run,  # the run with continuous batching
    )


def draw_batches(record: Record) -> scene.Scene:
    parts = []
    counts = []
    for name, steps, why in (
        ("Static batches", record.static, "a batch ends with its longest sequence"),
        ("Continuous batching", record.continuous, "no request is left for the slot"),
    ):
        rows = [
            scene.Row(
                f"slot {row + 1}",
                [scene.Cell(f"owner{n}", str(n)) if n else scene.Cell("idle") for n in owners],
            )
            for row, owners in enumerate(zip(*steps))
        ]
        idle = sum(step.count(None) for step in steps)
        counts.append(len(steps))
        title = f"{name}: {len(steps)} steps, {idle} idle slot-steps"
        parts.append(scene.Panel(title, scene.Cells(rows), key={"idle": f"idle: {why}"}))
    frames = record.run.frames
    later = range(len(frames) // 2, len(frames))  # no request ends in the first frame shown
    first = next((at for at in later if len(frames[at]["running"]) == len(record.static[0])), 0)
    parts.append(scene.Panel("The engine, step by step", runs.player(record.run, first)))
    return scene.Scene(
        "With continuous batching, the slot of a finished request goes to the next one "
        f"immediately, instead of waiting for the longest sequence of the batch: {counts[1]} "
        f"steps instead of {counts[0]} for {len(record.run.requests)} requests.",
        *parts,
    )


PICTURES = {"continuous-batching": scene.Picture("Lily", record_batches, draw_batches, card=(0, 1))}

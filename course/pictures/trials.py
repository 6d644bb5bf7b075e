"""Trials that decide whether drafting is profitable."""

import itertools
from types import SimpleNamespace as Record

from engine.drafter import TRIAL_STEPS, PagedModelDrafter, SpeculationTrial
from engine.engine import Engine
from pictures import runs, scene
from pictures.runs import AddedRequest
from pictures.scene import signed
from sampling import SamplingParams

GAMMA = 3
STEPS = 6 * TRIAL_STEPS
CLOCKS = {  # cost model of a step with drafts -> title, note; a pass over one token costs 1
    "weights": (
        "Bound by reading weights",
        f"A pass over {GAMMA + 1} tokens takes as long as a pass over one.",
    ),
    "products": (
        "Bound by computing products",
        f"A pass over {GAMMA + 1} tokens takes {GAMMA + 1} times as long as a pass over one.",
    ),
}


def record_trials(prompt: str) -> list[Record]:
    """Run a trial under two cost models, with the accepted drafts of a recorded run."""
    ids = runs.encode(prompt, 20)
    target, draft = runs.load(), runs.load("stories-draft")
    params = SamplingParams(200, ignore_eos=True, temperature=0.8, seed=1)
    engine = Engine(
        target, max_num_seqs=1, gamma=GAMMA, drafter=PagedModelDrafter(draft, target, 1)
    )
    run = runs.run_engine(engine, [AddedRequest(0, ids, params)])
    counts = [frame["running"][0]["work"][3] for frame in run.frames[1:-1]]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (draft, target)]
    small = GAMMA * sizes[0] / sizes[1]  # cost of the draft model's passes
    return [run_trial(clock, cost + small, counts) for clock, cost in zip(CLOCKS, (1, GAMMA + 1))]


def run_trial(clock: str, cost: float, counts: list[int]) -> Record:
    """Run a trial with a constant cost per step. counts: tokens of each step with drafts."""
    trial = SpeculationTrial()
    with_drafts = itertools.cycle(counts)
    steps = []
    while len(steps) < STEPS:
        drafts = trial.should_draft
        tokens = next(with_drafts) if drafts else 1
        steps.append((drafts, tokens))
        trial.record_step(drafts, tokens, cost if drafts else 1.0)
        if len(steps) == 2 * TRIAL_STEPS:
            rates = trial.throughput(True), trial.throughput(False)
    return Record(
        clock=clock,
        cost=cost,  # cost of a step with drafts
        steps=steps,  # (with drafts?, tokens)
        rates=rates,  # tokens per unit of cost, with and without drafts, at the decision
    )


def draw_trials(record: list[Record]) -> scene.Scene:
    parts = []
    for each in record:
        time = total = 0
        segments = []  # steps in the same mode
        for drafts, tokens in each.steps:
            if not segments or segments[-1][0] != drafts:
                segments.append((drafts, [(time, total)]))
            time += each.cost if drafts else 1
            total += tokens
            segments[-1][1].append((time, total))
        named = set()
        curves = []
        for drafts, points in segments:
            name = "with drafts" if drafts else "without drafts"
            kind = "good" if drafts else "second"
            curves.append(scene.Curve("" if kind in named else name, points, kind))
            named.add(kind)
        pays = "pay" if each.rates[0] > each.rates[1] else "do not pay"
        title, note = CLOCKS[each.clock]
        with_drafts, without = (signed(rate) for rate in each.rates)
        note += (
            f" With the draft model, a step with drafts takes {each.cost:.2f}. Tokens per unit of "
            f"time: {with_drafts} with drafts, {without} without."
        )
        lines = scene.Lines(curves, scene.Axis("time, in one-token passes"), scene.Axis("tokens"))
        parts.append(scene.Panel(f"{title}: drafts {pays}", lines, note))
    return scene.Scene(
        "Drafts pay where a step with them yields more tokens in its time. The engine measures "
        f"{TRIAL_STEPS} steps with drafts and {TRIAL_STEPS} without, then continues in the "
        "faster mode. Times are simulated here, not measured.",
        *parts,
    )


PICTURES = {"drafts-that-pay": scene.Picture("Lily", record_trials, draw_trials)}

"""A process of a benchmarks.scaling group: python -m benchmarks.ranks JOB, with JOB in JSON."""

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch
import torch.nn as nn

from benchmarks import common
from benchmarks.engine import run_prefill, stopwatch, timed_steps
from engine.engine import Engine
from loading.load import load_model
from native import use_native
from native.linear import NativeLinear
from parallel.ranks import TensorParallelGroup
from parallel.shards import load_shard, parallelize_vocabulary
from sampling import SamplingParams

SIZES = [2**12, 2**15, 2**18, 2**22]  # bytes that a rank contributes to a collective
TIMES = 50  # calls per type and size


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    if job["join"] is None:
        found = decode(job, None)
    else:
        with TensorParallelGroup(job["join"]) as tp_group:
            found = decode(job, tp_group)
    if found:
        Path(job["output"]).write_text(json.dumps(found))


@torch.inference_mode()
def decode(job: dict, tp_group: TensorParallelGroup | None) -> dict | None:
    """Return measurements of decode steps, memory and collectives; None on ranks above 0."""
    before = common.memory_in_use("cpu")
    model = load_shard(job["model"], tp_group=tp_group) if tp_group else load_model(job["model"])
    if job["native"]:
        use_native(model)
    if tp_group:
        parallelize_vocabulary(model)
    # Prefill all prompts in one step, so that all sequences decode in all others.
    engine = Engine(
        model,
        max_num_seqs=job["max_num_seqs"],
        max_num_batched_tokens=job["max_num_seqs"] * job["prompt"],
    )
    # Large collectives follow later, because they would raise the memory peak.
    collective_times = [time_collectives(tp_group, SIZES[:-1])] if tp_group else []
    found = None
    if tp_group and tp_group.rank:
        model.runner.run_worker_loop(model, engine.cache)
    else:
        found = run_driver(engine, job)
    memory = [common.memory_in_use("cpu") - before]
    if tp_group:
        if found:
            tp_group.broadcast()  # tells the workers to stop
        grown = torch.tensor(memory, dtype=torch.float64)
        memory = tp_group.all_gather(grown, [1] * tp_group.size).tolist()
        collective_times.append(time_collectives(tp_group, SIZES))
    return found and found | {"memory": memory, "collective_times": collective_times}


def run_driver(engine: Engine, job: dict) -> dict:
    """Run the engine on the driver; return its outputs, and means per decode step in seconds.

    sent: bytes that this rank sends. communication: seconds in collectives, including waiting for
    others.
    """
    model = engine.model
    tp_group = model.runner.tp_group
    params = SamplingParams(max_new_tokens=job["tokens"], ignore_eos=True)
    prompts = common.random_prompts(model.config.vocab_size, job["max_num_seqs"], job["prompt"])
    requests = [engine.add(prompt, params) for prompt in prompts]
    run_prefill(engine, requests)
    engine.step()  # the first step that only decodes
    methods = {}
    if job["parts"]:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | NativeLinear)]
        methods = {f"product {index}": (layer, "forward") for index, layer in enumerate(layers)}
        methods |= {"hidden": (model, "hidden"), "head": (model, "head")}
        methods |= {"attention": (engine.cache, "attend"), "broadcast": (tp_group, "broadcast")}
    if tp_group:
        tp_group.collectives, tp_group.bytes_sent, tp_group.seconds = 0, 0, 0.0
    cheap = SimpleNamespace(device=model.device)  # model.device takes several microseconds
    with stopwatch(cheap, **methods) as seconds:
        times = [took for took, _ in timed_steps(engine)]
    found = {"outputs": [request.output for request in requests], "step": statistics.mean(times)}
    if tp_group:
        totals = {"collectives": tp_group.collectives, "sent": tp_group.bytes_sent}
        totals |= {"communication": tp_group.seconds} | seconds
        found |= {name: value / len(times) for name, value in totals.items()}
    return found


def time_collectives(tp_group: TensorParallelGroup, sizes: list[int]) -> dict[str, list[float]]:
    """Return the mean seconds of each type of collective, for each size in bytes."""
    kinds = {
        "sum": tp_group.sum,
        "all_gather": lambda x: tp_group.all_gather(x, [len(x)] * tp_group.size),
        "gather": lambda x: tp_group.gather(x, [len(x)] * tp_group.size),
        "broadcast": lambda x: tp_group.broadcast(bytes(4 * len(x))),
    }
    rows, weight = torch.ones(32, 256), torch.ones(256, 512)
    found = {}
    for kind, collective in kinds.items():
        found[kind] = []
        for size in sizes:
            x = torch.ones(size // 4)
            collective(x)
            took = 0.0
            for _ in range(TIMES):
                rows @ weight  # compute between collectives, as layers do
                began = time.perf_counter()
                before = tp_group.seconds
                collective(x)
                # `communication` of a pass also counts only tp_group.seconds.
                took += tp_group.seconds - before or time.perf_counter() - began
            found[kind].append(took / TIMES)
    return found


if __name__ == "__main__":
    main()

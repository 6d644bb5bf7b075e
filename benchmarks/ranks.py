"""One process of a group of benchmarks.scaling: python -m benchmarks.ranks JOB, in JSON."""

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before torch, whose import takes a second

import torch
import torch.nn as nn

from benchmarks import common
from benchmarks.engine import run_prefill, stopwatch, timed_steps
from engine.engine import Engine
from loading.load import load_model
from native import use_native
from native.linear import NativeLinear
from parallel.ranks import Ranks
from parallel.shards import join_vocabulary, load_part
from sampling import SamplingParams

SIZES = [2**12, 2**15, 2**18, 2**22]  # bytes that a rank brings to a collective
TIMES = 50  # of each kind and size


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    if job["join"] is None:
        found = decode(job, None)
    else:
        with Ranks(job["join"]) as ranks:
            found = decode(job, ranks)
    if found:
        Path(job["output"]).write_text(json.dumps(found))


@torch.inference_mode()
def decode(job: dict, ranks: Ranks | None) -> dict | None:
    """What steps take in which all rows decode, and what else is known; None on a rank above 0."""
    before = common.memory_in_use("cpu")
    model = load_part(job["model"], ranks=ranks) if ranks else load_model(job["model"])
    if job["native"]:
        use_native(model)
    if ranks:
        join_vocabulary(model)
    # All prompts are read in one step, so that all rows decode in all others.
    engine = Engine(
        model, job["max_num_seqs"], max_num_batched_tokens=job["max_num_seqs"] * job["prompt"]
    )
    # Large ones later: they would be in the peak of memory.
    links = [links_of(ranks, SIZES[:-1])] if ranks else []
    found = None
    if ranks and ranks.rank:
        model.runner.follow(model, engine.cache)
    else:
        found = lead(engine, job)
    memory = [common.memory_in_use("cpu") - before]
    if ranks:
        if found:
            ranks.tell()  # that there is no more
        grown = torch.tensor(memory, dtype=torch.float64)
        memory = ranks.all_gather(grown, [1] * ranks.size).tolist()
        links.append(links_of(ranks, SIZES))
    return found and found | {"memory": memory, "links": links}


def lead(engine: Engine, job: dict) -> dict:
    """The steps, where the engine is: what one takes, on average, in seconds.

    sent: bytes that this rank sends. meeting: seconds in collectives, waiting for others included.
    """
    model = engine.model
    ranks = model.runner.ranks
    params = SamplingParams(max_new_tokens=job["tokens"], ignore_eos=True)
    prompts = common.random_prompts(model.config.vocab_size, job["max_num_seqs"], job["prompt"])
    requests = [engine.add(prompt, params) for prompt in prompts]
    run_prefill(engine, requests)
    engine.step()  # the first one that only decodes
    methods = {}
    if job["parts"]:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | NativeLinear)]
        methods = {f"product {index}": (layer, "forward") for index, layer in enumerate(layers)}
        methods |= {"hidden": (model, "hidden"), "head": (model, "head")}
        methods |= {"attention": (engine.cache, "attend"), "tell": (ranks, "tell")}
    if ranks:
        ranks.collectives, ranks.traffic, ranks.seconds = 0, 0, 0.0
    cheap = SimpleNamespace(device=model.device)  # to ask a model takes several microseconds
    with stopwatch(cheap, **methods) as seconds:
        times = [took for took, _ in timed_steps(engine)]
    found = {"outputs": [request.output for request in requests], "step": statistics.mean(times)}
    if ranks:
        of_all = {"collectives": ranks.collectives, "sent": ranks.traffic}
        of_all |= {"meeting": ranks.seconds} | seconds
        found |= {name: value / len(times) for name, value in of_all.items()}
    return found


def links_of(ranks: Ranks, sizes: list[int]) -> dict[str, list[float]]:
    """The mean seconds of each kind of collective, for each size in bytes."""
    kinds = {
        "sum": ranks.sum,
        "all_gather": lambda x: ranks.all_gather(x, [len(x)] * ranks.size),
        "gather": lambda x: ranks.gather(x, [len(x)] * ranks.size),
        "tell": lambda x: ranks.tell(bytes(4 * len(x))),
    }
    rows, weight = torch.ones(32, 256), torch.ones(256, 512)
    found = {}
    for kind, meet in kinds.items():
        found[kind] = []
        for size in sizes:
            x = torch.ones(size // 4)
            meet(x)
            took = 0.0
            for _ in range(TIMES):
                rows @ weight  # ranks compute between two of them, as layers do
                began = time.perf_counter()
                before = ranks.seconds
                meet(x)
                # Of a pass, too, only this is counted as meeting.
                took += ranks.seconds - before or time.perf_counter() - began
            found[kind].append(took / TIMES)
    return found


if __name__ == "__main__":
    main()

"""What a decode step asks of a GPU, counted: PYTHONPATH=tests python -m count_steps.

It stands beside the pretend GPU, because the repository's packages import nothing from tests.
"""

import csv
import sys

import torch
from pretend_gpu import PretendGraph, gpu, no_inference_mode

from benchmarks.common import RESULTS, commit
from command_line.options import STORIES
from engine.device import DeviceRunner
from engine.engine import Engine
from engine.static import StaticRunner
from graphs import eager_step
from loading.load import load_model
from model import TorchRunner
from sampling import SamplingParams

COUNTERS = ("launches", "uploads", "syncs")
SAMPLERS = {"greedy": {}, "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9}}


RUNNERS = {
    "TorchRunner": TorchRunner,
    "DeviceRunner": DeviceRunner,
    "StaticRunner, eager": lambda: StaticRunner(eager_step),
    "StaticRunner, replayed": lambda: StaticRunner(PretendGraph),
}


def count_step(model, runner, batch_size: int, **fields) -> tuple[dict, list]:
    """The counts of the third decode step, and the outputs. model: on the pretend GPU."""
    engine = Engine(model, max_num_seqs=batch_size)
    model.runner = runner
    requests = []
    for seed in range(batch_size):
        params = SamplingParams(8, seed=seed, ignore_eos=True, **fields)
        requests.append(engine.add([1, 2, 3 + seed], params))
    with no_inference_mode():
        for _ in range(3):  # the prefill, a step that is captured, and a replay
            engine.step()
        gpu().reset()
        engine.step()
        counts = {name: sum(getattr(gpu(), name).values()) for name in COUNTERS}
        while engine.busy:
            engine.step()
    return counts, [request.output for request in requests]


def main() -> None:
    environment = {"torch": torch.__version__, "commit": commit()}
    columns = ["model", "batch_size", "sampling", "runner", *COUNTERS, *environment]
    with (RESULTS / "graphs_counts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for name in (STORIES.with_name("stories-llama"), STORIES):
            model = gpu().move(load_model(name))
            for batch_size in (1, 8):
                for sampling, fields in SAMPLERS.items():
                    expected = None
                    for runner, make in RUNNERS.items():
                        counts, outputs = count_step(model, make(), batch_size, **fields)
                        if outputs != (expected := expected or outputs):
                            sys.exit(f"{runner}: other tokens; wrong results are not counted")
                        row = {"model": f"checkpoints/{name.name}", "batch_size": batch_size}
                        row |= {"sampling": sampling, "runner": runner} | counts | environment
                        writer.writerow(row)
                        print(*row.values(), sep="  ")


if __name__ == "__main__":
    main()

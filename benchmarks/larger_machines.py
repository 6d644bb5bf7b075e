"""Predictions of benchmarks.predict for larger machines: python -m benchmarks.larger_machines."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

from benchmarks import predict
from benchmarks.client import positive_float
from benchmarks.common import integer_in_range
from benchmarks.predict import Step
from command_line.parser import Parser, run_script
from errors import UserError
from llama import LlamaConfig
from parallel.ranks import PARALLEL_MODES

ITEM = 2  # bytes of a bfloat16
KERNELS = 10  # per layer
LLAMA = LlamaConfig(  # Llama 3 70B
    vocab_size=128256,
    block_size=8192,
    n_layer=80,
    n_head=64,
    n_kv_head=8,
    head_dim=128,
    n_embd=8192,
    n_inner=28672,
    tie_word_embeddings=False,
)


class Assumed(NamedTuple):
    """Constants of a GPU, its links and its host; each is an option."""

    memory: float
    bandwidth: float
    flops: float
    efficiency: float
    link: float
    latency: float
    kernel: float
    driver: float
    ingress: float
    failures: float


ASSUMED = {  # option -> default, help
    "memory": (141e9, "memory of a GPU in bytes (H200)"),
    "bandwidth": (4.8e12, "memory bandwidth in bytes per second (H200)"),
    "flops": (9.9e14, "dense bfloat16 operations per second (H200)"),
    "efficiency": (0.7, "share of bandwidth and flops that kernels reach, at most 1"),
    "link": (4.5e11, "bytes per second from one GPU to the others of its machine (H200)"),
    "latency": (1.5e-5, "latency of a collective in seconds"),
    "kernel": (3e-6, "seconds between kernels, of which a layer has ten"),
    "driver": (1e-3, "seconds of scheduling and sampling per step"),
    "ingress": (6e-4, "core seconds per token in the ingress"),
    "failures": (0.004, "failures of a machine per day"),
}


class Case(NamedTuple):
    """A division of a machine among replicas, and the prediction for it."""

    parallel_mode: str
    ranks: int
    num_seqs: int  # per replica
    memory: float  # bytes per GPU
    step: float  # seconds
    communication: float  # seconds of the step


def step_of(assumed: Assumed, num_seqs: int, positions: int) -> Step:
    """Return the Step of one GPU. Products take the longer of the times to read and to multiply."""
    whole = predict.shard_of(LLAMA, 0, 1, "reduce")
    numbers = predict.num_multiplied(whole)
    read = assumed.bandwidth * assumed.efficiency
    computed = assumed.flops * assumed.efficiency
    products = max(ITEM * numbers / read, 2 * numbers * num_seqs / computed)
    attention = predict.cache_bytes(whole, num_seqs, positions, ITEM) / read
    each = assumed.kernel * KERNELS * LLAMA.n_layer
    return Step(assumed.driver, each, products, attention)


def cases(assumed: Assumed, gpus: int, num_seqs: int, positions: int) -> Iterator[Case]:
    """Yield the divisions of a machine among replicas. num_seqs: of the machine."""
    for ranks in (size for size in range(1, gpus + 1) if gpus % size == 0):
        seqs_per_replica = num_seqs * ranks // gpus
        if not seqs_per_replica:
            continue  # more replicas than sequences
        for parallel_mode in PARALLEL_MODES if ranks > 1 else ("-",):
            memory = 0
            for rank in range(ranks):
                part = predict.shard_of(LLAMA, rank, ranks, parallel_mode)
                held = predict.weights(part, ITEM)
                held += predict.cache_bytes(part, seqs_per_replica, positions, ITEM)
                memory = max(memory, held)
            communication = 0.0
            if ranks > 1:
                for each in predict.collectives(
                    LLAMA, ranks, parallel_mode, seqs_per_replica, ITEM
                ):
                    communication += (
                        assumed.latency + predict.bytes_through_driver(each, ranks) / assumed.link
                    )
            share = predict.largest_shares(LLAMA, ranks, parallel_mode)
            step = predict.step_seconds(
                step_of(assumed, seqs_per_replica, positions), share, 1, communication
            )
            yield Case(parallel_mode, ranks, seqs_per_replica, memory, step, communication)


def run(args) -> None:
    """Print predictions for one machine and for many. Raises UserError if no division fits."""
    assumed = Assumed(*(getattr(args, name) for name in Assumed._fields))
    if assumed.efficiency > 1:
        raise UserError(f"--efficiency {assumed.efficiency:g}: must be at most 1")
    print("ranks  join     seqs  GB / GPU  step, ms comm., ms   tokens/s: seq    machine")
    best = 0.0
    for case in cases(assumed, args.gpus, args.num_seqs, args.positions):
        line = f"{case.ranks:5}  {case.parallel_mode:6}{case.num_seqs:7}{case.memory / 1e9:10.1f}"
        if case.memory > assumed.memory:
            print(f"{line}  does not fit")
            continue
        rate = args.gpus // case.ranks * case.num_seqs / case.step
        best = max(best, rate)
        times = f"{1000 * case.step:10.2f}{1000 * case.communication:9.2f}"
        print(f"{line}{times}{1 / case.step:18.1f}{rate:11,.0f}")
    if not best:
        raise UserError(
            f"--memory {assumed.memory:g}: no division of the model fits into these GPUs"
        )
    total = args.machines * best
    lost = args.machines * assumed.failures * args.num_seqs
    print(f"{args.machines} machines: {total:,.0f} tokens/s")
    print(f"cores of the ingress: {total * assumed.ingress:,.0f}")
    print(f"sequences lost to failures: {lost:,.0f} per day")


def main(argv=None) -> None:
    parser = Parser(description="Predict Llama 3 of 70 billion parameters on machines with GPUs.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    number = {"type": integer_in_range(1)}
    parser.add_argument("--gpus", type=integer_in_range(1, 64), default=8, help="GPUs per machine")
    parser.add_argument("--machines", **number, default=1000, help="number of machines")
    parser.add_argument(
        "--num-seqs", **number, default=512, help="concurrent sequences per machine"
    )
    window = {"type": integer_in_range(1, LLAMA.block_size), "default": 2000}
    parser.add_argument("--positions", **window, help="cached positions per sequence")
    for name, (value, about) in ASSUMED.items():
        parser.add_argument(f"--{name}", type=positive_float, default=value, help=about)
    run_script(parser, run, argv)


if __name__ == "__main__":
    main()

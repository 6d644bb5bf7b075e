"""Predictions of benchmarks.predict for larger machines: python -m benchmarks.larger_machines."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before torch, whose import takes a second

from benchmarks import predict
from benchmarks.client import positive_float
from benchmarks.common import integer_in_range
from benchmarks.predict import Step
from command_line import Parser, run_script
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
    "memory": (141e9, "bytes of a GPU; an H200's"),
    "bandwidth": (4.8e12, "bytes a second that it reads; an H200's"),
    "flops": (9.9e14, "operations a second in bfloat16, dense; an H200's"),
    "efficiency": (0.7, "the share of these two that kernels reach, at most 1"),
    "link": (4.5e11, "bytes a second from a GPU to others of its machine, one way; an H200's"),
    "latency": (1.5e-5, "seconds that a collective takes besides"),
    "kernel": (3e-6, "seconds from one kernel to the next, of ten a layer"),
    "driver": (1e-3, "seconds of scheduling and draws, before a step"),
    "ingress": (6e-4, "seconds of a core for each token, where clients come in"),
    "failures": (0.004, "how often a machine fails in a day"),
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
    """Return the Step of one GPU. Products take the slower of reading and multiplying."""
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
        raise UserError(f"--efficiency {assumed.efficiency:g}: it must be at most 1")
    print("ranks  join     seqs  GB a GPU  step, ms  meeting  tokens/s: a text  a machine")
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
        raise UserError(f"nothing fits into GPUs of {assumed.memory / 1e9:g} GB")
    total = args.machines * best
    lost = args.machines * assumed.failures * args.num_seqs
    print(f"{args.machines} machines: {total:,.0f} tokens/s")
    print(f"cores where clients come in: {total * assumed.ingress:,.0f}")
    print(f"sequences that end with an error: {lost:,.0f} a day")


def main(argv=None) -> None:
    parser = Parser(description="Predict Llama 3 of 70 billion parameters on machines with GPUs.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    number = {"type": integer_in_range(1)}
    parser.add_argument("--gpus", type=integer_in_range(1, 64), default=8, help="of a machine")
    parser.add_argument("--machines", **number, default=1000, help="how many")
    parser.add_argument("--num-seqs", **number, default=512, help="at once on a machine")
    window = {"type": integer_in_range(1, LLAMA.block_size), "default": 2000}
    parser.add_argument("--positions", **window, help="of each text, in the cache")
    for name, (value, about) in ASSUMED.items():
        parser.add_argument(f"--{name}", type=positive_float, default=value, help=about)
    run_script(parser, run, argv)


if __name__ == "__main__":
    main()

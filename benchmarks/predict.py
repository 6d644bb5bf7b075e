"""What several processes make, computed from what one takes and what their meetings cost.

A step of ranks is what one of them does for all, then what each does, its share of the products
and of the keys, and their meetings. Replicas make what one makes, as often as there are, until
the cores, or the process where clients come in, have no more time.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn as nn

from loading.load import get_architecture
from model import Model
from parallel.shards import ShardPlan, shard_model, split

FLOAT = 4  # bytes of a number


class RankOf(NamedTuple):
    """A rank of a group that need not run."""

    rank: int
    size: int
    parallel_mode: str


class Step(NamedTuple):
    """Where the seconds of a decoding step go, in one process."""

    driver: float  # scheduling and draws, which are rank 0's alone
    each: float  # norms, activations, sums: each rank computes them
    products: float  # divided by what a rank has of the weights
    attention: float  # divided by what it has of the keys


class Collective(NamedTuple):
    """A collective. kind: its method of TensorParallelGroup. size: bytes that a rank brings."""

    kind: str
    size: int


@functools.cache
def shard_of(config, rank: int, size: int, parallel_mode: str) -> Model:
    """What a rank has of a model, as shapes without numbers: for reading only, as it is kept.

    Raises UserError for more ranks than heads.
    """
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    shard_model(model, ShardPlan(model, RankOf(rank, size, parallel_mode)))
    return model


def weights(model: Model, itemsize: int = FLOAT) -> int:
    """The bytes of its weights. itemsize: of a number."""
    return itemsize * sum(weight.numel() for weight in model.parameters())


def num_multiplied(model: Model) -> int:
    """With how many numbers each token is multiplied."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


def cache_bytes(model: Model, num_seqs: int, positions: int, itemsize: int = FLOAT) -> int:
    """Bytes of the keys and values in this part of a model."""
    config = model.config
    numbers = 2 * config.n_layer * model.n_kv_head * config.head_dim
    return itemsize * num_seqs * positions * numbers


def largest_shares(config, size: int, parallel_mode: str) -> tuple[float, float]:
    """The largest part that one of so many ranks has of the products, and of the keys."""
    whole = shard_of(config, 0, 1, parallel_mode)
    parts = [shard_of(config, rank, size, parallel_mode) for rank in range(size)]
    products = max(map(num_multiplied, parts)) / num_multiplied(whole)
    return products, max(part.n_kv_head for part in parts) / config.n_kv_head


def collectives(
    config, size: int, parallel_mode: str, tokens: int, itemsize: int = FLOAT
) -> list[Collective]:
    """The collectives of a pass of so many texts with a token each, with float weights."""
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    plan = ShardPlan(model, RankOf(0, size, parallel_mode))
    all_reduce = Collective("sum", itemsize * tokens * config.n_embd)
    if parallel_mode == "reduce":
        layer = [all_reduce, all_reduce]
    else:  # parts are filled up to the widest
        outputs = max(map(len, plan.outputs))
        widths = max(map(len, plan.heads)) * config.head_dim, outputs
        widths += max(map(len, plan.inner)), outputs
        layer = [Collective("all_gather", itemsize * tokens * width) for width in widths]
    vocab = len(split(config.vocab_size, size)[0])
    return [all_reduce, *layer * config.n_layer, Collective("gather", itemsize * tokens * vocab)]


def sent(collective: Collective, size: int) -> int:
    """Bytes that rank 0 sends in it, as in a ring; of `gather` it only gets some."""
    if collective.kind == "all_gather":
        return (size - 1) * collective.size
    return 2 * (size - 1) * collective.size // size if collective.kind == "sum" else 0


def bytes_through_driver(collective: Collective, size: int) -> int:
    """Bytes that rank 0 sends in it or gets, whichever is more."""
    return (size - 1) * collective.size if collective.kind == "gather" else sent(collective, size)


def step_seconds(step: Step, share: tuple[float, float], turns: int, communication: float) -> float:
    """A step of several ranks. share: of `largest_shares`. communication: of all collectives.

    turns: how often a core computes between two of them: more processes than cores take turns.
    """
    own = step.each + share[0] * step.products + share[1] * step.attention
    return step.driver + turns * own + communication


def replica_rate(one: float, busy: float, ingress: float, count: int, cores: int) -> float:
    """Tokens/s of so many replicas. one: of one.

    busy: seconds of a core that a token takes in all processes; ingress: in the busiest of those
    through which all tokens pass.
    """
    return min(count * one, cores / busy, 1 / ingress)

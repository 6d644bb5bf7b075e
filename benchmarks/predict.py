"""Predicted throughput of several processes, from times of one process and of collectives.

A step of several ranks is the driver's own work, then each rank's share of the products and of
attention, and the collectives. Replicas scale linearly until the cores, or the process that all
tokens pass through, are saturated.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn as nn

from loading.load import get_architecture
from model import Model
from parallel.shards import ShardPlan, shard_model, split

FLOAT = 4  # bytes of a float32


class RankOf(NamedTuple):
    """A rank of a tensor-parallel group that need not run."""

    rank: int
    size: int
    parallel_mode: str


class Step(NamedTuple):
    """The seconds of a decode step in one process, by cause."""

    driver: float  # scheduling and sampling, on rank 0 only
    each: float  # norms, activations, sums: on every rank
    products: float  # scales with a rank's share of the weights
    attention: float  # scales with a rank's share of the keys


class Collective(NamedTuple):
    """A collective. kind: a method of TensorParallelGroup. size: bytes that a rank contributes."""

    kind: str
    size: int


@functools.cache
def shard_of(config, rank: int, size: int, parallel_mode: str) -> Model:
    """Return a rank's shard of a model on the meta device. It is cached, so do not modify it.

    Raises UserError for more ranks than heads.
    """
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    shard_model(model, ShardPlan(model, RankOf(rank, size, parallel_mode)))
    return model


def weights(model: Model, itemsize: int = FLOAT) -> int:
    """Return the bytes of the model's weights. itemsize: bytes per number."""
    return itemsize * sum(weight.numel() for weight in model.parameters())


def num_multiplied(model: Model) -> int:
    """Return the number of weights that each token is multiplied by."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


def cache_bytes(model: Model, num_seqs: int, positions: int, itemsize: int = FLOAT) -> int:
    """Return the bytes of the keys and values of this model or shard."""
    config = model.config
    numbers = 2 * config.n_layer * model.n_kv_head * config.head_dim
    return itemsize * num_seqs * positions * numbers


def largest_shares(config, size: int, parallel_mode: str) -> tuple[float, float]:
    """Return the largest share of products, and of keys, that one of `size` ranks has."""
    whole = shard_of(config, 0, 1, parallel_mode)
    parts = [shard_of(config, rank, size, parallel_mode) for rank in range(size)]
    products = max(map(num_multiplied, parts)) / num_multiplied(whole)
    return products, max(part.n_kv_head for part in parts) / config.n_kv_head


def collectives(
    config, size: int, parallel_mode: str, tokens: int, itemsize: int = FLOAT
) -> list[Collective]:
    """Return the collectives of a decode step of `tokens` sequences, with float weights."""
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    plan = ShardPlan(model, RankOf(0, size, parallel_mode))
    all_reduce = Collective("sum", itemsize * tokens * config.n_embd)
    if parallel_mode == "reduce":
        layer = [all_reduce, all_reduce]
    else:  # shards are padded to the widest
        outputs = max(map(len, plan.outputs))
        widths = max(map(len, plan.heads)) * config.head_dim, outputs
        widths += max(map(len, plan.inner)), outputs
        layer = [Collective("all_gather", itemsize * tokens * width) for width in widths]
    vocab = len(split(config.vocab_size, size)[0])
    return [all_reduce, *layer * config.n_layer, Collective("gather", itemsize * tokens * vocab)]


def sent(collective: Collective, size: int) -> int:
    """Return the bytes that rank 0 sends, as in a ring. In `gather` it only receives."""
    if collective.kind == "all_gather":
        return (size - 1) * collective.size
    return 2 * (size - 1) * collective.size // size if collective.kind == "sum" else 0


def bytes_through_driver(collective: Collective, size: int) -> int:
    """Return the bytes that rank 0 sends or receives, whichever is more."""
    return (size - 1) * collective.size if collective.kind == "gather" else sent(collective, size)


def step_seconds(step: Step, share: tuple[float, float], turns: int, communication: float) -> float:
    """Return the seconds of a step of several ranks.

    share: from `largest_shares`. communication: seconds of all collectives. turns: how often a core
    computes between two collectives, because more processes than cores take turns.
    """
    own = step.each + share[0] * step.products + share[1] * step.attention
    return step.driver + turns * own + communication


def replica_rate(one: float, busy: float, ingress: float, count: int, cores: int) -> float:
    """Return the tokens/s of `count` replicas. one: tokens/s of one replica.

    busy: core seconds per token in all processes. ingress: core seconds per token in the busiest
    process that all tokens pass through.
    """
    return min(count * one, cores / busy, 1 / ingress)

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
from parallel.shards import Plan, cut, split

FLOAT = 4  # bytes of a number


class Place(NamedTuple):
    """A rank of a group that need not run."""

    rank: int
    size: int
    way: str


class Step(NamedTuple):
    """Where the seconds of a decoding step go, in one process."""

    leader: float  # scheduling and draws, which are rank 0's alone
    each: float  # norms, activations, sums: each rank computes them
    products: float  # divided by what a rank has of the weights
    attention: float  # divided by what it has of the keys


class Meeting(NamedTuple):
    """A collective. kind: the name of a method of Ranks. size: bytes that a rank brings."""

    kind: str
    size: int


@functools.cache
def part_of(config, rank: int, size: int, way: str) -> Model:
    """What a rank has of a model, as shapes without numbers: for reading only, as it is kept.

    Raises UserError for more ranks than heads.
    """
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    cut(model, Plan(model, Place(rank, size, way)))
    return model


def weights(model: Model, itemsize: int = FLOAT) -> int:
    """The bytes of its weights. itemsize: of a number."""
    return itemsize * sum(weight.numel() for weight in model.parameters())


def multiplied(model: Model) -> int:
    """With how many numbers each token is multiplied."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


def cache_bytes(model: Model, num_seqs: int, positions: int, itemsize: int = FLOAT) -> int:
    """Bytes of the keys and values in this part of a model."""
    config = model.config
    numbers = 2 * config.n_layer * model.n_kv_head * config.head_dim
    return itemsize * num_seqs * positions * numbers


def shares(config, size: int, way: str) -> tuple[float, float]:
    """The largest part that one of so many ranks has of the products, and of the keys."""
    whole = part_of(config, 0, 1, way)
    parts = [part_of(config, rank, size, way) for rank in range(size)]
    products = max(map(multiplied, parts)) / multiplied(whole)
    return products, max(part.n_kv_head for part in parts) / config.n_kv_head


def meetings(config, size: int, way: str, tokens: int, itemsize: int = FLOAT) -> list[Meeting]:
    """The collectives of a pass of so many texts with a token each, with float weights."""
    with torch.device("meta"):
        model = get_architecture(config).model(config)
    plan = Plan(model, Place(0, size, way))
    joined = Meeting("sum", itemsize * tokens * config.n_embd)
    if way == "reduce":
        layer = [joined, joined]
    else:  # parts are filled up to the widest
        outputs = max(map(len, plan.outputs))
        widths = max(map(len, plan.heads)) * config.head_dim, outputs
        widths += max(map(len, plan.inner)), outputs
        layer = [Meeting("all_gather", itemsize * tokens * width) for width in widths]
    vocab = len(split(config.vocab_size, size)[0])
    return [joined, *layer * config.n_layer, Meeting("gather", itemsize * tokens * vocab)]


def sent(meeting: Meeting, size: int) -> int:
    """Bytes that rank 0 sends in it, as in a ring; of `gather` it only gets some."""
    if meeting.kind == "all_gather":
        return (size - 1) * meeting.size
    return 2 * (size - 1) * meeting.size // size if meeting.kind == "sum" else 0


def crossing(meeting: Meeting, size: int) -> int:
    """Bytes that rank 0 sends in it or gets, whichever is more."""
    return (size - 1) * meeting.size if meeting.kind == "gather" else sent(meeting, size)


def step_seconds(step: Step, share: tuple[float, float], turns: int, meeting: float) -> float:
    """A step of several ranks. share: as of `shares`. meeting: seconds in all collectives.

    turns: how often a core computes between two of them: more processes than cores take turns.
    """
    own = step.each + share[0] * step.products + share[1] * step.attention
    return step.leader + turns * own + meeting


def replica_rate(one: float, busy: float, ingress: float, count: int, cores: int) -> float:
    """Tokens/s of so many replicas. one: of one.

    busy: seconds of a core that a token takes in all processes; ingress: in the busiest of those
    through which all tokens pass.
    """
    return min(count * one, cores / busy, 1 / ingress)

"""Which part of a model each of several processes has, and how their results are joined.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn as nn

from errors import UserError
from loading.load import initialize_model, load_weights, resolve_source, weights_iterator
from loading.lora import merge_lora, read_adapter
from model import Model
from parallel.ranks import RankRunner, Ranks

UNIT = 32  # numbers: torch computes the last few of a tensor without vectors, and rounds otherwise


def load_part(
    name, dtype: torch.dtype = torch.float32, device="cpu", adapter=None, *, ranks: Ranks
) -> Model:
    """Load what this rank computes of a model. Arguments and errors are `load_model`'s.

    No process ever holds the whole model. Call `join_vocabulary` when no layer is replaced any
    more. Raises UserError, too, where there are too few heads.
    Where weights are rounded, layers are joined by "gather": a layer that rotates its inputs, or
    has them in blocks, needs all of them.
    """
    source = resolve_source(name)
    model = initialize_model(source)
    plan = Plan(model, ranks, ranks.way if dtype.is_floating_point else "gather")
    lora_weights = read_adapter(adapter, model)
    blocks = plan.own(merge_lora(weights_iterator(source, model, dtype, device), lora_weights))
    cut(model, plan)
    load_weights(model, blocks, source, dtype, device, lora_weights)
    join_blocks(model, plan)
    return model


class Part(NamedTuple):
    """What a rank has of a tensor: these rows, range after range, and these columns of them."""

    rows: list[range]
    columns: slice = slice(None)


def split(width: int, size: int, unit: int = UNIT) -> list[range]:
    """Split a width into one range a rank, as even as possible, in whole units where it divides."""
    unit = unit if width % unit == 0 and width >= unit * size else 1
    units, left = divmod(width // unit, size)
    ends = [unit * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


def keys_of(heads: range, group: int) -> list[int]:
    """The keys that these query heads need, if `group` neighbours share one.

    One for each query head, where not all are shared by as many here.
    """
    needed = [head // group for head in heads]
    keys = sorted(set(needed))
    shared = len(needed) // len(keys)
    return keys if needed == [key for key in keys for _ in range(shared)] else needed


class Plan:
    """What a rank has of each weight of a model, and what all ranks have.

    parts: by the name of the weight. heads, inner, expert_inner, outputs: of each rank. keys: of
    this one. way: how layers are joined; that of the ranks, if None. Raises UserError where there
    are too few heads.
    """

    def __init__(self, model: Model, ranks: Ranks, way: str | None = None):
        config = model.config
        if ranks.size > config.n_head:
            few = f"this model has {config.n_head} heads"
            raise UserError(f"{ranks.size} processes: {few}, and each process needs one")
        C = config.n_embd
        D = config.head_dim
        self.ranks = ranks
        self.way = way or ranks.way
        group = config.n_head // config.n_kv_head
        if config.n_kv_head >= ranks.size:
            own = split(config.n_kv_head, ranks.size, unit=1)
            self.heads = [range(group * keys.start, group * keys.stop) for keys in own]
        else:  # ranks that share a key have a copy each
            self.heads = split(config.n_head, ranks.size, unit=1)
        self.inner = split(config.n_inner, ranks.size)
        experts = getattr(config, "experts", None)
        self.expert_inner = split(experts.n_inner if experts else 0, ranks.size)
        self.outputs = split(C, ranks.size)
        heads = self.heads[ranks.rank]
        self.keys = keys_of(heads, group)
        queries = range(heads.start * D, heads.stop * D)
        vocab = Part([split(config.vocab_size, ranks.size)[ranks.rank]])
        inner = self.inner[ranks.rank]
        expert_inner = self.expert_inner[ranks.rank]

        def keys(before: int = 0) -> list[range]:
            """The rows of this rank's keys, or values, behind the rows of `before` heads."""
            return [range((before + key) * D, (before + key + 1) * D) for key in self.keys]

        def last(inputs: range) -> Part:
            if self.way == "reduce":
                return Part([range(C)], slice(inputs.start, inputs.stop))
            return Part([self.outputs[ranks.rank]])

        # By role; of all other layers each rank has all.
        cuts = {
            "embedding": vocab,
            "query": Part([queries]),
            "key": Part(keys()),
            "value": Part(keys()),
            "qkv": Part([queries, *keys(config.n_head), *keys(config.n_head + config.n_kv_head)]),
            "attn_out": last(queries),
            "gate": Part([inner]),
            "up": Part([inner]),
            "down": last(inner),
            "expert_gate": Part([expert_inner]),
            "expert_up": Part([expert_inner]),
            "expert_down": last(expert_inner),
            "head": vocab,
        }
        self.parts = {}
        for name, weight in model.named_parameters():
            part = cuts.get(model.role(name), Part([range(len(weight))]))
            self.parts[name] = part if weight.dim() > 1 else Part(part.rows)

    def own(self, blocks: Iterator[tuple]) -> Iterator[tuple]:
        """This rank's share of blocks of a whole model, as `load_weight_rows` takes them."""
        for name, rows, block in blocks:
            part = self.parts[name]
            for own, chosen in places(part.rows, rows):
                yield name, own, block[chosen], part.columns


def cut(model: Model, plan: Plan) -> None:
    """Leave of each weight of an empty model what is this rank's."""
    for name, part in plan.parts.items():
        layer, _, key = name.rpartition(".")
        whole = model.get_parameter(name)
        own = whole.new_empty(sum(map(len, part.rows)), *whole.shape[1:])[..., part.columns]
        setattr(model.get_submodule(layer), key, nn.Parameter(own))
    model.tie_weights()
    model.runner = RankRunner(plan.ranks, model.runner)
    model.n_kv_head = len(plan.keys)


def places(rows: list[range], block: slice) -> list[tuple[slice, slice]]:
    """Where a block of a weight's rows goes: of a rank's own rows, and of the block, which ones."""
    found = []
    first = 0
    for own in rows:
        start = max(own.start, block.start)
        stop = min(own.stop, block.stop)
        if start < stop:
            here = slice(first + start - own.start, first + stop - own.start)
            found.append((here, slice(start - block.start, stop - block.start)))
        first += len(own)
    return found


def join_blocks(model: Model, plan: Plan) -> None:
    """Let the layers that end a residual branch give what those of all ranks together do."""
    ranks = plan.ranks
    D = model.config.head_dim
    widths = {
        "attn_out": [len(heads) * D for heads in plan.heads],
        "down": [len(inner) for inner in plan.inner],
        "expert_down": [len(inner) for inner in plan.expert_inner],
    }
    outputs = [len(own) for own in plan.outputs]
    roles = {name.rpartition(".")[0]: model.role(name) for name in plan.parts}
    for path, role in roles.items():
        if role not in widths:
            continue
        layer = model.get_submodule(path)
        if plan.way == "gather":
            joined = ColumnParallelLinear(layer, ranks, widths[role], outputs)
        else:
            joined = RowParallelLinear(layer, ranks)
        model.set_submodule(path, joined)


def join_vocabulary(model: Model) -> None:
    """Join the token embedding, and the head, whose logits are rank 0's alone.

    These two may be one tensor, so this comes last, when no layer is replaced any more.
    """
    ranks = model.runner.ranks
    vocab = split(model.config.vocab_size, ranks.size)
    embedding = VocabParallelEmbedding(model.layer("embedding"), ranks, vocab[ranks.rank])
    head = ParallelHead(model.layer("head"), ranks, [len(part) for part in vocab])
    model.set_submodule(model.path("embedding"), embedding)
    model.set_submodule(model.path("head"), head)


class ColumnParallelLinear(nn.Module):
    """A layer that has some of its outputs on each rank.

    inputs, outputs: how many on each. Each output is the sum that one process makes.
    """

    def __init__(self, layer, ranks: Ranks, inputs: list[int], outputs: list[int]):
        super().__init__()
        self.layer = layer
        self.ranks = ranks
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x):
        y = self.layer(self.ranks.all_gather(x, self.inputs))
        return self.ranks.all_gather(y, self.outputs)


class RowParallelLinear(nn.Module):
    """A layer that has some of its inputs on each rank; their outputs are added up."""

    def __init__(self, layer: nn.Linear, ranks: Ranks):
        super().__init__()
        self.bias = layer.bias  # added once
        layer.bias = None
        self.layer = layer
        self.ranks = ranks

    def forward(self, x):
        y = self.ranks.sum(self.layer(x))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A token embedding that has some of its rows on each rank."""

    def __init__(self, layer, ranks: Ranks, own: range):
        super().__init__()
        self.layer = layer
        self.ranks = ranks
        self.own = own

    def forward(self, tokens):
        ids = tokens - self.own.start
        elsewhere = (ids < 0) | (ids >= len(self.own))
        rows = self.layer(ids.masked_fill(elsewhere, 0))
        return self.ranks.sum(rows.masked_fill(elsewhere[..., None], 0))


class ParallelHead(nn.Module):
    """A head that has the logits of some tokens on each rank: rank 0 gets all, (..., vocab_size).

    widths: how many each rank has.
    """

    def __init__(self, layer, ranks: Ranks, widths: list[int]):
        super().__init__()
        self.layer = layer
        self.ranks = ranks
        self.widths = widths

    def forward(self, x):
        return self.ranks.gather(self.layer(x), self.widths)

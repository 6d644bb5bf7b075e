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
from parallel.ranks import TensorParallelGroup, TensorParallelRunner

ALIGNMENT = 32  # torch computes the last few numbers without vectors, and rounds them otherwise


def load_shard(
    name,
    dtype: torch.dtype = torch.float32,
    device="cpu",
    adapter=None,
    *,
    tp_group: TensorParallelGroup,
) -> Model:
    """Load what this rank computes of a model. Arguments and errors are `load_model`'s.

    No process ever holds the whole model. Call `parallelize_vocabulary` when no layer is replaced
    any more. Raises UserError, too, where there are too few heads. Where weights are rounded,
    layers are joined by "gather": a layer that rotates its inputs, or has them in blocks, needs all
    of them.
    """
    source = resolve_source(name)
    model = initialize_model(source)
    plan = ShardPlan(
        model, tp_group, tp_group.parallel_mode if dtype.is_floating_point else "gather"
    )
    lora_weights = read_adapter(adapter, model)
    blocks = plan.local_blocks(
        merge_lora(weights_iterator(source, model, dtype, device), lora_weights)
    )
    shard_model(model, plan)
    load_weights(model, blocks, source, dtype, device, lora_weights)
    parallelize_blocks(model, plan)
    return model


class Shard(NamedTuple):
    """What a rank has of a tensor: these rows, range after range, and these columns of them."""

    rows: list[range]
    columns: slice = slice(None)


def split(width: int, size: int, alignment: int = ALIGNMENT) -> list[range]:
    """Split a width into one range a rank, as even as possible, in whole units where it divides."""
    alignment = alignment if width % alignment == 0 and width >= alignment * size else 1
    units, left = divmod(width // alignment, size)
    ends = [alignment * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


def local_kv_heads(heads: range, group: int) -> list[int]:
    """The keys that these query heads need, if `group` neighbours share one.

    One for each query head, where not all are shared by as many here.
    """
    needed = [head // group for head in heads]
    keys = sorted(set(needed))
    shared = len(needed) // len(keys)
    return keys if needed == [key for key in keys for _ in range(shared)] else needed


class ShardPlan:
    """What a rank has of each weight of a model, and what all ranks have.

    shards: by the name of the weight. heads, inner, expert_inner, outputs: of each rank. kv_heads:
    of this one. parallel_mode: how layers are joined; that of the ranks, if None. Raises UserError
    where there are too few heads.
    """

    def __init__(
        self, model: Model, tp_group: TensorParallelGroup, parallel_mode: str | None = None
    ):
        config = model.config
        if tp_group.size > config.n_head:
            reason = f"this model has {config.n_head} heads"
            raise UserError(f"{tp_group.size} processes: {reason}, and each process needs one")
        C = config.n_embd
        D = config.head_dim
        self.tp_group = tp_group
        self.parallel_mode = parallel_mode or tp_group.parallel_mode
        group = config.n_head // config.n_kv_head
        if config.n_kv_head >= tp_group.size:
            kv_heads = split(config.n_kv_head, tp_group.size, alignment=1)
            self.heads = [range(group * part.start, group * part.stop) for part in kv_heads]
        else:  # ranks that share a key have a copy each
            self.heads = split(config.n_head, tp_group.size, alignment=1)
        self.inner = split(config.n_inner, tp_group.size)
        experts = getattr(config, "experts", None)
        self.expert_inner = split(experts.n_inner if experts else 0, tp_group.size)
        self.outputs = split(C, tp_group.size)
        heads = self.heads[tp_group.rank]
        self.kv_heads = local_kv_heads(heads, group)
        queries = range(heads.start * D, heads.stop * D)
        vocab = Shard([split(config.vocab_size, tp_group.size)[tp_group.rank]])
        inner = self.inner[tp_group.rank]
        expert_inner = self.expert_inner[tp_group.rank]

        def kv_rows(before: int = 0) -> list[range]:
            """The rows of this rank's keys, or values, behind the rows of `before` heads."""
            return [range((before + key) * D, (before + key + 1) * D) for key in self.kv_heads]

        def block_end(inputs: range) -> Shard:
            if self.parallel_mode == "reduce":
                return Shard([range(C)], slice(inputs.start, inputs.stop))
            return Shard([self.outputs[tp_group.rank]])

        # By role; of all other layers each rank has all.
        shards = {
            "embedding": vocab,
            "query": Shard([queries]),
            "key": Shard(kv_rows()),
            "value": Shard(kv_rows()),
            "qkv": Shard(
                [queries, *kv_rows(config.n_head), *kv_rows(config.n_head + config.n_kv_head)]
            ),
            "attn_out": block_end(queries),
            "gate": Shard([inner]),
            "up": Shard([inner]),
            "down": block_end(inner),
            "expert_gate": Shard([expert_inner]),
            "expert_up": Shard([expert_inner]),
            "expert_down": block_end(expert_inner),
            "head": vocab,
        }
        self.shards = {}
        for name, weight in model.named_parameters():
            shard = shards.get(model.role(name), Shard([range(len(weight))]))
            self.shards[name] = shard if weight.dim() > 1 else Shard(shard.rows)

    def local_blocks(self, blocks: Iterator[tuple]) -> Iterator[tuple]:
        """This rank's share of blocks of a whole model, as `load_weight_rows` takes them."""
        for name, rows, block in blocks:
            shard = self.shards[name]
            for destination, source in overlapping_rows(shard.rows, rows):
                yield name, destination, block[source], shard.columns


def shard_model(model: Model, plan: ShardPlan) -> None:
    """Leave of each weight of an empty model what is this rank's."""
    for name, shard in plan.shards.items():
        layer, _, attribute = name.rpartition(".")
        whole = model.get_parameter(name)
        local = whole.new_empty(sum(map(len, shard.rows)), *whole.shape[1:])[..., shard.columns]
        setattr(model.get_submodule(layer), attribute, nn.Parameter(local))
    model.tie_weights()
    model.runner = TensorParallelRunner(plan.tp_group, model.runner)
    model.n_kv_head = len(plan.kv_heads)


def overlapping_rows(rows: list[range], block: slice) -> list[tuple[slice, slice]]:
    """Where a block of a weight's rows goes: of a rank's own rows, and of the block, which ones."""
    overlaps = []
    first = 0
    for shard_rows in rows:
        start = max(shard_rows.start, block.start)
        stop = min(shard_rows.stop, block.stop)
        if start < stop:
            destination = slice(first + start - shard_rows.start, first + stop - shard_rows.start)
            overlaps.append((destination, slice(start - block.start, stop - block.start)))
        first += len(shard_rows)
    return overlaps


def parallelize_blocks(model: Model, plan: ShardPlan) -> None:
    """Let the layers that end a residual branch give what those of all ranks together do."""
    tp_group = plan.tp_group
    D = model.config.head_dim
    widths = {
        "attn_out": [len(heads) * D for heads in plan.heads],
        "down": [len(inner) for inner in plan.inner],
        "expert_down": [len(inner) for inner in plan.expert_inner],
    }
    outputs = [len(part) for part in plan.outputs]
    roles = {name.rpartition(".")[0]: model.role(name) for name in plan.shards}
    for path, role in roles.items():
        if role not in widths:
            continue
        layer = model.get_submodule(path)
        if plan.parallel_mode == "gather":
            parallel_layer = ColumnParallelLinear(layer, tp_group, widths[role], outputs)
        else:
            parallel_layer = RowParallelLinear(layer, tp_group)
        model.set_submodule(path, parallel_layer)


def parallelize_vocabulary(model: Model) -> None:
    """Join the token embedding, and the head, whose logits are rank 0's alone.

    These two may be one tensor, so this comes last, when no layer is replaced any more.
    """
    tp_group = model.runner.tp_group
    vocab = split(model.config.vocab_size, tp_group.size)
    embedding = VocabParallelEmbedding(model.layer("embedding"), tp_group, vocab[tp_group.rank])
    head = ParallelLMHead(model.layer("head"), tp_group, [len(part) for part in vocab])
    model.set_submodule(model.path("embedding"), embedding)
    model.set_submodule(model.path("head"), head)


class ColumnParallelLinear(nn.Module):
    """A layer that has some of its outputs on each rank.

    inputs, outputs: how many on each. Each output is the sum that one process makes.
    """

    def __init__(self, layer, tp_group: TensorParallelGroup, inputs: list[int], outputs: list[int]):
        super().__init__()
        self.layer = layer
        self.tp_group = tp_group
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x):
        y = self.layer(self.tp_group.all_gather(x, self.inputs))
        return self.tp_group.all_gather(y, self.outputs)


class RowParallelLinear(nn.Module):
    """A layer that has some of its inputs on each rank; their outputs are added up."""

    def __init__(self, layer: nn.Linear, tp_group: TensorParallelGroup):
        super().__init__()
        self.bias = layer.bias  # added once
        layer.bias = None
        self.layer = layer
        self.tp_group = tp_group

    def forward(self, x):
        y = self.tp_group.sum(self.layer(x))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A token embedding that has some of its rows on each rank."""

    def __init__(self, layer, tp_group: TensorParallelGroup, vocab_range: range):
        super().__init__()
        self.layer = layer
        self.tp_group = tp_group
        self.vocab_range = vocab_range

    def forward(self, tokens):
        ids = tokens - self.vocab_range.start
        is_elsewhere = (ids < 0) | (ids >= len(self.vocab_range))
        rows = self.layer(ids.masked_fill(is_elsewhere, 0))
        return self.tp_group.sum(rows.masked_fill(is_elsewhere[..., None], 0))


class ParallelLMHead(nn.Module):
    """A head that has the logits of some tokens on each rank: rank 0 gets all, (..., vocab_size).

    widths: how many each rank has.
    """

    def __init__(self, layer, tp_group: TensorParallelGroup, widths: list[int]):
        super().__init__()
        self.layer = layer
        self.tp_group = tp_group
        self.widths = widths

    def forward(self, x):
        return self.tp_group.gather(self.layer(x), self.widths)

"""Tensor parallelism: each rank's shards of a model's weights, and its parallel layers.

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

ALIGNMENT = 32  # torch computes a tail without SIMD, which rounds differently


def load_shard(
    name,
    dtype: torch.dtype = torch.float32,
    device="cpu",
    adapter=None,
    *,
    tp_group: TensorParallelGroup,
) -> Model:
    """Load this rank's shard of a model, with `load_model`'s arguments and errors.

    No process ever holds the whole model. Call `parallelize_vocabulary` after the last layer has
    been replaced. Also raises UserError if the model has too few heads. Quantised weights always
    use "gather", because a layer that rotates its inputs or quantises them in blocks needs all of
    them.
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
    """A rank's shard of a tensor: concatenated ranges of rows, and the columns of each row."""

    rows: list[range]
    columns: slice = slice(None)


def split(width: int, size: int, alignment: int = ALIGNMENT) -> list[range]:
    """Split a width into one range per rank, as evenly as possible.

    The ranges are multiples of `alignment` if it divides the width and every rank gets at least
    one.
    """
    alignment = alignment if width % alignment == 0 and width >= alignment * size else 1
    units, left = divmod(width // alignment, size)
    ends = [alignment * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


def local_kv_heads(heads: range, group: int) -> list[int]:
    """Return the KV heads that these query heads need, if `group` adjacent ones share one.

    If they are shared unevenly on this rank, return one KV head per query head instead.
    """
    needed = [head // group for head in heads]
    keys = sorted(set(needed))
    shared = len(needed) // len(keys)
    return keys if needed == [key for key in keys for _ in range(shared)] else needed


class ShardPlan:
    """The shards of a model's weights on this rank, and the widths of all ranks.

    shards: of this rank, by weight name. heads, inner, expert_inner, outputs: one range per rank.
    kv_heads: of this rank. parallel_mode: how layers combine their results; None: the group's
    mode. Raises UserError if the model has too few heads.
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
        else:  # ranks that share a KV head hold a copy each
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
            """Return the rows of this rank's keys or values, which follow `before` heads."""
            return [range((before + key) * D, (before + key + 1) * D) for key in self.kv_heads]

        def block_end(inputs: range) -> Shard:
            if self.parallel_mode == "reduce":
                return Shard([range(C)], slice(inputs.start, inputs.stop))
            return Shard([self.outputs[tp_group.rank]])

        # By role. All other layers are replicated.
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
        """Yield this rank's share of blocks of weight rows, as `load_weight_rows` takes them."""
        for name, rows, block in blocks:
            shard = self.shards[name]
            for destination, source in overlapping_rows(shard.rows, rows):
                yield name, destination, block[source], shard.columns


def shard_model(model: Model, plan: ShardPlan) -> None:
    """Shrink each weight of an uninitialised model to this rank's shard."""
    for name, shard in plan.shards.items():
        layer, _, attribute = name.rpartition(".")
        whole = model.get_parameter(name)
        local = whole.new_empty(sum(map(len, shard.rows)), *whole.shape[1:])[..., shard.columns]
        setattr(model.get_submodule(layer), attribute, nn.Parameter(local))
    model.tie_weights()
    model.runner = TensorParallelRunner(plan.tp_group, model.runner)
    model.local_n_kv_head = len(plan.kv_heads)


def overlapping_rows(rows: list[range], block: slice) -> list[tuple[slice, slice]]:
    """Return the overlaps of a block of a weight's rows with a rank's shard.

    Each overlap is a slice of the shard's rows and the matching slice of the block's rows.
    """
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
    """Replace the layers that end a residual branch with parallel layers."""
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
    """Replace the token embedding and the head with parallel layers. Only rank 0 gets the logits.

    The two may share a tensor, so call this after the last layer has been replaced.
    """
    tp_group = model.runner.tp_group
    vocab = split(model.config.vocab_size, tp_group.size)
    embedding = VocabParallelEmbedding(model.layer("embedding"), tp_group, vocab[tp_group.rank])
    head = ParallelLMHead(model.layer("head"), tp_group, [len(part) for part in vocab])
    model.set_submodule(model.path("embedding"), embedding)
    model.set_submodule(model.path("head"), head)


class ColumnParallelLinear(nn.Module):
    """A linear layer with its outputs split over the ranks.

    It gathers its inputs first, unlike Megatron-LM's, so that a single process sums each output.
    inputs, outputs: the widths on each rank.
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
    """A linear layer with its inputs split over the ranks, whose outputs are all-reduced."""

    def __init__(self, layer: nn.Linear, tp_group: TensorParallelGroup):
        super().__init__()
        self.bias = layer.bias  # added once, after the all-reduce
        layer.bias = None
        self.layer = layer
        self.tp_group = tp_group

    def forward(self, x):
        y = self.tp_group.sum(self.layer(x))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A token embedding with the vocabulary split over the ranks."""

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
    """An LM head with the vocabulary split over the ranks. Rank 0 gets logits (..., vocab_size).

    widths: the number of logits on each rank.
    """

    def __init__(self, layer, tp_group: TensorParallelGroup, widths: list[int]):
        super().__init__()
        self.layer = layer
        self.tp_group = tp_group
        self.widths = widths

    def forward(self, x):
        return self.tp_group.gather(self.layer(x), self.widths)

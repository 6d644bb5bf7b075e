"""Tensor parallelism: each rank's shards of a model's weights, and its parallel layers.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

import torch
import torch.nn as nn

from loading.load import load_model
from model import Model
from parallel.ranks import TensorParallelGroup, TensorParallelRunner

ALIGNMENT = 32  # torch computes a tail without SIMD, which rounds differently


def load_shard(
    name, dtype: torch.dtype = torch.float32, device="cpu", *, tp_group: TensorParallelGroup
) -> Model:
    """Load this rank's shard of a model, with `load_model`'s arguments and errors."""
    model = load_model(name, dtype, device)
    plan = ShardPlan(model, tp_group)
    shard_model(model, plan)
    parallelize_blocks(model, plan)
    return model


def split(width: int, size: int) -> list[range]:
    """Split a width into one range per rank, as evenly as possible.

    The ranges are multiples of ALIGNMENT if it divides the width and every rank gets at least one.
    """
    alignment = ALIGNMENT if width % ALIGNMENT == 0 and width >= ALIGNMENT * size else 1
    units, left = divmod(width // alignment, size)
    ends = [alignment * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


class ShardPlan:
    """The shards of a model's weights on this rank, and the widths of all ranks.

    shards: of this rank, by weight name; a rank holds all of the other weights. inner, outputs: one
    range per rank.
    """

    def __init__(self, model: Model, tp_group: TensorParallelGroup):
        config = model.config
        C = config.n_embd
        self.tp_group = tp_group
        self.inner = split(config.n_inner, tp_group.size)
        self.outputs = split(C, tp_group.size)
        inner = self.inner[tp_group.rank]
        block_end = self.outputs[tp_group.rank]
        shards = {"gate": inner, "up": inner, "down": block_end}  # by role
        roles = {name: model.role(name) for name in model.state_dict()}
        self.shards = {name: shards[role] for name, role in roles.items() if role in shards}


def shard_model(model: Model, plan: ShardPlan) -> None:
    """Shrink each weight of a model to this rank's shard."""
    for name, whole in model.state_dict().items():
        if shard := plan.shards.get(name):
            path, _, attribute = name.rpartition(".")
            layer = model.get_submodule(path)
            local = whole[shard.start : shard.stop].clone()
            is_buffer = attribute in dict(layer.named_buffers())
            setattr(layer, attribute, local if is_buffer else nn.Parameter(local))
    model.runner = TensorParallelRunner(plan.tp_group, model.runner)


def parallelize_blocks(model: Model, plan: ShardPlan) -> None:
    """Replace the layers that end a residual branch with parallel layers."""
    tp_group = plan.tp_group
    widths = {"down": [len(inner) for inner in plan.inner]}
    outputs = [len(part) for part in plan.outputs]
    roles = {name.rpartition(".")[0]: model.role(name) for name in plan.shards}
    for path, role in roles.items():
        if role not in widths:
            continue
        layer = model.get_submodule(path)
        parallel_layer = ColumnParallelLinear(layer, tp_group, widths[role], outputs)
        model.set_submodule(path, parallel_layer)


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

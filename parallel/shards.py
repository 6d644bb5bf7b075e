"""Which part of a model each of several processes has, and how their results are joined.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

import torch.nn as nn

from model import GPT, Model
from parallel.ranks import Ranks

UNIT = 32  # numbers: torch computes the last few of a tensor without vectors, and rounds otherwise


def split(width: int, size: int) -> list[range]:
    """For each of so many ranks a range of a width, as equal as can be; in units, if that goes."""
    unit = UNIT if width % UNIT == 0 and width >= UNIT * size else 1
    units, left = divmod(width // unit, size)
    ends = [unit * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


class Plan:
    """What a rank has of each layer of a model."""

    def __init__(self, model: Model, ranks: Ranks):
        config = model.config
        C = config.n_embd
        self.ranks = ranks
        self.inner = split(4 * C if isinstance(model, GPT) else config.n_inner, ranks.size)
        self.outputs = split(C, ranks.size)
        inner = self.inner[ranks.rank]
        last = self.outputs[ranks.rank]
        # By the ends of names: rows of a layer's weight, which are its outputs.
        if isinstance(model, GPT):
            self.parts = {"c_fc": inner, "mlp.c_proj": last}
        else:
            self.parts = {"gate_proj": inner, "up_proj": inner, "down_proj": last}

    def part(self, name: str) -> range | None:
        """Of a layer of this name; None: each rank has all of it."""
        return next((part for end, part in self.parts.items() if name.endswith(end)), None)


def shard(model: Model, ranks: Ranks | None) -> Model:
    """Leave of a model what is this rank's; with None all of it."""
    if ranks:
        plan = Plan(model, ranks)
        cut(model, plan)
        join_blocks(model, plan)
    return model


def cut(model: Model, plan: Plan) -> None:
    """Leave of each layer's weight and bias what is this rank's, and of its scales."""
    for name, layer in model.named_modules():
        if part := plan.part(name):
            parameters = dict(layer.named_parameters())
            for key, tensor in layer.state_dict().items():
                own = tensor[part.start : part.stop].clone()
                setattr(layer, key, nn.Parameter(own) if key in parameters else own)
    model.ranks = plan.ranks


def join_blocks(model: Model, plan: Plan) -> None:
    """Let the layers that end a residual branch give what those of all ranks together do."""
    ranks = plan.ranks
    widths = dict.fromkeys(("mlp.c_proj", "down_proj"), [len(inner) for inner in plan.inner])
    outputs = [len(own) for own in plan.outputs]
    for name, layer in list(model.named_modules()):
        for end, inputs in widths.items():
            if name.endswith(end):
                parent, _, child = name.rpartition(".")
                joined = ColumnParallelLinear(layer, ranks, inputs, outputs)
                setattr(model.get_submodule(parent), child, joined)


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

"""Which part of a model each of several processes has, and how their results are joined.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

import torch
import torch.nn as nn

from loading.load import load_model
from model import Model
from parallel.ranks import RankRunner, Ranks

UNIT = 32  # numbers: torch computes the last few of a tensor without vectors, and rounds otherwise


def load_part(name, dtype: torch.dtype = torch.float32, device="cpu", *, ranks: Ranks) -> Model:
    """Load what this rank computes of a model. Arguments and errors are `load_model`'s."""
    model = load_model(name, dtype, device)
    plan = Plan(model, ranks)
    cut(model, plan)
    join_blocks(model, plan)
    return model


def split(width: int, size: int) -> list[range]:
    """Split a width into one range a rank, as even as possible, in whole units where it divides."""
    unit = UNIT if width % UNIT == 0 and width >= UNIT * size else 1
    units, left = divmod(width // unit, size)
    ends = [unit * (units * rank + min(rank, left)) for rank in range(size + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


class Plan:
    """What a rank has of each weight of a model, and what all ranks have.

    parts: rows, by the name of the weight; of others each rank has all. inner, outputs: of each
    rank.
    """

    def __init__(self, model: Model, ranks: Ranks):
        config = model.config
        C = config.n_embd
        self.ranks = ranks
        self.inner = split(config.n_inner, ranks.size)
        self.outputs = split(C, ranks.size)
        inner = self.inner[ranks.rank]
        last = self.outputs[ranks.rank]
        cuts = {"gate": inner, "up": inner, "down": last}  # by role
        roles = {name: model.role(name) for name in model.state_dict()}
        self.parts = {name: cuts[role] for name, role in roles.items() if role in cuts}


def cut(model: Model, plan: Plan) -> None:
    """Leave of each weight of a model what is this rank's."""
    for name, whole in model.state_dict().items():
        if part := plan.parts.get(name):
            layer, _, key = name.rpartition(".")
            own = whole[part.start : part.stop].clone()
            is_buffer = key in dict(model.get_submodule(layer).named_buffers())
            setattr(model.get_submodule(layer), key, own if is_buffer else nn.Parameter(own))
    model.runner = RankRunner(plan.ranks, model.runner)


def join_blocks(model: Model, plan: Plan) -> None:
    """Let the layers that end a residual branch give what those of all ranks together do."""
    ranks = plan.ranks
    widths = {"down": [len(inner) for inner in plan.inner]}
    outputs = [len(own) for own in plan.outputs]
    roles = {name.rpartition(".")[0]: model.role(name) for name in plan.parts}
    for path, role in roles.items():
        if role not in widths:
            continue
        layer = model.get_submodule(path)
        joined = ColumnParallelLinear(layer, ranks, widths[role], outputs)
        model.set_submodule(path, joined)


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

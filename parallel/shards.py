"""Which part of a model each of several processes has, and how their results are joined.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

import torch.nn as nn

from parallel.ranks import Ranks


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

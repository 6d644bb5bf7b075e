"""Tensor parallelism: each rank's shards of a model's weights, and its parallel layers.

After Shoeybi et al. 2019 (1909.08053), "Megatron-LM: Training multi-billion parameter language
models using model parallelism".
"""

import torch.nn as nn

from parallel.ranks import TensorParallelGroup


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

"""Collectives of three ranks: all-gather, and a product with its outputs split over the ranks."""

import torch
from ranks import results

from parallel.ranks import TensorParallelGroup
from parallel.shards import ColumnParallelLinear

WIDTHS = [3, 1, 2]
OUTPUTS = [20, 25, 15]


def test_all_gather_and_column_parallel_linear():
    def action():
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(65, 6, dtype=torch.float64, generator=generator).split([5, 60])
        with TensorParallelGroup() as tp_group:
            part = x.split(WIDTHS, dim=1)[tp_group.rank]
            assert torch.equal(tp_group.all_gather(part, WIDTHS), x)
            # Padded to the widest part, to each of two other ranks.
            assert (tp_group.collectives, tp_group.bytes_sent) == (1, 2 * 5 * 3 * 8)
            assert tp_group.seconds > 0
            own = weight.split(OUTPUTS)[tp_group.rank]
            layer = ColumnParallelLinear(lambda x: x @ own.t(), tp_group, WIDTHS, OUTPUTS)
            y = layer(part)
            assert tp_group.collectives == 3
            return (y - x @ weight.t()).abs().max().item()

    assert max(results(3, action)) < 1e-12

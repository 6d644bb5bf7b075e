"""A product of which each process computes some columns, and all get the whole."""

import torch
from ranks import results

from parallel.ranks import TensorParallelGroup
from parallel.shards import ColumnParallelLinear

WIDTHS = [3, 1, 2]


def test_all_get_all_parts():
    def gathered():
        with TensorParallelGroup() as tp_group:
            whole = torch.arange(12.0).view(2, 6)
            x = tp_group.all_gather(whole.split(WIDTHS, dim=1)[tp_group.rank], WIDTHS)
            # Filled up to the widest, to each of two others.
            assert (tp_group.collectives, tp_group.bytes_sent) == (1, 2 * 2 * 3 * 4)
            assert tp_group.seconds > 0
            return torch.equal(x, whole)

    assert results(3, gathered) == [True] * 3


def test_a_product_by_columns():
    def product():
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(65, 6, dtype=torch.float64, generator=generator).split([5, 60])
        outputs = [20, 25, 15]
        with TensorParallelGroup() as tp_group:
            part = weight.split(outputs)[tp_group.rank]
            layer = ColumnParallelLinear(lambda x: x @ part.t(), tp_group, WIDTHS, outputs)
            y = layer(x.split(WIDTHS, dim=1)[tp_group.rank])
            assert tp_group.collectives == 2
            return (y - x @ weight.t()).abs().max().item()

    assert max(results(3, product)) < 1e-12

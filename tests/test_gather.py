"""A product of which each process computes some columns, and all get the whole."""

import torch
from ranks import results

from parallel.ranks import Ranks

WIDTHS = [3, 1, 2]


def test_all_get_all_parts():
    def gathered():
        with Ranks() as ranks:
            whole = torch.arange(12.0).view(2, 6)
            x = ranks.all_gather(whole.split(WIDTHS, dim=1)[ranks.rank], WIDTHS)
            # Filled up to the widest, to each of two others.
            assert (ranks.collectives, ranks.traffic) == (1, 2 * 2 * 3 * 4)
            assert ranks.seconds > 0
            return torch.equal(x, whole)

    assert results(3, gathered) == [True] * 3


def test_a_product_by_columns():
    def product():
        from parallel.shards import ColumnParallelLinear

        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(65, 6, dtype=torch.float64, generator=generator).split([5, 60])
        outputs = [20, 25, 15]
        with Ranks() as ranks:
            part = weight.split(outputs)[ranks.rank]
            layer = ColumnParallelLinear(lambda x: x @ part.t(), ranks, WIDTHS, outputs)
            y = layer(x.split(WIDTHS, dim=1)[ranks.rank])
            assert ranks.collectives == 2
            return (y - x @ weight.t()).abs().max().item()

    assert max(results(3, product)) < 1e-12

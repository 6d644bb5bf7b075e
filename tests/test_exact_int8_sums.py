"""int8 by rows: one scale of all ranks and exact sums, so every bit is that of one process."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import SAMPLES, compared, results, texts_of

from parallel.ranks import Ranks


def test_texts(engine_cli, tmp_path):
    arguments = [*SAMPLES, "--dtype", "int8", "--seed", 1, "--temperature", 0.8]
    out = engine_cli(*arguments, "--backend", "torch")[1]
    found, err = texts_of(2, tmp_path, *arguments, "--join", "reduce")
    assert found == out
    # 8 layers of two sums, each with a maximum before; the embedding and the head.
    assert "2 ranks: 34 collectives a step, " in err


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_int8_logits_are_those_of_one_process(compiled, name, size, native):
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}
    assert compared(size, CHECKPOINTS / name, tokens, "reduce", **options)[0] == 0


def test_a_nan_of_any_rank_shows():
    def largest():
        with Ranks() as ranks:
            x = torch.full((3, 1), 3.0)
            x[ranks.rank] = torch.nan  # in another row on each rank
            return ranks.maximum(x).flatten().tolist()

    assert results(2, largest) == [[torch.inf, torch.inf, 3.0]] * 2


def test_infinities_show():
    from int8 import quantize

    x = torch.tensor([[1.0, float("inf")], [2.0, 4.0]])
    values, scale = quantize(x[:, :1], x.abs().amax(-1, keepdim=True))
    assert scale.isinf().tolist() == [True, False]
    assert values[1].tolist() == [64] and scale[1] == 4 / 127

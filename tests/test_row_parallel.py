"""Products by rows: half as many meetings, and logits that differ by rounding, if at all."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import SAMPLES, compared, results, save_uneven, texts_of

from int8 import quantize
from parallel.ranks import Ranks


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 4)])
def test_logits_differ_by_rounding(request, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    difference, (collectives, traffic), _ = compared(size, name, tokens, "reduce", **options)
    assert difference < 1e-11 and collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert traffic == 5 * (2 * (size - 1) * 23 * width * 8 // size)


@pytest.mark.parametrize(
    "options, collectives",
    [
        (["--dtype", "float32"], 18),
        # 8 layers of two sums, each with a maximum before; the embedding and the head.
        (["--dtype", "int8", "--seed", 1, "--temperature", 0.8], 34),
    ],
)
def test_texts(engine_cli, tmp_path, options, collectives):
    arguments = [*SAMPLES, *options]
    out = engine_cli(*arguments, "--backend", "torch" if "int8" in options else "auto")[1]
    found, err = texts_of(2, tmp_path, *arguments, "--join", "reduce")
    assert found == out
    assert f"2 ranks: {collectives} collectives a step, " in err


# int8: scales of all ranks and exact sums, so every bit is that of one process.


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
    x = torch.tensor([[1.0, float("inf")], [2.0, 4.0]])
    values, scale = quantize(x[:, :1], x.abs().amax(-1, keepdim=True))
    assert scale.isinf().tolist() == [True, False]
    assert values[1].tolist() == [64] and scale[1] == 4 / 127

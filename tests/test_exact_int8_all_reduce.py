"""int8 weights by rows: ranks share scales and sums are exact, so logits equal one process's."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import SAMPLES, compared, results, run_engine_script

from loading.load import load_model
from parallel.ranks import TensorParallelGroup


def test_texts(engine_cli, tmp_path):
    arguments = [*SAMPLES, "--dtype", "int8", "--seed", 1, "--temperature", 0.8]
    out = engine_cli(*arguments, "--backend", "torch")[1]
    found, err = run_engine_script(2, tmp_path, *arguments, "--join", "reduce")
    assert found == out
    # 8 layers of two sums, each with a maximum before; the embedding and the head.
    assert "2 ranks: 34 collectives a step, " in err


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_int8_logits_are_those_of_one_process(compiled, name, size, native):
    model = CHECKPOINTS / name
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}
    difference, (collectives, _), _ = compared(size, model, tokens, "reduce", **options)
    assert difference == 0
    # A gather before and after each of two products a layer; the embedding and the head.
    assert collectives == 4 * load_model(model).config.n_layer + 2


def test_a_nan_of_any_rank_shows():
    def largest():
        with TensorParallelGroup("reduce") as tp_group:
            x = torch.full((3, 1), 3.0)
            x[tp_group.rank] = torch.nan  # in another row on each rank
            return tp_group.maximum(x).flatten().tolist()

    assert results(2, largest) == [[torch.inf, torch.inf, 3.0]] * 2


def test_infinities_show():
    from quantisation.int8 import quantize

    x = torch.tensor([[1.0, float("inf")], [2.0, 4.0]])
    values, scale = quantize(x[:, :1], x.abs().amax(-1, keepdim=True))
    assert scale.isinf().tolist() == [True, False]
    assert values[1].tolist() == [64] and scale[1] == 4 / 127

"""int8 by rows: scales of all ranks, exact sums, so the logits of one process, bit for bit."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import alone, logits_of, results, texts_of

LLAMA = CHECKPOINTS / "stories-llama"


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_logits_are_those_of_one_process(compiled, name, size, native):
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}

    def action():
        return logits_of(CHECKPOINTS / name, tokens, "reduce", **options)

    logits = torch.from_numpy(results(size, action)[0][0])
    assert torch.equal(logits, alone(CHECKPOINTS / name, tokens, **options))


def test_a_nan_of_any_rank_shows():
    def largest():
        from parallel.ranks import Ranks

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


def test_texts(engine_cli, tmp_path):
    arguments = ["--model", LLAMA, "--prompt", "Lily", "--num-samples", 3, "--max-new-tokens", 9]
    arguments += ["--dtype", "int8", "--seed", 1, "--temperature", 0.8]
    out = engine_cli(*arguments, "--backend", "torch")[1]
    arguments += ["--join", "reduce"]
    found, err = texts_of(2, tmp_path, *arguments)
    assert found == out
    # 8 layers of two sums, each with a maximum before; the embedding and the head.
    assert "2 ranks: 34 collectives a step, " in err

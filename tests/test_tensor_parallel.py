"""A model's MLPs by columns: logits are those of one process, bit for bit."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import alone, logits_of, parallel_model, results, save_uneven, texts_of

LLAMA = CHECKPOINTS / "stories-llama"


def joined(size, *arguments, **options) -> torch.Tensor:
    """The logits of rank 0."""

    def action():
        return logits_of(*arguments, **options)

    return torch.from_numpy(results(size, action)[0][0])


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 2), ("tiny_llama", 4)])
def test_widths_that_no_number_of_ranks_divides(request, compiled, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    assert torch.equal(joined(size, name, tokens), alone(name, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_logits_of_three_ranks(compiled, dtype):
    tokens = torch.tensor([random_tokens(40, 4096)])
    assert torch.equal(joined(3, LLAMA, tokens, dtype=dtype), alone(LLAMA, tokens, dtype))


def test_products_of_torch_differ_by_rounding_only():
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.float64, "native": False}
    logits = joined(2, LLAMA, tokens, **options)
    assert (logits - alone(LLAMA, tokens, **options)).abs().max() < 1e-12


def test_what_a_rank_has():
    from loading.load import load_model

    def rows():
        from parallel.ranks import Ranks
        from parallel.shards import load_part

        with Ranks() as ranks:
            mlp = load_part(LLAMA, ranks=ranks).layers[0].mlp
            assert "0 collectives a step, 0 bytes" in ranks.statistics(0)
            return len(mlp.gate_proj.weight), len(mlp.down_proj.layer.weight)

    whole = load_model(LLAMA).layers[0].mlp
    found = torch.tensor(results(3, rows))
    assert found.sum(0).tolist() == [len(whole.gate_proj.weight), len(whole.down_proj.weight)]
    assert found.min() > 0


def test_statistics_are_of_one_pass():
    from parallel.ranks import Ranks

    ranks = object.__new__(Ranks)
    ranks.__dict__.update(size=3, collectives=8, traffic=5000, seconds=0.01)
    assert ranks.statistics(2) == "3 ranks: 4 collectives a step, 2,500 bytes sent, 5.0 ms"
    assert ranks.statistics(1) == "3 ranks: 8 collectives a step, 5,000 bytes sent, 10.0 ms"


def test_draws_are_in_c(compiled):
    from sampling import SamplingParams

    def draw():
        from parallel.ranks import Ranks

        with Ranks() as ranks:
            model = parallel_model(LLAMA, ranks)
            return model.runner.runner.draw(torch.arange(9.0)[None], [SamplingParams()], [0])

    assert results(2, draw) == [[8], [8]]


def test_splits():
    from parallel.shards import split

    assert split(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert split(512, 3) == [range(0, 192), range(192, 352), range(352, 512)]
    assert split(64, 3) == [range(0, 22), range(22, 43), range(43, 64)]


def test_texts_and_what_crosses(engine_cli, tmp_path):
    arguments = ["--model", LLAMA, "--prompt", "Lily", "--num-samples", 3, "--max-new-tokens", 9]
    arguments += ["--seed", 3, "--temperature", 0.7]
    out = engine_cli(*arguments)[1]
    found, err = texts_of(3, tmp_path, *arguments)
    assert found == out
    assert " collectives a step, " in err

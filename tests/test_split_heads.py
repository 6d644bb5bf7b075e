"""A model's MLPs by columns and attention by heads: the logits of one process, bit for bit."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, random_tokens
from ranks import (
    LLAMA,
    SAMPLES,
    alone,
    joined,
    parallel_model,
    results,
    save_uneven,
    script,
    start,
    texts_of,
    wait,
    written,
)


@pytest.mark.parametrize(
    "kind, size, divided",
    [
        ("tiny", 3, [2, 2, 1]),
        ("tiny_llama", 2, [3, 2]),
        ("tiny_llama", 4, [2, 1, 1, 1]),
    ],
)
def test_widths_that_no_number_of_ranks_divides(request, compiled, tmp_path, kind, size, divided):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    logits, _, heads = joined(size, name, tokens)
    assert torch.equal(logits, alone(name, tokens))
    assert heads == divided


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_two_keys_for_three_ranks(compiled, dtype):
    tokens = torch.tensor([random_tokens(40, 4096)])
    logits, _, heads = joined(3, LLAMA, tokens, dtype=dtype)
    assert torch.equal(logits, alone(LLAMA, tokens, dtype))
    assert heads == [1, 2, 1]  # the second has a query for each key


def test_products_of_torch_differ_by_rounding_only():
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.float64, "native": False}
    logits, _, heads = joined(2, LLAMA, tokens, **options)
    assert (logits - alone(LLAMA, tokens, **options)).abs().max() < 1e-12
    assert heads == [1, 1]


FLOAT64 = """
import sys
sys.path[:0] = ["tests", "."]
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import alone, logits_of, results
options = {"dtype": torch.float64, "native": False}
tokens = torch.tensor([random_tokens(40, 4096)])
for name in CHECKPOINTS / "stories", CHECKPOINTS / "stories-llama":
    expected = alone(name, tokens, **options)
    for size in 2, 3, 4:
        found = torch.from_numpy(results(size, lambda: logits_of(name, tokens, **options))[0][0])
        print((found - expected).abs().max().item())
"""


def test_still_every_bit_of_float64_where_mkl_adds_in_one_order():
    # What MKL reads as it starts, so in a process of its own.
    settings = os.environ | {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": settings}
    done = subprocess.run([sys.executable, "-c", FLOAT64], **options, timeout=100)
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 6, done.stderr
    assert max(differences) <= (0 if torch.backends.mkl.is_available() else 1e-12)


def test_queries_that_do_not_share_a_key_as_often(tiny_llama, compiled, tmp_path):
    shape = {"n_head": 12, "n_kv_head": 3, "n_embd": 84}
    name = save_uneven(tiny_llama, tmp_path, "tiny_llama", **shape)
    tokens = torch.tensor([random_tokens(23)])
    logits, _, heads = joined(4, name, tokens)
    assert torch.equal(logits, alone(name, tokens))
    assert heads == [1, 3, 3, 1]  # queries 3, 4, 5 have keys 0, 1, 1


def test_keys_of_query_heads():
    from parallel.shards import keys_of

    assert keys_of(range(0, 6), 3) == [0, 1]
    assert keys_of(range(2, 4), 3) == [0, 1]
    assert keys_of(range(1, 3), 4) == [0]
    assert keys_of(range(0, 4), 3) == [0, 0, 0, 1]  # three and one: each query a copy


def test_keys_are_divided_as_equally_as_can_be(tiny_llama):
    from parallel.shards import Plan

    model = tiny_llama(n_head=12, n_kv_head=6)
    plans = [Plan(model, SimpleNamespace(size=2, rank=rank, way="gather")) for rank in range(2)]
    assert [plan.keys for plan in plans] == [[0, 1, 2], [3, 4, 5]]
    assert plans[0].heads == plans[1].heads == [range(0, 6), range(6, 12)]


def test_still_texts_of_one_process(engine_cli, tmp_path):
    arguments = [*SAMPLES, "--seed", 3, "--temperature", 0.7]
    out = engine_cli(*arguments)[1]
    found, err = texts_of(3, tmp_path, *arguments)
    assert found == out and " collectives a step, " in err


def test_more_ranks_than_heads(tmp_path):
    import infer_engine

    arguments = ["--model", CHECKPOINTS / "stories-draft", "--prompt", "A"]
    processes = start(3, script, tmp_path, infer_engine.main, arguments)
    assert wait(processes) == [2, 2, 2]
    errors = [err for _, err in written(tmp_path, 3) if err]
    assert "3 processes: this model has 2 heads, and each process needs one\n" in errors[0]


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

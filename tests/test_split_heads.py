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
    compared,
    parallel_model,
    results,
    save_uneven,
    script,
    start,
    wait,
    written,
)

import infer_engine
from loading.load import load_model
from parallel.ranks import Ranks
from sampling import SamplingParams

UNSHARED = {"n_head": 12, "n_kv_head": 3, "n_embd": 84}  # queries 3, 4, 5 have keys 0, 1, 1
UNEVEN = [
    *(("tiny", 3, {}, [2, 2, 1]), ("tiny_llama", 2, {}, [3, 2])),
    *(("tiny_llama", 4, {}, [2, 1, 1, 1]), ("tiny_llama", 4, UNSHARED, [1, 3, 3, 1])),
]


@pytest.mark.parametrize("kind, size, shape, divided", UNEVEN)
def test_widths_that_ranks_do_not_divide(request, compiled, tmp_path, kind, size, shape, divided):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind, **shape)
    difference, _, heads = compared(size, name, torch.tensor([random_tokens(23)]))
    assert (difference, heads) == (0, divided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_two_keys_for_three_ranks(compiled, dtype):
    tokens = torch.tensor([random_tokens(40, 4096)])
    difference, _, heads = compared(3, LLAMA, tokens, dtype=dtype)
    assert (difference, heads) == (0, [1, 2, 1])  # the second has a query for each key


FLOAT64 = """
import sys
sys.path[:0] = ["tests", "."]
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import compared
options = {"dtype": torch.float64, "native": False}
tokens = torch.tensor([random_tokens(40, 4096)])
for name, size in ("stories", 3), ("stories-llama", 2), ("stories-llama", 4):
    print(compared(size, CHECKPOINTS / name, tokens, **options)[0])
"""


def test_still_every_bit_of_float64_where_mkl_adds_in_one_order():
    # What MKL reads as it starts, so in a process of its own.
    settings = os.environ | {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": settings}
    done = subprocess.run([sys.executable, "-c", FLOAT64], **options, timeout=100)
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 3, done.stderr
    assert max(differences) <= (0 if torch.backends.mkl.is_available() else 1e-12)


def test_keys_are_divided_as_equally_as_can_be(tiny_llama):
    from parallel.shards import Plan

    model = tiny_llama(n_head=12, n_kv_head=6)
    plans = [Plan(model, SimpleNamespace(size=2, rank=rank, way="gather")) for rank in range(2)]
    assert [plan.keys for plan in plans] == [[0, 1, 2], [3, 4, 5]]
    assert plans[0].heads == plans[1].heads == [range(0, 6), range(6, 12)]


def test_more_ranks_than_heads(tmp_path):
    arguments = ["--model", CHECKPOINTS / "stories-draft", "--prompt", "A"]
    processes = start(3, script, tmp_path, infer_engine.main, arguments)
    assert wait(processes) == [2, 2, 2]
    errors = [err for _, err in written(tmp_path, 3) if err]
    assert "3 processes: this model has 2 heads, and each process needs one\n" in errors[0]


def test_what_a_rank_has():
    def rows():
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
    ranks = object.__new__(Ranks)
    ranks.__dict__.update(size=3, collectives=8, traffic=5000, seconds=2.0)
    assert ranks.statistics(2) == "3 ranks: 4 collectives a step, 2,500 bytes sent, 1000.0 ms"
    assert ranks.statistics(1) == "3 ranks: 8 collectives a step, 5,000 bytes sent, 2000.0 ms"


def test_draws_are_in_c(compiled):
    def draw():
        with Ranks() as ranks:
            model = parallel_model(LLAMA, ranks)
            return model.runner.runner.draw(torch.arange(9.0)[None], [SamplingParams()], [0])

    assert results(2, draw) == [[8], [8]]


def test_splits():
    from parallel.shards import keys_of, split

    assert split(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert split(512, 3) == [range(0, 192), range(192, 352), range(352, 512)]
    assert split(64, 3) == [range(0, 22), range(22, 43), range(43, 64)]
    assert keys_of(range(0, 6), 3) == [0, 1]
    assert keys_of(range(2, 4), 3) == [0, 1]
    assert keys_of(range(1, 3), 4) == [0]
    assert keys_of(range(0, 4), 3) == [0, 0, 0, 1]  # three and one: each query a copy

"""Attention by heads: logits are those of one process, bit for bit, and caches are divided."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, random_tokens
from ranks import alone, logits_of, results, save_uneven, script, start, texts_of, wait, written

LLAMA = CHECKPOINTS / "stories-llama"


def joined(size, *arguments, **options):
    """Of rank 0 its logits; of all ranks how many heads their caches have."""

    def action():
        return logits_of(*arguments, **options)

    found = results(size, action)
    return torch.from_numpy(found[0][0]), [result[2:] for result in found]


@pytest.mark.parametrize(
    "kind, size, divided",
    [
        ("tiny", 3, [(2,), (2,), (1,)]),
        ("tiny_llama", 2, [(3,), (2,)]),
        ("tiny_llama", 4, [(2,), (1,), (1,), (1,)]),
    ],
)
def test_heads_that_no_number_of_ranks_divides(request, compiled, tmp_path, kind, size, divided):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    logits, heads = joined(size, name, tokens)
    assert torch.equal(logits, alone(name, tokens))
    assert heads == divided


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_two_keys_for_three_ranks(compiled, dtype):
    tokens = torch.tensor([random_tokens(40, 4096)])
    logits, heads = joined(3, LLAMA, tokens, dtype=dtype)
    assert torch.equal(logits, alone(LLAMA, tokens, dtype))
    assert heads == [(1,), (2,), (1,)]  # the second has a query for each key


def test_products_of_torch_differ_by_rounding_only():
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.float64, "native": False}
    logits, heads = joined(2, LLAMA, tokens, **options)
    assert (logits - alone(LLAMA, tokens, **options)).abs().max() < 1e-12
    assert heads == [(1,), (1,)]


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
    logits, heads = joined(4, name, tokens)
    assert torch.equal(logits, alone(name, tokens))
    assert heads == [(1,), (3,), (3,), (1,)]  # queries 3, 4, 5 have keys 0, 1, 1


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
    arguments = ["--model", LLAMA, "--prompt", "Lily", "--num-samples", 3, "--max-new-tokens", 9]
    arguments += ["--seed", 3, "--temperature", 0.7]
    out = engine_cli(*arguments)[1]
    assert texts_of(3, tmp_path, *arguments)[0] == out


def test_more_ranks_than_heads(tmp_path):
    import infer_engine

    arguments = ["--model", CHECKPOINTS / "stories-draft", "--prompt", "A"]
    processes = start(3, script, tmp_path, infer_engine.main, arguments)
    assert wait(processes) == [2, 2, 2]
    errors = [err for _, err in written(tmp_path, 3) if err]
    assert "3 processes: this model has 2 heads, and each process needs one\n" in errors[0]

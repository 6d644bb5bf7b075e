"""Attention by heads: the logits of one process, bit for bit in int8."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import LLAMA, ROUNDING, compared, save_uneven, script, start, wait, written

import infer_engine
from parallel.shards import ShardPlan, local_kv_heads

UNSHARED = {"n_head": 12, "n_kv_head": 3, "n_embd": 84}  # queries 3, 4, 5 have keys 0, 1, 1
UNEVEN = [
    ("tiny", 3, {}, [2, 2, 1]),
    ("tiny_llama", 4, {}, [2, 1, 1, 1]),
    ("tiny_llama", 4, UNSHARED, [1, 3, 3, 1]),
]


@pytest.mark.parametrize("kind, size, shape, divided", UNEVEN)
def test_widths_that_ranks_do_not_divide(request, compiled, tmp_path, kind, size, shape, divided):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind, **shape)
    difference, _, heads = compared(size, name, torch.tensor([random_tokens(23)]))
    assert difference <= ROUNDING[torch.float32] and heads == divided


def test_two_keys_for_three_ranks(compiled):
    tokens = torch.tensor([random_tokens(40, 4096)])
    difference, _, heads = compared(3, LLAMA, tokens, dtype=torch.int8)
    assert difference == 0
    assert heads == [1, 2, 1]  # the second has a query for each key


@pytest.mark.parametrize("name, size", [("stories", 3), ("stories-llama", 4)])
def test_logits_where_torch_multiplies(name, size):
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.float64, "native": False}
    assert compared(size, CHECKPOINTS / name, tokens, **options)[0] < 1e-12


def test_keys_are_divided_as_equally_as_can_be(tiny_llama):
    model = tiny_llama(n_head=12, n_kv_head=6)
    plans = [
        ShardPlan(model, SimpleNamespace(size=2, rank=rank, parallel_mode="gather"))
        for rank in range(2)
    ]
    assert [plan.kv_heads for plan in plans] == [[0, 1, 2], [3, 4, 5]]
    assert plans[0].heads == plans[1].heads == [range(0, 6), range(6, 12)]


def test_more_ranks_than_heads(tmp_path):
    arguments = ["--model", CHECKPOINTS / "stories-draft", "--prompt", "A"]
    processes = start(3, script, tmp_path, infer_engine.main, arguments)
    assert wait(processes) == [2, 2, 2]
    errors = [err for _, err in written(tmp_path, 3) if err]
    assert "3 processes: this model has 2 heads, and each process needs one\n" in errors[0]


def test_the_keys_that_heads_need():
    assert local_kv_heads(range(0, 6), 3) == [0, 1]
    assert local_kv_heads(range(2, 4), 3) == [0, 1]
    assert local_kv_heads(range(1, 3), 4) == [0]
    assert local_kv_heads(range(0, 4), 3) == [0, 0, 0, 1]  # three and one: each query a copy

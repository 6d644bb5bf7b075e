"""Weights read by shard: no process ever holds the whole model."""

from pathlib import Path

import pytest
import torch
from ranks import compared, results

from loading import load
from loading.load import save_model
from model import GPTConfig
from parallel.ranks import TensorParallelGroup
from parallel.shards import load_shard, overlapping_rows

SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 24000, "block_size": 16}


def peak(action) -> int:
    """By how many bytes the memory of this process grows while an action runs, at most."""

    def read(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


@pytest.fixture(scope="module")
def large(tiny, tmp_path_factory):
    """A directory with 37 MB of weights, and in small a model of the same kind."""
    directory = tmp_path_factory.mktemp("large")
    save_model(tiny(dtype=torch.float32, **SHAPE), directory)
    save_model(tiny(dtype=torch.float32, n_head=4), directory / "small")
    return directory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_the_peak_of_each_rank(large, parallel_mode):
    def action():
        with TensorParallelGroup(parallel_mode) as tp_group:
            load_shard(large / "small", tp_group=tp_group)  # code takes memory, too
            return peak(lambda: load_shard(large, tp_group=tp_group))

    whole = (large / "model.safetensors").stat().st_size
    for grown in results(4, action):
        assert grown < whole // 2  # a quarter, and blocks of 4 MB


def test_still_random_weights_are_those_of_one_process(monkeypatch):
    shape = GPTConfig(**SHAPE | {"vocab_size": 61, "eos_token_ids": (60,)})
    monkeypatch.setitem(load.PRESETS, "small", shape)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    options = {"dtype": torch.float64, "native": False}
    assert compared(3, "random:small", tokens, "reduce", **options)[0] < 1e-12


def test_overlapping_rows_of_a_block():
    rows = [range(2, 5), range(8, 10)]
    assert overlapping_rows(rows, slice(0, 4)) == [(slice(0, 2), slice(2, 4))]
    assert overlapping_rows(rows, slice(4, 12)) == [
        (slice(2, 3), slice(0, 1)),
        (slice(3, 5), slice(4, 6)),
    ]
    assert overlapping_rows(rows, slice(5, 8)) == []

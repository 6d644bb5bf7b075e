"""Weights read by shard: no process ever holds the whole model."""

from pathlib import Path

import pytest
import torch
from ranks import compared, results

from loading import load
from loading.load import save_model
from model import GPTConfig
from parallel.ranks import Ranks

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
@pytest.mark.parametrize("way", ["gather", "reduce"])
def test_the_peak_of_each_rank(large, way):
    def action():
        from parallel.shards import load_part

        with Ranks(way) as ranks:
            load_part(large / "small", ranks=ranks)  # code takes memory, too
            return peak(lambda: load_part(large, ranks=ranks))

    whole = (large / "model.safetensors").stat().st_size
    for grown in results(4, action):
        assert grown < whole // 2  # a quarter, and blocks of 4 MB


def test_still_random_weights_are_those_of_one_process(monkeypatch):
    shape = GPTConfig(**SHAPE | {"vocab_size": 61, "eos_token_ids": (60,)})
    monkeypatch.setitem(load.PRESETS, "small", shape)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    options = {"dtype": torch.float64, "native": False}
    assert compared(3, "random:small", tokens, "reduce", **options)[0] < 1e-12


def test_places_of_a_block():
    from parallel.shards import places

    rows = [range(2, 5), range(8, 10)]
    assert places(rows, slice(0, 4)) == [(slice(0, 2), slice(2, 4))]
    assert places(rows, slice(4, 12)) == [(slice(2, 3), slice(0, 1)), (slice(3, 5), slice(4, 6))]
    assert places(rows, slice(5, 8)) == []

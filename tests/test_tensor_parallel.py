"""Tensor parallelism: collectives, shards, parallel layers, and a server on several ranks."""

import os
import signal

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import (
    LLAMA,
    SAMPLES,
    SMALL,
    compared,
    parallel_model,
    results,
    run_engine_script,
    save_uneven,
    script,
    serving,
    start,
    wait,
    written,
)

import infer_engine
from engine import options
from loading.load import load_model
from parallel.ranks import TensorParallelGroup
from parallel.shards import ColumnParallelLinear, load_shard, split
from sampling import SamplingParams

WIDTHS = [3, 1, 2]
OUTPUTS = [20, 25, 15]


def test_all_gather_and_column_parallel_linear():
    def action():
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(65, 6, dtype=torch.float64, generator=generator).split([5, 60])
        with TensorParallelGroup() as tp_group:
            part = x.split(WIDTHS, dim=1)[tp_group.rank]
            assert torch.equal(tp_group.all_gather(part, WIDTHS), x)
            # Padded to the widest part, to each of two other ranks.
            assert (tp_group.collectives, tp_group.bytes_sent) == (1, 2 * 5 * 3 * 8)
            assert tp_group.seconds > 0
            own = weight.split(OUTPUTS)[tp_group.rank]
            layer = ColumnParallelLinear(lambda x: x @ own.t(), tp_group, WIDTHS, OUTPUTS)
            y = layer(part)
            assert tp_group.collectives == 3
            return (y - x @ weight.t()).abs().max().item()

    assert max(results(3, action)) < 1e-12


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 4)])
def test_reduce_sends_less_and_rounds_otherwise(request, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    difference, (collectives, bytes_sent), _ = compared(size, name, tokens, "reduce", **options)
    assert difference < 1e-11 and collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert bytes_sent == 5 * (2 * (size - 1) * 23 * width * 8 // size)


def test_reduce_on_the_command_line(engine_cli, tmp_path):
    out = engine_cli(*SAMPLES)[1]
    found, err = run_engine_script(2, tmp_path, *SAMPLES, "--join", "reduce")
    assert found == out
    assert "2 ranks: 18 collectives a step, " in err


def test_a_rank_has_its_shards_and_draws_in_c(compiled):
    def action():
        with TensorParallelGroup() as tp_group:
            model = parallel_model(LLAMA, tp_group)
            assert "0 collectives a step, 0 bytes" in tp_group.statistics(0)
            draws = model.runner.local_runner.draw(torch.arange(9.0)[None], [SamplingParams()], [0])
            mlp = load_shard(LLAMA, tp_group=tp_group).layers[0].mlp
            return draws, [len(mlp.gate_proj.weight), len(mlp.down_proj.layer.weight)]

    found = results(3, action)
    assert [draws for draws, _ in found] == [[8]] * 3
    whole = load_model(LLAMA).layers[0].mlp
    rows = torch.tensor([rows for _, rows in found])
    assert rows.sum(0).tolist() == [len(whole.gate_proj.weight), len(whole.down_proj.weight)]
    assert rows.min() > 0


def test_statistics_are_of_one_pass():
    tp_group = object.__new__(TensorParallelGroup)
    tp_group.__dict__.update(size=3, collectives=8, bytes_sent=5000, seconds=2.0)
    assert tp_group.statistics(2) == "3 ranks: 4 collectives a step, 2,500 bytes sent, 1000.0 ms"
    assert tp_group.statistics(1) == "3 ranks: 8 collectives a step, 5,000 bytes sent, 2000.0 ms"


def test_other_devices_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "pick_device", lambda name: "cuda")
    processes = start(2, script, tmp_path, infer_engine.main, ["--prompt", "A"])
    assert wait(processes) == [2, 2]
    (out, err), other = written(tmp_path, 2)
    assert (out, other) == ("", ("", ""))
    assert err.endswith("error: several processes require --device cpu, not cuda\n")


def test_splits():
    assert split(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert split(512, 3) == [range(0, 192), range(192, 352), range(352, 512)]
    assert split(64, 3) == [range(0, 22), range(22, 43), range(43, 64)]


def test_a_server_of_three_processes(engine_cli, tmp_path):
    llama = ["--model", CHECKPOINTS / "stories-llama"]  # 6 heads and 2 keys: one rank needs both
    write = ["--seed", 1, "--temperature", 0.8, "--max-new-tokens", 12]
    text = engine_cli(*SMALL, *llama, "--prompt", "Tom", *write)[1].rstrip("\n")
    path = "/v1/completions"
    body = {"prompt": "Tom", "seed": 1, "temperature": 0.8, "max_tokens": 12, "echo": True}
    endless = {"prompt": "Lily", "max_tokens": 2**18, "ignore_eos": True, "stream": True}
    with serving(tmp_path, "--max-num-seqs", 1, *llama, size=3) as (processes, client):
        for _ in range(2):
            with client.send("POST", path, endless) as answer:
                assert answer.readline()  # and leaves, so the only row is free
            status, found = client.post(path, body)
            assert status == 200, found
            assert found["choices"][0]["text"] == text
        assert written(tmp_path, 3)[1:] == [("", "")] * 2
        os.kill(processes[0].pid, signal.SIGTERM)
        assert wait(processes) == [0, 0, 0]
    (out, err), *others = written(tmp_path, 3)
    assert out.count("\n") == 1 and (err, others) == ("", [("", "")] * 2)

"""A model's MLPs by columns: the logits of one process, bit for bit in int8."""

import os
import signal

import torch
from conftest import CHECKPOINTS
from ranks import LLAMA, SMALL, parallel_model, results, script, serving, start, wait, written

import infer_engine
from engine import options
from loading.load import load_model
from parallel.ranks import TensorParallelGroup
from parallel.shards import load_shard, split
from sampling import SamplingParams


def test_a_rank_has_its_shards_and_draws_in_c(compiled):
    def action():
        with TensorParallelGroup() as tp_group:
            model = parallel_model(LLAMA, tp_group)
            assert "0 collectives a step, 0 bytes" in tp_group.statistics(0)
            draws = model.runner.runner.draw(torch.arange(9.0)[None], [SamplingParams()], [0])
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
    assert err.endswith("error: --device cuda: must be cpu with several processes\n")


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

"""Tensor parallelism: collectives, shards and their memory, scripts and a server on ranks."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, random_tokens
from ranks import (
    LLAMA,
    ROUNDING,
    SAMPLES,
    SCRIPT,
    SMALL,
    TORCHRUN,
    attention_in_float64,
    compared,
    logits_of,
    parallel_model,
    results,
    run_engine_script,
    save_uneven,
    script,
    serving,
    single_process_logits,
    start,
    wait,
    written,
)

import infer_engine
from engine import options
from loading import load
from loading.load import load_model, save_model
from model import GPTConfig
from parallel.ranks import TensorParallelGroup
from parallel.shards import ColumnParallelLinear, load_shard, split
from sampling import SamplingParams

DRAFT = CHECKPOINTS / "stories-draft"
WIDTHS = [3, 1, 2]
OUTPUTS = [20, 25, 15]
IN_TORCH = {"dtype": torch.float64, "native": False}

# Collectives and what crosses


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
    difference, (collectives, bytes_sent), _ = compared(size, name, tokens, "reduce", **IN_TORCH)
    assert difference < 1e-11 and collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert bytes_sent == 5 * (2 * (size - 1) * 23 * width * 8 // size)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_three_does_not_divide(compiled, tiny_llama, tmp_path, tied):
    shape = {"n_embd": 64, "n_head": 4, "head_dim": 32, "n_inner": 96, "tie_word_embeddings": tied}
    save_model(tiny_llama(dtype=torch.float32, **shape), tmp_path)
    edges = [0, 20, 21, 40, 41, 60]  # the first and the last id of each part
    tokens = torch.tensor([[*edges, *random_tokens(10)]])

    def near(logits, expected):
        return (torch.from_numpy(logits) - expected).abs().max() <= ROUNDING[torch.float32]

    with attention_in_float64():
        (logits, (collectives, bytes_sent), _), *others = results(
            3, lambda: logits_of(tmp_path, tokens)
        )
        expected = single_process_logits(tmp_path, tokens)
    assert near(logits, expected) and collectives == 2 * 4 + 2
    ends = 0, 21, 41, 61
    # Heads, two of a rank at most, outputs, inputs, outputs; of the others: what they lack.
    layers = 2 * 2 * 16 * 4 * (64 + 22 + 32 + 22)
    rows = 2 * 2 * 16 * 4 * 64 // 3
    assert bytes_sent == layers + rows  # the logits go to rank 0 only
    for (own, (_, bytes_sent), _), first, end in zip(others, ends[1:], ends[2:]):
        assert near(own, expected[..., first:end])
        assert bytes_sent == layers + rows + 16 * 4 * 21


def test_heads_that_keys_do_not_divide(compiled, tiny_llama, tmp_path):
    """Queries 3, 4 and 5 have keys 0, 1 and 1; and a rank may have a query for each of two keys."""
    shape = {"n_head": 12, "n_kv_head": 3, "n_embd": 84}
    name = save_uneven(tiny_llama, tmp_path, "tiny_llama", **shape)
    difference, _, heads = compared(4, name, torch.tensor([random_tokens(23)]))
    assert difference <= ROUNDING[torch.float32] and heads == [1, 3, 3, 1]
    tokens = torch.tensor([random_tokens(40, 4096)])
    difference, _, heads = compared(3, LLAMA, tokens, dtype=torch.int8)
    assert difference == 0 and heads == [1, 2, 1]


def test_splits():
    assert split(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert split(512, 3) == [range(0, 192), range(192, 352), range(352, 512)]
    assert split(64, 3) == [range(0, 22), range(22, 43), range(43, 64)]


def test_statistics_are_of_one_pass():
    tp_group = object.__new__(TensorParallelGroup)
    tp_group.__dict__.update(size=3, collectives=8, bytes_sent=5000, seconds=2.0)
    assert tp_group.statistics(2) == "3 ranks: 4 collectives a step, 2,500 bytes sent, 1000.0 ms"
    assert tp_group.statistics(1) == "3 ranks: 8 collectives a step, 5,000 bytes sent, 2000.0 ms"


# Shards of the weights


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


SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 48000, "block_size": 16}


def peak(action) -> int:
    """By how many bytes the memory of this process grows while an action runs, at most."""

    def read(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_no_rank_holds_the_whole_model(tiny, tmp_path, parallel_mode):
    save_model(tiny(dtype=torch.float32, **SHAPE), tmp_path)  # 62 MB
    save_model(tiny(dtype=torch.float32, n_head=4), tmp_path / "small")

    def action():
        with TensorParallelGroup(parallel_mode) as tp_group:
            load_shard(tmp_path / "small", tp_group=tp_group)  # code takes memory, too
            return peak(lambda: load_shard(tmp_path, tp_group=tp_group))

    whole = (tmp_path / "model.safetensors").stat().st_size
    assert all(grown < whole // 2 for grown in results(4, action))  # a quarter, and 4 MB blocks


def test_random_weights_are_those_of_one_process(monkeypatch):
    shape = GPTConfig(**SHAPE | {"vocab_size": 61, "eos_token_ids": (60,)})
    monkeypatch.setitem(load.PRESETS, "small", shape)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert compared(3, "random:small", tokens, "reduce", **IN_TORCH)[0] < 1e-12


# Scripts and servers


def test_torchrun_writes_one_text(engine_cli):
    arguments = ["--model", DRAFT, "--prompt", "Lily", "--max-new-tokens", 8]
    code, out, _ = engine_cli(*arguments)
    command = [*TORCHRUN, "2", SCRIPT, "--device", "cpu", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, **options, env=threads) as process:
        try:
            found, notes = process.communicate(timeout=200)
        finally:
            process.terminate()  # then torchrun ends its own processes; a kill would leave them
    assert (process.returncode, found) == (code, out) == (0, out)
    assert notes.count("tokens/s") == 1


def test_reduce_on_the_command_line(engine_cli, tmp_path):
    out = engine_cli(*SAMPLES)[1]
    found, err = run_engine_script(2, tmp_path, *SAMPLES, "--join", "reduce")
    assert found == out and "2 ranks: 18 collectives a step, " in err


def test_drafts_are_rank_0_s(engine_cli, tmp_path):
    # Without --gamma: whether they are asked for is decided by a clock.
    arguments = ["--prompt", "Tom had a red ball and", "--prompt", "Tom had a red ball"]
    arguments += ["--seed", 1, "--temperature", 0.8, "--max-new-tokens", 12]
    arguments += ["--model", DRAFT, "--draft", DRAFT]
    found, notes = run_engine_script(2, tmp_path, *arguments)
    assert found == engine_cli(*arguments)[1] and "drafts accepted" in notes


def test_all_that_an_engine_does_on_ranks(engine_cli, tmp_path):
    prompts = "A big ball, a red ball, a", "A big ball, a red ball and"
    arguments = ["--model", LLAMA, "--prompt", prompts[0], "--prompt", prompts[1]]
    arguments += ["--max-new-tokens", 14, "--dtype", "int8", "--draft", "lookup", "--gamma", 3]
    arguments += ["--num-pages", 14, "--page-size", 2, "--max-num-seqs", 2]
    arguments += ["--max-num-batched-tokens", 6]
    _, out, err = engine_cli(*arguments, "--backend", "torch")
    work = err.splitlines()[-1]
    assert " 0 shared" not in work and " 0 preempt" not in work and " of 0 drafts" not in work
    found, err = run_engine_script(3, tmp_path, *arguments)
    # 8 layers of four, the embedding and the head.
    assert found == out and work in err and "3 ranks: 34 collectives a step, " in err


def test_rank_0_reads_and_draws_a_seed(tmp_path, engine_cli):
    arguments = ["--model", DRAFT, "--temperature", 1, "--max-new-tokens", 9]
    pipe, end = os.pipe()  # what is in it can be read once
    os.write(end, b"A")
    os.close(end)
    out, err = run_engine_script(2, tmp_path, *arguments, "--prompt-file", f"/dev/fd/{pipe}")
    os.close(pipe)
    seed = err.splitlines()[0].rsplit(" ", 1)[1]
    assert engine_cli(*arguments, "--prompt", "A", "--seed", seed)[1] == out


@pytest.mark.parametrize(
    "size, device, model, words",
    [
        (2, "cpu", "nowhere", "unknown model 'nowhere'"),
        (2, "cuda", DRAFT, "error: several processes require --device cpu, not cuda\n"),
        (3, "cpu", DRAFT, "3 processes: this model has 2 heads, and each process needs one\n"),
    ],
)
def test_bad_input_is_told_once(tmp_path, monkeypatch, size, device, model, words):
    monkeypatch.setattr(options, "pick_device", lambda name: device)
    processes = start(
        size, script, tmp_path, infer_engine.main, ["--model", model, "--prompt", "A"]
    )
    assert wait(processes)[0] == 2
    outputs, errors = zip(*written(tmp_path, size))
    (told,) = filter(None, errors)
    assert not any(outputs) and told.count("error") == 1 and words in told


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

"""Several processes, measured and predicted: the arithmetic, its rows, and real ones."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benches import Bench, near
from conftest import CHECKPOINTS
from ranks import logits_of, results, save_uneven

from benchmarks import client
from benchmarks import scaling as script
from benchmarks.predict import Step, collectives, largest_shares, replica_rate, sent, step_seconds
from benchmarks.ranks import SIZES, decode
from errors import UserError
from loading.load import load_config
from parallel.ranks import TensorParallelGroup

LAYERS = 8  # of stories-llama
# The first of 3 ranks has 2 of 6 query heads and the key that they share, 192 of 512 inner numbers
# and 1,376 of 4,096 tokens. A whole layer has 393,216 numbers, the head 786,432.
THIRD = (LAYERS * (3 * 64 * 192 + 3 * 192 * 192) + 1376 * 192) / (LAYERS * 393216 + 786432)
COLLECTIVES = ("sum", "all_gather", "gather", "broadcast")
COLLECTIVE_TIMES = {kind: [1e-3, 1e-3, 1e-3, 3e-3] for kind in COLLECTIVES}


def config_of(name):
    return load_config(CHECKPOINTS / name)


def test_shares_are_those_of_the_rank_with_most():
    # Of the second rank's two heads each has another key, and there are no more.
    llama, gpt = config_of("stories-llama"), config_of("stories")
    assert largest_shares(llama, 3, "reduce") == pytest.approx((THIRD, 1))
    for parallel_mode in ("gather", "reduce"):
        for count in (2, 4):
            assert largest_shares(gpt, count, parallel_mode) == (1 / count, 1 / count)
    # Two of four heads, 352 of 1,024 inner numbers, 96 of 256 outputs, 1,376 of 4,096 tokens.
    layer = 256 * (3 * 128 + 352) + 96 * (256 + 1024)
    products = (16 * layer + 1376 * 256) / (16 * 12 * 256**2 + 4096 * 256)
    assert largest_shares(gpt, 3, "gather") == pytest.approx((products, 0.5))


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
@pytest.mark.parametrize("kind", ["tiny", "tiny_llama"])
def test_collectives_are_those_of_real_ranks(request, tmp_path, kind, parallel_mode):
    model = save_uneven(request.getfixturevalue(kind), tmp_path / "model", kind)
    found = results(3, logits_of, model, torch.arange(5)[None], parallel_mode)
    expected = collectives(load_config(model), 3, parallel_mode, 5)
    assert found[0][1] == (len(expected), sum(sent(collective, 3) for collective in expected))


def test_a_step_has_a_driver_turns_and_collectives():
    step = Step(driver=1, each=2, products=8, attention=4)
    assert step_seconds(step, (1, 1), 1, 0) == 15
    assert step_seconds(step, (0.5, 0.25), 1, 10) == 1 + 2 + 4 + 1 + 10
    assert step_seconds(step, (0.5, 0.25), 2, 10) == 1 + 2 * 7 + 10
    assert replica_rate(100, 0.005, 0.001, 3, 2) == 300
    assert replica_rate(100, 0.01, 0.001, 3, 2) == 200  # no more time of two cores
    assert replica_rate(100, 0.01, 0.004, 30, 20) == 250  # nor where clients come in
    times = [{"sum": [1.0, 2.0, 3.0]}, {"sum": [3.0, 4.0, 5.0, 7.0]}]  # and between sizes
    sizes = {1: 2, 2**15: 3, (2**12 + 2**15) // 2: 2.5, 2**22: 7, 2**23: 14}
    assert {size: script.cost(times, "sum", size) for size in sizes} == sizes


@pytest.fixture
def bench(request, monkeypatch):
    def run_group(directory, job, size, times=1):
        bench.asked.append((job["join"], size, times, job["threads"], job["parts"]))
        few = {kind: seconds[:3] for kind, seconds in COLLECTIVE_TIMES.items()}
        found = {"product 0": 0.003, "product 1": 0.005, "hidden": 0.02, "head": 0.002}
        found |= {"attention": 0.004, "step": 0.03 * size, "communication": 0.001}
        found |= {"broadcast": 0.003, "outputs": [[bench.token(job["join"], size)]]}
        found |= {"memory": [5e7], "collective_times": [few, COLLECTIVE_TIMES], "collectives": 3}
        return [found | {"sent": 7.0}] * times

    bench = Bench(request, script, "--model", CHECKPOINTS / "stories-llama")
    bench.asked = []
    bench.token = lambda join, size: 1
    monkeypatch.setattr(script, "run_group", run_group)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return bench


def values(rows, mode, processes):
    found = rows[(rows["mode"] == mode) & (rows["processes"] == processes)]
    return dict(zip(found["measure"], found["value"]))


def test_ranks_have_rows_of_what_is_measured_and_predicted(bench):
    rows = bench.rows("--ranks", 2, 3, "--join", "reduce", "--replicas", "--max-num-seqs", 3)
    assert list(rows) == list(script.COLUMNS)
    one, *others = bench.asked
    assert one == (None, 1, 1, 2, False)
    # A rank has a thread; the parts of its step are those of two that compute beside each other.
    ranks = [("reduce", size, 1, 1, False) for size in (1, 2, 3)]
    assert others == [ranks[0], ("reduce", 1, 2, 1, True), *ranks[1:]]
    threads = rows.groupby("mode", sort=False)["threads"].unique().map(list).to_dict()
    assert threads == {"one process": [2], "reduce": [1], "busy reduce": [1]}
    assert set(rows["max_num_seqs"]) == {3} and set(rows["cores"]) == {2}
    assert values(rows, "one process", 1) == {"tokens/s": 100, "memory, MB": 50}
    busy = {"driver, ms": 5, "each, ms": 9, "products, ms": 8, "attention, ms": 4}
    assert values(rows, "busy reduce", 2) == near(busy)
    two = values(rows, "reduce", 2)
    assert two["tokens/s"] == 50
    # A ms each: the embedding, two sums a layer, the logits; and what rank 0 tells.
    communication = 1 + 2 * LAYERS + 1
    assert two["collectives, ms per step, predicted"] == communication
    step = 5 + 9 + 8 / 2 + 4 / 2 + communication + 1
    assert two["tokens/s, predicted"] == near(3000 / step)
    assert two["tokens/s, predicted / measured"] == near(3000 / step / 50)
    assert (two["collectives, ms per step"], two["collectives per step"]) == (1, 3)
    assert two["bytes sent per step"] == 7
    # Of a sum a rank sends half, twice; rank 0 sends no logits.
    assert two["bytes sent per step, predicted"] == near((1 + 2 * LAYERS) * 3 * 192 * 4)
    assert (two["sum of 4 KiB, ms"], two["gather of 4096 KiB, ms"]) == (1, 3)
    three = values(rows, "reduce", 3)
    turns = 3000 / three["tokens/s, predicted"] - 5 - communication - 1
    assert turns == near(2 * (9 + 8 * THIRD + 4))  # three ranks on two cores
    assert three["share of outputs equal to one process"] == 1


def test_memory_is_less_by_weights_and_keys_that_others_have(bench):
    # 33 positions, so three pages.
    options = "--ranks 2 --join gather --replicas --max-num-seqs 3 --new-tokens 26"
    rows = bench.rows(*options.split())
    found = values(rows, "gather", 2)
    assert found["memory of rank 0, MB"] == 50
    # Half of all matrices, with those of the vocabulary, and one of two keys of 3 * 48 positions.
    weights = 4 * (LAYERS * 393216 + 786432) / 2
    keys = 4 * 2 * LAYERS * 32 * 3 * 48
    assert found["memory of rank 0, MB, predicted"] == near(50 - (weights + keys) / 1e6)


def test_other_texts_are_not_timed(bench):
    bench.token = lambda join, size: size
    code, rows, _ = bench("--replicas")
    assert code == "gather, 2 ranks: 1 of 1 sequences differ; wrong results are not timed"
    assert values(rows, "gather", 2) == {}
    bench.token = lambda join, size: size if join == "reduce" else 1  # it adds up in another order
    rows = bench.rows("--replicas")
    assert values(rows, "reduce", 4)["share of outputs equal to one process"] == 0


@pytest.fixture
def served(bench, monkeypatch):
    """Replicas that are not there: N make 50 + 50 N tokens/s, each token in 8 core ms."""

    @contextlib.contextmanager
    def server(line, threads):
        assert threads == 1
        served.lines.append([str(part) for part in line])
        yield "http://127.0.0.1:1"

    async def load(exchanges, clients, seconds):
        sent = list(itertools.islice(exchanges, clients))
        for exchange in sent:
            exchange.text = served.text(len(served.lines), exchange.max_tokens)
        served.asked.append((clients, seconds))
        served.clock += 0.08 * clients
        return sent, 0.0, 1.0

    def read(exchange):
        return client.RequestOutput(0, 0, [1.0], 10, exchange.text, served.failure)

    def rate(load, *_):
        return {"tokens/s": 50 + 50 * len(load.outputs) / 4}

    def clock(name=""):
        return served.clock * {"": 1, "Ingress": 0.25, "ProxyActor": 0.125}[name.rpartition(":")[2]]

    served = SimpleNamespace(lines=[], asked=[], clock=0.0, failure="")
    served.text = lambda servers, wanted: str(wanted)
    bench.installed(ray=True)
    monkeypatch.setattr(script, "server", server)
    monkeypatch.setattr(client, "closed_loop", load)
    monkeypatch.setattr(client, "read", read)
    monkeypatch.setattr(client, "calculate_metrics", rate)
    monkeypatch.setattr(script, "processor_seconds", clock)
    monkeypatch.setattr(script, "memory_of", lambda name: 3e8 * served.asked[-1][0] / 4)
    bench.default_args += ("--ranks", 2, "--join", "gather", "--max-num-seqs", 4)
    return served


def test_replicas_have_rows_of_what_is_measured_and_predicted(bench, served):
    rows = bench.rows("--replicas", 2, 3, "--seconds", 7)
    assert [line[line.index("--replicas") + 1] for line in served.lines] == ["1", "2", "3"]
    assert [line[line.index("--cpus") + 1] for line in served.lines] == ["1.0", "1.0", "0.6666"]
    # The same short requests for all, as many as the most replicas have rows.
    assert served.asked == [(12, math.inf), (4, 7), (12, math.inf), (8, 7), (12, math.inf), (12, 7)]
    one = {"tokens/s": 100, "core ms per token": 8, "of them in the ingress": 3}
    one |= {"of them in its busiest process": 2, "memory of replicas, MB": 300}
    assert values(rows, "replicas", 1) == near(one)
    predicted = [values(rows, "replicas", count)["tokens/s, predicted"] for count in (2, 3)]
    assert predicted == [near(200), near(250)]  # two cores have time for 250
    three = values(rows, "replicas", 3)
    assert three["tokens/s, predicted / measured"] == near(250 / 200)
    assert three["memory of replicas, MB, predicted"] == 900


def test_replicas_that_fail_or_write_other_texts_are_not_timed(bench, served):
    served.text = lambda servers, wanted: str(wanted + servers // 2)
    code, rows, _ = bench("--replicas", 2)
    assert code == "2 replicas: outputs differ; wrong results are not timed"
    assert values(rows, "replicas", 2) == {}
    served.failure = "cut off"
    code, rows, err = bench("--replicas", 2)
    assert code == 2 and err.endswith("error: requests to http://127.0.0.1:1 failed: cut off\n")
    assert "replicas" not in set(rows["mode"])


def test_without_ray_there_are_ranks_alone(bench):
    bench.draws = True
    bench.installed(ray=False)
    rows = bench.rows("--ranks", 2, 3, says="without replicas: pip install '.[ray]'\n")
    assert "replicas" not in set(rows["mode"]) and len(bench.figures[0].axes) == 1


def measured(model, max_num_seqs):
    with TensorParallelGroup("gather") as tp_group:
        return decode(job_of(model, max_num_seqs) | {"parts": True}, tp_group)


def job_of(model, max_num_seqs):
    job = {"model": model, "max_num_seqs": max_num_seqs, "prompt": 9, "tokens": 6, "native": True}
    return job | {"join": None, "threads": 1, "parts": False}


def test_two_real_ranks_find_what_they_took(monkeypatch):
    monkeypatch.setattr("benchmarks.ranks.TIMES", 2)
    model = str(CHECKPOINTS / "stories-draft")
    first, second = results(2, measured, model, 60)  # more than a step of 512 tokens takes
    assert second is None
    expected = collectives(config_of("stories-draft"), 2, "gather", 60)
    assert first["collectives"] == len(expected)
    assert first["sent"] == sum(sent(collective, 2) for collective in expected)
    passes = first["hidden"] + first["head"]
    products = sum(first[name] for name in first if name.startswith("product "))
    assert 0 < first["communication"] + products + first["attention"] < passes < first["step"]
    counts = [[len(times) for times in each.values()] for each in first["collective_times"]]
    assert counts == [[len(SIZES) - 1] * 4, [len(SIZES)] * 4]
    assert decode(job_of(model, 60), None)["outputs"] == first["outputs"]
    assert [len(tokens) for tokens in first["outputs"]] == [6] * 60


def test_torchrun_starts_so_many_ranks_and_says_what_is_wrong(tmp_path, monkeypatch):
    (found,) = script.run_group(tmp_path, job_of(str(CHECKPOINTS / "stories-draft"), 2), 1)
    assert len(found["outputs"]) == 2  # a real group answers
    started = []

    def start(line, env, stdout, **_):
        *line, job = map(str, line)
        started.append((line, env["OMP_NUM_THREADS"]))
        if json.loads(job)["threads"] == 3:
            stdout.write("Traceback\nerrors.UserError: no\n")
        else:
            Path(json.loads(job)["output"]).write_text(str(len(started)))
        return SimpleNamespace(wait=lambda seconds: 0, terminate=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert script.run_group(tmp_path, {"join": "reduce", "threads": 1}, 3, times=2) == [1, 2]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", "3", "--log-dir", str(tmp_path), "-m", "benchmarks.ranks"]
    assert script.run_group(tmp_path, {"join": None, "threads": 2}, 1) == [3]
    assert started == [(line, "1")] * 2 + [([line[0], *line[-2:]], "2")]
    with pytest.raises(UserError, match="^a group of 1 failed: no$"):
        script.run_group(tmp_path, {"join": None, "threads": 3}, 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what Linux tells of processes")
def test_the_time_and_memory_of_all_processes():
    code = "import sys, time\nbig = b'x' * 50_000_000\nwhile time.process_time() < 0.1: pass\n"
    code += "print()\nsys.stdin.read()"
    before = script.processor_seconds()
    command = [sys.executable, "-c", code, "by-this-name"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert script.processor_seconds() - before > 0.05
        assert script.processor_seconds("by-(this|that)-name") > 0.05
        assert script.processor_seconds("by-no-name") == 0
        assert 50e6 < script.memory_of("by-this-name") < 90e6
        process.communicate()
    assert script.memory_of("by-this-name") == 0

"""Machines that are not here: the prediction by hand, and what is printed of it."""

import dataclasses

import pytest
import torch

from benchmarks import larger_machines

# Of Llama 3's 70 billion: a layer's products, and the head's.
LAYER = 8192 * (64 * 128) * 2 + 2 * 8192 * (8 * 128) + 3 * 8192 * 28672
EMBEDDING = 8192 * 128256
LAYERS = 5  # of a model that is made faster than its 80
NUMBERS = LAYERS * LAYER + EMBEDDING


@pytest.fixture
def run(capsys, monkeypatch):
    # Its models have shapes only, and to draw no numbers for them takes half of the time.
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)
    whole = larger_machines.LLAMA

    def run(*args, layers=LAYERS):
        model = dataclasses.replace(whole, n_layer=layers) if layers else whole
        monkeypatch.setattr(larger_machines, "LLAMA", model)
        try:
            code = larger_machines.main([str(arg) for arg in args]) or 0
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_four_ranks_by_hand(run):
    fast = ["--kernel", 1e-12, "--driver", 1e-12, "--efficiency", 1, "--memory", 1.2e10]
    code, lines, _ = run("--gpus", 4, "--num-seqs", 64, "--positions", 1000, *fast, "--machines", 1)
    assert code == 0
    assert lines[1].endswith("does not fit")  # whole
    gather, reduce = (lines[at].split() for at in (4, 5))
    assert gather[:3] == ["4", "gather", "64"] and reduce[:3] == ["4", "reduce", "64"]
    cache = 64 * 1000 * 2 * LAYERS * 8 * 128 * 2
    memory = (2 * (NUMBERS + EMBEDDING) + cache) / 4 / 1e9
    assert float(reduce[3]) == pytest.approx(memory, abs=0.06)
    # The embedding and two sums a layer, of 64 * 8192 bfloat16s: a rank sends 3 / 2 of them. To
    # rank 0 come the logits that three others have.
    one = 64 * 8192 * 2
    logits = 1.5e-5 + 3 * 64 * 128256 * 2 / 4 / 4.5e11
    communication = (1 + 2 * LAYERS) * (1.5e-5 + 1.5 * one / 4.5e11) + logits
    assert float(reduce[5]) == pytest.approx(1000 * communication, abs=0.006)
    step = (2 * NUMBERS + cache) / 4 / 4.8e12 + communication
    assert float(reduce[4]) == pytest.approx(1000 * step, abs=0.006)
    assert float(reduce[6]) == pytest.approx(1 / step, abs=0.06)
    assert int(reduce[7].replace(",", "")) == pytest.approx(64 / step, abs=1)
    assert lines[6] == f"1 machines: {reduce[7]} tokens/s"
    # Of heads, outputs, inner numbers and outputs a rank sends its quarter to three others.
    quarter = 64 * 2 * (8192 + 8192 + 28672 + 8192) / 4
    communication = 1.5e-5 + 1.5 * one / 4.5e11 + logits
    communication += LAYERS * (4 * 1.5e-5 + 3 * quarter / 4.5e11)
    assert float(gather[5]) == pytest.approx(1000 * communication, abs=0.006)


def test_many_machines_make_as_often_as_much_and_what_does_not_fit_is_said(run):
    code, lines, _ = run("--machines", 500, "--ingress", 0.001, "--failures", 0.1)
    best = max(int(line.split()[-1].replace(",", "")) for line in lines[2:8])
    total = int(lines[8].removeprefix("500 machines: ").removesuffix(" tokens/s").replace(",", ""))
    assert code == 0 and total == pytest.approx(500 * best, rel=1e-3)
    cores = int(lines[9].rpartition(" ")[2].replace(",", ""))
    assert cores == pytest.approx(total * 0.001, abs=1)
    assert lines[10] == "sequences lost to failures: 25,600 per day"
    code, lines, err = run("--gpus", 1, "--num-seqs", 64, layers=None)
    assert (code, lines[1].split()) == (2, ["1", "-", "64", "183.1", "does", "not", "fit"])
    assert err.endswith("error: --memory 1.41e+11: no division of the model fits into these GPUs\n")

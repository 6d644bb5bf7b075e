"""Decode steps as they come and of fixed shapes: their rows, time and texts."""

import pytest
import torch
from benches import Bench
from count_steps import RUNNERS, count_step
from pretend_gpu import gpu

from benchmarks import graphs as script
from engine.static import StaticRunner
from errors import UserError
from graphs import eager_step
from model import TorchRunner
from native import NativeRunner

pytestmark = pytest.mark.usefixtures("compiled")
MODES = ["dynamic", "static", "compiled", "native"]


@pytest.fixture
def bench(request, checkpoint, monkeypatch):
    """Compiling takes a minute, so its steps are eager here."""
    monkeypatch.setitem(script.STEPS, "compiled", eager_step)
    monkeypatch.setattr(script, "check_compiler", lambda device: None)
    small = "--repeats 2 --max-new-tokens 6 --prompt-tokens 5 --batch-size 1 3".split()
    return Bench(request, script, "--model", checkpoint, *small)


def test_a_row_for_each_run_of_each_mode(bench):
    bench.draws = True
    rows = bench.rows("--dtype", "float32", "bfloat16", says="without captured: CUDA graphs need")
    assert list(rows) == list(script.COLUMNS)
    assert list(rows["mode"]) == MODES * 16  # in turns
    assert list(rows["repeat"][:8]) == 4 * [0] + 4 * [1]
    assert list(rows["temperature"][:16]) == 8 * [0] + 8 * [0.8]
    assert list(rows["batch_size"][:32]) == 16 * [1] + 16 * [3]
    assert list(rows["dtype"]) == 32 * ["float32"] + 32 * ["bfloat16"]
    exact = rows[rows["dtype"] == "float32"]
    assert exact["equal_sequences"].equals(exact["batch_size"])
    shapes = dict(zip(MODES, (0, 1, 1, 0)))
    assert list(rows["shapes"]) == [shapes[mode] for mode in rows["mode"]]
    assert (rows["make_s"] > 0).equals(rows["shapes"] > 0)
    assert list(exact["peak_memory_mb"].dropna()[:4]) == [1, 2, 3, 4]
    assert exact["peak_memory_mb"].notna().equals(exact["batch_size"] == 3)
    summary = bench.summary
    assert len(summary) == 2 * 2 * 2 * 4 and set(summary["runs"]) == {2}
    assert list(summary["make_s"] > 0) == [mode in script.STEPS for mode in summary["mode"]]
    assert set(summary[summary["mode"] == "dynamic"]["speedup_median"]) == {1}
    figure = bench.figures[0]
    assert len(figure.axes) == 2 * 2
    assert figure.axes[0].get_legend_handles_labels()[1] == MODES
    assert figure.axes[1].get_legend_handles_labels()[1] == ["static", "compiled"]


def test_time_is_that_of_the_padded_steps(bench, clock):
    """Three sequences are padded to four. Positions 15 and 16 have different shapes."""
    asked = ("--modes", "static", "--batch-size", 3, "--max-new-tokens", 20)
    by_mode = bench.rows(*asked, "--repeats", 1).groupby("mode")
    for mode, width, shapes in (("dynamic", 3, 0), ("static", 4, 2)):
        rows = by_mode.get_group(mode)
        assert set(rows["first_token_s"]) == {3 * 5}
        assert set(rows["inter_token_s"]) == {width}
        assert set(rows["decode_tokens_per_s"]) == {3 / width}
        assert set(rows["shapes"]) == {shapes}
        # Each is run once more when it is made.
        assert set(rows["make_s"]) == {shapes * width}
    summary = bench.summary
    assert set(summary[summary["mode"] == "static"]["speedup_median"]) == {3 / 4}


def test_all_prompts_fit_into_the_first_step(bench, clock):
    """An engine's default step would take 512 of these 660 tokens, or find them in its cache."""
    rows = bench.rows("--modes", "dynamic", "--batch-size", 12, "--prompt-tokens", 55)
    assert set(rows["first_token_s"]) == {12 * 55} and set(rows["inter_token_s"]) == {12}


@pytest.mark.parametrize("dtype, wrong", [("float32", 1), ("float32", 3), ("bfloat16", 3)])
def test_different_tokens_in_float32_are_not_timed(bench, dtype, wrong):
    def spoil(right, engine, *args):
        outputs, *times = right(engine, *args)
        if isinstance(engine.model.runner, StaticRunner):
            outputs[:wrong] = [[*output[:-1], -1] for output in outputs[:wrong]]
        return outputs, *times

    bench.change("run", spoil)
    asked = ("--modes", "compiled", "--batch-size", 3, "--dtype", dtype)
    code, rows, err = bench(*asked)
    found = f"compiled: {3 - wrong} of 3 sequences equal those of dynamic"
    if dtype == "float32":
        assert code == f"{found}; wrong results are not timed"
        assert list(rows["mode"]) == ["dynamic"]
    else:
        assert code == 0 and found in err
        assert set(rows[rows["mode"] == "compiled"]["equal_sequences"]) == {0}


def test_one_text_of_many_may_differ_by_rounding(capsys):
    outputs = [[1], [2], [3], [4], [5], [6], [7], [8], [9], [0]]
    assert script.count_equal("static", torch.float32, outputs, outputs) == 10
    assert capsys.readouterr().err == ""
    assert script.count_equal("static", torch.float32, outputs, [[7], *outputs[1:]]) == 9
    assert capsys.readouterr().err == "static: 9 of 10 sequences equal those of dynamic\n"


def test_memory_is_of_one_run_of_the_largest_batch(bench, monkeypatch):
    bench("--batch-size", 1, 3, 2, "--modes", "native", "compiled")
    jobs = bench.memory_jobs
    assert [job[6] for job in jobs] == ["dynamic", "compiled", "native"]
    assert [job[1] for job in jobs] == [[], ["torch._inductor.compile_fx"], []]
    loaded = bench.spy("load_model")
    ran = bench.spy("run")
    for _, _, function, *arguments in jobs:
        function(*arguments)
    assert len(loaded) == 3  # no second model resident
    assert [len(prompts) for _, prompts, *_ in ran] == [3, 3, 3]
    runners = [type(engine.model.runner) for engine, *_ in ran]
    assert runners == [TorchRunner, StaticRunner, NativeRunner]


def test_modes_that_cannot_run_are_named_and_left_out(bench, monkeypatch):
    def broken(device):
        raise UserError("--compile: torch.compile fails here: no compiler")

    monkeypatch.setattr(script, "check_compiler", broken)
    says = "without compiled: torch.compile fails here: no compiler\n"
    rows = bench.rows("--modes", "compiled", "native", "--batch-size", 1, says=says)
    assert set(rows["mode"]) == {"dynamic", "native"}
    assert script.available(list(script.MODES), "cuda") == ["dynamic", "static", "captured"]
    assert script.available(list(script.MODES), "mps") == ["dynamic"]


def test_a_profile_is_of_the_last_mode(bench, tmp_path):
    profiled = bench.spy("profile", of=script.common)
    file = tmp_path / "trace.json"
    asked = ("--modes", "static", "--profile", file, "--max-new-tokens", 9)
    bench.rows(*asked, says=f"profile: {file}")
    ((_, _, _, engine, prompts, params, _),) = profiled
    assert len(prompts) == 1
    assert isinstance(engine.model.runner, StaticRunner)
    assert [each.max_new_tokens for each in params] == [8]


def test_counts_on_the_pretend_gpu(tiny_llama):
    """A replay is one launch, with one upload before it and one sync after it."""
    model = gpu().move(tiny_llama())
    counts = {}
    outputs = []
    for name, make in RUNNERS.items():
        counts[name], output = count_step(model, make(), 3, temperature=0.8, top_p=0.9)
        outputs.append(output)
    assert all(output == outputs[0] for output in outputs)
    launches, uploads, syncs = (
        [each[name] for each in counts.values()] for name in ("launches", "uploads", "syncs")
    )
    assert launches[3] == 1 and min(launches[:3]) > 50
    assert uploads[1:] == syncs[1:] == [1, 1, 1] and syncs[0] > 1

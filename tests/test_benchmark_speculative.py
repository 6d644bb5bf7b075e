"""Lesson 18: rows that are written as they happen, ratios of neighbours, and no timing of wrong results."""

import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(tiny_checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on a tiny pair: exit code, the rows, stderr."""
    import benchmark_speculative

    monkeypatch.setattr(benchmark_speculative, "in_own_process", lambda *args: 1e6)  # a second each; tested below

    def run(*args):
        output = tmp_path / "results" / "run.csv"
        pair = ("--target", tiny_checkpoint, "--draft", tiny_checkpoint, "--output", output)
        small = ("--prompts", 2, "--repeats", 2, "--max-new-tokens", 12)
        code, _, err = run_main(benchmark_speculative.main, *pair, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    return run


def test_help_explains_each_column():
    from_root = {"cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "benchmark_speculative.py", "--help"], **from_root)
    assert result.returncode == 0
    for column in ("acceptance", "decode_tokens_per_s", "roofline_share", "peak_memory_mb", "commit", "threads"):
        assert f"\n  {column} " in result.stdout


def test_a_row_for_each_run_and_a_summary_of_paired_ratios(bench, tmp_path):
    code, rows, _ = bench("--gamma", 2, 4)
    assert code == 0
    assert len(rows) == 2 * 2 * 2 * 3  # temperatures, prompts, repeats, modes
    assert list(rows["mode"][:3]) == ["target", "gamma 2", "gamma 4"]  # interleaved
    assert set(rows["new_tokens"]) == {12} and rows["commit"].notna().all() and rows["device"].notna().all()
    drafted = rows[rows["mode"] == "gamma 4"]
    assert (drafted[drafted["temperature"] == 0]["acceptance"] == 1).all()  # the draft model is the target
    summary = pandas.read_csv(tmp_path / "results" / "run_summary.csv")
    ours = rows[(rows["mode"] == "gamma 2") & (rows["temperature"] == 0)]["decode_tokens_per_s"].to_numpy()
    base = rows[(rows["mode"] == "target") & (rows["temperature"] == 0)]["decode_tokens_per_s"].to_numpy()
    line = summary[(summary["mode"] == "gamma 2") & (summary["temperature"] == 0)].iloc[0]
    assert line["speedup_median"] == pytest.approx(float(pandas.Series(ours / base).median()), rel=1e-2)
    assert line["speedup_min"] == pytest.approx(min(ours / base), rel=1e-2) and line["runs"] == 4
    assert (tmp_path / "results" / "run.png").stat().st_size > 5000


def test_speedup_is_the_median_of_paired_ratios(tmp_path):
    from benchmark_common import COLUMNS, summarise

    rows = pandas.DataFrame(columns=list(COLUMNS))
    runs = [("b", 1, 40), ("a", 2, 10), ("b", 0, 20), ("a", 0, 10), ("a", 1, 80), ("b", 2, 90)]
    for index, (mode, repeat, rate) in enumerate(runs):
        setting = {"model": "m", "dtype": "float32", "batch_size": 1, "new_tokens": 9, "temperature": 0, "prompt": 0}
        rows.loc[index] = setting | {"mode": mode, "repeat": repeat, "decode_tokens_per_s": rate}
    rows.to_csv(tmp_path / "x.csv", index=False)
    summary = summarise(tmp_path / "x.csv", "a").set_index("mode")
    assert list(summary.loc["b", ["speedup_median", "speedup_min", "speedup_max"]]) == [2.0, 0.5, 9.0]


@pytest.mark.parametrize("finished", [1, 5])
def test_ctrl_c_leaves_the_finished_rows(bench, monkeypatch, finished):
    import benchmark_speculative

    timed, count = benchmark_speculative.timed, []

    def interrupted(*args):
        count.append(1)
        if len(count) > finished:
            raise KeyboardInterrupt
        return timed(*args)

    monkeypatch.setattr(benchmark_speculative, "timed", interrupted)
    code, rows, _ = bench("--gamma", 2)
    assert code == 130 and len(rows) == finished


def test_wrong_text_is_not_timed(bench, monkeypatch):
    import benchmark_speculative
    from infer_speculative import Pass

    def wrong(target, draft, prompt, params, *args):
        return (Pass([7], [], 0) for _ in range(params.max_new_tokens))

    monkeypatch.setattr(benchmark_speculative, "generate_speculative", wrong)
    code, rows, _ = bench("--gamma", 2)
    assert "not the target's text" in code and rows is None


@pytest.mark.parametrize(
    "args, complaint",
    [
        (("--gamma", 17), "--gamma 17"),
        (("--target", "random:gpt2"), "random"),
        (("--repeats", 0), "--repeats 0"),
        (("--max-new-tokens", 1), "--max-new-tokens 1"),
        (("--temperature", 0, -1), "temperature is -1"),
        (("--max-new-tokens", 12, 60), "do not fit"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(bench, args, complaint):
    code, rows, err = bench(*args)
    assert code == 2 and rows is None and complaint in err and err.count("\n") == 1


def test_the_roofline_counts_weights_and_cache(tiny):
    from benchmark_common import roofline_share

    model = tiny(dtype=torch.float32)
    weights = 4 * (sum(weight.numel() for weight in model.parameters()) - 16 * 16)
    cache = 4 * 2 * 2 * 16 * (4 + 10 / 2) * 3  # bytes x keys and values x layers x width x positions x rows
    share = roofline_share(model, batch_size=3, prompt_tokens=4, new_tokens=10, seconds=2.0, peak=1000.0)
    assert share == pytest.approx(9 * (weights + cache) / 2.0 / 1000.0)


def test_half_precision_is_checked_by_its_logits(tiny, monkeypatch):
    import benchmark_common
    from model import KVCache

    model, tokens = tiny(dtype=torch.bfloat16), torch.arange(12)[None]
    benchmark_common.check_half_precision(model, tokens)
    monkeypatch.setattr(KVCache, "lengths", property(lambda self: [0]))  # each piece as if it came first
    with pytest.raises(SystemExit, match="off by"):
        benchmark_common.check_half_precision(model, tokens)


def test_memory_is_that_of_a_process_of_its_own():
    from benchmark_common import in_own_process

    assert 60e6 < in_own_process("cpu", [], bytearray, 64_000_000) < 90e6

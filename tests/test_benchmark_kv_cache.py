"""Lesson 19: three ways to the same tokens, timed apart; the peer may be missing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(tiny_checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on a tiny model: exit code, the rows, stderr."""
    import benchmark_kv_cache

    monkeypatch.setattr(benchmark_kv_cache, "in_own_process", lambda *args: 1e6)

    def run(*args):
        output = tmp_path / "results" / "run.csv"
        small = ("--model", tiny_checkpoint, "--repeats", 2, "--max-new-tokens", 6, 9)
        code, _, err = run_main(benchmark_kv_cache.main, "--output", output, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    return run


def test_help_names_the_modes():
    from_root = {"cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "benchmark_kv_cache.py", "--help"], **from_root)
    assert result.returncode == 0 and "transformers" in result.stdout and "\n  first_token_s " in result.stdout


def test_a_row_for_each_run_of_each_mode(bench, tmp_path):
    code, rows, _ = bench("--batch-size", 1, 3)
    assert code == 0 and len(rows) == 2 * 2 * 2 * 3  # batch sizes, lengths, repeats, modes
    assert list(rows["mode"][:3]) == ["cache", "no cache", "transformers"]
    assert (rows["decode_tokens_per_s"] > 0).all() and (rows["first_token_s"] > 0).all()
    summary = pandas.read_csv(tmp_path / "results" / "run_summary.csv")
    assert (summary[summary["mode"] == "no cache"]["speedup_median"] == 1).all() and len(summary) == 12
    assert (tmp_path / "results" / "run.png").stat().st_size > 5000


def test_half_precision_runs(bench):
    code, rows, _ = bench("--dtype", "bfloat16")
    assert code == 0 and set(rows["dtype"]) == {"bfloat16"} and len(rows) == 12


def test_without_the_peer_its_rows_are_missing_and_it_says_so(bench, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    code, rows, err = bench()
    assert code == 0 and set(rows["mode"]) == {"cache", "no cache"} and "transformers is not installed" in err


def test_different_tokens_are_not_timed(bench, monkeypatch):
    import benchmark_kv_cache

    run = benchmark_kv_cache.run

    def wrong(mode, *args):
        steps, first, rest = run(mode, *args)
        return steps[1:] if mode == "cache" else steps, first, rest

    monkeypatch.setattr(benchmark_kv_cache, "run", wrong)
    code, rows, _ = bench()
    assert "do not make the same tokens" in code and rows is None


@pytest.mark.parametrize(
    "args, complaint", [(("--max-new-tokens", 6, 60), "76 tokens"), (("--batch-size", 0), "--batch-size 0")]
)
def test_bad_input_is_one_line_and_writes_nothing(bench, args, complaint):
    code, rows, err = bench(*args)
    assert code == 2 and rows is None and complaint in err and err.count("\n") == 1

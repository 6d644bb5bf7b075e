"""What the benchmarks share: time, bytes, rows that are never lost or mixed, and the summary of paired ratios."""

import argparse
import os
import resource
import subprocess
import time

import pandas
import pytest
import torch

import benchmark_common as common
from cache import KVCache
from checkpoint import UserError
from infer import Parser

ROW = dict.fromkeys(common.COLUMNS, 1) | {"model": "m", "draft": "", "dtype": "float32", "mode": "a"}


@pytest.fixture
def script(tmp_path, run_main):
    """A function that runs a benchmark that does `measure(args, device, results)`: exit code, stdout, stderr."""
    from matplotlib.figure import Figure

    def run(measure, *args, output=tmp_path / "run.csv"):
        parser = Parser(prog="benchmark.py")
        common.add_options(parser, "x.csv", lengths=[60, 220], repeats=3)
        plot = lambda summary: Figure()  # noqa: E731
        main = lambda argv: common.run_benchmark(parser, measure, "a", plot, argv)  # noqa: E731
        return run_main(main, "--output", output, *args)

    return run


def one_row(args, device, results):
    results.write(**ROW)


def files(directory):
    return sorted(file.name for file in directory.iterdir())


def test_time_is_split_after_the_first_item(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def steps():
        for seconds in (5, 1, 2):
            clock[0] += seconds
            yield seconds
        clock[0] += 4

    assert common.timed(steps(), "cpu") == ([5, 1, 2], 5, 7)


def test_a_device_has_finished_before_the_clock_is_read(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronised"))
    monkeypatch.setattr(time, "perf_counter", lambda: order.append("read") or 0.0)
    common.timed(iter("abc"), "cuda")
    assert order == ["synchronised", "read"] * 3


def test_bandwidth_is_bytes_over_the_median_second(monkeypatch):
    seconds = iter([50.0, 90, 1, 8, 2, 7, 3, 6, 4, 5])  # the first is warm-up
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones(*(2 for _ in shape), **options))
    monkeypatch.setattr(common, "timed", lambda steps, device: (list(steps), next(seconds), 0.0))
    assert common.bandwidth("cpu", torch.float32) == 2 * 2 * 4 / 5


def test_the_roofline_counts_weights_once_and_the_cache(tiny):
    model = tiny(dtype=torch.bfloat16)
    shapes = {id(weight): weight.numel() for weight in model.parameters()}  # the head is the embedding
    weights = 2 * (sum(shapes.values()) - 16 * 16)  # without the position embedding: a step reads one row of it
    steps = [2 * 2 * 2 * 16 * (4 + step) * 3 for step in range(1, 10)]  # bytes x keys, values x layers x width x rows
    share = common.roofline_share(model, 3, prompt_tokens=4, new_tokens=10, seconds=2.0, bandwidth=1000.0)
    assert share == pytest.approx((9 * weights + sum(steps)) / 1000 / 2)


def test_speeds_leave_the_prefill_out_and_count_all_texts(tiny):
    model = tiny()
    row = common.speeds(model, [[1, 2]] * 3, 9, first=100.0, rest=4.0, bandwidth=50.0)
    assert row["decode_tokens_per_s"] == 3 * 8 / 4 and row["first_token_s"] == 100
    assert (row["batch_size"], row["prompt_tokens"], row["new_tokens"]) == (3, 2, 9)
    assert row["roofline_share"] == common.roofline_share(model, 3, 2, 9, 4.0, 50.0)
    assert common.speeds(model, [[1]], 9, 100.0, 4.0, 50.0, skip=3)["decode_tokens_per_s"] == 6 / 4
    assert common.speeds(None, [[1, 2]] * 3, 9, 100.0, 4.0, 50.0) == row | {"roofline_share": None}


@pytest.mark.parametrize("piece", [1, 3])
def test_half_precision_is_checked_in_each_row(tiny, monkeypatch, piece):
    model, tokens = tiny(dtype=torch.bfloat16), torch.arange(24).view(2, 12)
    sizes, extend = [], KVCache.extend
    monkeypatch.setattr(KVCache, "extend", lambda self, new, rows: sizes.append(len(new[0])) or extend(self, new, rows))
    common.check_half_precision(model, tokens, piece)
    assert sizes == 12 // piece * [piece]

    def wrong(self, new, rows):
        positions = extend(self, new, rows).expand(2, -1).clone()
        positions[1] = 0
        return positions

    monkeypatch.setattr(KVCache, "extend", wrong)
    with pytest.raises(SystemExit, match="off by"):
        common.check_half_precision(model, tokens, piece)


@pytest.mark.parametrize("wrong", [1.5, torch.nan])
def test_the_peer_is_checked_in_half_precision(tiny, wrong):
    model, tokens = tiny(dtype=torch.bfloat16), torch.arange(24).view(2, 12)
    common.check_half_precision(model, tokens, peer=model)
    scale = lambda text: model(text) * (wrong if text[0, 0] == 12 else 1)  # noqa: E731  (the second row only)
    with pytest.raises(SystemExit, match="off by"):
        common.check_half_precision(model, tokens, peer=scale)


def test_one_large_difference_is_too_much(tiny):
    model, tokens = tiny(dtype=torch.bfloat16), torch.arange(12)[None]
    spot = torch.zeros(1, 12, 61)
    spot[0, 5, 7] = 2
    with pytest.raises(SystemExit, match="off by up to [12]"):
        common.check_half_precision(model, tokens, peer=lambda text: model(text) + spot)


def test_small_differences_everywhere_are_too_much(tiny):
    model, tokens = tiny(dtype=torch.bfloat16), torch.arange(12)[None]
    noise = 0.3 * torch.randn(1, 12, 61, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    with pytest.raises(SystemExit, match="off by up to 0.[1-4]"):
        common.check_half_precision(model, tokens, peer=lambda text: model(text) + noise)


def test_memory_is_that_of_a_process_of_its_own():
    assert 60e6 < common.in_own_process("cpu", ["pandas"], bytearray, 64_000_000) < 75e6


@pytest.mark.parametrize(
    "code, error, said",
    [(1, b"Traceback\n  line\nUserError: too large\n", "UserError: too large"), (-9, b"", "killed")],
)
def test_a_child_that_fails_is_one_line(monkeypatch, code, error, said):
    options = {}
    child = subprocess.CompletedProcess([], code, b"", error)
    monkeypatch.setattr(subprocess, "run", lambda *_, **given: options.update(given) or child)
    with pytest.raises(UserError, match=said) as caught:
        common.in_own_process("cpu", [], bytearray, 1)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert options["start_new_session"] and options["capture_output"]  # Ctrl-C is for the parent; no words of its own


def test_rows_are_there_as_they_are_measured_and_measured_numbers_are_rounded(tmp_path, capsys):
    results = common.ResultsFile(tmp_path / "run.csv")
    row = ROW | {"temperature": 0.800001, "first_token_s": 1.23456, "acceptance": None, "parameters": 123456789}
    results.write(**row)
    found = pandas.read_csv(tmp_path / "run.csv.part").iloc[0]
    assert found["temperature"] == 0.800001 and found["first_token_s"] == 1.235 and found["parameters"] == 123456789
    assert pandas.isna(found["acceptance"]) and "a: 1.0/s" in capsys.readouterr().err
    with pytest.raises(ValueError):
        results.write(**ROW, nonsense=1)


def test_a_run_replaces_an_older_one_when_it_ends(script, tmp_path):
    def measure(args, device, results):
        assert (tmp_path / "run.csv").read_text() == (tmp_path / "run.png").read_text() == "older"
        results.write(**ROW)
        assert (tmp_path / "run.csv").read_text() == "older"

    for name in ("run.csv", "run.png", "run_summary.csv"):
        (tmp_path / name).write_text("older")
    code, out, _ = script(measure)
    assert code == 0 and "speedup_median" in out and files(tmp_path) == ["run.csv", "run.png", "run_summary.csv"]
    assert len(pandas.read_csv(tmp_path / "run.csv")) == 1 == len(pandas.read_csv(tmp_path / "run_summary.csv"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rows_leaves_an_older_one(script, tmp_path):
    (tmp_path / "run.csv").write_text("older")
    code, _, err = script(lambda *_: refuse())
    assert code == 2 and err == "benchmark.py: error: no\n"
    assert files(tmp_path) == ["run.csv"] and (tmp_path / "run.csv").read_text() == "older"


def refuse():
    raise UserError("no")


def test_a_second_run_on_the_same_file_is_refused(script, tmp_path):
    def measure(args, device, results):
        results.write(**ROW)
        code, _, err = script(one_row)
        assert code == 2 and "run.csv.part exists: another run" in err.splitlines()[1]  # the first shows a row
        results.write(**ROW)

    assert script(measure)[0] == 0 and len(pandas.read_csv(tmp_path / "run.csv")) == 2
    assert pandas.read_csv(tmp_path / "run_summary.csv")["runs"][0] == 2
    assert script(one_row)[0] == 0 and len(pandas.read_csv(tmp_path / "run.csv")) == 1


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt, 130), (UserError("memory"), 2), (SystemExit("x"), "x")])
def test_what_was_measured_before_an_end_is_kept(script, tmp_path, error, code):
    def measure(args, device, results):
        results.write(**ROW)
        raise error

    assert script(measure)[0] == code and files(tmp_path) == ["run.csv", "run.png", "run_summary.csv"]


def test_a_closed_pipe_is_left_to_run_script_and_rows_are_kept(script, tmp_path, monkeypatch):
    def measure(args, device, results):
        results.write(**ROW)
        raise BrokenPipeError

    monkeypatch.setattr(common, "run_script", lambda parser, run, argv: run(parser.parse_args(argv)))
    with pytest.raises(BrokenPipeError):
        script(measure)
    assert files(tmp_path) == ["run.csv", "run.png", "run_summary.csv"]


OLDER = ["run.png", "run_summary.csv"]


@pytest.mark.parametrize(
    "rows, left", [(2, ["run.csv", "run_summary.csv"]), (1, ["run.csv"]), (0, OLDER), (-1, OLDER)], ids=str
)
def test_a_full_disk_keeps_whole_rows_and_writes_nothing_by_halves(script, tmp_path, rows, left):
    for name in OLDER:  # they must not stay beside newer rows
        (tmp_path / name).write_text("older")
    row = ROW | {"model": 800 * "x"} | dict.fromkeys(common.MEASURED, 1.5)

    def measure(args, device, results):
        for _ in range(9):
            results.write(**row)

    header, line = (len(",".join(str(value) for value in values)) + 1 for values in (row, row.values()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (header + rows * line + 20, limits[1]))  # the next row fits in part
    try:
        code, _, err = script(measure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and "run" in err and err.endswith(": File too large\n") and err.count("\n") == max(rows, 0) + 1
    assert files(tmp_path) == left
    if rows > 0:
        lines = (tmp_path / "run.csv").read_text().splitlines()
        assert len(lines) == rows + 1 and all(found == lines[1] and len(found) == line - 1 for found in lines[1:])


@pytest.mark.parametrize(
    "name, said",
    [("x.png", "end in .csv"), ("x", "end in .csv"), ("no/x.csv", "No such file"), ("plotted.csv", "is a directory")],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(script, tmp_path, name, said):
    (tmp_path / "plotted.png").mkdir()
    code, _, err = script(lambda *_: pytest.fail("it works"), output=tmp_path / name)
    assert code == 2 and said in err and name in err and err.count("\n") == 1 and files(tmp_path) == ["plotted.png"]


@pytest.mark.parametrize(
    "args, said",
    [
        (("--repeats", 0), "--repeats: '0': it must be an integer >= 1"),
        (("--max-new-tokens", 9, 1), "'1': it must be an integer >= 2"),
        (("--max-new-tokens", "-5"), "--max-new-tokens"),
        (("--threads", 1_000_000), f"from 1 to {os.cpu_count()}"),
        (("--threads", 0), "from 1"),
        (("--repeats", "²"), "--repeats"),
        (("--dtype", "int8"), "--dtype"),
    ],
)
def test_bad_options_are_one_line(script, tmp_path, args, said):
    code, _, err = script(one_row, *args)
    assert code == 2 and said in err and err.count("\n") == 1 and files(tmp_path) == []


def test_options_are_used_and_a_value_given_twice_is_dropped(script, monkeypatch):
    given, threads = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    script(lambda args, device, _: given.append((args, device)), "--max-new-tokens", 9, 5, 9, "--threads", 1)
    (args, device), *_ = given
    assert args.max_new_tokens == [9, 5] and args.repeats == 3 and device == "cpu" and threads == [1]


def test_help_explains_each_column_and_what_happens_to_the_file():
    parser = argparse.ArgumentParser()
    common.add_options(parser, "x.csv", lengths=[60], repeats=3)
    text = parser.format_help()
    assert all(f"\n  {name} " in text for name in common.COLUMNS) and ".part" in text and "(default: 3)" in text


def test_speedup_is_the_median_of_paired_ratios():
    rates = [("b", 1, 40), ("a", 2, 10), ("b", 0, 20), ("a", 0, 10), ("a", 1, 80), ("b", 2, 90), ("b", 3, 70)]
    rows = [ROW | {"mode": mode, "repeat": repeat, "decode_tokens_per_s": rate} for mode, repeat, rate in rates]
    rows[0]["first_token_s"] = 9
    summary = common.summarise(rows, "a").set_index("mode")
    assert list(summary.loc["b", ["speedup_median", "speedup_min", "speedup_max"]]) == [2.0, 0.5, 9.0]
    names = [
        "runs",
        "decode_tokens_per_s_median",
        "decode_tokens_per_s_min",
        "decode_tokens_per_s_max",
        "first_token_s",
    ]
    assert list(summary.loc["b", names]) == [4, 55, 20, 90, 1]
    assert summary["runs"].dtype == int and list(summary.index) == ["b", "a"]


@pytest.mark.parametrize(
    "column, values",
    [
        ("model", ("x/stories", "y/stories")),
        ("draft", ("x/stories", "")),
        ("temperature", (0.8, 0.80001)),
        ("new_tokens", (100000, 100001)),
        ("batch_size", (1, 8)),
        ("dtype", ("float32", "float16")),
    ],
)
def test_settings_are_not_pooled(column, values):
    rows = [ROW | {column: value, "decode_tokens_per_s": 10 + index} for index, value in enumerate(values)]
    summary = common.summarise(rows, "a")
    assert list(summary[column]) == list(values) and list(summary["speedup_median"]) == [1, 1]


def test_a_baseline_of_one_dtype_serves_all():
    rows = [ROW | {"mode": mode, "dtype": dtype, "decode_tokens_per_s": rate} for mode, dtype, rate in
            (("a", "int8", 30), ("a", "float32", 10), ("b", "int8", 40))]  # fmt: skip
    summary = common.summarise(rows, {"mode": "a", "dtype": "float32"})
    assert list(summary["speedup_median"]) == [3, 1, 4]


def test_the_commit_needs_no_hand(tmp_path, monkeypatch):
    def git(*args):
        settings = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *settings, *args], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "-m", "v1", "v1")
    assert common.commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "file").write_text("two")
    assert common.commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    (tmp_path / "copy").mkdir()  # a copy without .git in another repository
    monkeypatch.setattr(common, "ROOT", tmp_path / "copy")
    assert common.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert common.commit() == "unknown"


def test_what_ran_on_what(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "commit", lambda: "abc")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    model = tiny(dtype=torch.bfloat16)
    about = common.describe(".", model, "cpu", "..")
    assert about["model"] == str(tmp_path / "x") and about["draft"] == str(tmp_path) and about["commit"] == "abc"
    assert about["parameters"] == 61 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    assert about["dtype"] == "bfloat16" and about["device"].startswith("cpu ") and about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert common.describe("random:gpt2", model, "cuda")["device"] == "GPU"

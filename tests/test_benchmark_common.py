"""What the benchmarks share: time, bytes, rows that are never lost or mixed, and paired ratios."""

import argparse
import os
import resource
import subprocess
import time

import pandas
import pytest
import torch

from benchmarks import common
from cache import KVCache
from command_line import Parser
from errors import UserError

ROW = dict.fromkeys(common.COLUMNS, 1)
ROW |= {"model": "m", "draft": "", "dtype": "float32", "mode": "a"}
WRITTEN = ["run.csv", "run.png", "run_summary.csv"]


@pytest.fixture
def script(tmp_path, run_main):
    """A function that runs a benchmark that does `measure(args, device, results)`.

    It returns the exit code, stdout and stderr.
    """
    from matplotlib.figure import Figure

    def run(measure, *args, output=tmp_path / "run.csv"):
        def main(argv):
            parser = Parser(prog="benchmark.py")
            common.add_options(parser, "x.csv", lengths=[60, 220], repeats=3)
            common.run_benchmark(parser, measure, "a", lambda summary: Figure(), argv)

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

    def small(*shape, **options):
        return ones(*(2 for _ in shape), **options)

    monkeypatch.setattr(torch, "ones", small)
    monkeypatch.setattr(common, "timed", lambda steps, device: (list(steps), next(seconds), 0.0))
    assert common.bandwidth("cpu", torch.float32) == 2 * 2 * 4 / 5


def test_the_roofline_counts_weights_once_and_the_cache(tiny):
    model = tiny(dtype=torch.bfloat16)
    counts = {id(weight): weight.numel() for weight in model.parameters()}  # the head's are wte's
    weights = 2 * (sum(counts.values()) - 16 * 16)  # a step reads one row of wpe
    # Bytes x keys and values x layers x width x positions x rows.
    steps = [2 * 2 * 2 * 16 * (4 + step) * 3 for step in range(1, 10)]
    share = common.roofline_share(
        model, 3, prompt_tokens=4, new_tokens=10, seconds=2.0, bandwidth=1000.0
    )
    assert share == pytest.approx((9 * weights + sum(steps)) / 1000 / 2)


def test_speeds_leave_the_prefill_out_and_count_all_texts(tiny):
    model = tiny()
    row = common.speeds(model, [[1, 2]] * 3, 9, first=100.0, rest=4.0, bandwidth=50.0)
    assert row["decode_tokens_per_s"] == 3 * 8 / 4
    assert row["first_token_s"] == 100
    assert (row["batch_size"], row["prompt_tokens"], row["new_tokens"]) == (3, 2, 9)
    assert row["roofline_share"] == common.roofline_share(model, 3, 2, 9, 4.0, 50.0)
    skipped = common.speeds(model, [[1]], 9, 100.0, 4.0, 50.0, skip=3)
    assert skipped["decode_tokens_per_s"] == 6 / 4
    unknown = common.speeds(None, [[1, 2]] * 3, 9, 100.0, 4.0, 50.0)
    assert unknown == row | {"roofline_share": None}


@pytest.mark.parametrize("piece", [1, 3])
def test_half_precision_is_checked_in_each_row(tiny, monkeypatch, piece):
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    sizes = []
    extend = KVCache.extend

    def counted(self, new, rows):
        sizes.append(len(new[0]))
        return extend(self, new, rows)

    monkeypatch.setattr(KVCache, "extend", counted)
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
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    common.check_half_precision(model, tokens, peer=model)

    def second_row_scaled(text):
        return model(text) * (wrong if text[0, 0] == 12 else 1)

    with pytest.raises(SystemExit, match="off by"):
        common.check_half_precision(model, tokens, peer=second_row_scaled)


def test_one_large_difference_is_too_much(tiny):
    model = tiny(dtype=torch.bfloat16)
    spot = torch.zeros(1, 12, 61)
    spot[0, 5, 7] = 2
    with pytest.raises(SystemExit, match="off by up to [12]"):
        common.check_half_precision(
            model, torch.arange(12)[None], peer=lambda text: model(text) + spot
        )


def test_small_differences_everywhere_are_too_much(tiny):
    model = tiny(dtype=torch.bfloat16)
    noise = 0.3 * torch.randn(1, 12, 61, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    with pytest.raises(SystemExit, match="off by up to 0.[1-4]"):
        common.check_half_precision(
            model, torch.arange(12)[None], peer=lambda text: model(text) + noise
        )


def test_memory_is_that_of_a_process_of_its_own():
    assert 60e6 < common.in_own_process("cpu", ["pandas"], bytearray, 64_000_000) < 75e6


@pytest.mark.parametrize(
    "code, error, said",
    [
        (1, b"Traceback\n  line\nUserError: too large\n", "UserError: too large"),
        (-9, b"", "killed"),
    ],
)
def test_a_child_that_fails_is_one_line(monkeypatch, code, error, said):
    options = {}
    child = subprocess.CompletedProcess([], code, b"", error)
    monkeypatch.setattr(subprocess, "run", lambda *_, **given: options.update(given) or child)
    with pytest.raises(UserError, match=said) as caught:
        common.in_own_process("cpu", [], bytearray, 1)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert options["start_new_session"]  # Ctrl-C is for the parent
    assert options["capture_output"]  # it says nothing by itself


def test_rows_are_there_as_they_are_measured_and_measured_numbers_are_rounded(tmp_path, capsys):
    results = common.ResultsFile(tmp_path / "run.csv")
    exact = {"temperature": 0.800001, "parameters": 123456789}
    results.write(**ROW | exact | {"first_token_s": 1.23456, "acceptance": None})
    found = pandas.read_csv(tmp_path / "run.csv.part").iloc[0]
    assert (found["temperature"], found["parameters"]) == (0.800001, 123456789)
    assert found["first_token_s"] == 1.235
    assert pandas.isna(found["acceptance"])
    assert "a: 1.0/s" in capsys.readouterr().err
    with pytest.raises(ValueError):
        results.write(**ROW, nonsense=1)


def test_a_run_replaces_an_older_one_when_it_ends(script, tmp_path):
    def measure(args, device, results):
        assert (tmp_path / "run.csv").read_text() == (tmp_path / "run.png").read_text() == "older"
        results.write(**ROW)
        assert (tmp_path / "run.csv").read_text() == "older"

    for name in WRITTEN:
        (tmp_path / name).write_text("older")
    code, out, _ = script(measure)
    assert code == 0
    assert "speedup_median" in out
    assert files(tmp_path) == WRITTEN
    assert len(pandas.read_csv(tmp_path / "run.csv")) == 1
    assert len(pandas.read_csv(tmp_path / "run_summary.csv")) == 1
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rows_leaves_an_older_one(script, tmp_path):
    (tmp_path / "run.csv").write_text("older")
    code, _, err = script(lambda *_: refuse())
    assert (code, err) == (2, "benchmark.py: error: no\n")
    assert files(tmp_path) == ["run.csv"]
    assert (tmp_path / "run.csv").read_text() == "older"


def refuse():
    raise UserError("no")


def test_a_second_run_on_the_same_file_is_refused(script, tmp_path):
    def measure(args, device, results):
        results.write(**ROW)
        code, _, err = script(one_row)
        assert code == 2
        assert "run.csv.part exists: another run" in err.splitlines()[1]  # below a row of the first
        results.write(**ROW)

    assert script(measure)[0] == 0
    assert len(pandas.read_csv(tmp_path / "run.csv")) == 2
    assert pandas.read_csv(tmp_path / "run_summary.csv")["runs"][0] == 2
    assert script(one_row)[0] == 0
    assert len(pandas.read_csv(tmp_path / "run.csv")) == 1


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt, 130), (UserError("memory"), 2), (SystemExit("x"), "x")]
)
def test_what_was_measured_before_an_end_is_kept(script, tmp_path, error, code):
    def measure(args, device, results):
        results.write(**ROW)
        raise error

    assert script(measure)[0] == code
    assert files(tmp_path) == WRITTEN


def test_a_closed_pipe_is_left_to_run_script_and_rows_are_kept(script, tmp_path, monkeypatch):
    def measure(args, device, results):
        results.write(**ROW)
        raise BrokenPipeError

    def run_script(parser, run, argv):
        run(parser.parse_args(argv))

    monkeypatch.setattr(common, "run_script", run_script)
    with pytest.raises(BrokenPipeError):
        script(measure)
    assert files(tmp_path) == WRITTEN


OLDER = ["run.png", "run_summary.csv"]


@pytest.mark.parametrize(
    "rows, left",
    [(2, ["run.csv", "run_summary.csv"]), (1, ["run.csv"]), (0, OLDER), (-1, OLDER)],
    ids=str,
)
def test_a_full_disk_keeps_whole_rows_and_writes_nothing_by_halves(script, tmp_path, rows, left):
    for name in OLDER:  # they must not stay beside newer rows
        (tmp_path / name).write_text("older")
    row = ROW | {"model": 800 * "x"} | dict.fromkeys(common.MEASURED, 1.5)

    def measure(args, device, results):
        for _ in range(9):
            results.write(**row)

    header = len(",".join(row)) + 1
    line = len(",".join(map(str, row.values()))) + 1
    room = header + rows * line + 2  # the next row fits in part
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        code, _, err = script(measure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    *shown, last = err.splitlines()
    assert len(shown) == max(rows, 0)
    assert "run" in last and last.endswith(": File too large")
    assert files(tmp_path) == left
    if rows > 0:
        written = (tmp_path / "run.csv").read_text().splitlines()[1:]
        assert [len(found) for found in written] == [line - 1] * rows
        assert len(set(written)) == 1


@pytest.mark.parametrize(
    "name, said",
    [
        ("x.png", "end in .csv"),
        ("x", "end in .csv"),
        ("no/x.csv", "No such file"),
        ("plotted.csv", "is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(script, tmp_path, name, said):
    (tmp_path / "plotted.png").mkdir()
    code, _, err = script(lambda *_: pytest.fail("it works"), output=tmp_path / name)
    assert code == 2
    assert said in err and name in err and err.count("\n") == 1
    assert files(tmp_path) == ["plotted.png"]


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
    assert code == 2
    assert said in err and err.count("\n") == 1
    assert files(tmp_path) == []


def test_options_are_used_and_a_value_given_twice_is_dropped(script, monkeypatch):
    given = []
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def measure(args, device, results):
        given.append((args, device))

    script(measure, "--max-new-tokens", 9, 5, 9, "--threads", 1)
    ((args, device),) = given
    assert args.max_new_tokens == [9, 5]
    assert args.repeats == 3
    assert device == "cpu"
    assert threads == [1]


def test_help_explains_each_column_and_what_happens_to_the_file():
    parser = argparse.ArgumentParser()
    common.add_options(parser, "x.csv", lengths=[60], repeats=3)
    text = parser.format_help()
    assert [name for name in common.COLUMNS if f"\n  {name} " not in text] == []
    assert ".part" in text
    assert "(default: 3)" in text


def test_options_that_a_benchmark_does_not_have_are_left_out():
    parser = argparse.ArgumentParser()
    only = {"value": "as measured"}
    common.add_options(parser, "x.csv", lengths=None, repeats=3, dtypes=False, columns=only)
    text = parser.format_help()
    assert "--max-new-tokens" not in text
    assert "--dtype" not in text
    assert text.endswith(f"columns of the CSV file:\n  {'value':20} as measured\n")


def test_speedup_is_the_median_of_paired_ratios():
    rates = {0: {"b": 20, "a": 10}, 1: {"b": 40, "a": 80}, 2: {"a": 10, "b": 90}, 3: {"b": 70}}
    runs = [("b", 1), ("a", 2), ("b", 0), ("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    rows = []
    for mode, repeat in runs:
        rate = {"decode_tokens_per_s": rates[repeat][mode]}
        rows.append(ROW | {"mode": mode, "repeat": repeat} | rate)
    rows[0]["first_token_s"] = 9
    summary = common.summarise(rows, "a").set_index("mode")
    assert list(summary.index) == ["b", "a"]
    found = summary.loc["b"]
    assert [found[f"speedup_{name}"] for name in ("median", "min", "max")] == [2.0, 0.5, 9.0]
    decoded = [found[f"decode_tokens_per_s_{name}"] for name in ("median", "min", "max")]
    assert decoded == [55, 20, 90]
    assert found["first_token_s"] == 1
    assert found["runs"] == 4 and summary["runs"].dtype == int


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
    rows = []
    for index, value in enumerate(values):
        rows.append(ROW | {column: value, "decode_tokens_per_s": 10 + index})
    summary = common.summarise(rows, "a")
    assert list(summary[column]) == list(values)
    assert list(summary["speedup_median"]) == [1, 1]


def test_a_baseline_of_one_dtype_serves_all():
    rows = []
    for mode, dtype, rate in (("a", "int8", 30), ("a", "float32", 10), ("b", "int8", 40)):
        rows.append(ROW | {"mode": mode, "dtype": dtype, "decode_tokens_per_s": rate})
    summary = common.summarise(rows, {"mode": "a", "dtype": "float32"})
    assert list(summary["speedup_median"]) == [3, 1, 4]


def test_the_commit_needs_no_hand(tmp_path, monkeypatch):
    settings = {"user.name": "x", "user.email": "x@example.com", "commit.gpgsign": "false"}
    configured = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

    def git(*args):
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *configured, *args], **options).stdout.strip()

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
    assert about["model"] == str(tmp_path / "x")
    assert about["draft"] == str(tmp_path)
    assert about["commit"] == "abc"
    assert about["parameters"] == 61 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    assert about["dtype"] == "bfloat16"
    assert about["device"].startswith("cpu ")
    assert about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert common.describe("random:gpt2", model, "cuda")["device"] == "GPU"

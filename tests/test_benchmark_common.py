"""What the benchmarks share: time, bytes, rows that are never lost or mixed, and paired ratios."""

import argparse
import csv
import json
import resource
import subprocess
import time

import pandas
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import common
from cache import KVCache
from command_line.parser import Parser
from errors import UserError

ROW = dict.fromkeys(common.COLUMNS, 1)
ROW |= {"model": "m", "draft": "", "dtype": "float32", "mode": "a"}


def test_time_is_split_after_the_first_item(monkeypatch):
    clock = [100.0]
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronised"))
    monkeypatch.setattr(time, "perf_counter", lambda: order.append("read") or clock[0])

    def steps():
        for seconds in (5, 1, 2):
            clock[0] += seconds
            yield seconds
        clock[0] += 4

    assert common.timed(steps(), "cpu") == ([5, 1, 2], 5, 7)
    order.clear()  # a device has finished before the clock is read
    assert common.timed(steps(), "cuda") == ([5, 1, 2], 5, 7)
    assert order == ["synchronised", "read"] * 3


def test_bandwidth_is_bytes_over_the_median_second(monkeypatch):
    seconds = iter([50.0, 90, 1, 8, 2, 7, 3, 6, 4, 5])  # the first is warm-up
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones([2] * len(shape)))
    monkeypatch.setattr(common, "timed", lambda steps, device: (list(steps), next(seconds), 0.0))
    assert common.bandwidth("cpu", torch.float32) == 2 * 2 * 4 / 5


def test_the_roofline_counts_weights_once_and_the_cache(tiny):
    model = tiny(dtype=torch.bfloat16)
    counts = {id(weight): weight.numel() for weight in model.parameters()}  # the head's are wte's
    weights = 2 * (sum(counts.values()) - 16 * 16)  # a step reads one row of wpe
    # Bytes x keys and values x layers x width x positions x rows.
    steps = [2 * 2 * 2 * 16 * (4 + step) * 3 for step in range(1, 10)]
    share = common.roofline_share(model, 3, 4, 10, seconds=2.0, bandwidth=1000.0)
    assert share == pytest.approx((9 * weights + sum(steps)) / 1000 / 2)


def test_speeds_leave_the_prefill_out_and_count_all_texts(tiny):
    model = tiny()
    times = {"ttft": 100.0, "decode_time": 4.0, "bandwidth": 50.0}
    row = common.throughput_columns(model, [[1, 2]] * 3, 9, **times)
    assert row["decode_tokens_per_s"] == 3 * 8 / 4
    assert row["first_token_s"] == 100
    assert row["prefill_tokens_per_s"] == 3 * 2 / 100
    assert row["inter_token_s"] == 4 / 8  # of each text, however many there are
    assert (row["batch_size"], row["prompt_tokens"], row["new_tokens"]) == (3, 2, 9)
    assert row["roofline_share"] == common.roofline_share(model, 3, 2, 9, 4.0, 50.0)
    skipped = common.throughput_columns(model, [[1]], 9, **times, first_pass_tokens=3)
    assert (skipped["decode_tokens_per_s"], skipped["inter_token_s"]) == (6 / 4, 4 / 6)
    unknown = common.throughput_columns(None, [[1, 2]] * 3, 9, **times)
    assert unknown == row | {"roofline_share": None}


@pytest.mark.parametrize("pass_size", [1, 3])
def test_half_precision_is_checked_in_each_row(tiny, monkeypatch, pass_size):
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    sizes = []
    prepare = KVCache.prepare

    def wrong(self, spans):
        sizes.append(len(spans[0].tokens))
        tokens, positions, ends = prepare(self, spans)
        if is_wrong:
            positions = positions.expand(2, -1).clone()
            positions[1] = 0
        return tokens, positions, ends

    monkeypatch.setattr(KVCache, "prepare", wrong)
    is_wrong = False
    common.check_half_precision(model, tokens, pass_size)
    assert sizes == 12 // pass_size * [pass_size]
    is_wrong = True
    with pytest.raises(SystemExit, match="off by"):
        common.check_half_precision(model, tokens, pass_size)


@pytest.mark.parametrize(
    "scale, large, small, said",
    [(1.5, 0, 0, ""), (torch.nan, 0, 0, ""), (1, 3.25, 0, "0.1"), (1, 0, 0.3, "0.0[1-4]")],
    ids=["scaled", "nan", "one large error", "many small errors"],
)
def test_the_reference_is_checked_in_half_precision(tiny, scale, large, small, said):
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    common.check_half_precision(model, tokens, reference=model)
    noise = small * torch.randn(1, 12, 61, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    noise[0, 5, 7] += large

    def wrong_in_the_second_row(text):
        return scale * model(text) + noise if text[0, 0] == 12 else model(text)

    with pytest.raises(SystemExit, match=f"off by up to {said}"):
        common.check_half_precision(model, tokens, reference=wrong_in_the_second_row)


def test_what_bfloat16_does_to_an_improbable_token_is_no_error():
    expected, found, other = torch.tensor(
        [[[0.0, -15.0, -2.0]], [[0.0, -14.0, -2.0]], [[0.0, -15.0, -1.0]]]
    ).log_softmax(dim=-1)
    assert 0 < common.kl_divergence(found, expected).item() < 1e-6
    p, q = expected.double().exp(), other.double().exp()
    by_hand = (p * (p / q).log()).sum(dim=-1)
    assert by_hand > 0.05
    assert torch.allclose(common.kl_divergence(other, expected).double(), by_hand, atol=1e-6)


def test_only_the_default_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    results = common.ResultsFile(tmp_path / "results" / "run.csv")
    results.write(**ROW)
    with pytest.raises(ValueError):
        results.write(**ROW, nonsense=1)
    assert results.close() and (tmp_path / "results" / "run.csv").exists()
    monkeypatch.chdir(tmp_path)
    assert not common.ResultsFile(common.Path("results", "again.csv")).close()
    with pytest.raises(FileNotFoundError):
        common.ResultsFile(tmp_path / "resluts" / "run.csv")
    (tmp_path / "taken.txt").mkdir()  # beside a trace
    with pytest.raises(argparse.ArgumentTypeError, match="taken.txt is a directory"):
        common.trace_file(str(tmp_path / "taken.json"))


def test_speedup_is_the_median_of_paired_ratios():
    runs = [("b", 1, 40), ("a", 2, 10), ("b", 0, 20), ("a", 0, 10), ("a", 1, 80), ("b", 2, 90)]
    names = ("mode", "repeat", "decode_tokens_per_s")
    rows = [ROW | dict(zip(names, run)) for run in [*runs, ("b", 3, 70)]]
    rows[0]["first_token_s"] = 9
    summary = common.summarise(rows, "a").set_index("mode")
    assert list(summary.index) == ["b", "a"]
    found = summary.loc["b"]
    assert [found[f"speedup_{name}"] for name in ("median", "min", "max")] == [2.0, 0.5, 9.0]
    decoded = [found[f"decode_tokens_per_s_{name}"] for name in ("median", "min", "max")]
    assert decoded == [55, 20, 90]
    assert found["first_token_s"] == 1
    assert found["runs"] == 4 and summary["runs"].dtype == int


def test_settings_are_not_pooled_and_a_baseline_of_one_dtype_serves_all():
    settings = {
        "model": ("x/stories", "y/stories"),
        "draft": ("x/stories", ""),
        "temperature": (0.8, 0.80001),
        "new_tokens": (100000, 100001),
        "batch_size": (1, 8),
        "dtype": ("float32", "float16"),
    }
    for column, values in settings.items():
        pairs = zip(values, (10, 11))
        rows = [ROW | {column: value, "decode_tokens_per_s": rate} for value, rate in pairs]
        summary = common.summarise(rows, "a")
        assert list(summary[column]) == list(values)
        assert list(summary["speedup_median"]) == [1, 1]
    names = ("mode", "dtype", "decode_tokens_per_s")
    runs = (("a", "int8", 30), ("a", "float32", 10), ("b", "int8", 40))
    rows = [ROW | dict(zip(names, run)) for run in runs]
    summary = common.summarise(rows, {"mode": "a", "dtype": "float32"})
    assert list(summary["speedup_median"]) == [3, 1, 4]


def test_what_ran_on_what(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "commit", lambda: "abc")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    environment = common.describe_environment(".", tiny(dtype=torch.bfloat16), "cpu", "..")
    assert environment.pop("device").startswith("cpu ")
    weights = 61 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    expected = {"model": str(tmp_path / "x"), "draft": str(tmp_path), "commit": "abc"}
    expected |= {"parameters": weights, "dtype": "bfloat16", "torch": torch.__version__}
    expected |= {"threads": torch.get_num_threads(), "kernel": common.instruction_set("cpu")}
    assert environment == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert common.describe_environment("random:gpt2", tiny(), "cuda")["device"] == "GPU"


def test_memory_is_what_linux_says(monkeypatch):
    said = "VmPeak:\t     900 kB\nVmHWM:\t     300 kB\nVmRSS:\t     200 kB\n"
    monkeypatch.setattr(common.Path, "read_text", lambda self: said)
    assert common.memory_in_use("cpu") == 300 * 1024


# What was measured is neither lost nor mixed, however a run ends.

WRITTEN = ["run.csv", "run.json", "run.png", "run_summary.csv", "run_summary.json"]


@pytest.fixture
def script(tmp_path, run_main):
    """A function that runs a benchmark that does `measure(args, device, results)`.

    It returns the exit code, stdout and stderr.
    """

    def run(measure, *args, output=tmp_path / "run.csv"):
        def main(argv):
            parser = Parser(prog="benchmark.py")
            common.add_options(parser, "x.csv", lengths=[60, 220], repeats=3)
            common.run_benchmark(parser, measure, "a", lambda summary: Figure(), argv)

        return run_main(main, "--output", output, *args)

    return run


def one_row(args, device, results):
    results.write(**ROW)


def failing(error, *rows):
    def measure(args, device, results):
        for row in rows:
            results.write(**row)
        raise error

    return measure


def files(directory):
    return sorted(file.name for file in directory.iterdir())


def test_memory_is_that_of_a_process_of_its_own():
    assert 60e6 < common.in_own_process("cpu", ["json"], bytearray, 64_000_000) < 75e6


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
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert options["start_new_session"]  # Ctrl-C is for the parent
    assert options["capture_output"]  # it says nothing by itself


def test_a_run_replaces_an_older_one_when_it_ends(script, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    def measure(args, device, results):
        given.extend([device, args.max_new_tokens, args.repeats])
        assert (tmp_path / "run.csv").read_text() == (tmp_path / "run.png").read_text() == "older"
        results.write(**ROW)
        assert (tmp_path / "run.csv").read_text() == "older"

    for name in WRITTEN:
        (tmp_path / name).write_text("older")
    code, _, err = script(failing(UserError("no")))  # a run without rows leaves it
    assert (code, err) == (2, "benchmark.py: error: no\n") and files(tmp_path) == WRITTEN
    code, out, _ = script(measure, "--max-new-tokens", 9, 5, 9, "--threads", 1)
    assert code == 0 and "speedup_median" in out and given == [1, "cpu", [9, 5], 3]
    assert files(tmp_path) == WRITTEN
    for name in ("run.csv", "run_summary.csv"):
        assert len(pandas.read_csv(tmp_path / name)) == 1
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


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
    "error, code", [(KeyboardInterrupt(), 130), (UserError("memory"), 2), (SystemExit("x"), "x")]
)
def test_what_was_measured_before_an_end_is_kept(script, tmp_path, error, code):
    assert script(failing(error, ROW))[0] == code
    assert files(tmp_path) == WRITTEN
    assert len(json.loads((tmp_path / "run.json").read_text())) == 1


def test_a_closed_pipe_is_left_to_run_script_and_rows_are_kept(script, tmp_path, monkeypatch):
    monkeypatch.setattr(
        common, "run_script", lambda parser, run, argv: run(parser.parse_args(argv))
    )
    with pytest.raises(BrokenPipeError):
        script(failing(BrokenPipeError(), ROW))
    assert files(tmp_path) == WRITTEN


def test_json_has_the_values_of_the_csv(script, tmp_path):
    row = ROW | {"first_token_s": 1.23456e-16, "decode_tokens_per_s": torch.pi, "acceptance": None}
    row |= {"roofline_share": float("nan"), "commit": "0123456"}
    assert script(failing(SystemExit(0), row, row | {"repeat": 0}))[0] == 0
    for name in ("run", "run_summary"):
        records = json.loads((tmp_path / f"{name}.json").read_text())
        with (tmp_path / f"{name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert [list(record) for record in records] == [list(line) for line in lines]
        for record, line in zip(records, lines, strict=True):
            for column, value in record.items():
                assert ("" if value is None else str(value)) == line[column].replace("nan", "")
        assert records[0]["first_token_s"] == 1.235e-16
    assert "NaN" not in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize("rows", [2, 1, 0, -1])
def test_a_full_disk_keeps_whole_rows_and_writes_nothing_by_halves(script, tmp_path, rows):
    older = ["run.json", "run.png", "run_summary.csv"]  # they must not stay beside newer rows
    for name in older:
        (tmp_path / name).write_text("older")
    row = ROW | {"model": 800 * "x"} | dict.fromkeys(common.MEASURED, 1.5)
    header = len(",".join(row)) + 1
    line = len(",".join(map(str, row.values()))) + 1
    room = header + rows * line + 2  # the next row fits in part
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        code, _, err = script(failing(SystemExit("all fit"), *[row] * 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    *shown, last = err.splitlines()
    assert code == 2 and len(shown) == max(rows, 0)
    assert "run" in last and last.endswith(": File too large")
    left = {2: ["run.csv", "run_summary.csv"], 1: ["run.csv"]}
    assert files(tmp_path) == left.get(rows, older)
    if rows > 0:
        written = (tmp_path / "run.csv").read_text().splitlines()[1:]
        assert [len(found) for found in written] == [line - 1] * rows
        assert len(set(written)) == 1


@pytest.mark.parametrize(
    "name, said",
    [("x.png", "end in .csv"), ("no/x.csv", "No such file"), ("plotted.csv", "is a directory")],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(script, tmp_path, name, said):
    (tmp_path / "plotted.png").mkdir()
    code, _, err = script(lambda *_: pytest.fail("it works"), output=tmp_path / name)
    assert code == 2 and said in err and name in err and err.count("\n") == 1
    assert files(tmp_path) == ["plotted.png"]


def test_the_commit_needs_no_hand(tmp_path, monkeypatch):
    def git(*args):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost", *args]
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, **options).stdout.strip()

    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("-c", "commit.gpgsign=false", "commit", "-q", "-m", "one")
    git("tag", "-a", "-m", "v1", "v1")
    assert common.commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "file").write_text("two")
    assert common.commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert common.commit() == "unknown"

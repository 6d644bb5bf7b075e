"""What a benchmark has measured is neither lost nor mixed, however its run ends."""

import csv
import json
import resource
import subprocess

import pandas
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import common
from command_line.parser import Parser
from errors import UserError

ROW = dict.fromkeys(common.COLUMNS, 1)
ROW |= {"model": "m", "draft": "", "dtype": "float32", "mode": "a"}
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
    """A benchmark that measures these rows, and then fails."""

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

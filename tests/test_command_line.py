"""The command line around the loop: options, output, and how a run ends that cannot go on."""

import argparse
import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line

import infer
from command_line.models import pick_device
from command_line.output import OutputWriter
from command_line.parser import Parser, run_script
from errors import UserError
from text.tokenizer import load_encoding

DRAFT = CHECKPOINTS / "stories-draft"  # is loaded sooner than the larger one


def test_the_device_that_is_named_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, device in (("auto", "cuda"), ("cpu", "cpu"), ("mps", "mps"), ("cuda", "cuda")):
        assert pick_device(name) == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "mps"
    with pytest.raises(UserError, match="--device cuda: not on this machine, which has mps, cpu"):
        pick_device("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "gpt5"], "unknown model 'gpt5'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--prompt", "caf\udce9"], r"--prompt 'caf\udce9': not UTF-8 text"),
        (["--prompt=--"], "argument --prompt: expected one argument"),
    ],
)
def test_bad_input_is_one_line(cli, arguments, words):
    assert is_one_line(cli(*arguments), words)


@pytest.mark.parametrize(
    "error, code, words",
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "do not fit in memory\n"),
        (UserError("no such thing"), 2, "no such thing\n"),
        (ModuleNotFoundError(name="pandas"), 2, "pandas: pip install '.[test]'\n"),
        (RuntimeError("our own mistake is not hidden"), None, ""),
        (ModuleNotFoundError(name="infre"), None, ""),
    ],
)
def test_how_a_run_ends(cli, monkeypatch, error, code, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(infer, "load_encoding", fail)
    if code is None:
        with pytest.raises(type(error)):
            cli("--model", DRAFT)
        return
    ended, out, err = cli("--prompt", "x", "--model", DRAFT)
    assert ended == code and out == "" and err.endswith(words) and err.count("\n") == (code == 2)


ENCODING = load_encoding(CHECKPOINTS / "stories", 4096)
RULE = "\n" + "-" * 40 + "\n"


def print_texts(*texts):
    """Run a script that shows these texts and no more; its exit code."""

    def action(args):
        with OutputWriter(texts, ENCODING):
            pass

    with pytest.raises(SystemExit) as ended:
        run_script(Parser(prog="x"), action, [])
        sys.exit(0)
    return ended.value.code


def test_a_closed_pipe_ends_a_script_quietly(monkeypatch):
    """As in `python infer.py ... | head -1`: not a word, and the exit code that SIGPIPE gives."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return file.fileno()

    with open("/dev/null", "w") as file:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert print_texts("Once") == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_full_disk_is_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert print_texts("Once") == 2
        full.flush()  # as Python does at exit
    assert capsys.readouterr().err == "x: error: standard output: No space left on device\n"


def test_what_a_terminal_cannot_show_is_written_as_an_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert print_texts("a caf\xe9") == 0
    assert raw.getvalue() == b"a caf\\xe9\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_belongs_to_a_closed_stream_goes_nowhere(capsys, monkeypatch, name):
    def write(args):
        print("to stdout")
        print("to stderr", file=sys.stderr)

    monkeypatch.setattr(sys, name, None)
    run_script(argparse.ArgumentParser(), write, [])
    out, err = capsys.readouterr()
    assert (out, err) == (("", "to stderr\n") if name == "stdout" else ("to stdout\n", ""))


@pytest.mark.parametrize(
    "script", ["infer.py", "infer_engine.py", "infer_speculative.py", "serve.py", "serve_ray.py"]
)
def test_ctrl_c_while_torch_is_imported_is_not_a_word(tmp_path, script):
    (tmp_path / "torch.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, ROOT / script],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever runs the tests in the background has a shell that lets them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")


def test_ctrl_c_is_an_exception_from_main_on():
    seen = []
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run_script(Parser(), lambda args: seen.append(signal.getsignal(signal.SIGINT)), [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler]


def test_one_text_is_shown_as_it_comes_and_several_at_the_end(capsys):
    (a,) = ENCODING.encode(" a")
    with OutputWriter(["One"], ENCODING) as output:
        for shown in ("One a", " a"):
            output.add(0, a)
            output.end_step()
            assert capsys.readouterr().out == shown
    assert capsys.readouterr().out == "\n"
    with OutputWriter(["One", "Two"], ENCODING) as output:
        for row in (1, 0, 1):
            output.add(row, a)
        output.end_step()
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == f"One a{RULE}Two a a\n"
    with OutputWriter(["One"], ENCODING):  # without tokens
        pass
    assert capsys.readouterr() == ("One\n", "")
    with pytest.raises(UserError), OutputWriter(["One"], ENCODING):  # before the first token
        raise UserError("no")
    assert capsys.readouterr() == ("", "")


def test_each_text_completes_its_own_characters(capsys):
    first, second = (ENCODING.encode_single_token(byte) for byte in (b"\xc3", b"\xa9"))
    with OutputWriter(["", ""], ENCODING) as output:
        for row, token in ((0, first), (1, first), (0, second), (1, second), (1, first)):
            output.add(row, token)
        output.end_step()
    assert capsys.readouterr().out == f"é{RULE}é\ufffd\n"


def test_an_interrupted_run_keeps_what_it_has(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("command_line.output.time.perf_counter", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), OutputWriter(["One", "Two"], ENCODING) as output:
        for seconds in (0.5, 1.0, 3.0):
            clock[0] = seconds
            output.add(0, *ENCODING.encode(" a"))
            output.add(1, 5)
            output.end_step()
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    assert out.startswith(f"One a a a{RULE}Two")
    assert err == "6 tokens, 2.0 tokens/s, the first after 0.500 s\n"

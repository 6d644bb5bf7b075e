"""The command line around the loop: options, output, and how a run ends that cannot go on."""

import argparse
import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import CHECKPOINTS, PROMPTS, ROOT, is_one_line

import infer
import infer_speculative
from command_line.models import pick_device
from command_line.output import OutputWriter
from command_line.parser import Parser, run_script
from engine.engine import Engine
from errors import UserError, catch_out_of_memory
from infer_speculative import SpeculativeStep, main
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
    raw = io.BytesIO()  # a terminal that cannot show a character gets an escape
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert print_texts("a caf\xe9") == 0
    assert raw.getvalue() == b"a caf\\xe9\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_full_disk_is_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert print_texts("Once") == 2
        full.flush()  # as Python does at exit
    assert capsys.readouterr().err == "x: error: standard output: No space left on device\n"


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
    first, second = (ENCODING.encode_single_token(byte) for byte in (b"\xc3", b"\xa9"))
    with OutputWriter(["One", "Two"], ENCODING) as output:  # each completes its own characters
        for row, token in ((0, first), (1, first), (0, second), (1, second), (1, first)):
            output.add(row, token)
        output.end_step()
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == f"Oneé{RULE}Twoé\ufffd\n"
    output.times, output.count = [1.0, 1.5, 3.0], 4
    assert output.statistics() == "4 tokens, 2.0 tokens/s, the first after 0.500 s"
    with OutputWriter(["One"], ENCODING):  # without tokens
        pass
    assert capsys.readouterr() == ("One\n", "")
    with pytest.raises(UserError), OutputWriter(["One"], ENCODING):  # before the first token
        raise UserError("no")
    assert capsys.readouterr() == ("", "")


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


# Several prompts.


def test_options_come_first_then_the_lines_of_the_file(cli, monkeypatch, tiny_checkpoint, tmp_path):
    monkeypatch.setattr(infer, "generate", lambda *args, **options: iter(()))
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffTom and\n\n caf\u00e9\fone line\n".encode())  # with a byte-order mark
    lines = ["Tom and", " café\fone line"]
    both = ("--prompt", "Once", "--prompt", "Lily")
    for args, prompts in (
        (both, ["Once", "Lily"]),
        (("--prompt-file", file), lines),
        (("--prompt-file", file, "--prompt", "Once"), ["Once", *lines]),
        ((), [""]),
        ((*both, "--num-samples", 2, "--temperature", 1), ["Once", "Once", "Lily", "Lily"]),
    ):
        code, out, _ = cli("--model", tiny_checkpoint, *args)
        assert (code, out.removesuffix("\n").split(RULE)) == (0, prompts)


@pytest.mark.parametrize(
    "content, complaint",
    [(None, "No such file"), (b"", "empty"), (b"\n\n", "empty"), (b"caf\xe9", "not UTF-8")],
)
def test_a_bad_prompt_file_is_one_line(cli, tmp_path, content, complaint):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    assert is_one_line(cli("--prompt-file", file), str(file), complaint)


# infer_engine.py: the texts of infer.py, and what they took.

SEEDED = ("--max-new-tokens", 12, "--temperature", 1, "--num-samples", 2, "--seed", 5)
FILTERED = ("--max-new-tokens", 12, "--temperature", 0.9, "--top-p", 0.9, "--seed", 2**64 - 1)


@pytest.mark.parametrize(
    "args, rows",
    [
        (("--max-new-tokens", 12), ()),
        (("--max-new-tokens", 60, "--ignore-eos", "--stride", 5), ("--max-num-seqs", 2)),
        (SEEDED, ("--max-num-seqs", 3)),
        ((*FILTERED, "--repetition-penalty", 2), ()),
        (("--max-new-tokens", 0), ()),
        (("--max-new-tokens", 5, "--prompt", "", "--dtype", "int8"), ("--max-num-seqs", 1)),
    ],
)
def test_the_engine_prints_what_is_printed_without_it(
    cli, engine_cli, tiny_checkpoint, prompts_file, args, rows
):
    args = ("--model", tiny_checkpoint, "--prompt-file", prompts_file, *args)
    code, out, err = engine_cli(*args, *rows)
    assert code == 0, err
    assert (code, out) == cli(*args)[:2]


def test_a_single_sequence_is_streamed(cli, engine_cli, tiny_checkpoint, monkeypatch):
    args = ("--model", tiny_checkpoint, "--prompt", "Once", "--max-new-tokens", 6)
    step = Engine.step
    shown = []
    expected = cli(*args)[1]
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(Engine, "step", lambda self: shown.append(out.getvalue()) or step(self))
    engine_cli(*args)
    assert shown[0] == "" and len(set(shown)) > 3 and out.getvalue() == expected
    assert all(expected.startswith(part) for part in shown)


def test_replies_of_a_chat_model(cli, engine_cli, prompts_file, monkeypatch):
    args = ["--model", CHECKPOINTS / "stories-llama", "--chat", "--max-new-tokens", 6]
    args += ["--temperature", 1, "--seed", 7]
    expected = cli(*args, "--prompt-file", prompts_file)[:2]
    assert engine_cli(*args, "--prompt-file", prompts_file, "--max-num-seqs", 2)[:2] == expected
    outs = []
    for script in (cli, engine_cli):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"dog, park\ncat, tree\n")))
        code, out, err = script(*args)
        assert code == 0 and err.count(" tokens, ") == 2
        outs.append(out)
    assert outs[0] == outs[1] != ""
    # The second line of steps counts those of both replies.
    steps = [line for line in err.splitlines() if " steps, " in line]
    assert [line.split()[0] for line in steps] == ["6", "12"]
    assert [line.endswith(", in all") for line in steps] == [False, True]


@pytest.mark.parametrize("max_num_seqs, steps", [(None, 7), (5, 7), (2, 3 * 7), (1, 5 * 7)])
def test_statistics(engine_cli, tiny_checkpoint, prompts_file, max_num_seqs, steps):
    args = ["--model", tiny_checkpoint, "--prompt-file", prompts_file, "--max-new-tokens", 7]
    args += ["--ignore-eos", "--seed", 3, "--temperature", 1]
    args += [] if max_num_seqs is None else ["--max-num-seqs", max_num_seqs]
    code, _, err = engine_cli(*args)
    tokens = sum(len(load_encoding(tiny_checkpoint, 4096).encode(prompt)) for prompt in PROMPTS)
    first, second = err.splitlines()
    assert code == 0 and first.startswith("35 tokens, ") and first.endswith(", seed 3")
    assert f"{second},".startswith(f"{steps} steps, {tokens + 5 * 6} positions computed,")


# infer_speculative.py: its text is the target's, its report counts passes.


@pytest.fixture
def passes(monkeypatch):
    calls = []

    def set_passes(*steps, error=None):
        def generate(*args, **options):
            calls.append(args)
            yield from steps
            if error:
                raise error

        monkeypatch.setattr(infer_speculative, "generate_speculative", generate)
        return calls

    return set_passes


@pytest.mark.parametrize(
    "arguments", [("--prompt", "Once"), ("--prompt", "Once", "--prompt", "Lily and Tom"), ()]
)
def test_the_text_is_that_of_the_target(run_main, cli, arguments):
    arguments = (*arguments, "--max-new-tokens", 6, "--stride", 100)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", DRAFT, *arguments)
    assert (code, out) == cli("--model", DRAFT, *arguments)[:2]
    assert "drafts accepted" in err and "tokens per target pass" in err


def test_the_report_counts_before_the_text_is_cut(run_main, passes, monkeypatch):
    given = ("--target", DRAFT, "--prompt", "Once")
    assert run_main(main, *given, "--max-new-tokens", 0) == (0, "Once\n", "")
    passes(SpeculativeStep([4], [], 0))
    _, _, err = run_main(main, *given, "--max-new-tokens", 1)
    assert err.startswith("0 of 0 drafts accepted (0%), 1.00 tokens per target pass\n")
    steps = ([1, 2, 3], [1, 2], 2), ([4], [5, 6], 0), ([7], [7, 8], 1)
    passes(*(SpeculativeStep(*step) for step in steps))
    clock = iter([0.0, 0.5, 1.0, 2.0])
    monkeypatch.setattr("command_line.output.time.perf_counter", lambda: next(clock))
    assert run_main(main, *given)[2].splitlines() == [
        "3 of 6 drafts accepted (50%), 1.67 tokens per target pass",
        "passes by accepted drafts: 0: 1, 1: 1, 2: 1",
        "5 tokens, 2.5 tokens/s, the first after 0.500 s",
    ]


def test_options_reach_the_loop(run_main, passes):
    calls = passes()
    options = ("--gamma", 5, "--stride", 7, "--temperature", 1, "--seed", 3, "--prompt", "Once")
    assert run_main(main, "--target", DRAFT, "--draft", DRAFT, *options)[0] == 0
    ((_, _, _, params, gamma, generator, stride, *_),) = calls
    assert (params.temperature, gamma, generator.initial_seed(), stride) == (1, 5, 3, 7)


@pytest.mark.parametrize(
    "terminal, no_color, colours",
    [(True, None, True), (True, "", True), (True, "0", False), (False, None, False)],
)
def test_colours_are_for_terminals(run_main, passes, monkeypatch, terminal, no_color, colours):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    passes(SpeculativeStep([65, 66, 67], [65, 66], 2), SpeculativeStep([68], [], 0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for arguments, coloured in ((("--show",), colours), ((), False)):
        _, out, _ = run_main(main, "--target", DRAFT, "--prompt", "Once", *arguments)
        drafted = "\033[32mb\033[0m\033[32mc\033[0m" if coloured else "bc"
        own = "\033[35md\033[0m\033[35me\033[0m" if coloured else "de"
        assert out == f"Once{drafted}{own}\n"


def test_ctrl_c_keeps_the_text(run_main, passes):
    passes(SpeculativeStep([65, 66], [65], 1), error=KeyboardInterrupt)
    code, out, err = run_main(main, "--target", DRAFT, "--prompt", "Once")
    assert (code, out) == (130, "Oncebc\n") and "1 of 1 drafts accepted" in err


# Errors that the user can put right: one line for each.


def test_a_user_error_is_one_line_and_a_value_error():
    assert str(UserError("this\nand that\r\nand more")) == "this and that and more"
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2Jx", "\\x1b[2Jx"),  # would clear the terminal
        ("a\0b\x7f\x9b", "a\\x00b\\x7f\\x9b"),
        ("\u202egpj.exe", "\\u202egpj.exe"),  # would be shown from right to left
        ("\udcff", "\\udcff"),  # no UTF-8: a byte of a path that is none
        ("ein Täßchen Ġ 東京 🙂 \\n", "ein Täßchen Ġ 東京 🙂 \\n"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    """Names in files are anyone's, and a terminal obeys what it is sent."""
    assert str(UserError(f"{text}: no such thing")) == f"{shown}: no such thing"


def test_a_long_error_is_cut_in_the_middle():
    message = str(UserError("begin " + "x" * 100_000 + " end"))
    assert len(message) <= 1000 and " ... " in message
    assert message.startswith("begin xxx") and message.endswith("xxx end")
    assert str(UserError("x" * 1000)) == "x" * 1000


@pytest.mark.parametrize(
    "error, is_memory",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (None, True),
        (RuntimeError("shapes differ"), False),
        (TypeError("alloc"), False),
        (UserError("alloc"), False),
    ],
    ids=repr,
)
def test_memory_that_runs_out_names_what_did_not_fit(error, is_memory):
    with pytest.raises(Exception) as seen, catch_out_of_memory("7 bytes"):
        if error:
            raise error
        torch.empty(2**50)
    if is_memory:
        assert type(seen.value) is UserError
        assert str(seen.value) == "7 bytes do not fit in memory"
    else:
        assert seen.value is error

"""The command line around the loop: options, output, and how a run ends that cannot go on."""

import io
import subprocess
import sys

import pytest
import torch
from conftest import CHECKPOINTS, ROOT

import infer
from checkpoint import UserError
from model import GPT
from tokenizer import load_encoding


def test_importing_does_nothing_and_loads_nothing_heavy():
    heavy = "{'transformers', 'pandas', 'huggingface_hub', 'tokenizers'}"
    code = f"import sys, infer; sys.exit(bool({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_device_that_is_named_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [infer.pick_device(name) for name in ("auto", "cpu", "mps", "cuda")] == ["cuda", "cpu", "mps", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert infer.pick_device("auto") == "mps"
    with pytest.raises(UserError, match="--device cuda: not on this machine, which has mps, cpu"):
        infer.pick_device("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert infer.pick_device("auto") == "cpu"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "gpt5"], "unknown model 'gpt5'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--prompt", "caf\udce9"], r"--prompt 'caf\udce9': not UTF-8 text"),
    ],
)
def test_bad_input_is_one_line(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "error, code, words",
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "do not fit in memory\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "do not fit in memory\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), 2, "in memory\n"),
        (UserError("no such thing"), 2, "no such thing\n"),
    ],
)
def test_how_a_run_ends(cli, monkeypatch, error, code, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(GPT, "from_pretrained", fail)
    ended, out, err = cli("--prompt", "x")
    assert ended == code and out == "" and err.endswith(words) and err.count("\n") == (code == 2)


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), ValueError("another one")])
def test_our_own_mistakes_are_not_hidden(cli, monkeypatch, error):
    monkeypatch.setattr(infer, "load_encoding", lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        cli()


def test_nobody_reads_the_output(cli, monkeypatch):
    """The exit code of a program that SIGPIPE ended, and not a word; `python infer.py ... | head -1`."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return file.fileno()

    with open("/dev/null", "w") as file:
        monkeypatch.setattr(sys, "stdout", Closed())
        with pytest.raises(SystemExit) as ended:
            infer.main(["--prompt", "Once", "--device", "cpu"])
    assert ended.value.code == 141


@pytest.fixture
def encoding():
    return load_encoding(CHECKPOINTS / "stories", 4096)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets, instead of real ones."""
    now = [0.0]
    monkeypatch.setattr(infer.time, "perf_counter", lambda: now[0])
    return now


def byte_tokens(encoding, text):
    """One token for each byte."""
    return [encoding.encode_single_token(bytes([byte])) for byte in text.encode()]


def test_one_text_is_shown_as_it_comes_and_several_at_the_end(capsys, encoding):
    (a,) = encoding.encode(" a")
    with infer.Output(["One"], encoding) as output:
        output.add(0, a)
        output.end_step()
        assert capsys.readouterr().out == "One a"
        output.add(0, a)
        output.end_step()
        assert capsys.readouterr().out == " a"
    assert capsys.readouterr().out == "\n"
    with infer.Output(["One", "Two"], encoding) as output:
        for row in (1, 0, 1):
            output.add(row, a)
        output.end_step()
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == "One a\n" + "-" * 40 + "\nTwo a a\n"


def test_the_text_is_out_before_the_statistics(monkeypatch, encoding):
    """Also where both go to one file: stdout holds back what is not flushed, stderr does not."""
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Log(both)))
    monkeypatch.setattr(sys, "stderr", both)
    with infer.Output(["One", "Two"], encoding) as output:
        output.add(0, *encoding.encode(" a"))
        output.end_step()
    assert both.getvalue().startswith("One a\n" + "-" * 40 + "\nTwo\n1 tokens")


class Log(io.RawIOBase):
    """A file that writes into another one's text."""

    def __init__(self, text: io.StringIO):
        self.text = text

    def writable(self):
        return True

    def write(self, data):
        return self.text.write(bytes(data).decode())


def test_each_text_completes_its_own_characters(capsys, encoding):
    first, second = byte_tokens(encoding, "é")
    with infer.Output(["", ""], encoding) as output:
        for row, token in ((0, first), (1, first), (0, second), (1, second)):
            output.add(row, token)
        output.end_step()
    assert capsys.readouterr().out == "é\n" + "-" * 40 + "\né\n"


def test_statistics_count_tokens_and_time_steps(capsys, encoding, clock):
    with infer.Output(["", ""], encoding) as output:
        for seconds in (0.5, 1.0, 3.0):
            clock[0] = seconds
            output.add(0, 5)
            output.add(1, 5)
            output.end_step()
    assert capsys.readouterr().err == "6 tokens, 2.0 tokens/s, the first after 0.500 s\n"


def test_an_interrupted_run_keeps_what_it_has(capsys, encoding, clock):
    with pytest.raises(KeyboardInterrupt), infer.Output(["One", "Two"], encoding) as output:
        output.add(0, *encoding.encode(" a"))
        clock[0] = 2.0
        output.end_step()
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    assert out == "One a\n" + "-" * 40 + "\nTwo\n"
    assert err == "1 tokens, 0.5 tokens/s, the first after 2.000 s\n"


def test_an_error_before_the_first_token_prints_nothing(capsys, encoding):
    with pytest.raises(UserError), infer.Output(["One"], encoding):
        raise UserError("no")
    assert capsys.readouterr() == ("", "")


def test_without_tokens_the_prompt_is_all(capsys, encoding):
    with infer.Output(["One"], encoding):
        pass
    assert capsys.readouterr() == ("One\n", "")

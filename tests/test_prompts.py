"""Several prompts on the command line: repeated options, a file with one in each line."""

from types import SimpleNamespace

import pytest
from conftest import is_one_line, refused

import infer
from command_line.options import read_prompts


@pytest.fixture
def prompts(cli, monkeypatch, tiny_checkpoint):
    """A function that runs `infer.py` with these arguments and gives the prompts that it read."""

    def run(*args):
        monkeypatch.setattr(infer, "generate", lambda *args, **options: iter(()))
        code, out, _ = cli("--model", tiny_checkpoint, *args)
        assert code == 0
        return out.removesuffix("\n").split("\n" + "-" * 40 + "\n")

    return run


def test_options_come_first_then_the_lines_of_the_file(prompts, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffTom and\n\n caf\u00e9\fone line\n".encode())  # with a byte-order mark
    lines = ["Tom and", " café\fone line"]
    both = ("--prompt", "Once", "--prompt", "Lily")
    assert prompts(*both) == ["Once", "Lily"]
    assert prompts("--prompt-file", file) == lines
    assert prompts("--prompt-file", file, "--prompt", "Once") == ["Once", *lines]
    assert prompts() == [""]
    samples = prompts(*both, "--num-samples", 2, "--temperature", 1)
    assert samples == ["Once", "Once", "Lily", "Lily"]


@pytest.mark.parametrize(
    "content, complaint",
    [(None, "No such file"), (b"", "empty"), (b"\n\n", "empty"), (b"caf\xe9", "not UTF-8")],
)
def test_a_bad_prompt_file_is_one_line(cli, tmp_path, content, complaint):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    assert is_one_line(cli("--prompt-file", file), str(file), complaint)


def test_as_many_texts_as_are_allowed():
    args = SimpleNamespace(prompt=["a", "b"], prompt_file=None, num_samples=2**15)
    assert len(read_prompts(args)) == 2**16
    args.num_samples += 1
    words = "2 prompts x --num-samples 32769: at most 65536 sequences are allowed"
    assert refused(read_prompts, args) == words

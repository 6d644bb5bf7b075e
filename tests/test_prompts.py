"""Several prompts on the command line: repeated options, a file with one in each line."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def prompts(cli, monkeypatch, tiny_checkpoint):
    """A function that runs `infer.py` with these arguments and gives the prompts that it read."""
    import infer

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
    assert prompts("--prompt", "Once", "--prompt", "Lily") == ["Once", "Lily"]
    assert prompts("--prompt-file", file) == lines
    assert prompts("--prompt-file", file, "--prompt", "Once") == ["Once", *lines]
    assert prompts() == [""]


def test_samples_of_a_prompt_stand_together(prompts):
    args = ("--prompt", "Once", "--prompt", "Lily", "--num-samples", 2, "--temperature", 1)
    assert prompts(*args) == ["Once", "Once", "Lily", "Lily"]


@pytest.mark.parametrize(
    "content, complaint",
    [(None, "No such file"), (b"", "empty"), (b"\n\n", "empty"), (b"caf\xe9", "not UTF-8")],
)
def test_a_bad_prompt_file_is_one_line(cli, tmp_path, content, complaint):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    code, out, err = cli("--prompt-file", file)
    assert (code, out) == (2, "")
    assert str(file) in err and complaint in err and err.count("\n") == 1


def test_as_many_texts_as_are_allowed():
    from command_line import read_prompts

    args = SimpleNamespace(prompt=["a", "b"], prompt_file=None, num_samples=2**15)
    assert len(read_prompts(args)) == 2**16


def test_too_many_texts_are_one_line(cli):
    many = ("--num-samples", 40000, "--temperature", 1)
    code, out, err = cli("--prompt", "a", "--prompt", "b", *many)
    assert (code, out) == (2, "")
    assert "2 prompts x --num-samples 40000: at most 65536 texts at once" in err
    assert err.count("\n") == 1

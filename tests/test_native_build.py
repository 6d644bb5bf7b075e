"""What native/build.py compiles, when, and which files it loads."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT


def files(build) -> list:
    return sorted(build.cache_directory().iterdir())


@pytest.fixture
def compilations(fresh, monkeypatch):
    """A list to which each run of the compiler that makes code adds its command."""
    commands, call = [], fresh.call
    monkeypatch.setattr(fresh, "call", lambda command: ("-c" in command and commands.append(command)) or call(command))
    return commands


def test_it_is_compiled_once(fresh, compilations, monkeypatch):
    library = fresh.load()
    fresh.load.cache_clear()
    fresh.load()  # another process
    assert len(compilations) == 1 and len(files(fresh)) == 1 and library.int8_linear
    for change in ({"CFLAGS": "-DX"}, {}):
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        fresh.load.cache_clear()
        fresh.load(None if change else ("-O1",))  # other flags, or another processor
    assert len(compilations) == 3 and len(files(fresh)) == 3


def test_other_flags_are_other_code(fresh, compilations, monkeypatch):
    fresh.load()
    monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-fno-inline"))  # which no predefined macro shows
    fresh.load.cache_clear()
    fresh.load()
    assert len(compilations) == 2


def test_the_directory_is_for_this_user_alone(fresh, capsys):
    before = os.umask(0)  # what others may do is not forbidden by default
    try:
        fresh.load()
    finally:
        os.umask(before)
    assert fresh.cache_directory().stat().st_mode & 0o777 == 0o700 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"CC": "gcc 'x"}, "CC or .CFLAGS: No closing quotation"),
        ({"CFLAGS": "-DX='a"}, "CC or .CFLAGS: No closing quotation"),
        ({"CC": "true"}, "gpt.c cannot be compiled: "),
        ({"CC": "no-such-compiler"}, "cannot be run: No such file"),
    ],
)
def test_what_cannot_compile_is_one_line(fresh, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fresh.BuildError, match=words):
        fresh.load()


def test_no_compiler_is_the_systems(fresh, monkeypatch):
    monkeypatch.setenv("CC", "  ")
    assert fresh.load().int8_linear


def test_fast_math_is_not_taken(fresh, compilations, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-ffast-math")
    fresh.load()
    (command,) = compilations
    assert command.index("-ffast-math") < command.index("-fno-fast-math")
    assert torch.tensor(1e-40) + 0 > 0  # the processor still computes with such numbers


def test_another_source_is_other_code(fresh, compilations):
    fresh.load()
    fresh.SOURCE.write_text(fresh.SOURCE.read_text() + "int more;\n")
    fresh.load.cache_clear()
    fresh.load()
    assert len(compilations) == 2


@pytest.mark.parametrize("harm", ["cut", "foreign bytes", 0o720, 0o702, "wrong name"])
def test_a_file_that_this_user_did_not_compile_is_not_loaded(fresh, compilations, monkeypatch, harm):
    fresh.load()
    (file,) = files(fresh)
    whole = file.read_bytes()
    fresh.load.cache_clear()
    if isinstance(harm, int):
        file.chmod(harm)  # others can write to it
    elif harm != "wrong name":
        file.unlink()  # not written in place: this process has it loaded
        file.write_bytes(whole[:1000] if harm == "cut" else whole + b"x")
        file.chmod(0o700)
    else:
        file.rename(file.with_name(file.name.replace("-", "-0", 1)))
    opened, open_library = [], fresh.open_library
    monkeypatch.setattr(fresh, "open_library", lambda path: opened.append(path.read_bytes()) or open_library(path))
    fresh.load()
    assert len(compilations) == 2 and opened == [whole]


def test_a_file_of_another_user_is_not_loaded(fresh, compilations, monkeypatch):
    fresh.load()
    me = os.getuid()
    fresh.load.cache_clear()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    fresh.load()
    assert len(compilations) == 2


@pytest.mark.parametrize("problem", ["not a directory", 0o770, 0o707, "no home"])
def test_without_a_directory_it_is_compiled_in_each_run(fresh, compilations, monkeypatch, capsys, tmp_path, problem):
    if problem == "not a directory":
        (tmp_path / "cache").write_text("")
    elif isinstance(problem, int):
        fresh.cache_directory().mkdir(parents=True)
        fresh.cache_directory().chmod(problem)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(fresh.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    for _ in range(2):
        fresh.load.cache_clear()
        assert fresh.load().int8_linear
        assert capsys.readouterr().err.startswith("note: gpt.c is compiled in each run: ")
    assert len(compilations) == 2


def test_two_processes_compile_at_once(fresh):
    code = "import sys; from native import build; build.SOURCE = build.Path(sys.argv[1]); print(build.kernel())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(fresh.SOURCE)], cwd=ROOT, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    results = [process.communicate() for process in processes]
    assert results[0] == results[1] == (fresh.kernel() + "\n", "") and len(files(fresh)) == 1


def test_an_error_of_the_compiler_is_one_line(fresh):
    fresh.SOURCE.write_text('#warning "not this line"\nint broken(\n')
    with pytest.raises(fresh.BuildError, match="^the C compiler cc failed: .*error: expected"):
        fresh.load()
    assert files(fresh) == []


def test_a_compiler_without_openmp_makes_code_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "SOURCE", fresh.Path(fresh.__file__).with_name("gpt.c"))
    monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-O0"))  # in a second instead of four
    call = fresh.call

    def without(command):
        if "-fopenmp" in command:
            raise fresh.BuildError("no OpenMP here")
        return call(command)

    monkeypatch.setattr(fresh, "call", without)
    assert fresh.kernel() in [f"{name}, one thread" for name in ("AVX-512 VNNI", "AVX2", "NEON", "plain C")]

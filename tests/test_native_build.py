"""What native/build.py compiles, when, and which files it loads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, record

ONCE = "note: gpt.c is compiled for this processor, once\n"
EACH_RUN = "note: gpt.c is compiled in each run: "


def files(build) -> list:
    return sorted(build.cache_directory().iterdir())


def script(file, *lines) -> str:
    """Write a program that runs these lines of shell, such as a compiler's."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def compilations(fresh, monkeypatch):
    """A list to which each run of the compiler that makes code adds its command."""
    commands = []
    call = fresh.call

    def recorded(command):
        if "-c" in command:
            commands.append(command)
        return call(command)

    monkeypatch.setattr(fresh, "call", recorded)
    return commands


def test_it_is_compiled_once(fresh, compilations, capsys):
    library = fresh.load()
    assert library.linear and capsys.readouterr().err == ONCE
    fresh.load.cache_clear()
    fresh.load()  # another process
    assert len(compilations) == 1 and len(files(fresh)) == 1 and capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", ["CFLAGS", "LDFLAGS", "target", "source", "our flags"])
def test_other_flags_or_lines_are_other_code(fresh, compilations, monkeypatch, variable):
    fresh.load()
    fresh.load.cache_clear()
    if variable == "our flags":  # one that no predefined macro shows
        monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-fno-inline"))
    elif variable == "source":
        fresh.SOURCE.write_text(fresh.SOURCE.read_text() + "int more;\n")
    elif variable != "target":
        monkeypatch.setenv(variable, "-DX" if variable == "CFLAGS" else "-Wl,-O1")
    fresh.load(("-O1",) if variable == "target" else None)
    assert len(compilations) == 2 and len(files(fresh)) == 2


def test_the_directory_is_for_this_user_alone(fresh, capsys):
    before = os.umask(0)  # what others may do is not forbidden by default
    try:
        fresh.load()
    finally:
        os.umask(before)
    assert fresh.cache_directory().stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ONCE
    fresh.load.cache_clear()
    fresh.load()  # the file is for this user alone, too, or it would be compiled anew
    assert capsys.readouterr().err == ""


def test_an_empty_variable_is_no_directory(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(fresh.Path, "home", lambda: tmp_path / "home")
    assert fresh.load().linear
    assert len(list((tmp_path / "home" / ".cache" / "gpt-native").iterdir())) == 1


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"CC": "gcc 'x"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"CFLAGS": "-DX='a"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"LDFLAGS": "'"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"CC": "true"}, "the C compiler wrote no file"),
        ({"CC": "no-such-compiler"}, "cannot be run: No such file"),
        ({"CFLAGS": "-Dkernel=other"}, "the compiled gpt.c cannot be loaded: .*kernel"),
    ],
)
def test_what_cannot_compile_is_one_line(fresh, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fresh.BuildError, match=words) as raised:
        fresh.load()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name, value", [("CC", "  "), ("CFLAGS", "-fvisibility=hidden")])
def test_variables_that_change_nothing(fresh, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert fresh.load().linear


def test_fast_math_is_not_taken(fresh, compilations, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-ffast-math")
    fresh.load()
    (command,) = compilations
    assert command.index("-ffast-math") < command.index("-fno-fast-math")
    assert torch.tensor(1e-40) + 0 > 0  # the processor still computes with such numbers


@pytest.mark.parametrize("harm", ["cut", "foreign bytes", 0o720, 0o702, "another user", "a name"])
def test_a_file_that_this_user_did_not_compile_is_not_loaded(
    fresh, compilations, monkeypatch, harm
):
    fresh.load()
    (file,) = files(fresh)
    whole = file.read_bytes()
    fresh.load.cache_clear()
    if isinstance(harm, int):
        file.chmod(harm)  # others can write to it
    elif harm == "another user":
        monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    elif harm != "a name":
        file.unlink()  # not written in place: this process has it loaded
        file.write_bytes(whole[:1000] if harm == "cut" else whole + b"x")
        file.chmod(0o700)
    else:
        file.rename(file.with_name(file.name.replace("-", "-0", 1)))
    opened = record(monkeypatch, fresh, "open_library", Path.read_bytes)
    fresh.load()
    assert len(compilations) == 2 and opened == [whole]


@pytest.mark.parametrize("problem", ["not a directory", 0o770, 0o707, "no home", "full"])
def test_without_a_directory_it_is_compiled_in_each_run(
    fresh, compilations, monkeypatch, capsys, tmp_path, problem
):
    def refuse(*args, **options):
        raise RuntimeError("no home directory") if problem == "no home" else OSError("it is full")

    if problem == "not a directory":
        (tmp_path / "cache").write_text("")
    elif isinstance(problem, int):
        fresh.cache_directory().mkdir(parents=True)
        fresh.cache_directory().chmod(problem)
    elif problem == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(fresh.Path, "home", refuse)
    else:
        monkeypatch.setattr(fresh.tempfile, "TemporaryFile", refuse)
    for run in (1, 2):
        fresh.load.cache_clear()
        assert fresh.load().linear
        assert capsys.readouterr().err.startswith(EACH_RUN)
        assert len(compilations) == run  # and not twice, for the directory and without it


def test_a_file_that_cannot_be_kept_is_not_compiled_twice(fresh, compilations, monkeypatch, capsys):
    def refuse(*args):
        raise PermissionError("no names here")

    monkeypatch.setattr(fresh.Path, "replace", refuse)
    assert fresh.load().linear and len(compilations) == 1 and files(fresh) == []
    assert capsys.readouterr().err == f"{ONCE}{EACH_RUN}no names here\n"


def test_a_pass_takes_what_is_compiled_already(fresh, compilations, tmp_path):
    from native.step import NativeRunner

    (tmp_path / "cache").write_text("")  # no directory
    assert fresh.kernel() == "small"
    with pytest.raises(AttributeError, match="work_floats"):  # which small.c lacks
        NativeRunner(SimpleNamespace(config=None))
    assert len(compilations) == 1


# What another process runs: build.py by itself, so that it imports no torch.
CODE = """
import sys
sys.path.insert(0, "native")
import build
build.SOURCE = build.Path(sys.argv[1])
print(build.kernel())
"""


def start(fresh) -> subprocess.Popen:
    command = [sys.executable, "-c", CODE, str(fresh.SOURCE)]
    return subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True)


def test_two_processes_compile_at_once(fresh, monkeypatch, tmp_path):
    compiler = script(tmp_path / "slow-cc", "sleep 0.3", 'exec cc "$@"')
    monkeypatch.setenv("CC", compiler)
    processes = [start(fresh), start(fresh)]
    results = [process.communicate() for process in processes]
    assert [output for output, _ in results] == ["small\n"] * 2 and len(files(fresh)) == 1
    assert {errors for _, errors in results} <= {ONCE, ""}  # one may have been late


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(int(pid), 0)
        about = Path("/proc", pid.strip(), "stat")
        return not Path("/proc").exists() or " Z " not in about.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def hanging(monkeypatch, tmp_path):
    """A compiler that knows its macros but never ends its work, and the file with its process."""
    pid = tmp_path / "pid"
    macros = 'case "$*" in *-dM*) exec cc "$@";; esac'
    lines = (macros, "sleep 1000 &", f"echo $! > {pid}", "wait")
    monkeypatch.setenv("CC", script(tmp_path / "hanging-cc", *lines))
    return pid


def test_a_compiler_that_hangs_is_ended(fresh, hanging, monkeypatch):
    monkeypatch.setattr(fresh, "SECONDS", 1)
    with pytest.raises(fresh.BuildError, match="hanging-cc takes more than 1 s"):
        fresh.load()
    wait_until(lambda: not alive(hanging.read_text()))
    assert files(fresh) == []


def test_a_process_that_is_ended_while_it_compiles_leaves_nothing(fresh, hanging):
    process = start(fresh)
    wait_until(lambda: hanging.exists() and hanging.read_text())
    assert len(files(fresh)) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM and files(fresh) == []
    wait_until(lambda: not alive(hanging.read_text()))


def test_a_signal_while_a_compiler_is_started_ends_it_too(fresh, hanging, monkeypatch):
    start = subprocess.Popen

    def started(command, **options):
        process = start(command, **options)
        if "-dM" not in command:
            wait_until(lambda: hanging.exists() and hanging.read_text())
            assert callable(signal.getsignal(signal.SIGTERM))
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(fresh.subprocess, "Popen", started)
    with pytest.raises(SystemExit):
        fresh.load()
    wait_until(lambda: not alive(hanging.read_text()))
    assert files(fresh) == []


def test_another_way_to_end_is_left_alone(fresh, monkeypatch):
    def own(*args):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        fresh.load()
        assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        monkeypatch.setenv("CFLAGS", "-DX")
        fresh.load.cache_clear()
        fresh.load()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_of_the_compiler_is_one_line(fresh):
    fresh.SOURCE.write_text('#warning "not this line"\nint broken(\n')
    with pytest.raises(fresh.BuildError, match="^the C compiler cc failed: .*error: expected"):
        fresh.load()
    assert files(fresh) == []


def test_errors_are_in_english(fresh, monkeypatch, tmp_path):
    words = 'if [ "$LC_ALL" = C ]; then echo "error: it is broken"; else echo "Fehler"; fi >&2'
    monkeypatch.setenv("CC", script(tmp_path / "local-cc", words, "exit 1"))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(fresh.BuildError, match="local-cc failed: error: it is broken$"):
        fresh.load()


def test_without_a_compiler_the_package_ziglang_is_one(fresh, compilations, monkeypatch, tmp_path):
    which = fresh.shutil.which
    monkeypatch.setattr(fresh.shutil, "which", lambda name: None if name == "cc" else which(name))
    package = tmp_path / "packages" / "ziglang"  # one that passes everything on
    package.mkdir(parents=True)
    call = "import os, sys\nos.execvp(sys.argv[1], sys.argv[1:])\n"
    (package / "__main__.py").write_text(call)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert fresh.load().linear
    assert all(command[1:4] == ["-m", "ziglang", "cc"] for command in compilations)
    fresh.SOURCE.write_text("int broken(\n")
    fresh.load.cache_clear()
    with pytest.raises(fresh.BuildError, match="^the C compiler ziglang failed: .*error: expected"):
        fresh.load()


def test_of_several_openmp_libraries_one_is_linked(fresh, monkeypatch, tmp_path):
    """That of GCC, if torch has it: with two, two pools of threads would share the cores."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libiomp5.so", "libgomp-1.so.1", "libtorch.so"):
        (libraries / name).write_text("")
    torch_package = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(fresh.importlib.util, "find_spec", lambda name: torch_package)
    assert fresh.openmp() == [str(libraries / "libgomp-1.so.1")]
    (libraries / "libgomp-1.so.1").unlink()
    assert fresh.openmp() == [str(libraries / "libiomp5.so")]


def test_without_torchs_openmp_the_code_is_for_one_thread(fresh, monkeypatch):
    """It is not left to what this process may have loaded."""
    several = "#include <omp.h>\nint linear(void) { return omp_get_max_threads(); }"
    lines = ("#ifdef _OPENMP", several, 'const char kernel[64] = "several";', "#else")
    lines += ('const char kernel[64] = "one";', "#endif", "")
    fresh.SOURCE.write_text("\n".join(lines))
    monkeypatch.setattr(fresh, "openmp", lambda: [])
    assert fresh.kernel() == "one"


def test_a_compiler_without_openmp_makes_code_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "SOURCE", fresh.Path(fresh.__file__).with_name("gpt.c"))
    monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-O0"))  # a second less
    call = fresh.call

    def without(command):
        if "-fopenmp" in command:
            raise fresh.BuildError("no OpenMP here")
        return call(command)

    monkeypatch.setattr(fresh, "call", without)
    kernels = [f"{name}, one thread" for name in ("AVX-512 VNNI", "AVX2", "NEON", "plain C")]
    assert fresh.kernel() in kernels

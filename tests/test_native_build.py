"""C is compiled once, with exact arithmetic, and kept safely; torch computes where it is not."""

import ctypes
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, PLAIN, record
from natives import alive, files, hanging_compiler, native, script, start, wait_until

from native import build

KERNELS = ("AVX-512 VNNI", "AVX-512", "AVX-VNNI", "AVX2", "NEON", "plain C")
ONCE = "note: gpt.c is compiled for this processor, once\n"
EACH_RUN = "note: gpt.c is compiled in each run: "


@pytest.mark.parametrize("target", [None, PLAIN], ids=str)
def test_it_says_what_it_is_compiled_for(tiny, target):
    name = (ctypes.c_char * 64).in_dll(build.load(target), "kernel").value.decode()
    assert name in (KERNELS if target is None else ["plain C"])
    library = build.load() if target is None else build.load(target)
    assert native(tiny(dtype=torch.float32), target).runner.library is library
    assert build.load() is not build.load(PLAIN)


def test_it_is_compiled_once(fresh, compilations, capsys):
    assert fresh.kernel() == "small" and fresh.load().linear() == 1
    assert capsys.readouterr().err == ONCE
    fresh.load.cache_clear()
    fresh.load()  # another process
    assert len(compilations) == 1 and len(files(fresh)) == 1 and capsys.readouterr().err == ""


KEYED = ["CFLAGS", "LDFLAGS", "target", "source", "our flags", "macros", "OpenMP"]


@pytest.mark.parametrize("variable", KEYED)
def test_other_flags_or_lines_are_other_code(fresh, compilations, monkeypatch, variable):
    fresh.load()
    fresh.load.cache_clear()
    if variable == "our flags":  # one that no predefined macro shows
        monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-fno-inline"))
    elif variable == "macros":  # another version of the compiler, or another processor
        found = fresh.predefined_macros
        monkeypatch.setattr(fresh, "predefined_macros", lambda *about: (found(*about)[0], b"other"))
    elif variable == "OpenMP":
        monkeypatch.setattr(fresh, "torch_openmp", lambda: [])
    elif variable == "source":
        fresh.SOURCE.write_text(fresh.SOURCE.read_text() + "int more;\n")
    elif variable != "target":
        monkeypatch.setenv(variable, "-DX" if variable == "CFLAGS" else "-Wl,-O1")
    fresh.load(("-O1",) if variable == "target" else None)
    assert len(compilations) == 2 and len(files(fresh)) == 2


def test_all_c_files_and_their_headers_are_one_library(fresh):
    header = fresh.SOURCE.with_name("part.h")
    part = fresh.SOURCE.with_name("part.c")
    for number, offset, expected in ((1, "", 1), (2, "", 2), (2, " + 1", 3)):
        header.write_text(f"enum {{ PART = {number} }};\n")
        part.write_text(f'#include "part.h"\nint part(void) {{ return PART{offset}; }}\n')
        fresh.load.cache_clear()
        assert fresh.load().part() == expected and fresh.load().linear() == 1


# Where it is kept


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


@pytest.mark.parametrize(
    "problem", ["not a directory", 0o770, 0o707, "no home", "read-only", "full"]
)
def test_without_a_directory_it_is_compiled_in_each_run(
    fresh, compilations, monkeypatch, capsys, tmp_path, problem
):
    def refuse(*args, **options):
        raise RuntimeError("no home") if problem == "no home" else OSError("it is read-only")

    if problem == "not a directory":
        (tmp_path / "cache").write_text("")
    elif isinstance(problem, int):
        fresh.cache_directory().mkdir(parents=True)
        fresh.cache_directory().chmod(problem)
    elif problem == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(fresh.Path, "home", refuse)
    elif problem == "read-only":
        monkeypatch.setattr(fresh.tempfile, "TemporaryFile", refuse)
    else:
        monkeypatch.setattr(fresh.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))
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


def test_two_processes_compile_at_once(fresh, monkeypatch, tmp_path):
    compiler = script(tmp_path / "slow-cc", "sleep 0.3", 'exec cc "$@"')
    monkeypatch.setenv("CC", compiler)
    processes = [start(fresh), start(fresh)]
    results = [process.communicate() for process in processes]
    assert [output for output, _ in results] == ["small\n"] * 2 and len(files(fresh)) == 1
    assert {errors for _, errors in results} <= {ONCE, ""}  # one may have been late


# Compilers


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"CC": "gcc 'x"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"CFLAGS": "-DX='a"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"LDFLAGS": "'"}, "CC, .CFLAGS or .LDFLAGS: No closing quotation"),
        ({"CC": "true"}, "the C compiler wrote no file"),
        ({"CC": "no-such-compiler"}, "cannot be run: No such file"),
        ({"CFLAGS": "-Dkernel=other"}, "the compiled gpt.c cannot be loaded: .*kernel"),
        ({}, "^the C compiler cc failed: .*error: expected"),
    ],
)
def test_what_cannot_compile_is_one_line_and_leaves_no_file(fresh, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not variables:
        fresh.SOURCE.write_text('#warning "not this line"\nint broken(\n')
    with pytest.raises(fresh.BuildError, match=words) as raised:
        fresh.load()
    assert "\n" not in str(raised.value) and (variables or files(fresh) == [])


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


def test_errors_are_in_english(fresh, monkeypatch, tmp_path):
    words = 'if [ "$LC_ALL" = C ]; then echo "error: it is broken"; else echo "Fehler"; fi >&2'
    monkeypatch.setenv("CC", script(tmp_path / "local-cc", words, "exit 1"))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(fresh.BuildError, match="local-cc failed: error: it is broken$"):
        fresh.load()


def test_flags_that_the_compiler_does_not_know_are_left_out(
    fresh, compilations, monkeypatch, tmp_path
):
    """Each compiler has its own: one on ARM may take -mcpu=native alone."""
    for unknown in ("-mprefer", "-march", "-m"):
        refuse = f'case " $*" in *" {unknown}"*) echo "error: what?" >&2; exit 1;; esac'
        monkeypatch.setenv("CC", script(tmp_path / f"old{unknown}", refuse, 'exec cc "$@"'))
        fresh.load.cache_clear()
        assert fresh.load().linear
        assert ("-march=native" in compilations[-1]) == (unknown == "-mprefer")
    assert len(compilations) == 3


def only_ziglang(fresh, monkeypatch, tmp_path, program: str) -> None:
    """Let there be no cc, and a package ziglang that runs this program."""
    which = fresh.shutil.which
    monkeypatch.setattr(fresh.shutil, "which", lambda name: None if name == "cc" else which(name))
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(program)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_without_a_compiler_the_package_ziglang_is_one(fresh, compilations, monkeypatch, tmp_path):
    pass_on = "import os, sys\nos.execvp(sys.argv[1], sys.argv[1:])\n"
    only_ziglang(fresh, monkeypatch, tmp_path, pass_on)
    assert fresh.load().linear
    assert all(command[1:4] == ["-m", "ziglang", "cc"] for command in compilations)
    fresh.SOURCE.write_text("int broken(\n")
    fresh.load.cache_clear()
    with pytest.raises(fresh.BuildError, match="^the C compiler ziglang failed: .*error: expected"):
        fresh.load()


def test_a_compiler_that_hangs_is_named_and_ended(fresh, monkeypatch, tmp_path):
    hanging = hanging_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(fresh, "TIMEOUT", 1)
    with pytest.raises(fresh.BuildError, match="hanging-cc takes more than 1 s"):
        fresh.load()
    wait_until(lambda: not alive(hanging.read_text()))
    assert files(fresh) == []
    monkeypatch.delenv("CC")
    only_ziglang(fresh, monkeypatch, tmp_path, "import time\ntime.sleep(1000)\n")
    with pytest.raises(fresh.BuildError, match="^the C compiler ziglang takes more than 1 s"):
        fresh.load()


# OpenMP


def test_of_several_openmp_libraries_one_is_linked(fresh, monkeypatch, tmp_path):
    """GCC's is linked, if torch has it: with two, two pools of threads would share the cores."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libiomp5.so", "libgomp-1.so.1", "libtorch.so"):
        (libraries / name).write_text("")
    torch_package = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(fresh.importlib.util, "find_spec", lambda name: torch_package)
    assert fresh.torch_openmp() == [str(libraries / "libgomp-1.so.1")]
    (libraries / "libgomp-1.so.1").unlink()
    assert fresh.torch_openmp() == [str(libraries / "libiomp5.so")]


def test_without_torchs_openmp_the_code_is_for_one_thread(fresh, monkeypatch):
    """It is not left to what this process may have loaded."""
    several = "#include <omp.h>\nint linear(void) { return omp_get_max_threads(); }"
    lines = ("#ifdef _OPENMP", several, 'const char kernel[64] = "several";', "#else")
    lines += ('const char kernel[64] = "one";', "#endif", "")
    fresh.SOURCE.write_text("\n".join(lines))
    monkeypatch.setattr(fresh, "torch_openmp", lambda: [])
    assert fresh.kernel() == "one"


def test_a_compiler_without_openmp_makes_code_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "SOURCE", fresh.Path(fresh.__file__).with_name("gpt.c"))
    monkeypatch.setattr(fresh, "FLAGS", (*fresh.FLAGS, "-O0"))  # a second less
    call = fresh.run_compiler

    def without(command):
        if "-fopenmp" in command:
            raise fresh.BuildError("no OpenMP here")
        return call(command)

    monkeypatch.setattr(fresh, "run_compiler", without)
    assert fresh.kernel() in [f"{name}, one thread" for name in KERNELS]


# Signals


@pytest.fixture
def hanging(monkeypatch, tmp_path):
    return hanging_compiler(monkeypatch, tmp_path)


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

    before = signal.getsignal(signal.SIGTERM)
    try:
        for number, handler in enumerate((own, signal.SIG_DFL)):
            signal.signal(signal.SIGTERM, handler)
            monkeypatch.setenv("CFLAGS", f"-DX={number}")
            fresh.load.cache_clear()
            fresh.load()
            assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)


# On the command line

ARGS = ("--prompt", "Once upon a time", "--max-new-tokens", 12)
DRAFT = ("--model", CHECKPOINTS / "stories-draft", *ARGS)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_without_compiled_code_torch_computes(fresh, cli, monkeypatch, backend):
    expected = cli(*DRAFT, "--backend", "torch")[:2]
    monkeypatch.setenv("CC", "false")
    find_spec = fresh.importlib.util.find_spec
    for note in (
        "the C compiler false failed: no reason given",
        "there is no C compiler; `pip install ziglang` installs one, for one thread",
    ):
        code, out, err = cli(*DRAFT, "--backend", backend)
        assert (code, out) == expected and err.count("\n") == 2
        assert err.splitlines()[0] == f"note: {note}; torch computes instead"
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(fresh.shutil, "which", lambda name: None)
        monkeypatch.setattr(
            fresh.importlib.util, "find_spec", lambda name: name != "ziglang" and find_spec(name)
        )


def test_a_note_says_that_compiling_happens_once(fresh, cli, monkeypatch):
    monkeypatch.setattr("command_line.models.use_native", lambda model: fresh.load())
    notes = [cli(*DRAFT)[2].count(ONCE)]
    fresh.load.cache_clear()  # another process
    notes.append(cli(*DRAFT)[2].count("note"))
    assert notes == [1, 0]


@pytest.mark.parametrize("kernel", ["AVX2", "plain C", "AVX2, one thread"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_note_says_what_is_not_there(cli, monkeypatch, kernel, backend):
    monkeypatch.setattr("command_line.models.kernel", lambda: kernel)
    code, _, err = cli(*DRAFT, "--backend", backend)
    note = f"note: --backend native: a slow build: {kernel}\n"
    noted = kernel != "AVX2" and backend == "native"
    assert code == 0 and err.startswith(note) == noted and err.count("note") == noted

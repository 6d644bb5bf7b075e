"""What is compiled once, where it is kept, and which files are loaded."""

import os
from pathlib import Path

import pytest
from conftest import record
from natives import alive, files, hanging_compiler, script, start, wait_until

ONCE = "note: gpt.c is compiled for this processor, once\n"
EACH_RUN = "note: gpt.c is compiled in each run: "


def test_it_is_compiled_once(fresh, compilations, capsys):
    library = fresh.load()
    assert library.linear and capsys.readouterr().err == ONCE
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
        raise (
            RuntimeError("no home directory")
            if problem == "no home"
            else OSError("it is read-only")
        )

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


def test_a_compiler_that_hangs_is_ended(fresh, monkeypatch, tmp_path):
    hanging = hanging_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(fresh, "TIMEOUT", 1)
    with pytest.raises(fresh.BuildError, match="hanging-cc takes more than 1 s"):
        fresh.load()
    wait_until(lambda: not alive(hanging.read_text()))
    assert files(fresh) == []


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


def test_ziglang_is_named_when_it_hangs(fresh, monkeypatch, tmp_path):
    only_ziglang(fresh, monkeypatch, tmp_path, "import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(fresh, "TIMEOUT", 1)
    with pytest.raises(fresh.BuildError, match="^the C compiler ziglang takes more than 1 s"):
        fresh.load()


def test_still_all_c_files_and_their_headers_are_one_library(fresh):
    header = fresh.SOURCE.with_name("part.h")
    header.write_text("enum { PART = 1 };\n")
    part = fresh.SOURCE.with_name("part.c")
    part.write_text('#include "part.h"\nint part(void) { return PART; }\n')
    assert fresh.load().part() == 1 and fresh.load().linear() == 1
    header.write_text("enum { PART = 2 };\n")
    fresh.load.cache_clear()
    assert fresh.load().part() == 2
    part.write_text('#include "part.h"\nint part(void) { return PART + 1; }\n')
    fresh.load.cache_clear()
    assert fresh.load().part() == 3


def test_a_failure_leaves_no_file(fresh):
    fresh.SOURCE.write_text("int broken(\n")
    with pytest.raises(fresh.BuildError, match="^the C compiler cc failed: .*error: expected"):
        fresh.load()
    assert files(fresh) == []


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

"""C is compiled by the system's compiler, with flags that keep its arithmetic exact."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from conftest import PLAIN, module_with
from natives import script

KERNELS = ("AVX-512 VNNI", "AVX-512", "AVX2", "NEON", "plain C")


@pytest.mark.parametrize("target", [None, PLAIN], ids=str)
def test_it_says_what_it_is_compiled_for(target):
    module_with("native")
    from native import build

    name = (ctypes.c_char * 64).in_dll(build.load(target), "kernel").value.decode()
    assert name in (KERNELS if target is None else ["plain C"])
    assert build.load(target) is build.load(target)


def test_a_small_library_is_compiled_and_called(fresh):
    assert fresh.kernel() == "small" and fresh.load().linear() == 1


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


def test_an_error_of_the_compiler_is_one_line(fresh):
    fresh.SOURCE.write_text('#warning "not this line"\nint broken(\n')
    with pytest.raises(fresh.BuildError, match="^the C compiler cc failed: .*error: expected"):
        fresh.load()


def test_errors_are_in_english(fresh, monkeypatch, tmp_path):
    words = 'if [ "$LC_ALL" = C ]; then echo "error: it is broken"; else echo "Fehler"; fi >&2'
    monkeypatch.setenv("CC", script(tmp_path / "local-cc", words, "exit 1"))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(fresh.BuildError, match="local-cc failed: error: it is broken$"):
        fresh.load()


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

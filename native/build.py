"""Compile gpt.c, and load it."""

import ctypes
import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("gpt.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=default",
    "-fno-semantic-interposition",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
NATIVE = ("-march=native",)  # for this processor


class BuildError(Exception):
    """There is no compiled code. The message is one line."""


@functools.cache
def load(target: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Compile the library and load it. Raises BuildError.

    target: the compiler's flags for another processor than this one.
    The compiler is $CC, or cc. $CFLAGS and $LDFLAGS come before the flags of this file.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        options = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
        # Not $CFLAGS: -ffast-math there would make the whole process round tiny numbers to 0.
        linking = [*compiler, "-O3", *shlex.split(os.environ.get("LDFLAGS", ""))]
    except ValueError as error:  # an unclosed quotation mark
        raise BuildError(f"$CC, $CFLAGS or $LDFLAGS: {error}") from None
    try:
        compiling = [*compiler, *options, *(NATIVE if target is None else target)]
        with tempfile.TemporaryDirectory() as temporary:
            return open_library(compile_into(Path(temporary), compiling, linking))
    except OSError as error:
        raise BuildError(f"gpt.c cannot be compiled: {error}") from None


def openmp() -> list[str]:
    """The path of torch's OpenMP library, or nothing.

    With another library, two pools of threads would compete for the cores.
    """
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    patterns = ("libgomp*", "libomp*", "libiomp5*")
    return sorted(str(file) for pattern in patterns for file in library.glob(pattern))[:1]


def compile_into(directory: Path, compiling: list[str], linking: list[str]) -> Path:
    """Compile gpt.c into a library. Raises BuildError.

    The library has one thread if the compiler cannot use torch's OpenMP.
    """
    sources = sorted(SOURCE.parent.glob("*.c"))
    objects = {source: str(directory / f"{source.stem}.o") for source in sources}
    library = directory / "gpt.so"
    link = [*linking, "-shared", *objects.values(), "-lm", "-o", str(library)]
    if sys.platform == "linux":
        link.append("-Wl,-z,defs")
    for threads, libraries in ((["-fopenmp"], openmp()), ([], [])):
        try:
            for source, code in objects.items():
                call([*compiling, *threads, "-c", str(source), "-o", code])
            call([*link, *libraries])
            if library.exists():
                return library
            raise BuildError("the C compiler wrote no file")
        except BuildError as error:
            reason = error
    raise reason


def call(command: list[str]) -> bytes:
    """Run a compiler and return its output. Raises BuildError with its first error."""
    name = command[0]
    english = os.environ | {"LC_ALL": "C"}
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=english
        )
    except OSError as error:
        raise BuildError(f"the C compiler {name} cannot be run: {error.strerror}") from None
    output, errors = process.stdout, process.stderr
    if process.returncode:
        lines = errors.decode(errors="replace").splitlines() or ["no reason given"]
        reason = next((line for line in lines if "error:" in line), lines[0])
        raise BuildError(f"the C compiler {name} failed: {reason}")
    return output


def open_library(file: Path) -> ctypes.CDLL:
    """Load a library and check that it is ours. Raises BuildError."""
    try:
        library = ctypes.CDLL(str(file))
        ctypes.c_char.in_dll(library, "kernel")
        return library
    except (OSError, ValueError) as error:  # ValueError: it has no such symbol
        raise BuildError(f"the compiled gpt.c cannot be loaded: {error}") from None


def kernel() -> str:
    """The instruction set of the compiled code, such as "AVX-512 VNNI"."""
    return (ctypes.c_char * 64).in_dll(load(), "kernel").value.decode()

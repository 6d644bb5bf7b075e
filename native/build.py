"""Build of gpt.c: compiled, then loaded."""

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
TARGETS = ("-march=native",)  # for this processor


class BuildError(Exception):
    """A failed build, with a message of one line."""


@functools.cache
def load(target: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Compile the library and load it. Raises BuildError.

    target: compiler flags for a processor other than this one.
    The compiler is $CC or cc. $CFLAGS and $LDFLAGS come before the flags of this file.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        base_flags = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
        # Without $CFLAGS, because linking with -ffast-math would make the whole process flush
        # subnormals to 0.
        link_command = [*compiler, "-O3", *shlex.split(os.environ.get("LDFLAGS", ""))]
    except ValueError as error:  # an unclosed quotation mark
        raise BuildError(f"$CC, $CFLAGS or $LDFLAGS: {error}") from None
    try:
        compile_command = [*compiler, *base_flags, *(TARGETS if target is None else target)]
        with tempfile.TemporaryDirectory() as temporary:
            return open_library(compile_library(Path(temporary), compile_command, link_command))
    except OSError as error:
        raise BuildError(f"gpt.c cannot be compiled: {error}") from None


def torch_openmp() -> list[str]:
    """Return the path of torch's OpenMP library in a list, empty if it has none.

    With another OpenMP library, two thread pools would compete for the cores.
    """
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    patterns = ("libgomp*", "libomp*", "libiomp5*")
    return sorted(str(file) for pattern in patterns for file in library.glob(pattern))[:1]


def compile_library(directory: Path, compile_command: list[str], link_command: list[str]) -> Path:
    """Compile gpt.c into a library. Raises BuildError.

    The library is single-threaded if the compiler cannot use torch's OpenMP.
    """
    sources = sorted(SOURCE.parent.glob("*.c"))
    objects = {source: str(directory / f"{source.stem}.o") for source in sources}
    library = directory / "gpt.so"
    link = [*link_command, "-shared", *objects.values(), "-lm", "-o", str(library)]
    if sys.platform == "linux":
        link.append("-Wl,-z,defs")
    for threads, libraries in ((["-fopenmp"], torch_openmp()), ([], [])):
        try:
            for source, object_file in objects.items():
                run_compiler([*compile_command, *threads, "-c", str(source), "-o", object_file])
            run_compiler([*link, *libraries])
            if library.exists():
                return library
            raise BuildError("the C compiler wrote no file")
        except BuildError as error:
            reason = error
    raise reason


def run_compiler(command: list[str]) -> bytes:
    """Run a compiler and return its output. Raises BuildError with its first error."""
    name = command[0]
    environment = os.environ | {"LC_ALL": "C"}
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment
        )
    except OSError as error:
        raise BuildError(f"the C compiler {name} cannot be run: {error.strerror}") from None
    if process.returncode:
        lines = process.stderr.decode(errors="replace").splitlines() or ["no reason given"]
        reason = next((line for line in lines if "error:" in line), lines[0])
        raise BuildError(f"the C compiler {name} failed: {reason}")
    return process.stdout


def open_library(file: Path) -> ctypes.CDLL:
    """Load a library and check that it exports `kernel`. Raises BuildError."""
    try:
        library = ctypes.CDLL(str(file))
        ctypes.c_char.in_dll(library, "kernel")
        return library
    except (OSError, ValueError) as error:  # ValueError: the symbol is missing
        raise BuildError(f"the compiled gpt.c cannot be loaded: {error}") from None


def kernel() -> str:
    """Return the instruction set of the compiled code, such as "AVX-512 VNNI"."""
    return (ctypes.c_char * 64).in_dll(load(), "kernel").value.decode()

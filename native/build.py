"""Build of gpt.c and draw.c: compiled once per source, compiler and processor, then loaded."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
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
# When gcc tunes for some AMD processors, its code reloads values from memory at each use.
AVX512 = ("-march=native", "-mtune=generic", "-mprefer-vector-width=512")
TARGETS = AVX512, ("-march=native",), ("-mcpu=native",), ()  # the first that the compiler accepts
TIMEOUT = 120  # seconds per run of the compiler


class BuildError(Exception):
    """A failed build, with a message of one line."""


@functools.cache
def load(target: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Load the library, and compile it first if it is not in the cache. Raises BuildError.

    target: compiler flags for a processor other than this one.
    The compiler is $CC, cc, or the one in the Python package ziglang. $CFLAGS and $LDFLAGS come
    before the flags of this file. `key` of the library is a hash of the source, the compiler, its
    flags and the instruction sets. The library is cached in `cache_directory`. If other users can
    write to that directory, each run compiles again.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or default_compiler()
        base_flags = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
        # Without $CFLAGS, because linking with -ffast-math would make the whole process flush
        # subnormals to 0.
        link_command = [*compiler, "-O3", *shlex.split(os.environ.get("LDFLAGS", ""))]
    except ValueError as error:  # an unclosed quotation mark
        raise BuildError(f"$CC, $CFLAGS or $LDFLAGS: {error}") from None
    try:
        flags, macros = predefined_macros(
            [*compiler, *base_flags], TARGETS if target is None else (target,)
        )
        compile_command = [*compiler, *base_flags, *flags]
        commands = repr((compile_command, link_command, torch_openmp())).encode()
        sources = [file.read_bytes() for file in sorted(SOURCE.parent.glob("*.[ch]"))]
        key = hashlib.sha256(b"\0".join([macros, commands, *sources])).hexdigest()
        directory, file = find_cached(key)
        if file is None:
            with exit_on_sigterm(), tempfile.TemporaryDirectory(dir=directory) as temporary:
                file = compile_library(Path(temporary), compile_command, link_command)
                library = open_library(cache_library(file, directory, key) if directory else file)
        else:
            library = open_library(file)
        library.key = key
        return library
    except OSError as error:
        raise BuildError(f"gpt.c cannot be compiled: {error}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"the C compiler {compiler_name(compiler)} takes more than {TIMEOUT} s"
        ) from None


def default_compiler() -> list[str]:
    """Return the command cc, or the C compiler of the Python package ziglang. Raises BuildError."""
    if shutil.which("cc"):
        return ["cc"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise BuildError("there is no C compiler; `pip install ziglang` installs one, for one thread")


def predefined_macros(command: list[str], candidates: tuple) -> tuple[tuple[str, ...], bytes]:
    """Return the first flags that the compiler accepts, and its predefined macros with them.

    The macros identify its version and the enabled instruction sets. Raises BuildError.
    """
    for flags in candidates:
        try:
            return flags, run_compiler([*command, *flags, "-dM", "-E", "-x", "c", os.devnull])
        except BuildError as error:
            reason = error
    raise reason


def find_cached(key: str) -> tuple[Path | None, Path | None]:
    """Return the cache directory and the library in it, each None if it cannot be used.

    The library is named KEY-HASH.so. It is used only if no other user can have written it and its
    bytes have that hash. Otherwise a note on stderr says that it is compiled now.
    """
    try:
        directory = cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(directory):
            raise PermissionError(f"{directory} is not a directory of this user alone")
        for file in directory.glob(f"{key}-*.so"):
            library_hash = hashlib.sha256(file.read_bytes()).hexdigest()
            if is_private(file) and file.stem == f"{key}-{library_hash}":
                return directory, file
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(2**20))  # raises if the directory is read-only or the disk full
        print("note: gpt.c is compiled for this processor, once", file=sys.stderr)
        return directory, None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        print(f"note: gpt.c is compiled in each run: {error}", file=sys.stderr)
        return None, None


def cache_library(library: Path, directory: Path, key: str) -> Path:
    """Move a complete library into the cache, which concurrent processes may do safely."""
    try:
        library.chmod(0o700)
        library_hash = hashlib.sha256(library.read_bytes()).hexdigest()
        return library.replace(directory / f"{key}-{library_hash}.so")
    except OSError as error:
        print(f"note: gpt.c is compiled in each run: {error}", file=sys.stderr)
        return library


def cache_directory() -> Path:
    """Return the project's directory in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-native"


def is_private(path: Path) -> bool:
    """Return whether this user owns a file or directory and no one else can write to it."""
    info = path.stat()
    owner = os.getuid() if hasattr(os, "getuid") else info.st_uid
    return info.st_uid == owner and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def torch_openmp() -> list[str]:
    """Return the path of torch's OpenMP library in a list, empty if it has none.

    With another OpenMP library, two thread pools would compete for the cores.
    """
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    patterns = ("libgomp*", "libomp*", "libiomp5*")
    return sorted(str(file) for pattern in patterns for file in library.glob(pattern))[:1]


def compile_library(directory: Path, compile_command: list[str], link_command: list[str]) -> Path:
    """Compile gpt.c and the C files beside it into one library. Raises BuildError.

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


def compiler_name(command: list[str]) -> str:
    """Return the name of a compiler for error messages."""
    return "ziglang" if "ziglang" in command[:3] else command[0]


def run_compiler(command: list[str], seconds: float | None = None) -> bytes:
    """Run a compiler and return its output.

    seconds: time limit; None: TIMEOUT. Raises BuildError with the compiler's first error, and
    TimeoutExpired after the limit.
    """
    name = compiler_name(command)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"LC_ALL": "C"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(defer_sigterm())
        try:
            process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        except OSError as error:
            raise BuildError(f"the C compiler {name} cannot be run: {error.strerror}") from None
        with process:
            try:
                stack.close()
                output, errors = process.communicate(timeout=seconds or TIMEOUT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # a compiler starts child processes
                raise
    if process.returncode:
        lines = errors.decode(errors="replace").splitlines() or ["no reason given"]
        reason = next((line for line in lines if "error:" in line), lines[0])
        raise BuildError(f"the C compiler {name} failed: {reason}")
    return output


@contextlib.contextmanager
def defer_sigterm() -> Iterator[None]:
    """Delay SIGTERM to the end of the block, if the program has a handler for it.

    If the handler raised while a process is being started, that process would be orphaned.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = []
    signal.signal(signal.SIGTERM, lambda *info: deferred.append(info))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
    for info in deferred[:1]:
        handler(*info)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM in the block, so that its temporary files are removed."""

    def end(number, frame):
        raise SystemExit(128 + number)

    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield  # the program has its own handler, or this thread may not set one
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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

"""Compile gpt.c for this machine, once for each source, compiler and processor, and load it."""

import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("gpt.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
WIDE = ("-march=native", "-mprefer-vector-width=512")
NATIVE = WIDE, ("-march=native",), ("-mcpu=native",), ()  # the first that the compiler takes


class BuildError(Exception):
    """Why there is no compiled code: one line."""


@functools.cache
def load(target: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """The compiled gpt.c. target: flags that name a processor, None for this one. Raises BuildError.

    $CC is the compiler; $CFLAGS and $LDFLAGS come before the flags of this file. The code is kept in
    `cache_directory`, or compiled in each run where that is not a directory of this user alone.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        options = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
    except ValueError as error:  # a quotation without its end
        raise BuildError(f"$CC or $CFLAGS: {error}") from None
    for flags in NATIVE if target is None else (target,):
        try:
            # The macros that the compiler predefines: its version, and each instruction set that it may use here.
            macros = call([*compiler, *options, *flags, "-dM", "-E", "-x", "c", os.devnull])
            break
        except BuildError as error:
            reason = error
    else:
        raise reason
    options += flags
    about = repr((compiler, options, os.environ.get("LDFLAGS"), openmp())).encode()
    key = hashlib.sha256(b"\0".join([macros, about, SOURCE.read_bytes()])).hexdigest()
    try:
        directory = cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_ours(directory):
            raise PermissionError(f"{directory} is not a directory of this user alone")
        file = find(directory, key) or compile_into(directory, key, compiler, options)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        print(f"note: gpt.c is compiled in each run: {error}", file=sys.stderr)
        try:
            with tempfile.TemporaryDirectory() as temporary:
                return open_library(compile_into(Path(temporary), key, compiler, options))
        except OSError as error:
            raise BuildError(f"gpt.c cannot be compiled: {error}") from None
    return open_library(file)


def cache_directory() -> Path:
    """Where compiled code is kept: $XDG_CACHE_HOME or ~/.cache, and in it a directory of this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-native"


def openmp() -> list[str]:
    """Torch's own OpenMP library. With another one, two pools of threads would take the processor from each other."""
    library = Path(torch.__file__).parent / "lib"
    return sorted(str(file) for pattern in ("libgomp*", "libomp*", "libiomp5*") for file in library.glob(pattern))[:1]


def call(command: list[str]) -> bytes:
    """What a compiler prints. Raises BuildError with its first error if it fails or is not there."""
    try:
        english = os.environ | {"LC_ALL": "C"}
        result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=english)
    except OSError as error:
        raise BuildError(f"the C compiler {command[0]} cannot be run: {error.strerror}") from None
    if result.returncode:
        lines = result.stderr.decode(errors="replace").splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0] if lines else "no reason given")
        raise BuildError(f"the C compiler {command[0]} failed: {reason}")
    return result.stdout


def only_ours(path: Path) -> bool:
    """Whether this user owns a file or directory, and nobody else can write to it."""
    about = path.stat()
    owner = os.getuid() if hasattr(os, "getuid") else about.st_uid
    return about.st_uid == owner and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def find(directory: Path, key: str) -> Path | None:
    """A library KEY-HASH.so that nobody else can have changed, and whose bytes have that hash."""
    for file in directory.glob(f"{key}-*.so"):
        if only_ours(file) and file.stem == f"{key}-{hashlib.sha256(file.read_bytes()).hexdigest()}":
            return file
    return None


def compile_into(directory: Path, key: str, compiler: list[str], options: list[str]) -> Path:
    """Compile gpt.c to KEY-HASH.so. It gets its name when it is whole, so several processes may do this at once.

    Raises BuildError. With a compiler whose OpenMP is not torch's, it is compiled for one thread.
    """
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        code, library = Path(temporary, "gpt.o"), Path(temporary, "gpt.so")
        link = ["-shared", str(code), "-lm", "-o", str(library), *(["-Wl,-z,defs"] if sys.platform == "linux" else [])]
        # Not $CFLAGS: -ffast-math there would make the whole process round tiny numbers to 0.
        linker = [*compiler, *shlex.split(os.environ.get("LDFLAGS", ""))]
        for threads, libraries in ((["-fopenmp"], openmp()), ([], [])):
            try:
                call([*compiler, *options, *threads, "-c", str(SOURCE), "-o", str(code)])
                call([*linker, *link, *libraries])
                break
            except BuildError as error:
                reason = error
        else:
            raise reason
        library.chmod(0o700)
        return library.replace(directory / f"{key}-{hashlib.sha256(library.read_bytes()).hexdigest()}.so")


def open_library(file: Path) -> ctypes.CDLL:
    """Load a library. Raises BuildError."""
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildError(f"the compiled gpt.c cannot be loaded: {error}") from None


def kernel() -> str:
    """What the compiled code uses of this processor, such as "AVX-512 VNNI"."""
    return (ctypes.c_char * 64).in_dll(load(), "kernel").value.decode()

"""--prefix-cache: files of prefixes, and a fingerprint of what computes their pages."""

import hashlib
from pathlib import Path

import torch

from command_line.options import check_option_limits, check_utf8
from command_line.parser import Parser
from errors import UserError
from loading.prefix_files import PrefixFiles, check_directory, hash_tensors
from model import Model
from native.step import NativeSampler

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_BYTES = 2**32  # bytes of all files
# Code that computes pages, or decides which tokens they hold. An edit discards saved prefixes.
CODE = (
    *("adapters.py", "cache.py", "gemma.py", "graphs.py", "infer.py", "llama.py", "model.py"),
    *("engine/*.py", "loading/prefix_files.py", "native/*.[pch]*", "quantisation/*.py"),
)
LIMITS = {"--prefix-cache-bytes": (int, lambda value: value >= 1, "an integer >= 1")}


def add_prefix_cache_options(parser: Parser) -> None:
    """Add the options for files of prefixes."""
    group = parser.group("prefix cache")
    directory_help = "keep KV pages of prompts and outputs in files here, also after a restart"
    group.add_argument("--prefix-cache", metavar="DIR", help=directory_help)
    bytes_help = "maximum bytes of these files; the least recently used go (default: 4 GiB)"
    group.add_argument("--prefix-cache-bytes", metavar="N", type=int, help=bytes_help)


def check_prefix_cache_options(args) -> None:
    """Raise UserError for a bad number of bytes, or a directory that cannot be used."""
    if args.prefix_cache is None:
        if args.prefix_cache_bytes is not None:
            raise UserError("--prefix-cache-bytes requires --prefix-cache")
        return
    check_utf8("--prefix-cache", args.prefix_cache)
    if not args.prefix_cache:
        raise UserError("--prefix-cache is empty: must be a directory")
    if args.prefix_cache_bytes is not None:
        check_option_limits(args, LIMITS)
    check_directory(Path(args.prefix_cache))


def open_prefix_files(args, model: Model) -> PrefixFiles | None:
    """Return the prefix files that the options name, for this model; None: none."""
    if args.prefix_cache is None:
        return None
    return PrefixFiles(
        args.prefix_cache, fingerprint(model), args.prefix_cache_bytes or DEFAULT_BYTES
    )


def fingerprint(model: Model) -> str:
    """Return a hash of what changes the last bit of a key or value, except tokens and adapters.

    Weights are hashed as they are in memory, after quantisation, merging of an adapter and packing.
    Backends round differently, and so may versions of this code, of torch and of the compiler.
    """
    runner = model.runner
    code = hashlib.sha256()
    for file in sorted(file for pattern in CODE for file in ROOT.glob(pattern)):
        if file.is_file():  # not an editor's dangling link
            code.update(file.read_bytes())
    facts = (
        hash_tensors(model.state_dict()),
        model.config,
        code.hexdigest(),
        type(runner).__name__,
        runner.library.key if isinstance(runner, NativeSampler) else None,
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        str(model.device),
        torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
        torch.get_float32_matmul_precision(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()

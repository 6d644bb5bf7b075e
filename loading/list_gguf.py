"""List a GGUF file: its metadata, and its tensors with shapes, types and byte ranges."""

import argparse
import array
import collections
import math
import reprlib
from pathlib import Path

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

from command_line.parser import Parser, run_script, write_stdout
from loading.gguf import read_gguf


def main(argv=None):
    parser = Parser(prog="python -m loading.list_gguf", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    run_script(parser, list_file, argv)


def printable(name: str) -> str:
    """Escape a name: a terminal would obey its control characters."""
    return repr(name)[1:-1]


def list_file(args: argparse.Namespace) -> None:
    """Print metadata, tensors and totals. Raises UserError as `read_gguf` does."""
    gguf = read_gguf(args.file)
    for key, value in gguf.metadata.items():
        is_array = isinstance(value, (list, array.array))
        count = f"{len(value):,} values: " if is_array else ""
        write_stdout(
            f"{printable(key):38} {count}{reprlib.repr(list(value[:7]) if is_array else value)}\n"
        )
    for name, tensor in gguf.tensors.items():
        extent = f"{tensor.offset:13,} to {tensor.offset + tensor.nbytes:13,}"
        write_stdout(f"{printable(name):38} {tensor.type:6} {str(tensor.shape):16} {extent}\n")
    types = collections.Counter(tensor.type for tensor in gguf.tensors.values())
    size = sum(tensor.nbytes for tensor in gguf.tensors.values())
    counts = ", ".join(f"{count} {name}" for name, count in types.most_common())
    numbers = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    loaded = f"loaded {4 * numbers:,} in float32, {2 * numbers:,} in float16 or bfloat16"
    write_stdout(f"{len(gguf.tensors)} tensors ({counts}), {size:,} bytes; {loaded}\n")


if __name__ == "__main__":
    main()

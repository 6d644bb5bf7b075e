"""The files of a model, read and written. Nothing here knows an architecture."""

import contextlib
import json
import math
import reprlib
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from errors import UserError


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises UserError if it cannot be read or holds anything else."""
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raw = None  # not JSON, not UTF-8, a number of 5,000 digits; nested too deeply
    if not isinstance(raw, dict):
        raise UserError(f"{file}: not a JSON object")
    return raw


def check_values(where, raw: dict, supported: dict[str, tuple]) -> None:
    """Raise UserError unless each key of a JSON object has one of these values.

    where: what the error begins with. The first value is what a missing key means. A key `a.b` is
    the key b in the object a; its value is None if a is no object.
    """
    for key, values in supported.items():
        outer, _, inner = key.rpartition(".")
        owner = raw.get(outer) if outer else raw
        value = owner.get(inner, values[0]) if isinstance(owner, dict) else None
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise UserError(f"{where}: {key} is {reprlib.repr(value)}; supported is {allowed}")


BLOCK = 2**22  # bytes of float32 in a block of `read_tensors`


def read_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str = "",
    skip: tuple[str, ...] = (),
    transposed: Collection[str] = (),
    says: str = "config.json says",
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """The tensors of safetensors files in blocks of rows: (name, which rows, these rows).

    Rows come in the dtype of the file. With blocks of a few megabytes, loading takes hardly more
    memory than what becomes of them.
    shapes: name -> shape, what the files must hold together. prefix: may stand before each name.
    skip: endings of names that may be in the files and are not read. transposed: names of tensors
    that are stored as (columns, rows); these come whole. says: the source of shapes, in errors.
    Raises UserError, before anything is read, if a file is cut short, or a tensor is missing,
    unexpected, there twice, of another shape or not of floating-point numbers.
    """
    stored = find_tensors(files, shapes, prefix, skip, transposed, says)
    return read_rows(stored, shapes, transposed)


def find_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str,
    skip: tuple[str, ...],
    transposed: Collection[str],
    says: str,
) -> dict[str, tuple[Path, str]]:
    """Which file each tensor is in, and its name there, once all are as they must be."""
    stored = {}
    for file in files:
        with complete(file):
            tensors = safe_open(file, framework="pt")
        for key in tensors.keys():
            name = key.removeprefix(prefix)
            if name in stored:
                other = stored[name][0]
                how = f"also in {other.name}"
                if other == file:
                    how = f"with and without {prefix!r}"
                raise UserError(f"{file}: tensor {name} is there twice, {how}")
            if name not in shapes and not name.endswith(skip):
                raise UserError(f"{file}: unexpected tensor {name}")
            stored[name] = file, key, tensors.get_slice(key)
    for name, shape in shapes.items():
        if name not in stored:
            where = file if len(files) == 1 else file.parent
            raise UserError(f"{where}: tensor {name} is missing")
        file, _, tensor = stored[name]
        expected = tuple(reversed(shape) if name in transposed else shape)
        if (found := tuple(tensor.get_shape())) != expected:
            raise UserError(f"{file}: tensor {name} is {found}, and {says} {expected}")
        if not tensor.get_dtype().startswith(("F", "BF")):  # F32, BF16
            dtype = tensor[:0].dtype
            raise UserError(f"{file}: tensor {name} is {dtype}; it must be floating-point")
    return {name: stored[name][:2] for name in shapes}


def read_rows(
    stored: dict[str, tuple[Path, str]], shapes: dict, transposed: Collection[str]
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """The blocks of `read_tensors`. stored: as of `find_tensors`."""
    opened = None
    read = 0  # what was read of a file counts as memory until it is closed
    for name, (file, key) in stored.items():
        shape = shapes[name]
        turned = name in transposed
        height = shape[0] if turned else max(1, BLOCK // (4 * math.prod(shape[1:])))
        for start in range(0, shape[0], height):
            rows = slice(start, start + height)
            with complete(file):
                if file != opened or read >= BLOCK:
                    tensors = safe_open(file, framework="pt")
                    opened = file
                    read = 0
                tensor = tensors.get_slice(key)
                block = tensor[:].t() if turned else tensor[rows]
            read += block.nbytes
            yield name, rows, block


@contextlib.contextmanager
def complete(file: Path) -> Iterator[None]:
    """Raise UserError for what the block finds wrong with a safetensors file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None


def write_checkpoint(directory: Path, config: dict, tensors: dict) -> None:
    """Write `config.json` and `model.safetensors`.

    Raises UserError if that fails; nothing half-written is left then. Both are written in a
    temporary directory first. An old configuration is removed before its weights are replaced, and
    the new one is moved last: at any time a directory with a configuration holds the weights that
    belong to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            save_file(tensors, Path(temporary) / "model.safetensors", metadata={"format": "pt"})
            (Path(temporary) / "config.json").write_text(
                json.dumps(config, indent=2) + "\n", "utf-8"
            )
            (directory / "config.json").unlink(missing_ok=True)
            for file in ("model.safetensors", "config.json"):
                (Path(temporary) / file).replace(directory / file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: the model could not be written: {error}") from None

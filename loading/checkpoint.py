"""Reading and writing model files, independent of the architecture."""

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


@contextlib.contextmanager
def complete(file: Path) -> Iterator[None]:
    """Raise UserError for an error in the block that a damaged safetensors file causes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None


def read_json(file: Path) -> dict:
    """Return the object in a JSON file. Raises UserError if it is unreadable or not an object."""
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
    """Raise UserError unless each key has one of the supported values.

    where: prefix of the error. A missing key means the first value.
    """
    for key, values in supported.items():
        value = raw.get(key, values[0])
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise UserError(f"{where}: {key} is {reprlib.repr(value)}; supported is {allowed}")


def check_nested_values(where, raw: dict, supported: dict[str, tuple]) -> None:
    """Call `check_values`; a key `a.b` is the key b in the object a, or None if a is not one."""
    found = {}
    for key in supported:
        outer, _, inner = key.rpartition(".")
        owner = raw.get(outer) if outer else raw
        if not isinstance(owner, dict):
            found[key] = None
        elif inner in owner:
            found[key] = owner[inner]
    check_values(where, found, supported)


CHUNK_BYTES = 2**22  # bytes of a chunk of `read_tensors` in float32


def read_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str = "",
    skip: tuple[str, ...] = (),
    transposed: Collection[str] = (),
    shape_source: str = "config.json says",
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Iterate over tensors of safetensors files in chunks: (name, slice of rows, these rows).

    Rows have the dtype of the file. With chunks of a few megabytes, loading takes hardly more
    memory than the loaded weights.
    shapes: name -> shape of all tensors that the files must hold together. prefix: optional prefix
    of each name. skip: suffixes of names that may be in the files and are not read. transposed:
    names of tensors stored as (columns, rows), each yielded in one chunk. shape_source: the source
    of shapes, for errors. Raises UserError, before any tensor is read, if a file is truncated, or a
    tensor is missing, unexpected, duplicated, of another shape or not floating-point.
    """
    infos = find_tensors(files, shapes, prefix, skip, transposed, shape_source)
    return read_rows(infos, shapes, transposed)


def find_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str,
    skip: tuple[str, ...],
    transposed: Collection[str],
    shape_source: str,
) -> dict[str, tuple[Path, str]]:
    """Return the file and the key of each tensor, after the checks of `read_tensors`."""
    infos = {}
    for file in files:
        with complete(file):
            tensors = safe_open(file, framework="pt")
        for key in tensors.keys():
            name = key.removeprefix(prefix)
            if name in infos:
                other = infos[name][0]
                how = f"also in {other.name}"
                if other == file:
                    how = f"with and without {prefix!r}"
                raise UserError(f"{file}: duplicate tensor {name}, {how}")
            if name not in shapes and not name.endswith(skip):
                raise UserError(f"{file}: unexpected tensor {name}")
            infos[name] = file, key, tensors.get_slice(key)
    for name, shape in shapes.items():
        if name not in infos:
            where = file if len(files) == 1 else file.parent
            raise UserError(f"{where}: tensor {name} is missing")
        file, _, tensor = infos[name]
        expected = tuple(reversed(shape) if name in transposed else shape)
        if (found := tuple(tensor.get_shape())) != expected:
            raise UserError(f"{file}: tensor {name} has shape {found}; {shape_source} {expected}")
        if not tensor.get_dtype().startswith(("F", "BF")):  # F32, BF16
            dtype = tensor[:0].dtype
            raise UserError(f"{file}: tensor {name} has dtype {dtype}: must be floating-point")
    return {name: infos[name][:2] for name in shapes}


def read_rows(
    infos: dict[str, tuple[Path, str]], shapes: dict, transposed: Collection[str]
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Yield the chunks of `read_tensors`. infos: from `find_tensors`."""
    opened = None
    read = 0  # bytes of the open file, which count as memory until it is closed
    for name, (file, key) in infos.items():
        shape = shapes[name]
        is_transposed = name in transposed
        height = shape[0] if is_transposed else max(1, CHUNK_BYTES // (4 * math.prod(shape[1:])))
        for start in range(0, shape[0], height):
            rows = slice(start, start + height)
            with complete(file):
                if file != opened or read >= CHUNK_BYTES:
                    tensors = safe_open(file, framework="pt")
                    opened = file
                    read = 0
                tensor = tensors.get_slice(key)
                chunk = tensor[:].t() if is_transposed else tensor[rows]
            read += chunk.nbytes
            yield name, rows, chunk


def write_checkpoint(directory: Path, config: dict, tensors: dict) -> None:
    """Write `config.json` and `model.safetensors`.

    Raises UserError if that fails, and leaves no partial file then. Both are first written to a
    temporary directory. An old configuration is removed before its weights are replaced, and the
    new one is moved last, so a directory with a configuration always holds the matching weights.
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
        raise UserError(f"{directory}: could not write the model: {error}") from None

"""Reading and writing model files, independent of the architecture."""

import json
import math
import reprlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from errors import UserError


def read_json(file: Path) -> dict:
    """Return the object in a JSON file. Raises UserError if it is unreadable or not an object."""
    try:
        data = file.read_bytes()
        raw = json.loads(data.decode("utf-8-sig"))  # some editors put a byte order mark first
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raw = None  # not JSON, not UTF-8, a number of 5,000 digits; nested too deeply
    if not isinstance(raw, dict):
        check_lfs_pointer(file, data)
        raise UserError(f"{file}: not a JSON object")
    return raw


def check_lfs_pointer(file: Path, data: bytes) -> None:
    """Raise UserError if data begins a git-lfs pointer, which a clone without git-lfs leaves."""
    if data.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{file}: a git-lfs pointer, not the file itself: fetch it with git lfs pull"
        )


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
MAX_HEADER_SIZE = 100_000_000  # bytes of a safetensors header, the library's limit
DTYPES = {  # safetensors name -> torch dtype
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
# Suffixes of tensors that GPTQ, AWQ, bitsandbytes, fp8 and others store beside weights.
QUANT_SUFFIX = ("qweight", "qzeros", "scales", "g_idx", "scale", "scale_inv", "absmax", "quant_map")
QUANT_SUFFIX += ("SCB", "weight_packed", "weight_shape", "zero_point", "_blocks", "_scale_2")


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor. offset, nbytes: in the file."""

    file: Path
    dtype: str  # as the file names it
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file. Raises UserError unless all are complete.

    The format: github.com/huggingface/safetensors. The library maps a file, and reading a mapped
    file that was truncated kills the process (SIGBUS), so this reads.
    """
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = opened.read(8)
            check_lfs_pointer(file, length + opened.read(64))
            opened.seek(8)
            count = int.from_bytes(length, "little")
            if len(length) < 8 or count > min(size - 8, MAX_HEADER_SIZE):
                raise ValueError("its header is truncated")
            header = json.loads(opened.read(count))
        infos = locate(file, header, 8 + count)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{file}: not a complete safetensors file ({reason:.100})") from None
    end = max((info.offset + info.nbytes for info in infos.values()), default=8 + count)
    if end != size:
        ends = f"its tensors end at byte {end}, the file at byte {size}"
        raise UserError(f"{file}: not a complete safetensors file ({ends})")
    return infos


def locate(file: Path, header: dict, start: int) -> dict[str, TensorInfo]:
    """Return the tensors that a header describes, contiguous from byte `start`.

    Raises ValueError, TypeError, AttributeError or LookupError for an invalid header.
    """
    infos = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise ValueError(f"tensor {name}: data_offsets and shape must be integers >= 0")
        dtype = DTYPES.get(entry["dtype"])
        if dtype and math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name}: shape {shape} does not fit {end - begin} bytes")
        infos[name] = TensorInfo(file, entry["dtype"], shape, start + begin, end - begin)
    for name, info in sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != start:
            raise ValueError(f"tensor {name} has file offset {info.offset}: must be {start}")
        start += info.nbytes
    return infos


def read_bytes(file: Path, start: int, size: int) -> bytearray:
    """Return `size` bytes of a file from byte `start`. Raises UserError if it ends earlier."""
    data = bytearray(size)
    try:
        # Not mapped: reading a mapped file that was truncated kills the process.
        with open(file, "rb") as opened:
            opened.seek(start)
            complete = opened.readinto(data) == size
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if not complete:
        raise UserError(f"{file}: truncated while it was read")
    return data


def read_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str = "",
    skip: tuple[str, ...] = (),
    transposed: Collection[str] = (),
    shape_source: str = "config.json says",
    map_key: Callable[[str], str | None] = str,
    split_key: Callable[[str], list[str]] = lambda key: [key],
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Iterate over tensors of safetensors files in chunks: (name, slice of rows, these rows).

    Rows have the dtype of the file. With chunks of a few megabytes, loading takes hardly more
    memory than the loaded weights.
    shapes: name -> shape of all tensors that the files must hold together. prefix: optional prefix
    of each name. skip: suffixes of names that may be in the files and are not read. transposed:
    names of tensors stored as (columns, rows), each yielded in one chunk. shape_source: the source
    of shapes, for errors. map_key: maps a name in a file to the canonical one, None if it is not
    read. split_key: maps that to the tensors stored in it, one below the other. Raises UserError,
    before any tensor is read, if a file is truncated, or a tensor is missing, unexpected,
    duplicated, of another shape or not floating-point.
    """
    infos = find_tensors(files, shapes, prefix, skip, transposed, shape_source, map_key, split_key)
    return read_rows(infos, shapes, transposed)


def find_tensors(
    files: list[Path],
    shapes: dict,
    prefix: str,
    skip: tuple[str, ...],
    transposed: Collection[str],
    shape_source: str,
    map_key: Callable[[str], str | None],
    split_key: Callable[[str], list[str]],
) -> dict[str, TensorInfo]:
    """Return the location of each tensor, after the checks of `read_tensors`."""

    def split(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
        for key, tensor in tensors.items():
            mapped = map_key(key)
            if mapped is None:
                continue
            name = mapped.removeprefix(prefix)
            parts = split_key(name)
            if len(parts) == 1 or not shapes.keys() >= {*parts}:
                yield name, tensor
                continue
            heights = [shapes[part][0] for part in parts]
            expected = (sum(heights), *shapes[parts[0]][1:])
            if tensor.shape != expected:
                where = f"{tensor.file}: tensor {name}"
                raise UserError(f"{where} has shape {tensor.shape}; {shape_source} {expected}")
            yield from zip(parts, split_rows(tensor, heights))

    infos = {}
    for file in files:
        for name, tensor in split(read_header(file)):
            if name in infos:
                other = infos[name].file
                how = f"also in {other.name}"
                if other == file:
                    how = f"with and without {prefix!r}"
                raise UserError(f"{file}: duplicate tensor {name}, {how}")
            if name not in shapes and not name.endswith(skip):
                hint = "; quantised weights are not supported" * name.endswith(QUANT_SUFFIX)
                raise UserError(f"{file}: unexpected tensor {name}{hint}")
            infos[name] = tensor
    for name, shape in shapes.items():
        if name not in infos:
            where = file if len(files) == 1 else file.parent
            raise UserError(f"{where}: tensor {name} is missing")
        tensor = infos[name]
        where = f"{tensor.file}: tensor {name}"
        expected = tuple(reversed(shape) if name in transposed else shape)
        if tensor.shape != expected:
            raise UserError(f"{where} has shape {tensor.shape}; {shape_source} {expected}")
        dtype = DTYPES.get(tensor.dtype)
        if not dtype or not dtype.is_floating_point:
            raise UserError(f"{where} has dtype {dtype or tensor.dtype}: must be floating-point")
    return {name: infos[name] for name in shapes}


def split_rows(tensor, heights: list[int]) -> list:
    """Return the parts of a tensor with these numbers of rows, each as a tensor in the file.

    tensor: a TensorInfo, which may be of a GGUF file.
    """
    width = tensor.nbytes // tensor.shape[0]  # bytes of a row
    parts = []
    start = tensor.offset
    for height in heights:
        shape = (height, *tensor.shape[1:])
        parts.append(replace(tensor, shape=shape, offset=start, nbytes=width * height))
        start += width * height
    return parts


def has_tensors(files: list[Path], prefix: str) -> bool:
    """Return whether files hold tensors of a part of a model, by the prefix of their names."""
    beginnings = (f"{prefix}.", f"model.{prefix}.")
    return any(name.startswith(beginnings) for file in files for name in read_header(file))


def weights_differ(files: list[Path], map_key: Callable[[str], str | None], *ends: str) -> bool:
    """Return whether files hold two unequal matrices. ends: the suffixes of their layers' names."""
    infos = {}
    for file in files:
        for key, tensor in read_header(file).items():
            for end in ends:
                if (map_key(key) or "").endswith(f"{end}.weight"):
                    infos[end] = tensor
    if len(infos) < len(ends):
        return False
    shapes = {end: tensor.shape for end, tensor in infos.items()}
    first, second = ({end: infos[end]} for end in ends)
    if len(set(shapes.values())) > 1:
        return True
    pairs = zip(read_rows(first, shapes, ()), read_rows(second, shapes, ()))
    return any(not torch.equal(a.float(), b.float()) for (*_, a), (*_, b) in pairs)


def read_rows(
    infos: dict[str, TensorInfo], shapes: dict, transposed: Collection[str]
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Yield the chunks of `read_tensors`. infos: from `find_tensors`."""
    for name, tensor in infos.items():
        shape = shapes[name]
        is_transposed = name in transposed
        height = shape[0] if is_transposed else max(1, CHUNK_BYTES // (4 * math.prod(shape[1:])))
        width = tensor.nbytes // shape[0]  # bytes of a row
        for start in range(0, shape[0], height):
            stop = min(start + height, shape[0])
            data = read_bytes(tensor.file, tensor.offset + width * start, width * (stop - start))
            numbers = torch.frombuffer(data, dtype=DTYPES[tensor.dtype])
            chunk = (
                numbers.view(tensor.shape).t() if is_transposed else numbers.view(-1, *shape[1:])
            )
            yield name, slice(start, stop), chunk


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

"""The header of a GGUF file: a model's metadata, and the locations of its tensors.

The format: docs/gguf.md in github.com/ggml-org/ggml. Nothing here depends on the architecture.
"""

import array
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from errors import UserError

SCALAR_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # for `struct`
LENGTH = struct.Struct("<Q")
STRING = 8
ARRAY = 9
GGML_TYPES = {  # number of the type -> name, numbers per block, bytes per block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor. shape: as in torch, the slowest dimension first."""

    shape: tuple[int, ...]
    type: str  # a name in GGML_TYPES
    offset: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """The contents of a header. Arrays of numbers are `array`s, arrays of strings lists."""

    file: Path
    metadata: dict
    tensors: dict[str, TensorInfo]


class GGUFReader:
    """A sequential reader of values. Raises UserError if the file ends too early."""

    def __init__(self, file: Path, stream: BinaryIO):
        self.file = file
        self.stream = stream
        self.size = os.fstat(stream.fileno()).st_size
        self.position = 0

    def read(self, size: int) -> bytes:
        """Read the next bytes."""
        # A damaged length may exceed memory, so it is compared with the file's size first.
        data = self.stream.read(size) if size <= self.size - self.position else b""
        if len(data) < size:
            raise UserError(f"{self.file}: truncated: the file ends at byte {self.size}")
        self.position += size
        return data

    def scalar(self, fmt: str):
        """Read a number. A float32 becomes its shortest decimal: 1e-05, not 9.99...e-06."""
        (value,) = struct.unpack(f"<{fmt}", self.read(struct.calcsize(fmt)))
        return shortest_decimal(value) if fmt == "f" else value

    def string(self) -> str:
        """Read a length and UTF-8. Tokens may be parts of characters: their bytes are escaped."""
        (length,) = LENGTH.unpack(self.read(8))  # faster than scalar(), as vocabularies are long
        return self.read(length).decode("utf-8", "surrogateescape")

    def value(self, key: str, value_type: int):
        """Read a value of metadata. key: its key, for errors."""
        if value_type == STRING:
            return self.string()
        if value_type in SCALAR_FORMATS:
            return self.scalar(SCALAR_FORMATS[value_type])
        if value_type != ARRAY:
            raise UserError(f"{self.file}: {key} has the type {value_type}; supported are 0 to 12")
        value_type = self.scalar("I")
        count = self.scalar("Q")
        if value_type == STRING:
            return [self.string() for _ in range(count)]
        if value_type not in SCALAR_FORMATS:
            raise UserError(
                f"{self.file}: {key} is an array of type {value_type}; supported are"
                " numbers and strings"
            )
        numbers = array.array(SCALAR_FORMATS[value_type].replace("?", "B"))
        numbers.frombytes(self.read(count * numbers.itemsize))
        return numbers


def shortest_decimal(number: float) -> float:
    """Return the decimal of fewest digits, at least six, that rounds to this float32."""
    for digits in (6, 7, 8):
        decimal = float(f"{number:.{digits}g}")
        if struct.pack("<f", decimal) == struct.pack("<f", number):
            return decimal
    return float(f"{number:.9g}")


def read_gguf(file: Path) -> GGUF:
    """Return the checked header of a file. Raises UserError.

    Memory use is limited to a few times the file's size.
    """
    try:
        # Not mapped: reading a mapped file that was truncated kills the process.
        with open(file, "rb") as stream:
            return read_header(GGUFReader(file, stream))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def read_header(reader: GGUFReader) -> GGUF:
    """Read the header. Raises UserError if it is invalid."""
    file = reader.file
    if not reader.size:
        raise UserError(f"{file}: the file is empty")
    if reader.read(4) != b"GGUF":
        raise UserError(f"{file}: not a GGUF file")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise UserError(f"{file}: GGUF version {version}; supported are 2 and 3, little-endian")
    tensor_count = reader.scalar("Q")
    metadata = {}
    for _ in range(reader.scalar("Q")):
        key = reader.string()
        if key in metadata:
            raise UserError(f"{file}: duplicate key {key}")
        metadata[key] = reader.value(key, reader.scalar("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise UserError(f"{file}: general.alignment {alignment!r:.20}: must be a multiple of 8")
    entries = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in entries:
            raise UserError(f"{file}: duplicate tensor {name}")
        dimensions = reader.scalar("I")
        if not 1 <= dimensions <= 4:
            raise UserError(f"{file}: tensor {name} has {dimensions} dimensions: must have 1 to 4")
        shape = tuple(reader.scalar("Q") for _ in range(dimensions))[::-1]
        entries[name] = shape, reader.scalar("I"), reader.scalar("Q")
    tensors = {name: locate(reader, name, alignment, *entry) for name, entry in entries.items()}
    check_no_overlap(file, tensors)
    return GGUF(file, metadata, tensors)


def locate(
    reader: GGUFReader, name: str, alignment: int, shape: tuple, ggml_type: int, offset: int
) -> TensorInfo:
    """Locate a tensor, after the header is read. Raises UserError if it is truncated or unknown.

    ggml_type: a key of GGML_TYPES. offset: in bytes from the first multiple of `alignment` after
    the header.
    """
    where = f"{reader.file}: tensor {name}"
    if ggml_type not in GGML_TYPES:
        known = ", ".join(known for known, _, _ in GGML_TYPES.values())
        raise UserError(f"{where} has the type {ggml_type}; supported are {known}")
    type_name, numbers, width = GGML_TYPES[ggml_type]
    if not all(shape) or shape[-1] % numbers:
        allowed = f"above 0, rows of {type_name} multiples of {numbers}"
        raise UserError(f"{where} has shape {shape}; sizes must be {allowed}")
    if offset % alignment:
        raise UserError(f"{where} has offset {offset}: must be a multiple of {alignment}")
    start = -(-reader.position // alignment) * alignment + offset
    size = math.prod(shape) // numbers * width
    if start + size > reader.size:
        ends = f"it ends at byte {start + size}, the file at byte {reader.size}"
        raise UserError(f"{where} is truncated: {ends}")
    return TensorInfo(shape, type_name, start, size)


def check_no_overlap(file: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise UserError if two tensors share a byte."""
    end = 0
    last = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise UserError(f"{file}: tensors {last} and {name} overlap")
        end = tensor.offset + tensor.nbytes
        last = name

"""The header of a GGUF file: a model's metadata, and the locations of its tensors.

The format: docs/gguf.md in github.com/ggml-org/ggml. Nothing here depends on the architecture.
"""

import array
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from errors import UserError
from loading.checkpoint import check_lfs_pointer

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
UNSUPPORTED_TYPES = dict(  # types of llama.cpp that are not read: name -> number
    Q8_1=9, Q8_K=15, IQ2_XXS=16, IQ2_XS=17, IQ3_XXS=18, IQ1_S=19, IQ4_NL=20, IQ3_S=21, IQ2_S=22,
    IQ4_XS=23, I8=24, I16=25, I32=26, I64=27, F64=28, IQ1_M=29, Q4_0_4_4=31, Q4_0_4_8=32,
    Q4_0_8_8=33, TQ1_0=34, TQ2_0=35, IQ4_NL_4_4=36, IQ4_NL_4_8=37, IQ4_NL_8_8=38, NVFP4=40,
    Q1_0=41, Q2_0=42,
)  # fmt: skip
# llama.cpp's names for the splits of a model.
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor. shape: as in torch, the slowest dimension first."""

    shape: tuple[int, ...]
    type: str  # a name in GGML_TYPES
    offset: int  # bytes from the beginning of the file
    nbytes: int
    file: Path


@dataclass(frozen=True)
class GGUF:
    """The contents of a header. Arrays of numbers are `array`s, arrays of strings lists.

    For a model in several files, `file` and `metadata` belong to the first.
    """

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
    """Return the checked header of a file, or of all splits of a model.

    file: any of the splits. Raises UserError. Memory use is limited to a few times the files' size.
    """
    gguf = read_split(file)
    count = gguf.metadata.get("split.count", 0)
    if count in (0, 1):
        return gguf
    match = SPLIT_NAME.fullmatch(file.name)
    if type(count) is not int or not match or int(match[3]) != count:
        splits = "N for files named NAME-00001-of-0000N.gguf"
        raise UserError(f"{file}: split.count {count!r:.20}: must be 0, 1, or {splits}")
    headers = []
    tensors = {}
    for number in range(count):
        path = file.with_name(f"{match[1]}-{number + 1:05}-of-{count:05}{match[4]}")
        header = gguf if path == file else read_split(path)
        split = header.metadata.get("split.no"), header.metadata.get("split.count")
        if split != (number, count):
            raise UserError(f"{path}: split.no and split.count {split}: must be {(number, count)}")
        if duplicates := tensors.keys() & header.tensors.keys():
            raise UserError(f"{path}: duplicate tensor {min(duplicates)}, also in an earlier split")
        tensors |= header.tensors
        headers.append(header)
    metadata = headers[0].metadata
    if (expected := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        counts = f"split.tensors.count is {expected}, but there are {len(tensors)} tensors"
        raise UserError(f"{headers[0].file}: {counts}")
    return GGUF(headers[0].file, metadata, tensors)


def read_split(file: Path) -> GGUF:
    """Return the header of one file. Raises UserError."""
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
    magic = reader.read(4)
    if magic != b"GGUF":
        check_lfs_pointer(file, magic + reader.stream.read(64))
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
        names = {number: name for name, number in UNSUPPORTED_TYPES.items()}
        raise UserError(
            f"{where} has the type {names.get(ggml_type, ggml_type)}; supported are {known}"
        )
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
    return TensorInfo(shape, type_name, start, size, reader.file)


def check_no_overlap(file: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise UserError if two tensors share a byte."""
    end = 0
    last = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise UserError(f"{file}: tensors {last} and {name} overlap")
        end = tensor.offset + tensor.nbytes
        last = name

"""The head of a GGUF file: a model's metadata, and where its tensors are.

The form: docs/gguf.md in github.com/ggml-org/ggml. Nothing here knows an architecture.
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
from loading.checkpoint import check_pointer

NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # type -> `struct` form
LENGTH = struct.Struct("<Q")
STRING = 8
ARRAY = 9
TYPES = {  # of a tensor -> its name, how many numbers a block of it holds, and in how many bytes
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
UNREAD = dict(  # name -> number of a type that llama.cpp has, or had, and that is not read
    Q8_1=9, Q8_K=15, IQ2_XXS=16, IQ2_XS=17, IQ3_XXS=18, IQ1_S=19, IQ4_NL=20, IQ3_S=21, IQ2_S=22,
    IQ4_XS=23, I8=24, I16=25, I32=26, I64=27, F64=28, IQ1_M=29, Q4_0_4_4=31, Q4_0_4_8=32,
    Q4_0_8_8=33, TQ1_0=34, TQ2_0=35, IQ4_NL_4_4=36, IQ4_NL_4_8=37, IQ4_NL_8_8=38, NVFP4=40,
    Q1_0=41, Q2_0=42,
)  # fmt: skip
# A model in several files: the names that llama.cpp gives them.
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is. shape: as in torch, the slowest dimension first."""

    shape: tuple[int, ...]
    type: str  # a name in TYPES
    start: int  # in bytes from the file's beginning
    size: int  # in bytes
    file: Path


@dataclass(frozen=True)
class GGUF:
    """What the head of a file says. Arrays of numbers are `array`s, those of strings lists.

    Of a model in several files, `file` and the metadata are those of the first.
    """

    file: Path
    metadata: dict
    tensors: dict[str, Tensor]


class Cursor:
    """Reads values one after the other. Raises UserError where the file ends too early."""

    def __init__(self, file: Path, opened: BinaryIO):
        self.file = file
        self.opened = opened
        self.size = os.fstat(opened.fileno()).st_size
        self.place = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        # What is asked for may be more than there is memory, so the file's size comes first.
        data = self.opened.read(size) if size <= self.size - self.place else b""
        if len(data) < size:
            raise UserError(f"{self.file}: cut off: the file ends at byte {self.size}")
        self.place += size
        return data

    def number(self, form: str):
        """A number. A float32 is a short decimal that rounds to it: 1e-05, not 9.99...e-06."""
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))
        return shortest(value) if form == "f" else value

    def string(self) -> str:
        """UTF-8 behind its length. Tokens may be parts of characters: their bytes are escaped."""
        (length,) = LENGTH.unpack(self.take(8))  # faster than number: a vocabulary has many
        return self.take(length).decode("utf-8", "surrogateescape")

    def value(self, kind: int):
        """A value of metadata."""
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise UserError(f"{self.file}: a value has the type {kind}; types are 0 to 12")
        kind = self.number("I")
        count = self.number("Q")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind not in NUMBERS:
            raise UserError(
                f"{self.file}: an array has the type {kind}; numbers or strings are read"
            )
        numbers = array.array(NUMBERS[kind].replace("?", "B"))
        numbers.frombytes(self.take(count * numbers.itemsize))
        return numbers


def shortest(number: float) -> float:
    """The decimal of fewest digits, six or more, that rounds to this float32."""
    for digits in (6, 7, 8):
        decimal = float(f"{number:.{digits}g}")
        if struct.pack("<f", decimal) == struct.pack("<f", number):
            return decimal
    return float(f"{number:.9g}")


def read_gguf(file: Path) -> GGUF:
    """Return the head of a file, checked, and of all parts if the model is in several files.

    file: any of the parts. Raises UserError, in memory of a few times the files' size.
    """
    gguf = read_part(file)
    count = gguf.metadata.get("split.count", 0)
    if count in (0, 1):
        return gguf
    named = PART.fullmatch(file.name)
    if type(count) is not int or not named or int(named[3]) != count:
        parts = "files named NAME-00001-of-0000N.gguf, where split.count is N"
        raise UserError(
            f"{file}: split.count is {count!r:.20}; supported is 0 or 1, or the parts as {parts}"
        )
    heads = []
    tensors = {}
    for number in range(count):
        path = file.with_name(f"{named[1]}-{number + 1:05}-of-{count:05}{named[4]}")
        head = gguf if path == file else read_part(path)
        found = head.metadata.get("split.no"), head.metadata.get("split.count")
        if found != (number, count):
            raise UserError(f"{path}: split.no and split.count are {found}, not {(number, count)}")
        if twice := tensors.keys() & head.tensors.keys():
            raise UserError(f"{path}: tensor {min(twice)} is also in a part before")
        tensors |= head.tensors
        heads.append(head)
    metadata = heads[0].metadata
    if (said := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise UserError(
            f"{heads[0].file}: {said} tensors in all parts, but there are {len(tensors)}"
        )
    return GGUF(heads[0].file, metadata, tensors)


def read_part(file: Path) -> GGUF:
    """Return the head of one file. Raises UserError."""
    try:
        # Not mapped: reading a mapped file that became shorter kills the process.
        with open(file, "rb") as opened:
            return read_head(Cursor(file, opened))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def read_head(cursor: Cursor) -> GGUF:
    """What stands before the tensors. Raises UserError."""
    file = cursor.file
    if not cursor.size:
        raise UserError(f"{file}: the file is empty")
    kind = cursor.take(4)
    if kind != b"GGUF":
        check_pointer(file, kind + cursor.opened.read(64))
        raise UserError(f"{file}: not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UserError(f"{file}: GGUF version {version}; 2 and 3 are read, little-endian")
    tensor_count = cursor.number("Q")
    metadata = {}
    for _ in range(cursor.number("Q")):
        key = cursor.string()
        if key in metadata:
            raise UserError(f"{file}: key {key} is there twice")
        metadata[key] = cursor.value(cursor.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise UserError(
            f"{file}: general.alignment is {alignment!r:.20}; it must be a multiple of 8"
        )
    listed = {}
    for _ in range(tensor_count):
        name = cursor.string()
        if name in listed:
            raise UserError(f"{file}: tensor {name} is there twice")
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= 4:
            raise UserError(f"{file}: tensor {name} has {dimensions} dimensions; 1 to 4 are read")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        listed[name] = shape, cursor.number("I"), cursor.number("Q")
    tensors = {name: locate(cursor, name, alignment, *said) for name, said in listed.items()}
    check_apart(file, tensors)
    return GGUF(file, metadata, tensors)


def locate(
    cursor: Cursor, name: str, alignment: int, shape: tuple, kind: int, offset: int
) -> Tensor:
    """A tensor of a file whose head is read. Raises UserError if it is not whole, or unknown.

    kind: a key of TYPES. offset: from where tensors begin, the first multiple after the head.
    """
    where = f"{cursor.file}: tensor {name}"
    if kind not in TYPES:
        known = ", ".join(known for known, _, _ in TYPES.values())
        names = {number: name for name, number in UNREAD.items()}
        raise UserError(f"{where} has the type {names.get(kind, kind)}; known are {known}")
    type_name, numbers, width = TYPES[kind]
    if not all(shape) or shape[-1] % numbers:
        raise UserError(f"{where} is {shape}; rows of {type_name} are multiples of {numbers}")
    if offset % alignment:
        raise UserError(f"{where} begins at {offset}, which is no multiple of {alignment}")
    start = -(-cursor.place // alignment) * alignment + offset
    size = math.prod(shape) // numbers * width
    if start + size > cursor.size:
        ends = f"it ends at byte {start + size}, the file at byte {cursor.size}"
        raise UserError(f"{where} is cut off: {ends}")
    return Tensor(shape, type_name, start, size, cursor.file)


def check_apart(file: Path, tensors: dict[str, Tensor]) -> None:
    """Raise UserError if two tensors share a byte."""
    end = 0
    last = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise UserError(f"{file}: tensors {last} and {name} overlap")
        end = tensor.start + tensor.size
        last = name

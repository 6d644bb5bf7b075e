"""The head of a GGUF file, beside what the package `gguf` reads, and files that lie."""

import math
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, refused

from benchmarks.export_gguf import write_gguf
from loading.gguf import GGML_TYPES, read_gguf
from loading.list_gguf import main


@pytest.fixture
def written(tiny_llama, tmp_path):
    model = tiny_llama(dtype=torch.float32, vocab_size=4096, n_embd=32, n_layer=1)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "int8", CHECKPOINTS / "stories" / "tokenizer.json")
    return file


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def file_of(*values: bytes, tensors=(), version=3, counts=None, end=bytes(64)) -> bytes:
    """A file with these keys and values; of each tensor its name, shape, type and offset."""
    listed = b""
    for name, shape, kind, offset in tensors:
        numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        listed += text(name) + numbers
    counts = counts or (len(tensors), len(values))
    head = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(values) + listed
    return head + bytes(-len(head) % 32) + end


def value(key: str, kind: int, form: str, *numbers) -> bytes:
    return text(key) + struct.pack(f"<I{form}", kind, *numbers)


def read(file, data: bytes | None = None):
    if data is not None:
        file.write_bytes(data)
    return read_gguf(file)


def test_it_says_what_the_package_gguf_reads(written):
    theirs = gguf.GGUFReader(written)
    ours = read(written)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names and ours.file == written
    for name in names:
        found = ours.metadata[name]
        found = list(found) if type(found).__name__ == "array" else found
        found = np.float32(found) if type(found) is float else found
        assert found == theirs.fields[name].contents(), name
    assert ours.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    data = written.read_bytes()
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist())[::-1]
        assert (found.type, found.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert data[found.offset :][: found.nbytes] == tensor.data.tobytes()
    for kind, (name, *sizes) in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(kind)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (name, tuple(sizes))


def test_each_type_of_value(tmp_path):
    values = [value(f"k{kind}", kind, form, 1) for kind, form in zip(range(7), "BbHhIif")]
    values += [value("k7", 7, "?", True), value("k10", 10, "Q", 2**64 - 1)]
    values += [value("k11", 11, "q", -(2**63)), value("k12", 12, "d", 0.1)]
    values += [text("s") + struct.pack("<I", 8) + text("d\u00e9")]
    values += [value("a", 9, "IQ3h", 3, 3, -1, 0, 1), value("b", 9, "IQ2?", 7, 2, True, False)]
    values += [text("w") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("")]
    values += [value("e", 9, "IQ", 6, 0)]
    found = read(tmp_path / "f", file_of(*values)).metadata
    assert [found[f"k{kind}"] for kind in range(8)] == [1, 1, 1, 1, 1, 1, 1.0, True]
    assert (found["k10"], found["k11"], found["k12"]) == (2**64 - 1, -(2**63), 0.1)
    assert found["s"] == "d\u00e9" and found["w"] == ["a", ""]
    assert [list(found[key]) for key in "abe"] == [[-1, 0, 1], [1, 0], []]
    assert read(tmp_path / "f", file_of(version=2)).tensors == {}
    token = struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xe2\x96"  # bytes that are no text are kept
    (found,) = read(tmp_path / "f", file_of(text("t") + token)).metadata["t"]
    assert found.encode("utf-8", "surrogateescape") == b"\xe2\x96"
    for number in (1e-5, 0.1, 3.4e38, 1e6, 0.0008022651, 0.25506902, 127.118706):
        found = read(tmp_path / "f", file_of(value("k", 6, "f", number))).metadata["k"]
        assert found == number and np.float32(found) == np.float32(number)  # the shortest decimal


TENSOR = ("t", (2, 4), 0, 0)  # 32 bytes
BAD = {
    "the file is empty": b"",
    "not a GGUF file": b"GGML" + bytes(60),
    "GGUF version 1; supported are 2 and 3, little-endian": file_of(version=1),
    "GGUF version 50331648; supported are 2 and": file_of(version=3 << 24),
    "k has the type 13; supported are 0 to 12": file_of(value("k", 13, "")),
    "k is an array of type 9; supported are numbers": file_of(value("k", 9, "IQ", 9, 1)),
    "duplicate key k": file_of(value("k", 0, "B", 1), value("k", 0, "B", 1)),
    "general.alignment 12: must be": file_of(value("general.alignment", 4, "I", 12)),
    "general.alignment 0:": file_of(value("general.alignment", 4, "I", 0)),
    "general.alignment True:": file_of(value("general.alignment", 7, "?", True)),
    "duplicate tensor t": file_of(tensors=[TENSOR, TENSOR]),
    "tensor t has 0 dimensions: must have 1 to 4": file_of(tensors=[("t", (), 0, 0)]),
    "tensor t has 5 dimensions: must have 1 to 4": file_of(tensors=[("t", (1,) * 5, 0, 0)]),
    "tensor t has the type IQ2_XXS; supported are F32,": file_of(tensors=[("t", (256,), 16, 0)]),
    "tensor t has the type 99; supported are F32,": file_of(tensors=[("t", (256,), 99, 0)]),
    "tensor t has shape (2, 48); sizes must be above 0, rows of Q8_0 multiples of 32": file_of(
        tensors=[("t", (2, 48), 8, 0)], end=bytes(999)
    ),
    "tensor t has shape (0, 4);": file_of(tensors=[("t", (0, 4), 0, 0)]),
    "tensor t has offset 4: must be a multiple of 32": file_of(tensors=[("t", (1,), 0, 4)]),
    "tensor t is truncated: it ends at byte 192, the file at byte 160": file_of(
        tensors=[("t", (2, 4), 0, 64)]
    ),
    "tensor t is truncated: it ends at byte 4722366482869645213": file_of(
        tensors=[("t", (2**35, 2**35), 0, 0)]
    ),
    "tensors t and u overlap": file_of(tensors=[("t", (16,), 0, 0), ("u", (8,), 0, 32)]),
}


@pytest.mark.parametrize("words", BAD)
def test_a_file_that_lies_is_one_line(tmp_path, words):
    message = refused(read, tmp_path / "f", BAD[words])
    assert message.startswith(f"{tmp_path / 'f'}: ") and words in message


def test_a_file_that_is_not_there_or_cut_off_anywhere_is_one_line(tmp_path):
    assert refused(read, tmp_path / "f") == f"{tmp_path / 'f'}: No such file or directory"
    assert "Is a directory" in refused(read, tmp_path)
    whole = file_of(value("k", 4, "I", 7), value("a", 9, "IQ4H", 2, 4, 1, 2, 3, 4),
                    tensors=[TENSOR], end=bytes(32))  # fmt: skip
    assert read(tmp_path / "f", whole).metadata["k"] == 7
    for size in range(1, len(whole)):
        assert "truncated" in refused(read, tmp_path / "f", whole[:size]), size


@pytest.mark.parametrize(
    "data",
    [
        file_of(counts=(2**63, 0), end=b""),
        file_of(counts=(0, 2**64 - 1), end=b""),
        file_of(text("k") + struct.pack("<IQ", 8, 2**62)),
        file_of(value("k", 9, "IQ", 8, 2**62)),
        file_of(value("k", 9, "IQ", 12, 2**61)),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**64 - 1),
    ],
)
def test_absurd_counts_take_no_memory(tmp_path, data):
    tracemalloc.start()
    try:
        assert "truncated" in refused(read, tmp_path / "f", data)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_the_list_of_a_file(written, tmp_path, capsys):
    main([str(written)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["general.architecture", "'llama'"]
    (tokens,) = (line for line in lines if line.startswith("tokenizer.ggml.tokens "))
    assert tokens.split(maxsplit=1)[1].startswith("4,096 values: ['!', ")
    (row,) = (line for line in lines if line.startswith("blk.0.attn_k.weight"))
    assert row.split()[1:4] == ["Q8_0", "(12,", "32)"]
    assert lines[-1].startswith("13 tensors (7 Q8_0, 6 F32), ")
    numbers = sum(math.prod(tensor.shape) for tensor in read(written).tensors.values())
    loaded = f"loaded {4 * numbers:,} in float32, {2 * numbers:,} in float16 or bfloat16"
    assert lines[-1].endswith(f" bytes; {loaded}")
    name = "a\x1b[2J\nb"  # which cannot control a terminal
    (tmp_path / "f").write_bytes(file_of(value(name, 0, "B", 1), tensors=[(name, (1,), 0, 0)]))
    main([str(tmp_path / "f")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("a\\x1b[2J\\nb ") == 2 and out.count("\n") == 3
    file = CHECKPOINTS / "stories" / "config.json"
    with pytest.raises(SystemExit) as ended:
        main([str(file)])
    assert is_one_line((ended.value.code, *capsys.readouterr()), f"{file}: not a GGUF file")

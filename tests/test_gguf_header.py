"""The header of a GGUF file, beside what the package `gguf` reads."""

import struct

import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, module_with, refused
from gguf_headers import file_of, text, value

from benchmarks.export_gguf import write_gguf


@pytest.fixture
def written(tiny_llama, tmp_path):
    """A small Llama's file with a vocabulary, as the export writes it."""
    model = tiny_llama(dtype=torch.float32, vocab_size=4096, n_embd=32, n_layer=1)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "int8", CHECKPOINTS / "stories" / "tokenizer.json")
    return file


def read(file, data: bytes | None = None):
    reader = module_with("loading.gguf", "read_gguf")
    if data is not None:
        file.write_bytes(data)
    return reader.read_gguf(file)


def test_it_says_what_the_package_gguf_reads(written):
    import gguf

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
    for kind, (name, *sizes) in module_with("loading.gguf").GGML_TYPES.items():
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


def test_bytes_that_are_no_text_are_kept(tmp_path):
    token = struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xe2\x96"
    (found,) = read(tmp_path / "f", file_of(text("t") + token)).metadata["t"]
    assert found.encode("utf-8", "surrogateescape") == b"\xe2\x96"


def test_a_float32_is_its_shortest_decimal(tmp_path):
    for number in (1e-5, 0.1, 3.4e38, 1e6, 0.0008022651, 0.25506902, 127.118706):
        found = read(tmp_path / "f", file_of(value("k", 6, "f", number))).metadata["k"]
        assert found == number and np.float32(found) == np.float32(number)


BAD = {
    "not a GGUF file": b"GGML" + bytes(60),
    "GGUF version 1; supported are 2 and 3, little-endian": file_of(version=1),
    "GGUF version 50331648; supported are 2 and": file_of(version=3 << 24),
    "k has the type 13; supported are 0 to 12": file_of(value("k", 13, "")),
    "k is an array of type 9; supported are numbers": file_of(value("k", 9, "IQ", 9, 1)),
    "tensor t has the type IQ2_XXS; supported are F32,": file_of(tensors=[("t", (256,), 16, 0)]),
    "tensor t has the type 99; supported are F32,": file_of(tensors=[("t", (256,), 99, 0)]),
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_not_supported_is_one_line(tmp_path, words):
    message = refused(read, tmp_path / "f", BAD[words])
    assert message.startswith(f"{tmp_path / 'f'}: ") and words in message


def test_a_header_cut_off_says_where(tmp_path):
    values = [value("k", 4, "I", 7), value("a", 9, "IQ4H", 2, 4, 1, 2, 3, 4)]
    whole = file_of(*values, end=b"")
    assert read(tmp_path / "f", whole).metadata["k"] == 7
    for size in range(1, 24 + len(b"".join(values))):
        message = refused(read, tmp_path / "f", whole[:size])
        assert message == f"{tmp_path / 'f'}: truncated: the file ends at byte {size}"

"""GGUF files whose headers lie, and the list of a file."""

import struct
import tracemalloc

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, module_with, refused
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


def refused_in_little_memory(file, data: bytes) -> str:
    """The one line with which a file is refused, in less than a megabyte."""
    tracemalloc.start()
    try:
        message = refused(read, file, data)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    return message


@pytest.mark.parametrize(
    "data",
    [
        file_of(counts=(2**63, 0), end=b""),
        file_of(counts=(0, 2**64 - 1), end=b""),
        file_of(value("k", 9, "IQ", 8, 2**62)),
    ],
)
def test_still_counts_end_where_the_file_ends(tmp_path, data):
    assert "truncated" in refused_in_little_memory(tmp_path / "f", data)


TENSOR = ("t", (2, 4), 0, 0)  # 32 bytes
BAD = {
    "the file is empty": b"",
    "duplicate key k": file_of(value("k", 0, "B", 1), value("k", 0, "B", 1)),
    "general.alignment 12: must be": file_of(value("general.alignment", 4, "I", 12)),
    "general.alignment 0:": file_of(value("general.alignment", 4, "I", 0)),
    "general.alignment True:": file_of(value("general.alignment", 7, "?", True)),
    "duplicate tensor t": file_of(tensors=[TENSOR, TENSOR]),
    "tensor t has 0 dimensions: must have 1 to 4": file_of(tensors=[("t", (), 0, 0)]),
    "tensor t has 5 dimensions: must have 1 to 4": file_of(tensors=[("t", (1,) * 5, 0, 0)]),
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


def test_a_file_that_is_not_there(tmp_path):
    assert refused(read, tmp_path / "f") == f"{tmp_path / 'f'}: No such file or directory"
    assert "Is a directory" in refused(read, tmp_path)


def test_a_file_cut_off_anywhere_is_one_line(tmp_path):
    whole = file_of(value("k", 4, "I", 7), value("a", 9, "IQ4H", 2, 4, 1, 2, 3, 4),
                    tensors=[TENSOR], end=bytes(32))  # fmt: skip
    assert read(tmp_path / "f", whole).metadata["k"] == 7
    for size in range(1, len(whole)):
        assert "truncated" in refused(read, tmp_path / "f", whole[:size]), size


@pytest.mark.parametrize(
    "data",
    [
        file_of(text("k") + struct.pack("<IQ", 8, 2**62)),
        file_of(value("k", 9, "IQ", 12, 2**61)),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**64 - 1),
    ],
)
def test_absurd_lengths_take_no_memory(tmp_path, data):
    assert "truncated" in refused_in_little_memory(tmp_path / "f", data)


def test_the_list_of_a_file(written, capsys):
    main = module_with("loading.list_gguf", "main").main

    main([str(written)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["general.architecture", "'llama'"]
    (tokens,) = (line for line in lines if line.startswith("tokenizer.ggml.tokens "))
    assert tokens.split(maxsplit=1)[1].startswith("4,096 values: ['!', ")
    (row,) = (line for line in lines if line.startswith("blk.0.attn_k.weight"))
    assert row.split()[1:4] == ["Q8_0", "(12,", "32)"]
    assert lines[-1].startswith("13 tensors (7 Q8_0, 6 F32), ")


def test_names_cannot_control_a_terminal(tmp_path, capsys):
    main = module_with("loading.list_gguf", "main").main

    name = "a\x1b[2J\nb"
    (tmp_path / "f").write_bytes(file_of(value(name, 0, "B", 1), tensors=[(name, (1,), 0, 0)]))
    main([str(tmp_path / "f")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("a\\x1b[2J\\nb ") == 2 and out.count("\n") == 3


def test_the_list_of_no_gguf_file(capsys):
    main = module_with("loading.list_gguf", "main").main

    file = CHECKPOINTS / "stories" / "config.json"
    with pytest.raises(SystemExit) as ended:
        main([str(file)])
    assert is_one_line((ended.value.code, *capsys.readouterr()), f"{file}: not a GGUF file")

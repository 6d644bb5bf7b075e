"""Blocks of numbers with a scale, beside what the package `gguf` makes of them."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line, module_with, random_tokens, refused, run
from gguf_files import edited, loadable, loaded
from ranks import ROUNDING, compared

from benchmarks.export_gguf import write_gguf
from loading.load import load_model, resolve_source
from native import use_native

BLOCKS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a random Llama with rows of whole blocks: the model, its file."""

    def make(**shape):
        shape = {"n_embd": 64, "n_inner": 96, "head_dim": 16, "tie_word_embeddings": True} | shape
        model = tiny_llama(dtype=torch.float32, **shape)
        write_gguf(model, tmp_path / "f32.gguf", "float32")
        return model, tmp_path / "f32.gguf"

    return make


@pytest.mark.parametrize("name", BLOCKS)
def test_random_bytes_are_the_numbers_of_gguf(name):
    dequantize = module_with("loading.gguf_blocks", "dequantize").dequantize
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (3000, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, kind).ravel()
    ours = dequantize(name, torch.from_numpy(data).flatten()).numpy()
    assert not np.isfinite(theirs).all() and ours.dtype == np.float32
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view("u4")[numbers], theirs.view("u4")[numbers])


def test_a_block_by_hand():
    dequantize = module_with("loading.gguf_blocks", "dequantize").dequantize
    half = [0x00, 0x38]  # 0.5 as float16
    two = [0x00, 0x40]
    first = [0x21, *[0] * 15]  # 1 comes first, 2 after all low ones
    for name, data, expected in (
        ("Q8_0", [*half, 0xFF, 4, *[0] * 30], {0: -0.5, 1: 2}),
        ("Q4_0", [*half, *first], {0: -3.5, 16: -3, 1: -4}),
        ("Q4_1", [*half, *two, *first], {0: 2.5, 16: 3, 1: 2}),
        ("Q5_0", [*half, 0b11, 0, 0, 0x80, *first], {0: 0.5, 1: 0, 16: -7, 2: -8, 31: 0}),
        ("Q5_1", [*half, *two, 0b11, 0, 0, 0x80, *first], {0: 10.5, 1: 10, 16: 3, 2: 2, 31: 10}),
    ):
        found = dequantize(name, torch.tensor(data, dtype=torch.uint8))
        assert len(found) == 32
        assert {place: found[place].item() for place in expected} == expected, name


def check_numbers(blocks, plain, name: str) -> None:
    """A file whose matrices are in blocks of this name is the model of the plain numbers."""
    types = {tensor.type for tensor in resolve_source(blocks).gguf.tensors.values()}
    assert types == {"F32", name}
    ours, theirs = loaded(blocks), loaded(plain)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    text = run(theirs, [random_tokens(9)], max_new_tokens=20)
    use_native(ours)
    assert run(ours, [random_tokens(9)], max_new_tokens=20) == text
    ours, theirs = loaded(blocks, torch.int8).state_dict(), loaded(plain, torch.int8).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_of_blocks_is_its_numbers(made, tmp_path, name):
    _, file = made()
    blocks = edited(file, tmp_path / "blocks.gguf", kind=name)
    plain = edited(blocks, tmp_path / "plain.gguf")
    check_numbers(blocks, plain, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_ranks_read_their_blocks(made, compiled, tmp_path, dtype):
    _, file = made()
    file = edited(file, tmp_path / "blocks.gguf", kind="Q5_1")
    loaded(file)
    assert compared(2, file, torch.tensor([random_tokens(15)]), dtype=dtype)[0] <= ROUNDING[dtype]


def test_the_int8_export_of_an_embedded_model_writes_its_text(cli, tmp_path):
    name = CHECKPOINTS / "stories-llama"
    (tmp_path / "tokenizer.json").write_bytes((name / "tokenizer.json").read_bytes())
    write_gguf(load_model(name), tmp_path / "q8.gguf", "int8")
    options = ["--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 20]
    code, out, err = cli("--model", tmp_path / "q8.gguf", *options)
    assert (code, out) == cli("--model", name, *options)[:2], err


def test_other_types_are_refused(made):
    _, file = made()
    data = bytearray(file.read_bytes())
    name = b"token_embd.weight"
    data[data.index(name) + len(name) + 4 + 2 * 8] = 39
    file.write_bytes(data)
    found = refused(load_model, file)
    assert "tensor token_embd.weight has the type MXFP4; supported are F32, F16" in found


def test_a_vector_in_blocks(made, tmp_path, monkeypatch):
    """No program writes one, but a file may say so. It comes whole, however small blocks are."""
    from loading import gguf_model

    _, file = made()
    loaded(file)
    data = bytearray(file.read_bytes())
    name = b"output_norm.weight"
    place = data.index(name) + len(name) + 4 + 8
    assert data[place : place + 4] == bytes(4)
    data[place] = 8
    file.write_bytes(data)
    tensor = resolve_source(file).gguf.tensors["output_norm.weight"]
    raw = np.frombuffer(bytes(data[tensor.offset :][: tensor.nbytes]), np.uint8)
    theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 5)
    assert np.array_equal(load_model(file).norm.weight.detach().numpy(), theirs)


def test_broken_files_of_blocks(made, tmp_path):
    _, file = made(n_layer=1)
    file = edited(file, tmp_path / "blocks.gguf", kind="Q4_1")
    loaded(file)
    head = min(tensor.offset for tensor in resolve_source(file).gguf.tensors.values())
    assert 5 < loadable(file, head, 100, seed=2) < 70


MEASURE = """
import resource, sys
from loading.load import load_model
peaks = []
for file in sys.argv[1:]:
    model = load_model(file)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
def test_peak_memory_is_the_weights_and_a_block(made, tmp_path):
    _, file = made()
    small = edited(file, tmp_path / "small.gguf", kind="Q4_0")
    model, file = made(vocab_size=40000, n_embd=256)
    file = edited(file, tmp_path / "blocks.gguf", kind="Q4_0")
    size = sum(weight.nbytes for weight in model.parameters()) // 1024
    line = [sys.executable, "-c", MEASURE, small, file]
    found = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < size + 24 * 1024


def test_the_memory_of_a_model_is_said(made, tmp_path, capsys, cli):
    from loading.list_gguf import main

    model, file = made()
    main([str(edited(file, tmp_path / "blocks.gguf", kind="Q8_0"))])
    numbers = sum(weight.numel() for weight in model.parameters()) + 8  # its table
    last = capsys.readouterr().out.splitlines()[-1]
    words = f" bytes; loaded {4 * numbers:,} in float32, {2 * numbers:,} in float16 or bfloat16"
    assert last.endswith(words)
    assert is_one_line(cli("--model", tmp_path / "none.gguf"), "No such file")

"""A model's files, and every way in which they can fail: one line for each."""

import ast
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, record, refused
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from errors import UserError
from loading import checkpoint
from loading.checkpoint import check_nested_values, read_json, read_tensors, write_checkpoint
from loading.gguf import read_gguf

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(4)}
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.items()}


def read(file, transposed=("none",)) -> dict:
    """All tensors of a file, or of a list of them, put together from their blocks."""
    files = file if isinstance(file, list) else [file]
    blocks = {}
    skipped = ("lm_head.weight", ".masked_bias")
    for name, rows, block in read_tensors(files, SHAPES, "transformer.", skipped, transposed):
        assert rows.start == sum(len(part) for part in blocks.setdefault(name, []))
        blocks[name].append(block)
    return {name: torch.cat(parts) for name, parts in blocks.items()}


NOT_OBJECTS = {
    "empty": b"",
    "cut": b'{"a": 1',
    "list": b"[1]",
    "number": b"1",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nested objects": b'{"a":' * 100_000,
    "nested lists": b"[" * 100_000,
    "5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("kind", NOT_OBJECTS)
def test_what_is_no_json_object_is_named(tmp_path, kind):
    file = tmp_path / "config.json"
    file.write_bytes(NOT_OBJECTS[kind])
    assert refused(read_json, file) == f"{file}: not a JSON object"


def test_other_files_of_json(tmp_path):
    assert refused(read_json, tmp_path) == f"{tmp_path}: Is a directory"
    assert refused(read_json, tmp_path / "none") == f"{tmp_path}/none: No such file or directory"
    file = tmp_path / "config.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')  # a byte order mark is no part of it
    assert read_json(file) == {"a": 1}


def test_values_are_checked_by_name():
    supported = {"kind": ("x", "y"), "part.size": (None, 1)}
    whole = {"kind": "x", "part": {"size": 1}}
    for good in ({}, {"kind": "y"}, {"part": None}, {"part": {}}, whole):
        check_nested_values("f", good, supported)
    message = refused(check_nested_values, "f", {"kind": None}, supported)
    assert message == "f: kind is None; supported is 'x' or 'y'"
    message = refused(check_nested_values, "f", {"part": {"size": 2}}, supported)
    assert message == "f: part.size is 2; supported is None or 1"
    message = refused(check_nested_values, "f", {}, {"part.size": (1,)})
    assert message == "f: part.size is None; supported is 1"
    deep = json.loads('{"kind": ' + "[" * 900 + "]" * 900 + "}")
    assert len(refused(check_nested_values, "f", deep, supported)) < 100
    assert len(refused(check_nested_values, "f", {"kind": "z" * 10**6}, supported)) < 100


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_are_read_as_they_are(tmp_path, prefix, dtype):
    file = tmp_path / "x.safetensors"
    stored = {prefix + name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    stored["lm_head.weight"] = torch.ones(1)
    stored[f"{prefix}h.0.masked_bias"] = torch.tensor(True)
    save_file(stored, file)
    weights = read(file)
    assert list(weights) == list(SHAPES)
    for name, tensor in WEIGHTS.items():
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], tensor.to(dtype))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"a": None}, "tensor a is missing"),
        ({"a": torch.ones(3, 2)}, "tensor a has shape (3, 2); config.json says (2, 3)"),
        ({"a": torch.ones(6)}, "tensor a has shape (6,); config.json says (2, 3)"),
        ({"extra": torch.ones(1)}, "unexpected tensor extra"),
        ({"\x1b]0;x\a": torch.ones(1)}, "unexpected tensor \\x1b]0;x\\x07"),
        ({"lm_head": torch.ones(1)}, "unexpected tensor lm_head"),
        ({"transformer.a": WEIGHTS["a"]}, "duplicate tensor a, with and without 'transformer.'"),
        ({"transformer.transformer.a": WEIGHTS["a"]}, "unexpected tensor transformer.a"),
    ]
    + [
        ({name: torch.ones(1)}, f"tensor {name}; quantised weights are not supported")
        for name in ("a.qweight", "a.weight_scale_inv", "a.scales", "a.absmax")
    ]
    + [
        (
            {"b.c": torch.ones(4, dtype=dtype)},
            f"tensor b.c has dtype {dtype}: must be floating-point",
        )
        for dtype in (torch.int8, torch.complex64)
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, words):
    file = tmp_path / "model.safetensors"
    changed = WEIGHTS | change
    save_file({name: part.clone() for name, part in changed.items() if part is not None}, file)
    message = refused(read, file)
    assert words in message
    assert str(file) in message


def test_all_tensors_are_checked_before_the_first_is_read(tmp_path):
    files = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    save_file({"a": WEIGHTS["a"]}, files[0])
    for wrong, words in (
        (torch.ones(5), "has shape (5,)"),
        (torch.ones(4).bool(), "has dtype torch.bool:"),
    ):
        save_file({"b.c": wrong}, files[1])
        message = refused(read_tensors, files, SHAPES)  # no block was asked for
        assert message.startswith(f"{files[1]}: tensor b.c {words}")


def test_large_tensors_come_in_blocks_of_rows(tmp_path, monkeypatch):
    """No more than a block is read at once: loading must not need the model twice."""
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    sizes = record(monkeypatch, checkpoint, "read_bytes", lambda file, start, size: size)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 12)  # bytes: a row of three floats
    blocks = list(read_tensors([file], SHAPES))
    lengths = [(name, len(block)) for name, _, block in blocks]
    assert lengths == [("a", 1), ("a", 1), ("b.c", 3), ("b.c", 1)]
    assert sizes == [12, 12, 12, 4]
    for name, tensor in read(file).items():
        assert torch.equal(tensor, WEIGHTS[name])


def test_a_file_that_becomes_shorter_while_it_is_read_is_one_line(tmp_path, monkeypatch):
    """A mapped file would kill the process (SIGBUS), which nothing can catch."""
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 12)
    blocks = read_tensors([file], SHAPES)
    next(blocks)
    with open(file, "r+b") as opened:
        opened.truncate(100)
    assert refused(list, blocks) == f"{file}: truncated while it was read"
    save_file(WEIGHTS, file)
    blocks = read_tensors([file], SHAPES)
    file.unlink()
    assert refused(next, blocks) == f"{file}: No such file or directory"


HEAD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "head, size",
    [
        ({}, 1),
        ({"a": HEAD, "b": HEAD | {"data_offsets": [12, 20]}}, 20),  # a hole
        ({"a": HEAD, "b": HEAD | {"data_offsets": [4, 12]}}, 12),  # an overlap
        ({"a": HEAD | {"shape": [3]}}, 8),
        ({"a": HEAD | {"shape": [-1, -2]}}, 8),
        ({"a": HEAD | {"shape": [2.0]}}, 8),
        ({"a": HEAD | {"data_offsets": [8, 16]}}, 16),
        ({"a": HEAD}, 9),  # more behind it
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": "F32"}, 8),
        ({"a": HEAD | {"data_offsets": [0, 4, 8]}}, 8),
        ([HEAD], 8),
        ({"a": HEAD | {"dtype": ["F32"]}}, 8),
        *((None, size) for size in (0, 5, 100, -1)),  # a whole file, cut short
    ],
)
def test_a_head_that_makes_no_sense_is_one_line(tmp_path, head, size):
    file = tmp_path / "model.safetensors"
    data = json.dumps(head).encode()
    if head is None:
        save_file(WEIGHTS, file)
        file.write_bytes(file.read_bytes()[:size])
    else:
        file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(size))
    with pytest.raises(SafetensorError):  # the library refuses it too
        load_file(file)
    assert refused(read, file).startswith(f"{file}: not a complete safetensors file (")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_a_git_lfs_pointer_is_called_so(tmp_path):
    words = "a git-lfs pointer, not the file itself: fetch it with git lfs pull"
    for name, function in (
        ("tokenizer.json", read_json),
        ("model.safetensors", read),
        ("model.gguf", read_gguf),
    ):
        file = tmp_path / name
        file.write_bytes(POINTER)
        assert refused(function, file) == f"{file}: {words}"


def test_a_transposed_matrix_is_turned(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS | {"a": WEIGHTS["a"].t().contiguous()}, file)
    assert torch.equal(read(file, transposed=("a",))["a"], WEIGHTS["a"])
    assert "tensor a has shape (3, 2); config.json says (2, 3)" in refused(read, file)
    save_file(WEIGHTS, file)
    assert "tensor a has shape (2, 3); config.json says (3, 2)" in refused(read, file, ("a",))


def test_files_that_do_not_fit_each_other_are_named(tmp_path):
    files = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    save_file({"a": WEIGHTS["a"]}, files[0])
    save_file(WEIGHTS, files[1])
    assert refused(read, files) == f"{files[1]}: duplicate tensor a, also in x.safetensors"
    save_file({"other": torch.ones(1)}, files[1])
    assert refused(read, files) == f"{files[1]}: unexpected tensor other"
    save_file({}, files[1])
    assert refused(read, files) == f"{tmp_path}: tensor b.c is missing"


def test_what_is_written_is_read(tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(write_checkpoint, tmp_path / "file", {}, WEIGHTS)
    directory = tmp_path / "new" / "deep"
    write_checkpoint(directory, {"é": 1}, WEIGHTS)
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert read_json(directory / "config.json") == {"é": 1}
    for name, tensor in read(directory / "model.safetensors").items():
        assert torch.equal(tensor, WEIGHTS[name])


def contents(directory) -> dict:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(params=["empty", "old model"])
def directory(request, tmp_path):
    if request.param == "old model":
        write_checkpoint(tmp_path, {"old": True}, {"a": torch.zeros(1)})
    return tmp_path


def test_a_full_disk_leaves_what_was_there(directory):
    before = contents(directory)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # a file can grow no further
    try:
        message = refused(write_checkpoint, directory, {}, {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith(f"{directory}: could not write the model: ")
    assert contents(directory) == before


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("owner, step", [(checkpoint, "save_file"), (Path, "write_text")])
def test_an_interruption_leaves_what_was_there(directory, monkeypatch, owner, step, error):
    before = contents(directory)

    def half(*args, **kwargs):
        file = next(arg for arg in args if isinstance(arg, Path))
        file.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(owner, step, half)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        write_checkpoint(directory, {}, WEIGHTS)
    assert contents(directory) == before


def test_no_configuration_stands_beside_the_weights_of_another(directory, monkeypatch):
    """The two files cannot be replaced in one step: between them the directory is not a model."""

    def names(file, target):
        return target.name, (directory / "config.json").exists()

    seen = record(monkeypatch, Path, "replace", names)
    write_checkpoint(directory, {"new": True}, WEIGHTS)
    assert seen == [("model.safetensors", False), ("config.json", False)]
    assert read_json(directory / "config.json") == {"new": True}
    assert list(load_file(directory / "model.safetensors")) == list(WEIGHTS)


SCRIPT = 'if __name__ == "__main__":'
LIBRARIES = [file.stem for file in ROOT.glob("*.py") if SCRIPT not in file.read_text("utf-8")]
LIBRARIES.append("infer")
FOLDERS = ["command_line", "constraints", "loading", "native", "parallel", "quantisation", "text"]
LATE = {"text.taint", "text.templates"}  # imported where a chat template runs
FILES = [f"{name}.py" for name in LIBRARIES]
FILES += [str(file.relative_to(ROOT)) for name in FOLDERS for file in (ROOT / name).glob("*.py")]


@pytest.mark.parametrize("name", FILES)
def test_imports_are_light(name):
    """Others, such as transformers and huggingface_hub, take longer to load than a model."""
    statements = ast.parse((ROOT / name).read_text("utf-8")).body
    imports = [node for node in statements if isinstance(node, ast.Import)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    light = {"numpy", "torch", "safetensors", "tokenizers"}  # torch imports numpy
    if name.removesuffix(".py").replace("/", ".") in LATE:
        light |= {"jinja2", "markupsafe"}
    else:
        assert not names & LATE
    allowed = sys.stdlib_module_names | {*light, *LIBRARIES, *FOLDERS}
    assert {name.partition(".")[0] for name in names} <= allowed


def test_layers_that_a_file_stores_as_one_are_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 24)  # two rows
    file = tmp_path / "model.safetensors"
    whole = torch.randn(8, 3).half()
    save_file({"x.abc": whole, "y": whole.clone()}, file)
    shapes = {"x.a": (3, 3), "y": (8, 3), "x.b": (1, 3), "x.c": (4, 3)}

    def read(parts=("x.a", "x.b", "x.c")):
        found = {name: torch.zeros(shape).half() for name, shape in shapes.items()}
        options = {"split_key": lambda key: parts if key == "x.abc" else [key]}
        for name, rows, chunk in read_tensors([file], shapes, **options):
            found[name][rows] = chunk
        return found

    found = read()
    assert torch.equal(torch.cat([found["x.a"], found["x.b"], found["x.c"]]), whole)
    assert torch.equal(found["y"], whole)
    assert "unexpected tensor x.abc" in refused(read, ("x.a", "x.d"))
    shapes["x.b"] = (2, 3)
    assert "tensor x.abc has shape (8, 3); config.json says (9, 3)" in refused(read)

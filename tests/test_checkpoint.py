"""What a model's name means, and every way in which its files can fail: one line for each."""

import ast
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import (
    HUB_NAMES,
    RANDOM_NAMES,
    Source,
    UserError,
    check_values,
    memory_for,
    parse_name,
    read_json,
    read_tensors,
    write_checkpoint,
)

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(4)}
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.items()}


def refused(function, *args) -> str:
    with pytest.raises(UserError) as error:
        function(*args)
    message = str(error.value)
    assert message and "\n" not in message
    return message


def read(file, transposed=("none",)) -> dict:
    """All tensors of a file, or of a list of them, put together from their blocks."""
    files, blocks = file if isinstance(file, list) else [file], {}
    for name, rows, block in read_tensors(
        files, SHAPES, "transformer.", ("lm_head.weight", ".masked_bias"), transposed
    ):
        assert rows.start == sum(len(part) for part in blocks.setdefault(name, []))
        blocks[name].append(block)
    return {name: torch.cat(parts) for name, parts in blocks.items()}


# Names


def test_a_user_error_is_one_line_and_a_value_error():
    assert str(UserError("this\nand that\r\nand more")) == "this and that and more"
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "a/b", "meta-llama/Llama-3.2-1B", "o_1/x.y_z"])
def test_any_model_of_the_hub_has_an_organisation_and_a_name(name):
    assert parse_name(name) == Source("hub", name) and parse_name(name).label == name


@pytest.mark.parametrize("name", HUB_NAMES)
def test_names_of_gpt2(name):
    assert parse_name(name) == Source("hub", name) and parse_name(name).label == name
    assert (
        parse_name(f"random:{name}") == Source("random", name)
        and parse_name(f"random:{name}").label == f"random:{name}"
    )


def test_every_random_name_has_a_shape():
    from load import ARCHITECTURES

    assert tuple(name for kind in dict.fromkeys(ARCHITECTURES.values()) for name in kind.PRESETS) == RANDOM_NAMES
    assert RANDOM_NAMES[: len(HUB_NAMES)] == HUB_NAMES


def test_a_directory_comes_before_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert parse_name("gpt2") == Source("directory", "gpt2") == parse_name(Path("gpt2"))


@pytest.mark.parametrize(
    "name",
    [
        *("gpt3", "random:gpt3", "random:", "no/such/directory", "random:random:gpt2", "", "x" * 300, "a\0b", __file__),
        *(
            "random:org/name",
            "org/",
            "/name",
            "./name",
            "org/../name",
            "org/na me",
            "örg/name",
            "org/name\n",
            "org\\name",
        ),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(name):
    message = refused(parse_name, name)
    assert all(words in message for words in (repr(name), "gpt2, gpt2-medium, gpt2-large, gpt2-xl", "random:"))


def test_a_directory_misspelled_is_no_model_of_the_hub(monkeypatch):
    monkeypatch.chdir(CHECKPOINTS.parent)
    assert parse_name("checkpoints/stories").kind == "directory"
    assert "unknown model 'checkpoints/storis'" in refused(parse_name, "checkpoints/storis")


def test_a_directory_has_one_label_however_it_is_spelled(tmp_path, monkeypatch):
    spelled = [CHECKPOINTS / "stories", f"{CHECKPOINTS}/stories/", CHECKPOINTS / "stories-draft/../stories"]
    labels = {parse_name(name).label for name in spelled}
    monkeypatch.chdir(CHECKPOINTS / "stories")
    assert labels | {parse_name(".").label} == {"checkpoints/stories"}
    for name in ("a/stories", "b/stories"):
        (tmp_path / name).mkdir(parents=True)
        assert parse_name(tmp_path / name).label == str(tmp_path.resolve() / name)


# Files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with these files, in a directory, of a model. It notes what is asked of it."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    class Hub:
        asked, files, commit = [], {"config.json", "model.safetensors"}, "c0ffee"

    def download(repository, file, revision):
        Hub.asked.append((repository, file, revision))
        if file not in Hub.files:
            raise EntryNotFoundError(f"404: no {file}")
        path = tmp_path / "hub" / Hub.commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)

    Hub.asked.clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(checkpoint, "COMMITS", {})
    return Hub


@pytest.mark.parametrize("name, repository", [("gpt2-large", "openai-community/gpt2-large"), ("org/name", "org/name")])
def test_a_file_of_the_hub_is_fetched_when_it_is_asked_for(hub, name, repository):
    source = parse_name(name)
    assert hub.asked == []
    path = source.file("config.json")
    assert path.name == "config.json" and path.is_file()
    assert hub.asked == [(repository, "config.json", None)]
    assert source.weights() == [path.with_name("model.safetensors")]
    assert source.find("chat_template.jinja") is None
    assert refused(source.file, "tokenizer.json") == f"{name}: no tokenizer.json on the Hugging Face hub"


def test_all_files_of_a_model_are_of_one_commit(hub):
    """Its author may replace them while we read."""
    parse_name("org/name").file("config.json")
    hub.commit = "badc0de"
    parse_name("org/name").weights()
    parse_name("org/other").file("config.json")
    parse_name("org/other").weights()
    assert [revision for *_, revision in hub.asked] == [None, "c0ffee", None, "badc0de"]


def test_shards_of_the_hub(hub, monkeypatch):
    hub.files = {"config.json", "model.safetensors.index.json", "a.safetensors"}
    monkeypatch.setattr(
        checkpoint, "read_json", lambda file: {"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}
    )
    assert [file.name for file in parse_name("org/name").weights()] == ["a.safetensors"]
    hub.files.remove("a.safetensors")
    assert refused(parse_name("org/name").weights) == "org/name: no a.safetensors on the Hugging Face hub"
    hub.files = {"config.json", "pytorch_model.bin"}
    assert refused(parse_name("org/name").weights) == "org/name: no model.safetensors on the Hugging Face hub"
    assert "pytorch_model.bin" not in [file for _, file, _ in hub.asked]


@pytest.mark.parametrize("text, reason", [("offline\nsecond line", "offline"), ("", "OSError")])
@pytest.mark.parametrize("name, words", [("gpt2", "gpt2"), ("org/name", "org/name is no directory here, and")])
def test_a_hub_that_does_not_answer_is_one_line(monkeypatch, text, reason, name, words):
    import huggingface_hub

    def no_network(*args, **options):
        raise OSError(text)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    for ask in (parse_name(name).weights, lambda: parse_name(name).find("chat_template.jinja")):
        assert refused(ask) == f"{words} could not be fetched from the Hugging Face hub: {reason}"


def test_without_a_network_a_file_known_to_be_none_is_none(monkeypatch):
    """A model in the hub's cache is used offline; that it has no template was noted when there was a network."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **options):
        raise LocalEntryNotFoundError("offline")

    known = {"generation_config.json": huggingface_hub._CACHED_NO_EXIST, "tokenizer.json": None}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repository, file: known[file])
    source = parse_name("org/name")
    assert source.find("generation_config.json") is None
    assert refused(source.find, "tokenizer.json").endswith("could not be fetched from the Hugging Face hub: offline")


def test_ctrl_c_during_a_download_is_no_error_of_the_hub(monkeypatch):
    import huggingface_hub

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parse_name("gpt2").weights()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_a_file_names_it(tmp_path, missing):
    write_checkpoint(tmp_path, {}, WEIGHTS)
    source = parse_name(tmp_path)
    assert source.file("config.json") == tmp_path / "config.json"
    assert source.weights() == [tmp_path / "model.safetensors"]

    def ask():
        source.file("config.json")
        source.weights()

    (tmp_path / missing).unlink()
    assert refused(ask) == f"{tmp_path}: no {missing} in this directory"
    (tmp_path / missing).mkdir()
    if missing == "config.json":
        (tmp_path / "pytorch_model.bin").touch()  # not what is wrong here
    assert refused(ask) == f"{tmp_path}: no {missing} in this directory"


def test_a_pickle_is_refused_and_the_way_to_convert_it_told(tmp_path):
    write_checkpoint(tmp_path, {}, WEIGHTS)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refused(parse_name(tmp_path).weights)
    assert "no model.safetensors" in message and "pickle" in message and "save_pretrained" in message


def sharded(directory, files: dict, index: dict | None = None) -> Path:
    """Write shards, file -> names of tensors of WEIGHTS, and their index."""
    for file, names in files.items():
        save_file({name: WEIGHTS[name] for name in names}, directory / file)
    mapped = {name: file for file, names in files.items() for name in names} if index is None else index
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return directory


def test_shards_hold_a_model_together(tmp_path):
    weights = parse_name(sharded(tmp_path, {"x-2.safetensors": ["a"], "x-1.safetensors": ["b.c"]})).weights()
    assert weights == [tmp_path / "x-2.safetensors", tmp_path / "x-1.safetensors"]
    for name, tensor in read(weights).items():
        assert torch.equal(tensor, WEIGHTS[name])
    save_file(WEIGHTS, tmp_path / "model.safetensors")  # a whole model comes first
    assert parse_name(tmp_path).weights() == [tmp_path / "model.safetensors"]


def test_shards_that_do_not_fit_are_named(tmp_path):
    whole = sharded(tmp_path, {"x.safetensors": ["a"], "y.safetensors": ["b.c"]})
    files = parse_name(whole).weights()
    save_file(WEIGHTS, files[1])
    assert refused(read, files) == f"{files[1]}: tensor a is there twice, also in x.safetensors"
    save_file({"other": torch.ones(1)}, files[1])
    assert refused(read, files) == f"{files[1]}: unexpected tensor other"
    save_file({}, files[1])
    assert refused(read, files) == f"{tmp_path}: tensor b.c is missing"
    files[1].write_bytes(b"short")
    assert f"{files[1]}: not a complete safetensors file" in refused(read, files)
    files[1].unlink()
    assert refused(parse_name(whole).weights) == f"{tmp_path}: no y.safetensors in this directory"


@pytest.mark.parametrize(
    "index",
    [{}, [], None, 1, {"a": 1}, {"a": None}, {"a": "../x.safetensors"}, {"a": "/x.safetensors"}, {"a": "x.bin"}]
    + [{"a": "x.safetensors", "b": "d/y.safetensors"}, {"a": ".safetensors\n"}, {"a": ["x.safetensors"]}],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    message = refused(parse_name(tmp_path).weights)
    assert message.endswith(
        "model.safetensors.index.json: weight_map does not name a .safetensors file beside it for each tensor"
    )


# JSON


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
    (tmp_path / "config.json").write_bytes(NOT_OBJECTS[kind])
    assert refused(read_json, tmp_path / "config.json") == f"{tmp_path}/config.json: not a JSON object"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert refused(read_json, tmp_path) == f"{tmp_path}: Is a directory"
    assert refused(read_json, tmp_path / "none") == f"{tmp_path}/none: No such file or directory"


def test_json_is_utf8(tmp_path):
    (tmp_path / "x").write_text('{"Ġ": 1}', "utf-8")
    assert read_json(tmp_path / "x") == {"Ġ": 1}


def test_values_are_checked_by_name():
    supported = {"kind": ("x", "y"), "part.size": (None, 1)}
    for good in ({}, {"kind": "y"}, {"part": None}, {"part": {}}, {"kind": "x", "part": {"size": 1}}):
        check_values("f", good, supported)
    assert refused(check_values, "f", {"kind": None}, supported) == "f: kind is None; supported is 'x' or 'y'"
    assert refused(check_values, "f", {"part": {"size": 2}}, supported) == "f: part.size is 2; supported is None or 1"
    assert refused(check_values, "f", {}, {"part.size": (1,)}) == "f: part.size is None; supported is 1"
    deep = json.loads('{"kind": ' + "[" * 900 + "]" * 900 + "}")
    assert len(refused(check_values, "f", deep, supported)) < 100
    assert len(refused(check_values, "f", {"kind": "z" * 10**6}, supported)) < 100


# Tensors


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_are_read_as_they_are(tmp_path, prefix, dtype):
    file = tmp_path / "x.safetensors"
    stored = {prefix + name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    save_file(stored | {"lm_head.weight": torch.ones(1), prefix + "h.0.masked_bias": torch.tensor(True)}, file)
    weights = read(file)
    assert list(weights) == list(SHAPES)
    for name, tensor in WEIGHTS.items():
        assert torch.equal(weights[name], tensor.to(dtype)) and weights[name].dtype == dtype


@pytest.mark.parametrize(
    "change, words",
    [
        ({"a": None}, "tensor a is missing"),
        ({"a": torch.ones(3, 2)}, "tensor a is (3, 2), and config.json says (2, 3)"),
        ({"a": torch.ones(6)}, "tensor a is (6,), and config.json says (2, 3)"),
        ({"extra": torch.ones(1)}, "unexpected tensor extra"),
        ({"lm_head": torch.ones(1)}, "unexpected tensor lm_head"),
        ({"transformer.a": WEIGHTS["a"]}, "tensor a is there twice, with and without 'transformer.'"),
        ({"transformer.transformer.a": WEIGHTS["a"]}, "unexpected tensor transformer.a"),
    ]
    + [
        ({"b.c": torch.ones(4, dtype=dtype)}, f"tensor b.c is {dtype}; it must be floating-point")
        for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64)
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, words):
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in (WEIGHTS | change).items() if tensor is not None}, file)
    message = refused(read, file)
    assert words in message and str(file) in message


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_cut_short_is_named(tmp_path, size):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:size])
    message = refused(read, file)
    assert "not a complete safetensors file" in message and str(file) in message


def test_a_missing_file_is_named(tmp_path):
    assert str(tmp_path / "none") in refused(read, tmp_path / "none")


def test_large_tensors_come_in_blocks_of_rows_and_the_file_is_closed_between(tmp_path, monkeypatch):
    """What was read of an open file counts as memory: loading must not need the model twice."""
    file, opened, open_file = tmp_path / "model.safetensors", [], checkpoint.safe_open
    save_file(WEIGHTS, file)
    monkeypatch.setattr(
        checkpoint, "safe_open", lambda *args, **options: opened.append(1) or open_file(*args, **options)
    )
    monkeypatch.setattr(checkpoint, "BLOCK", 12)  # bytes: a row of three floats
    blocks = list(read_tensors([file], SHAPES))
    assert [(name, len(block)) for name, _, block in blocks] == [("a", 1), ("a", 1), ("b.c", 3), ("b.c", 1)]
    assert len(opened) == 1 + 4
    for name, tensor in read(file).items():
        assert torch.equal(tensor, WEIGHTS[name])


def test_a_transposed_matrix_is_turned(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS | {"a": WEIGHTS["a"].t().contiguous()}, file)
    assert torch.equal(read(file, transposed=("a",))["a"], WEIGHTS["a"])
    assert "tensor a is (3, 2), and config.json says (2, 3)" in refused(read, file)
    save_file(WEIGHTS, file)
    assert "tensor a is (2, 3), and config.json says (3, 2)" in refused(read, file, ("a",))


# Memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory"),
    ],
    ids=repr,
)
def test_memory_that_runs_out_names_what_did_not_fit(error):
    def run():
        with memory_for("7 bytes"):
            raise error

    assert refused(run) == "7 bytes do not fit in memory"


def test_a_real_allocation_that_fails_is_recognised():
    def run():
        with memory_for("many bytes"):
            torch.empty(2**50)

    assert refused(run) == "many bytes do not fit in memory"


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), TypeError("alloc"), UserError("alloc")], ids=repr)
def test_other_errors_are_no_lack_of_memory(error):
    with pytest.raises(type(error)) as seen, memory_for("7 bytes"):
        raise error
    assert seen.value is error


# Writing


def test_what_is_written_is_read(tmp_path):
    directory = tmp_path / "new" / "deep"
    write_checkpoint(directory, {"é": 1}, WEIGHTS)
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert read_json(directory / "config.json") == {"é": 1}
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in read(directory / "model.safetensors").items())


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
    assert message.startswith(f"{directory}: the model could not be written: ")
    assert contents(directory) == before


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", ["save_file", "write_text"])
def test_an_interruption_leaves_what_was_there(directory, monkeypatch, step, error):
    before = contents(directory)

    def half(*args, **kwargs):
        file = next(arg for arg in args if isinstance(arg, Path))
        file.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(*(checkpoint, "save_file") if step == "save_file" else (Path, "write_text"), half)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        write_checkpoint(directory, {}, WEIGHTS)
    assert contents(directory) == before


def test_no_configuration_stands_beside_the_weights_of_another(directory, monkeypatch):
    """The two files cannot be replaced in one step; between the steps the directory is not a model."""
    replace, seen = Path.replace, []

    def watched(file, target):
        seen.append((target.name, (directory / "config.json").exists()))
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_checkpoint(directory, {"new": True}, WEIGHTS)
    assert seen == [("model.safetensors", False), ("config.json", False)]
    assert read_json(directory / "config.json") == {"new": True}
    assert list(load_file(directory / "model.safetensors")) == list(WEIGHTS)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(write_checkpoint, tmp_path / "file", {}, WEIGHTS)


@pytest.mark.parametrize(
    "file", [f"{name}.py" for name in ("chat", "checkpoint", "int8", "llama", "load", "model", "tokenizer")]
)
def test_imports_are_light(file):
    """Others, as transformers and huggingface_hub, take longer to import than the embedded model to load."""
    statements = ast.parse((CHECKPOINTS.parent / file).read_text("utf-8")).body
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    allowed = sys.stdlib_module_names | {"torch", "safetensors", "tiktoken", "checkpoint", "int8", "llama", "model"}
    assert {name.partition(".")[0] for name in names} <= allowed

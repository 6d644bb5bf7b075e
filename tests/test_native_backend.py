"""Lesson 26: `--backend`, which computes in C where it can and in torch elsewhere."""

import pytest
from conftest import CHECKPOINTS, is_one_line

import command_line
from infer_speculative import main
from model import TorchRunner

INT8 = ("--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "int8")
DRAFT = ("--model", CHECKPOINTS / "stories-draft", *INT8)


@pytest.fixture
def native_models(monkeypatch):
    """A list to which each model is added that a command line makes native."""
    models = []
    use_native = getattr(command_line, "use_native", None)

    def recorded(model):
        use_native(model)
        models.append(model)

    monkeypatch.setattr(command_line, "use_native", recorded, raising=False)
    return models


@pytest.mark.parametrize("backend", [(), ("--backend", "auto"), ("--backend", "native")], ids=str)
def test_the_command_line_takes_the_backend(cli, native_models, backend):
    expected = cli(*DRAFT, "--backend", "torch")[:2]
    assert expected[0] == 0 and not native_models
    code, out, err = cli(*DRAFT, *backend)
    assert (code, out) == expected and "note" not in err
    (model,) = native_models
    assert type(model.runner) is not TorchRunner


def test_drafts_are_native_too(run_main, native_models):
    code, out, err = run_main(main, *INT8)
    assert len(native_models) == 2 and "note" not in err
    assert (code, out) == run_main(main, *INT8, "--backend", "torch")[:2] and code == 0


def test_still_auto_takes_torch_for_other_dtypes(cli, native_models):
    code, out, err = cli("--prompt", "Once", "--max-new-tokens", 3, "--dtype", "bfloat16")
    assert code == 0 and out.startswith("Once") and not native_models and "note" not in err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_native_is_refused_for_other_dtypes(cli, dtype):
    result = cli("--backend", "native", "--dtype", dtype)
    assert is_one_line(result, "--backend native is for --device cpu and --dtype")


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_without_compiled_code_torch_computes(fresh, cli, monkeypatch, backend):
    monkeypatch.setenv("CC", "false")
    code, out, err = cli(*DRAFT, "--backend", backend)
    assert (code, out) == cli(*DRAFT, "--backend", "torch")[:2]
    note = "note: the C compiler false failed: no reason given; torch computes instead"
    assert err.splitlines()[0] == note and err.count("\n") == 2


def test_a_note_says_how_to_get_a_compiler(fresh, cli, monkeypatch):
    find_spec = fresh.importlib.util.find_spec
    monkeypatch.setattr(fresh.shutil, "which", lambda name: None)
    monkeypatch.setattr(
        fresh.importlib.util, "find_spec", lambda name: name != "ziglang" and find_spec(name)
    )
    code, _, err = cli(*DRAFT)
    note = "note: there is no C compiler; `pip install ziglang` brings one, for one thread"
    assert code == 0 and err.splitlines()[0] == f"{note}; torch computes instead"


def test_a_note_says_that_compiling_happens_once(fresh, cli, monkeypatch):
    monkeypatch.setattr(command_line, "use_native", lambda model: fresh.load())
    notes = [cli(*DRAFT)[2].count("note: gpt.c is compiled for this processor, once\n")]
    fresh.load.cache_clear()  # another process
    notes.append(cli(*DRAFT)[2].count("note"))
    assert notes == [1, 0]


@pytest.mark.parametrize("kernel", ["AVX2", "plain C", "AVX2, one thread"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_note_says_what_is_not_there(cli, monkeypatch, kernel, backend):
    monkeypatch.setattr(command_line, "kernel", lambda: kernel)
    code, _, err = cli(*DRAFT, "--backend", backend)
    note = f"note: --backend native: without what makes it fast: {kernel}\n"
    noted = kernel != "AVX2" and backend == "native"
    assert code == 0 and err.startswith(note) == noted and err.count("note") == noted

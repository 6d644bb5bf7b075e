"""`--backend` computes in C where it can and in torch elsewhere; a model's layers in C."""

import pytest
import torch
from conftest import CHECKPOINTS
from natives import with_native_linear

from infer_speculative import main
from native import use_native

ARGS = ("--prompt", "Once upon a time", "--max-new-tokens", 12)
DRAFT = ("--model", CHECKPOINTS / "stories-draft", *ARGS)


@pytest.fixture
def native_models(monkeypatch):
    """A list to which each model is added that a command line makes native."""
    models = []

    def recorded(model):
        use_native(model)
        models.append(model)

    monkeypatch.setattr("command_line.models.use_native", recorded)
    return models


@pytest.mark.parametrize("backend", [(), ("--backend", "auto"), ("--backend", "native")], ids=str)
def test_the_command_line_takes_the_backend(cli, native_models, backend):
    expected = cli(*DRAFT, "--backend", "torch")[:2]
    assert expected[0] == 0 and not native_models
    code, out, err = cli(*DRAFT, *backend)
    assert (code, out) == expected and "note" not in err
    (model,) = native_models
    assert type(model.lm_head).__name__ == "NativeLinear"


def test_drafts_are_native_too(run_main, native_models):
    code, out, err = run_main(main, *ARGS)
    assert len(native_models) == 2 and "note" not in err
    assert (code, out) == run_main(main, *ARGS, "--backend", "torch")[:2] and code == 0


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
    monkeypatch.setattr("command_line.models.use_native", lambda model: fresh.load())
    notes = [cli(*DRAFT)[2].count("note: gpt.c is compiled for this processor, once\n")]
    fresh.load.cache_clear()  # another process
    notes.append(cli(*DRAFT)[2].count("note"))
    assert notes == [1, 0]


@pytest.mark.parametrize("kernel", ["AVX2", "plain C", "AVX2, one thread"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_note_says_what_is_not_there(cli, monkeypatch, kernel, backend):
    monkeypatch.setattr("command_line.models.kernel", lambda: kernel)
    code, _, err = cli(*DRAFT, "--backend", backend)
    note = f"note: --backend native: a slow build: {kernel}\n"
    noted = kernel != "AVX2" and backend == "native"
    assert code == 0 and err.startswith(note) == noted and err.count("note") == noted


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_an_embedding_reads_its_rows(tiny, target, shape):
    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0, **shape)
        tokens = torch.arange(vocab_size).view(1, -1)
        expected = model.wte(tokens)
        assert torch.equal(with_native_linear(model).wte(tokens), expected)
        for token in (-1, vocab_size):
            with pytest.raises(ValueError, match=f"must be from 0 to {vocab_size - 1}"):
                model.wte(torch.tensor([token]))


def test_a_shared_weight_is_packed_once(tiny, tiny_llama, compiled):
    for model in (
        tiny(dtype=torch.float32),
        tiny_llama(dtype=torch.float32, tie_word_embeddings=True),
    ):
        with_native_linear(model)
        assert model.layer("embedding").linear is model.lm_head
    other = with_native_linear(tiny_llama(dtype=torch.float32))
    assert other.embed_tokens.linear is not other.lm_head


def test_layers_become_native_once(tiny, compiled):
    model = with_native_linear(tiny(dtype=torch.float32))
    with pytest.raises(ValueError, match="the layers of this model are native already"):
        with_native_linear(model)

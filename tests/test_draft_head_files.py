"""Draft heads: their passes, and files; what does not fit a target is refused."""

import pytest
import torch
from conftest import edit_json, random_tokens, refused
from draft_heads import head_of
from draws import seeded
from natives import native
from safetensors.torch import load_file, save

from cache import Span
from draft_head import head_rows
from engine.cache import PagedCache
from loading.draft_head import is_draft_head, load_draft_head, save_draft_head
from loading.load import load_model, save_model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
def test_rows_of_the_targets_head(compiled, tiny_llama, tmp_path, dtype):
    """Whatever their quantisation, in torch and in C."""
    ids = torch.tensor([3, 60, 0])
    for tied in (False, True):
        save_model(tiny_llama(n_embd=64, tie_word_embeddings=tied).float(), tmp_path)
        want = load_model(tmp_path, torch.float32).lm_head.weight[ids]
        target = load_model(tmp_path, dtype)
        for each in (target, native(load_model(tmp_path, dtype))):
            tolerance = 0.0 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(head_rows(each, ids), want, rtol=0, atol=tolerance)


@torch.inference_mode()
def test_each_span_reads_its_own_states(tiny_llama):
    """A paged cache groups spans by their lengths."""
    head = head_of(tiny_llama())
    spans = [
        Span([2], 0, random_tokens(2, seed=1)),
        Span([1], 0, random_tokens(1, seed=2)),
        Span([3], 0, random_tokens(2, seed=3)),
    ]
    states = torch.randn(5, 16, generator=seeded(0), dtype=torch.float64)
    output = head.runner.forward(head, PagedCache(head, 4, 4), spans, states)
    for row, (span, own) in enumerate(zip(spans, states.split([2, 1, 2]))):
        want = head.runner.forward(head, PagedCache(head, 4, 4), [span], own)
        torch.testing.assert_close(output.hidden[row], want.hidden[0])
        torch.testing.assert_close(output.logits[row], want.logits[0])


@pytest.fixture
def files(tiny_llama, tmp_path):
    """Directories of a target and its head."""
    target = tiny_llama(vocab_size=4096, eos_token_id=4095)
    save_model(target.float(), tmp_path / "target")
    save_draft_head(head_of(target, 4096).half(), tmp_path / "head")
    return tmp_path


def test_save_and_load(files):
    target = load_model(files / "target", torch.float64)
    head = load_draft_head(files / "head", target)
    assert is_draft_head(files / "head") and not is_draft_head(files / "target")
    assert not is_draft_head(files) and head.dtype == torch.float64
    expected = head_of(target, 4096).half()
    for (name, weight), (other, want) in zip(head.named_parameters(), expected.named_parameters()):
        assert name == other and torch.equal(weight, want.double())
    assert head.token_ids.tolist() == list(range(4096)) and head.config.sliding_windows == (3,)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "llama"}, "model_type is 'llama'; supported is 'draft_head'"),
        ({"hidden_size": 32}, "hidden_size 32: must be the target's (16)"),
        ({"vocab_size": 4097}, "vocab_size 4097: must be the target's (4096)"),
        ({"token_ids": []}, "token_ids []: must be"),
        ({"token_ids": [0, 4096]}, "token_ids [0, 4096]: must be"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
        ({"head_dim": 5}, "head_dim 5: must be even"),
        ({"intermediate_size": 25}, "block.mlp.gate_proj.weight has shape (24, 16); config.json"),
        ({"sliding_window": 0}, "sliding_window 0: must be an integer from 1"),
        ({"rope_theta": None}, "rope_theta None: must be above 0"),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_refused(files, changes, words):
    edit_json(files / "head" / "config.json", changes)
    target = load_model(files / "target")
    message = refused(load_draft_head, files / "head", target)
    assert message.startswith(str(files / "head")) and words in message


def test_damaged_files_are_refused(files):
    target = load_model(files / "target")
    file = files / "head" / "model.safetensors"
    data = file.read_bytes()
    tensors = load_file(file)
    for damaged, words in (
        (data[:-1], "not a complete safetensors file"),
        (b"", "not a complete safetensors file"),
        (save({"fc.weight": tensors["fc.weight"]}), "is missing"),
        (save(tensors | {"norm.weight": torch.ones(16)}), "unexpected tensor norm.weight"),
        (save({name: each.int() for name, each in tensors.items()}), "must be floating-point"),
        ((files / "target" / "model.safetensors").read_bytes(), "unexpected tensor"),
    ):
        file.write_bytes(damaged)
        message = refused(load_draft_head, files / "head", target)
        assert message.startswith(str(file)) and words in message
    file.unlink()
    assert str(file) in refused(load_draft_head, files / "head", target)
    assert "File name too long" in refused(is_draft_head, "x" * 300)

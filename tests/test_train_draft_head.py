"""The training script of draft heads: its stages, its attention and its loss."""

import importlib

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from draft_heads import head_of
from families import SAVED, family

from loading.draft_head import load_draft_head
from loading.load import load_model, save_model


@pytest.fixture
def script(monkeypatch, compiled):
    """The script, without compiling its loss."""
    monkeypatch.setattr(torch, "compile", lambda **_: lambda function: function)
    monkeypatch.syspath_prepend(CHECKPOINTS)
    monkeypatch.delitem(importlib.sys.modules, "train_draft_head", raising=False)
    return importlib.import_module("train_draft_head")


@pytest.fixture
def train(script, capsys, tmp_path):
    """A function that trains a head for a model: exit code, stdout, stderr."""

    def run(model, **options) -> tuple[int, str, str]:
        small = {"tokens": 1600, "max_num_seqs": 4, "token_ids": 30, "counted": 300, "inner": 16}
        small |= {"steps": 3, "batch_size": 1, "model": tmp_path / "target"}
        small |= {"work": tmp_path / "work", "out": tmp_path / "head"}
        save_model(model.float(), tmp_path / "target")
        options = {name.replace("_", "-"): value for name, value in (small | options).items()}
        try:
            script.main([f"--{name}={value}" for name, value in options.items()])
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_a_head_is_trained_and_loads(train, tiny_llama, tmp_path):
    """A second run finds all stages finished, and writes the same bytes."""
    target = tiny_llama(n_embd=64, block_size=256)
    code, out, err = train(target)
    assert code == 0, err
    stages = "texts.json", "states.pt", "token_ids.json", "head.pt"
    assert [line[3:] for line in out.splitlines() if line.startswith("-- ")] == list(stages)
    head = load_draft_head(tmp_path / "head", load_model(tmp_path / "target"))
    assert len(head.token_ids) == 30 and 60 in head.token_ids
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    code, out, _ = train(target)
    assert code == 0 and "--" not in out
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert not list((tmp_path / "work").glob("*.part"))


def test_a_finished_stage_keeps_its_options(train, tiny_llama):
    target = tiny_llama(n_embd=64, block_size=256)
    assert train(target)[0] == 0
    code, _, err = train(target, seed=1)
    assert code == 2 and err.count("\n") == 1 and "texts.json was made with" in err
    code, _, err = train(target, lr=0.02)
    assert code == 2 and err.count("\n") == 1 and "head.pt was made with" in err


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("Gemma3", {}, "must be a Llama without biases, QK-norm and experts"),
        ("Qwen2", {}, "must be a Llama without biases, QK-norm and experts"),
        ("Qwen3Moe", {}, "must be a Llama without biases, QK-norm and experts"),
        ("Llama", {"inner": 25}, "--inner 25: must be at most the target's, 24"),
        ("Llama", {"steps": 0}, "--steps 0: must be from 1 to 4294967295"),
        ("Llama", {"lr": "nan"}, "--lr nan: must be above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_before_the_first_stage(
    train, request, tmp_path, kind, options, words
):
    target = family(request, kind)(n_embd=64, block_size=256, **SAVED.get(kind, {}))
    code, out, err = train(target, **options)
    assert (code, out) == (2, "") and err.count("\n") == 1 and words in err
    assert not (tmp_path / "work").exists()


@torch.inference_mode()
def test_a_round_reads_what_a_draft_reads(script, tiny_llama):
    """The target's states up to its first draft, then the head's own."""
    target = tiny_llama(block_size=64)
    head = head_of(target, 61, window=64)
    tokens = torch.tensor([random_tokens(9)])
    states = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0)).double()
    rounds = list(script.unroll(head, tokens, states, 3))
    for first in range(6):
        known = states[:, : first + 1]
        for x in rounds:
            positions = torch.arange(known.shape[1])
            drafted = tokens[:, 1 : known.shape[1] + 1]
            want = head.hidden(drafted, positions, head.causal_attention, known)[:, -1:]
            torch.testing.assert_close(x[:, known.shape[1] - 1], want[:, 0])
            known = torch.cat([known, want], dim=1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_the_gradient_is_that_of_the_loss(script, share):
    """Of the cross entropy and the probability of a rejection, as autograd finds it."""
    generator = torch.Generator().manual_seed(0)
    p = 2 * torch.randn(5, 9, generator=generator)
    logits = (2 * torch.randn(5, 9, generator=generator)).requires_grad_()
    loss, accepted, gradient = script.loss_and_gradient(p, logits.detach(), share)
    q = logits.softmax(dim=-1)
    overlap = torch.minimum(p.softmax(dim=-1), q).sum(dim=-1)
    cross_entropy = -(p.softmax(dim=-1) * q.log()).sum(dim=-1)
    want = (cross_entropy * (1 - share) + share * (1 - overlap)).sum()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(accepted, overlap.sum().detach())
    torch.testing.assert_close(gradient.float(), logits.grad, rtol=0.01, atol=0.002)

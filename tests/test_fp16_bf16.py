"""Lesson 12: half precision takes half the bytes; logits change a little; sampling is float32."""

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, record, run

import sampling
from loading.load import load_model
from model import GPT


@pytest.fixture
def built(monkeypatch):
    """The models that are built from here on."""
    return record(monkeypatch, GPT, "__init__", lambda model, config: model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sampling_sees_float32(tiny, monkeypatch, dtype):
    seen = []

    def sample(logits, *args):
        seen.append(logits.dtype)
        return logits.argmax(dim=-1)

    monkeypatch.setattr(sampling, "sample", sample)
    run(tiny(dtype=dtype), [[1]], max_new_tokens=3, repetition_penalty=1.1)
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_command_line_runs_in_it_on_a_cpu(cli, built, dtype):
    arguments = ("--max-new-tokens", 8, "--dtype", dtype, "--backend", "torch")
    code, out, _ = cli("--prompt", "Once upon a time", *arguments)
    assert code == 0
    assert out.startswith("Once upon a time")
    assert {weight.dtype for weight in built[0].parameters()} == {getattr(torch, dtype)}


def test_a_dtype_that_the_device_lacks_is_one_line(cli, tiny_checkpoint, monkeypatch):
    def ones(*args, **kwargs):
        raise TypeError("BFloat16 is not supported on this device")

    monkeypatch.setattr(torch, "ones", ones)
    result = cli("--model", tiny_checkpoint, "--dtype", "bfloat16")
    assert is_one_line(result, "--dtype bfloat16: not supported on cpu")


def test_an_unknown_dtype_lists_the_valid_ones(cli):
    assert is_one_line(cli("--dtype", "int3"), "float32", "bfloat16")


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 0.1), (torch.bfloat16, 0.5)])
@torch.inference_mode()
def test_still_close_to_the_float32_logits(stories, dtype, bound):
    tokens = torch.randint(4096, (1, 256), generator=torch.Generator().manual_seed(0))
    model = load_model(CHECKPOINTS / "stories", dtype)
    error = (model(tokens).float() - stories(tokens)).abs()
    assert 0 < error.max() < bound


def test_still_float32_by_default(cli, built, tiny_checkpoint):
    cli("--model", tiny_checkpoint, "--max-new-tokens", 1)
    assert {weight.dtype for weight in built[0].parameters()} == {torch.float32}

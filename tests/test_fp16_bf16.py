"""Lesson 12: half precision takes half the bytes, changes the logits a little, and never reaches the sampling."""

import pytest
import torch
from conftest import CHECKPOINTS

from model import GPT


def load(dtype):
    return GPT.from_pretrained(CHECKPOINTS / "stories", dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sampling_sees_float32(tiny, monkeypatch, dtype):
    import infer
    import sampling

    seen = []
    monkeypatch.setattr(sampling, "sample", lambda logits, *args: seen.append(logits.dtype) or logits.argmax(dim=-1))
    list(infer.generate(tiny(dtype=dtype), [[1]], sampling.SamplingParams(max_new_tokens=3, repetition_penalty=1.1)))
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_command_line_runs_in_it_on_a_cpu(cli, monkeypatch, dtype):

    loaded = []
    original = GPT.from_pretrained
    monkeypatch.setattr(GPT, "from_pretrained", lambda *args: loaded.append(original(*args)) or loaded[0])
    code, out, _ = cli("--prompt", "Once upon a time", "--max-new-tokens", 8, "--dtype", dtype, "--device", "cpu")
    assert code == 0 and out.startswith("Once upon a time")
    assert {p.dtype for p in loaded[0].parameters()} == {getattr(torch, dtype)}


def test_a_dtype_that_the_device_lacks_is_one_line(cli, tiny_checkpoint, monkeypatch):
    def ones(*args, **kwargs):
        raise TypeError("BFloat16 is not supported on this device")

    monkeypatch.setattr(torch, "ones", ones)
    code, out, err = cli("--model", tiny_checkpoint, "--dtype", "bfloat16", "--device", "cpu")
    assert code == 2 and out == "" and "--dtype bfloat16: cpu does not compute in it" in err and err.count("\n") == 1


def test_an_unknown_dtype_lists_the_valid_ones(cli):
    code, _, err = cli("--dtype", "int3")
    assert code == 2 and "float32" in err and "bfloat16" in err and err.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_still_half_the_bytes(stories, dtype):
    def size(model):
        return sum(p.untyped_storage().nbytes() for p in model.parameters())

    assert size(load(dtype)) * 2 == size(stories)


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 0.1), (torch.bfloat16, 0.5)])
@torch.inference_mode()
def test_still_close_to_the_float32_logits(stories, dtype, bound):
    tokens = torch.randint(4096, (1, 256), generator=torch.Generator().manual_seed(0))
    error = (load(dtype)(tokens).float() - stories(tokens)).abs()
    assert 0 < error.max() < bound


def test_still_float32_by_default(cli, monkeypatch, tiny_checkpoint):

    loaded = []
    original = GPT.from_pretrained
    monkeypatch.setattr(GPT, "from_pretrained", lambda *a, **k: loaded.append(original(*a, **k)) or loaded[0])
    cli("--model", tiny_checkpoint, "--max-new-tokens", 1)
    assert {p.dtype for p in loaded[0].parameters()} == {torch.float32}

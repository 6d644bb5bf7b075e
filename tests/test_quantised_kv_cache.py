"""Keys and values in float16 or int8, each rounded by itself."""

import functools
import math

import numpy
import pytest
import torch
from conftest import CHECKPOINTS, module_with
from natives import random_numbers

from cache import cached_attention, to_cache_dtype
from quantisation.int8 import quantize


def hadamard(n: int) -> numpy.ndarray:
    """Sylvester's matrix, of a power of two."""
    pair = numpy.array([[1, 1], [1, -1]])
    return functools.reduce(numpy.kron, [pair] * (n.bit_length() - 1))


def restored(stored: torch.Tensor, dim: int) -> numpy.ndarray:
    """What int8 numbers with a scale behind them stand for, rotated back, in float64."""
    scale = stored[..., -4:].contiguous().numpy().view("<f4").astype(float)
    return stored[..., :dim].numpy() * scale @ hadamard(dim) / dim


def test_an_int8_key_by_hand():
    keys = random_numbers(5, 3, 8) * torch.tensor([1e-3, 1, 1e3])[:, None]
    stored = to_cache_dtype(keys, torch.int8)
    assert stored.dtype == torch.int8 and stored.shape == (5, 3, 12)
    scale = stored[..., -4:].contiguous().numpy().view("<f4")
    rotated = keys.numpy() @ hadamard(8)
    assert scale == pytest.approx(abs(rotated).max(-1, keepdims=True) / 127, rel=1e-6)
    assert abs(stored[..., :8].numpy() - rotated / scale).max() < 0.5001
    assert (stored[..., :8].abs().amax(-1) == 127).all()


@pytest.mark.parametrize("dim, width", [(1, 8), (5, 12), (6, 12), (7, 12), (8, 12), (64, 68)])
def test_stored_head_dim_aligns_the_scale(dim, width):
    from cache import stored_head_dim

    assert stored_head_dim(dim, torch.int8) == width and stored_head_dim(dim, torch.float16) == dim
    stored = to_cache_dtype(random_numbers(2, dim), torch.int8)
    assert stored.shape == (2, width) and not stored[:, dim:-4].any()
    zeros = to_cache_dtype(torch.zeros(2, dim), torch.int8)
    assert (
        not zeros[:, :-4].any() and zeros[:, -4:].contiguous().view(torch.float32).isfinite().all()
    )


def test_outliers_cost_little():
    keys = random_numbers(200, 64)
    keys[:, 5] *= 30
    values, scale = quantize(keys)
    plain = (values * scale[:, None] - keys).std()
    rotated = (torch.from_numpy(restored(to_cache_dtype(keys, torch.int8), 64)) - keys).std()
    assert rotated < plain / 2


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_cached_attention_dequantizes_int8(q_dtype):
    q = random_numbers(2, 4, 3, 8).to(q_dtype)
    stored = [to_cache_dtype(random_numbers(2, 2, 5, 8, seed=seed), torch.int8) for seed in (1, 2)]
    mask = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    out = cached_attention(q, *stored, mask)
    keys, values = (numpy.repeat(restored(each, 8), 2, axis=1) for each in stored)
    scores = q.double().numpy() @ keys.swapaxes(2, 3) / math.sqrt(8)
    weights = numpy.exp(scores) * mask.numpy()
    expected = weights / weights.sum(-1, keepdims=True) @ values
    assert out.dtype == q_dtype
    bound = 0.02 if q_dtype == torch.bfloat16 else 1e-5
    assert out.double().numpy() == pytest.approx(expected, abs=bound)


@torch.inference_mode()
def test_divergences_on_stories():
    quality = module_with("benchmarks.quality", "quality")
    model = quality.load_model(CHECKPOINTS / "stories-llama")
    text = (quality.TEXTS / "stories.txt").read_text()
    tokens = quality.load_encoding(CHECKPOINTS / "stories-llama", 4096).encode_ordinary(text)[:200]
    exact = functools.partial(quality.model_logits, model)
    kl = {}
    for dtype in (torch.float16, torch.int8):
        ours = functools.partial(quality.model_logits, model, cache_dtype=dtype)
        kl[dtype] = quality.quality(ours, exact, [tokens])["kl"]
    assert 0 < kl[torch.float16] < 1e-6 < kl[torch.int8] < 3e-4

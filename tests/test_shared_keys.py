"""Lesson 29: several query heads share keys and values, as in transformers."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import module_with

from cache import KVCache
from model import GPTConfig, causal_attention


def random_heads(*shape, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_causal_attention_shares_keys():
    q = random_heads(2, 9, 6, 4)
    k, v = random_heads(2, 2, 9, 2, 4, seed=1)
    shared = causal_attention(0, q, k, v)
    # Neighbouring heads share.
    each = causal_attention(0, q, *(x.repeat_interleave(3, dim=2) for x in (k, v)))
    torch.testing.assert_close(shared, each, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 1), (4, 4), (6, 2), (8, 1), (8, 4)])
@pytest.mark.parametrize("head_dim", [2, 6, 10])
@torch.inference_mode()
def test_attention_is_that_of_transformers(heads, kv_heads, head_dim):
    """A head's size need not be the width over the number of heads."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    llama = module_with("llama", "Attention", "LlamaConfig")
    sizes = {"n_embd": 24, "n_head": heads, "n_kv_head": kv_heads, "head_dim": head_dim}
    config = llama.LlamaConfig(**sizes)
    ours = llama.Attention(config).double()
    for index, weight in enumerate(ours.parameters()):
        weight.data = 0.3 * random_heads(*weight.shape, seed=index)
    sizes = {"hidden_size": 24, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    peer = LlamaConfig(head_dim=head_dim, attn_implementation="sdpa", **sizes)
    theirs = LlamaAttention(peer, 0).double()
    theirs.load_state_dict(ours.state_dict())  # the names, and no biases
    x = random_heads(2, 11, 24, seed=9)
    causal = torch.full((11, 11), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    turns = LlamaRotaryEmbedding(peer)(x, torch.arange(11)[None])
    expected, _ = theirs(x, turns, causal)
    cos, sin = llama.RotaryEmbedding(config, x.dtype, torch.device("cpu")).cos_sin(11)
    attend = functools.partial(causal_attention, 0)
    torch.testing.assert_close(ours(x, cos, sin, attend), expected, rtol=0, atol=1e-10)


def empty_cache(heads: int) -> KVCache:
    """A cache of two layers for two rows of a model that has keys in `heads` heads."""
    shape = {
        "n_layer": 2,
        "n_head": 6,
        "n_kv_head": heads,
        "head_dim": 4,
        "block_size": 16,
        "sliding_windows": (),
    }
    model = SimpleNamespace(config=SimpleNamespace(**shape), dtype=torch.float64, device="cpu")
    return KVCache(model, 2)


def test_a_cache_shares_keys():
    """It gives what a cache with each key repeated gives, pass after pass, for unequal rows."""
    shared = empty_cache(2)
    assert shared.storage.shape == (2, 2, 2, 2, 16, 4)
    each = empty_cache(6)
    for seed, rows in enumerate([[[1, 2, 3, 4], [5, 6]], [[7], [8]], [[9, 10], [11]]]):
        for cache in (shared, each):
            tokens, _, _ = cache.prepare(cache.spans(rows))
        q = random_heads(*tokens.shape, 6, 4, seed=seed)
        k, v = random_heads(2, *tokens.shape, 2, 4, seed=seed + 9)
        for layer in range(2):
            expected = each.attend(layer, q, *(x.repeat_interleave(3, dim=2) for x in (k, v)))
            seen = shared.attend(layer, q, k, v)
            assert seen.shape == q.shape
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
        shared.commit()
        each.commit()


def test_a_gpt2_has_a_key_for_each_query():
    assert getattr(GPTConfig(n_head=7), "n_kv_head", None) == 7


def test_a_cache_that_does_not_fit_names_the_heads_with_keys(monkeypatch):
    from errors import UserError

    def no_memory(*args, **options):
        raise RuntimeError

    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(UserError, match="x 2 heads x 16 positions x 4 elements x 8 bytes$"):
        empty_cache(2)

"""Lesson 14: the cache is one tensor, allocated once; it can be cut back; what does not fit changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import infer
from model import KVCache


def random_tokens(length, seed=0):
    return torch.randint(61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def caches(monkeypatch):
    """The caches that `generate` makes from here on."""
    made = []

    class Recorded(KVCache):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(infer, "KVCache", Recorded)
    return made


def test_decoding_allocates_no_keys(tiny, monkeypatch):
    places, attention = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        places.append((k.data_ptr(), v.data_ptr()))
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    list(infer.generate(tiny(), [[1, 2, 3]], infer.SamplingParams(max_new_tokens=10, ignore_eos=True)))
    assert len(places) == 2 * 10 and len(set(places)) == 2  # one place for each of the two layers


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
def test_bytes_are_the_formula(tiny, caches, dtype, size):
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    list(infer.generate(tiny(dtype=dtype), prompts, infer.SamplingParams(max_new_tokens=6)))
    # layers x keys and values x rows x heads x (3 + 6 - 1 positions) x head_dim
    assert [cache.storage.untyped_storage().nbytes() for cache in caches] == [2 * 2 * 3 * 2 * 8 * 8 * size]


def test_it_never_is_longer_than_the_window(tiny, caches):
    list(infer.generate(tiny(), [[1] * 20], infer.SamplingParams(max_new_tokens=6)))
    assert [cache.storage.shape for cache in caches] == [(2, 2, 1, 2, 16, 8)]


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 16)), min_size=1, max_size=6), st.integers(0, 99))
@torch.inference_mode()
def test_after_truncate_logits_equal_full_recomputation(tiny, cuts, seed):
    model = tiny()
    cache, tokens = KVCache(model), random_tokens(0)
    for kept, new in cuts:
        known = min(kept, tokens.shape[1], 15)
        cache.truncate(known)
        tokens = torch.cat([tokens[:, :known], random_tokens(new, seed)], dim=1)[:, :16]
        logits = model(tokens[:, known:], cache=cache)
        torch.testing.assert_close(logits, model(tokens)[:, known:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_overflow_raises_and_changes_nothing(tiny):
    model, tokens = tiny(), random_tokens(12)
    cache = KVCache(model, max_len=12)
    model(tokens[:, :9], cache=cache)
    before = cache.storage[..., :9, :].clone()
    with pytest.raises(ValueError, match="13 positions do not fit into a cache of 12"):
        model(tokens[:, :4], cache=cache)
    assert torch.equal(cache.storage[..., :9, :], before)
    torch.testing.assert_close(model(tokens[:, 9:], cache=cache), model(tokens)[:, 9:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_reset_forgets_everything(tiny):
    model, tokens = tiny(), random_tokens(10)
    cache = KVCache(model, max_len=10)
    for _ in range(3):
        torch.testing.assert_close(model(tokens, cache=cache), model(tokens), rtol=0, atol=1e-12)
        cache.reset()


def test_a_negative_length_is_refused(tiny):
    with pytest.raises(ValueError, match="-1 positions"):
        KVCache(tiny()).truncate(-1)


def test_what_does_not_fit_in_memory_says_its_bytes(tiny):
    with pytest.raises(ValueError) as raised:
        KVCache(tiny(), 10**12)
    assert "a cache of 8,192,000,000,000,000 bytes does not fit" in str(raised.value)
    assert "1000000000000 rows x 2 layers x" in str(raised.value)


def test_still_the_text_of_recomputation(tiny):
    model, params = tiny(seed=6), infer.SamplingParams(max_new_tokens=40, ignore_eos=True)
    cached = list(infer.generate(model, [[1, 2], [3, 4]], params))
    assert cached == list(infer.generate(model, [[1, 2], [3, 4]], params, use_cache=False))

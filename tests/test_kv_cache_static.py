"""Lesson 14: the cache is one tensor, allocated once; it can be cut back; what does not fit changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from conftest import in_cache, random_tokens, run
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from cache import KVCache


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
    run(tiny(), [[1, 2, 3]], max_new_tokens=10, ignore_eos=True)
    assert len(places) == 2 * 10 and len(set(places)) == 2  # one place for each of the two layers


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
def test_bytes_are_the_formula(tiny, caches, dtype, size):
    run(tiny(dtype=dtype), [[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_new_tokens=6)
    # layers x keys and values x rows x heads x (3 + 6 - 1 positions) x head_dim
    assert [cache.storage.untyped_storage().nbytes() for cache in caches] == [2 * 2 * 3 * 2 * 8 * 8 * size]


def test_it_never_is_longer_than_the_window(tiny, caches):
    run(tiny(), [[1] * 20], max_new_tokens=6)
    assert [cache.storage.shape for cache in caches] == [(2, 2, 1, 2, 16, 8)]
    assert KVCache(tiny()).storage.shape[4] == 16  # as if there were no limit


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 16)), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=40)
@torch.inference_mode()
def test_after_truncate_logits_equal_full_recomputation(tiny, cuts, seed):
    model = tiny()
    cache, tokens = KVCache(model), []
    for kept, count in cuts:
        known = min(kept, len(tokens), 15)
        cache.truncate(known)
        tokens = (tokens[:known] + random_tokens(count, seed=seed))[:16]
        logits = in_cache(model, cache, tokens[known:])
        torch.testing.assert_close(logits, model(torch.tensor([tokens]))[:, known:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_overflow_raises_and_changes_nothing(tiny):
    model, tokens = tiny(), random_tokens(12)
    cache = KVCache(model, max_len=12)
    in_cache(model, cache, tokens[:9])
    before = cache.storage.clone()
    with pytest.raises(ValueError, match="13 positions do not fit into a cache of 12"):
        in_cache(model, cache, tokens[:4])
    assert torch.equal(cache.storage, before) and cache.tokens == [tokens[:9]]
    full = model(torch.tensor([tokens]))
    torch.testing.assert_close(in_cache(model, cache, tokens[9:]), full[:, 9:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_reset_forgets_everything(tiny):
    model, tokens = tiny(), random_tokens(10)
    cache = KVCache(model, max_len=10)
    for _ in range(3):
        full = model(torch.tensor([tokens]))
        torch.testing.assert_close(in_cache(model, cache, tokens), full, rtol=0, atol=1e-12)
        cache.reset()
        assert cache.tokens == [[]]


def test_a_negative_length_is_refused(tiny):
    with pytest.raises(ValueError, match="cut to -1 positions; it must be 0 or more"):
        KVCache(tiny()).truncate(-1)


def test_no_memory_is_read_before_it_is_written(tiny, monkeypatch):
    """Allocators hand out memory as others left it, NaN included; 0 times NaN is NaN."""
    model = tiny()
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    assert KVCache(model).storage.eq(0).all()


def test_what_does_not_fit_in_memory_says_its_bytes(tiny):
    with pytest.raises(ValueError) as raised:
        KVCache(tiny(), max_len=10**12)
    assert "a cache of 512,000,000,000,000 bytes does not fit" in str(raised.value)
    assert "1 rows x 2 layers x keys and values x 2 heads x 1000000000000 positions x" in str(raised.value)


def test_still_the_text_of_recomputation(tiny):
    model, params = tiny(seed=6), {"max_new_tokens": 40, "ignore_eos": True}
    assert run(model, [[1, 2], [3, 4]], **params) == run(
        model, [[1, 2], [3, 4]], options={"use_cache": False}, **params
    )

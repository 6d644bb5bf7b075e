"""Lesson 14: the cache is one tensor, allocated once; what does not fit changes nothing."""

import pytest
import torch
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


def test_decoding_allocates_no_keys(tiny, attended):
    run(tiny(), [[1, 2, 3]], max_new_tokens=10, ignore_eos=True)
    places = [(k.data_ptr(), v.data_ptr()) for _, k, v in attended]
    assert len(places) == 2 * 10
    assert len(set(places)) == 2  # one place for each of the two layers


@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)]
)
def test_bytes_are_the_formula(tiny, caches, dtype, size):
    run(tiny(dtype=dtype), [[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_new_tokens=6)
    # Layers x keys and values x rows x heads x (3 + 6 - 1 positions) x head_dim.
    expected = 2 * 2 * 3 * 2 * 8 * 8 * size
    assert [cache.storage.untyped_storage().nbytes() for cache in caches] == [expected]


def test_it_never_is_longer_than_the_window(tiny, caches):
    run(tiny(), [[1] * 20], max_new_tokens=6)
    assert [cache.storage.shape for cache in caches] == [(2, 2, 1, 2, 16, 8)]
    assert KVCache(tiny()).storage.shape[4] == 16  # as if there were no limit


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 16)), min_size=1, max_size=6),
    st.integers(0, 99),
)
@settings(max_examples=40)
@torch.inference_mode()
def test_still_after_cutting_back_logits_equal_full_recomputation(tiny, cuts, seed):
    model = tiny()
    cache = KVCache(model)
    tokens = []
    for step, (kept, count) in enumerate(cuts):
        tokens = (tokens[: min(kept, 15)] + random_tokens(count, seed=seed + step))[:16]
        cache.truncate_to_prefix([tokens])
        known = len(cache.tokens[0])
        assert cache.tokens[0] == tokens[:known] and known < len(tokens)
        logits = in_cache(model, cache, tokens[known:])
        full = model(torch.tensor([tokens]))
        torch.testing.assert_close(logits, full[:, known:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_overflow_raises_and_changes_nothing(tiny):
    model = tiny()
    tokens = random_tokens(12)
    cache = KVCache(model, max_len=12)
    in_cache(model, cache, tokens[:9])
    before = cache.storage.clone()
    with pytest.raises(ValueError, match="13 positions exceed max_len"):
        in_cache(model, cache, tokens[:4])
    assert torch.equal(cache.storage, before)
    assert cache.tokens == [tokens[:9]]
    full = model(torch.tensor([tokens]))
    torch.testing.assert_close(in_cache(model, cache, tokens[9:]), full[:, 9:], rtol=0, atol=1e-12)


def test_no_memory_is_read_before_it_is_written(tiny, monkeypatch):
    """Allocators hand out memory as others left it, NaN included; 0 times NaN is NaN."""
    model = tiny()

    def left_over(shape, **options):
        return torch.full(shape, torch.nan, **options)

    monkeypatch.setattr(torch, "empty", left_over)
    assert KVCache(model).storage.eq(0).all()


def test_what_does_not_fit_in_memory_says_its_bytes(tiny):
    with pytest.raises(ValueError) as raised:
        KVCache(tiny(), max_len=10**12)
    said = str(raised.value)
    assert "a cache of 512,000,000,000,000 bytes does not fit" in said
    factors = "batch size 1 x 2 layers x keys and values x 2 heads x 1000000000000 positions x"
    assert factors in said

"""The logits of several last positions of each window, for any windows, one after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCache
from infer import next_logits
from sampling import SamplingParams, sampling_probs


@given(data=st.data(), keep=st.integers(1, 4), cached=st.booleans())
@settings(max_examples=40)
@torch.inference_mode()
def test_logits_equal_full_recomputation(tiny, data, keep, cached):
    """Windows of a small alphabet share beginnings by chance: they grow, change, hop."""
    model = tiny()
    window = st.lists(st.integers(0, 2), min_size=keep, max_size=16)
    steps = data.draw(st.lists(st.lists(window, min_size=3, max_size=3), min_size=1, max_size=4))
    cache = KVCache(model, 3) if cached else None
    for windows in steps:
        logits = next_logits(model, windows, cache, keep)
        assert logits.shape == (3, keep, 61)
        assert logits.dtype == torch.float32
        for tokens, ours in zip(windows, logits):
            torch.testing.assert_close(ours, model(torch.tensor([tokens]))[0, -keep:].float())


@pytest.mark.parametrize("cached", [True, False])
def test_a_window_shorter_than_what_is_kept_is_refused(tiny, cached):
    cache = KVCache(tiny(), 2) if cached else None
    with pytest.raises(ValueError, match="shorter than the 3 positions to keep"):
        next_logits(tiny(), [[1, 2, 3], [1, 2]], cache, keep=3)


def test_a_pass_that_fails_leaves_no_claim(tiny):
    """What a broken pass has not written is computed again."""
    model = tiny()
    cache = KVCache(model)
    next_logits(model, [[1, 2]], cache)
    handle = model.h[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next_logits(model, [[1, 2, 3, 4]], cache)
    handle.remove()
    expected = model(torch.tensor([[1, 2, 3, 4, 5]]))[:, -1:].float()
    torch.testing.assert_close(next_logits(model, [[1, 2, 3, 4, 5]], cache), expected)


def test_greedy_is_a_distribution_too():
    """All of the mass on the best token, so that one rule accepts greedy and sampled drafts."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 9.0, 0.0]])
    assert sampling_probs(logits, SamplingParams()).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]

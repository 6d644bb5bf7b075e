"""The logits of several last positions of each window, for any windows, one after the other."""

import pytest
import torch
from conftest import random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCache
from infer import next_logits
from sampling import SamplingParams, penalize, sampling_probs


@given(data=st.data(), keep=st.integers(1, 4), cached=st.booleans())
@settings(max_examples=40)
@torch.inference_mode()
def test_logits_equal_full_recomputation(tiny, data, keep, cached):
    """Windows of a small alphabet share beginnings by chance: they grow, change in the middle, hop."""
    model = tiny()
    window = st.lists(st.integers(0, 2), min_size=keep, max_size=16)
    steps = data.draw(st.lists(st.lists(window, min_size=3, max_size=3), min_size=1, max_size=4))
    cache = KVCache(model, 3) if cached else None
    for windows in steps:
        logits = next_logits(model, windows, cache, keep)
        assert logits.shape == (3, keep, 61) and logits.dtype == torch.float32
        for tokens, ours in zip(windows, logits):
            torch.testing.assert_close(ours, model(torch.tensor([tokens]))[0, -keep:].float())


@torch.inference_mode()
def test_a_hop_of_one_row_with_several_positions_to_keep(tiny):
    model, cache = tiny(), KVCache(tiny(), 2)
    texts = [random_tokens(16, seed=1), random_tokens(11, seed=2)]
    next_logits(model, texts, cache, keep=3)
    windows = [texts[0][8:] + [5], texts[1] + [7, 9, 4]]
    logits = next_logits(model, windows, cache, keep=3)
    for tokens, ours in zip(windows, logits):
        torch.testing.assert_close(ours, model(torch.tensor([tokens]))[0, -3:].float())


@pytest.mark.parametrize("cached", [True, False])
def test_a_window_shorter_than_what_is_kept_is_refused(tiny, cached):
    with pytest.raises(ValueError, match="shorter than the 3 positions to keep"):
        next_logits(tiny(), [[1, 2, 3], [1, 2]], KVCache(tiny(), 2) if cached else None, keep=3)


def test_a_pass_that_fails_leaves_no_claim(tiny):
    """What a broken pass has not written is computed again."""
    model, cache = tiny(), KVCache(tiny())
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


def test_penalties_one_by_one():
    """A penalty that is on counts even if the others are off."""
    logits, counts = torch.tensor([2.0, 2.0, 2.0, -2.0]), torch.tensor([0, 1, 3, 0])
    in_prompt = torch.tensor([False, False, False, True])

    def penalized(**penalties):
        return penalize(logits, SamplingParams(**penalties), counts, in_prompt).tolist()

    assert penalized() == [2.0, 2.0, 2.0, -2.0]
    assert penalized(presence_penalty=0.5) == [2.0, 1.5, 1.5, -2.0]
    assert penalized(frequency_penalty=0.5) == [2.0, 1.5, 0.5, -2.0]
    assert penalized(repetition_penalty=2.0) == [2.0, 1.0, 1.0, -4.0]
    assert penalized(repetition_penalty=2.0, presence_penalty=0.5) == [2.0, 0.5, 0.5, -4.0]


@pytest.mark.parametrize("stride, expected", [(None, 8), (1, 1), (16, 16)])
def test_the_stride_of_a_window(stride, expected):
    from cache import check_stride

    assert check_stride(stride, 16) == expected and check_stride(None, 1) == 1

"""A pass over tokens of several texts: the logits of each are those of that text alone."""

import pytest
import torch
from conftest import random_tokens
from engines import poison
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Span
from engine.cache import PagedCache

BAD = 60  # a token that is in none of them
TEXTS = [random_tokens(16, BAD, seed=seed) for seed in range(4)]


def new_cache(model):
    """A cache with room for four texts."""
    return PagedCache(model, 17, page_size=4)


def place(text):
    """Where in the cache one of TEXTS is: four pages, neither in order nor side by side."""
    return [5 * (4 * text + page) % 17 for page in range(4)]


def part(text, start, end):
    """The span of positions start to end of one of TEXTS."""
    return Span(place(text), start, TEXTS[text][start:end])


def logits_of(model, cache, spans):
    """The logits at all positions of each span, in the model's dtype."""
    tokens, positions, ends = cache.prepare(spans)
    logits = model.head(model.hidden(tokens, positions, cache.attend))
    return [logits[end - len(span.tokens) : end] for span, end in zip(spans, ends)]


def check(model, cache, parts):
    """Pass parts (text, start, end) together, and compare each with a pass over its text alone."""
    for (text, start, end), ours in zip(
        parts, logits_of(model, cache, [part(*each) for each in parts])
    ):
        alone = model(torch.tensor([TEXTS[text][:end]]))[0, start:]
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_a_pass_mixes_spans_of_any_start_and_length(build):
    model = build()
    parts = [(0, 12, 13), (1, 1, 7), (2, 7, 8), (3, 3, 9)]
    for first in range(len(parts)):
        order = parts[first:] + parts[:first]
        cache = new_cache(model)
        for text, past, _ in parts:
            check(model, cache, [(text, 0, past)])
        check(model, cache, order)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 16)), min_size=1, max_size=4),
        max_size=12,
    )
)
@settings(max_examples=15)
@torch.inference_mode()
def test_logits_of_any_chunks(tiny, passes):
    model = tiny()
    ends = [0] * 4
    cache = new_cache(model)
    for counts in passes:
        starts = {text: ends[text] % 16 for text, _ in counts}
        parts = [
            (text, starts[text], min(starts[text] + count, 16))
            for text, count in dict(counts).items()
        ]
        check(model, cache, parts)
        for text, _, end in parts:
            ends[text] = end


@torch.inference_mode()
@pytest.mark.parametrize("keep", [[1, 1, 1, 1], [5, 1, 2, 4]])
def test_last_logits_are_in_the_order_of_the_spans_and_float32(build, keep):
    model = build()
    spans = [part(2, 0, 5), part(0, 0, 9), part(3, 0, 5), part(1, 0, 16)]
    logits = model.runner.logits(model, new_cache(model), spans, keep)
    assert logits.dtype == torch.float32
    alone = [model(torch.tensor([span.tokens]))[0, -count:] for span, count in zip(spans, keep)]
    torch.testing.assert_close(logits, torch.cat(alone).float(), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_only_new_tokens_are_passed_and_only_last_ones_reach_the_head(tiny):
    model = tiny()
    widths = []
    model.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape))
    model.lm_head.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[:-1]))
    cache = new_cache(model)
    model.runner.logits(model, cache, [part(0, 0, 9), part(1, 0, 4), part(2, 0, 9)], [1, 1, 1])
    model.runner.logits(model, cache, [part(1, 4, 6), part(0, 9, 10)], [1, 1])
    assert widths == [(9 + 4 + 9,), (3,), (2 + 1,), (2,)]


def bad_part(text, start, end, at):
    """A `part` with BAD as its token number `at`."""
    span = part(text, start, end)
    return span._replace(tokens=span.tokens[:at] + [BAD] + span.tokens[at + 1 :])


@torch.inference_mode()
def test_nan_stays_in_its_sequence(build):
    model = poison(build(), BAD)
    bad = bad_part(1, 0, 6, at=3)
    for spans in (
        [bad, part(0, 0, 6), part(2, 0, 9)],
        [part(0, 0, 6), part(2, 0, 9), part(3, 0, 16), bad],
    ):
        for span, ours in zip(spans, logits_of(model, new_cache(model), spans)):
            if span is bad:
                assert ours[3:].isnan().all()
            else:
                alone = model(torch.tensor([span.tokens]))[0]
                torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_nan_in_stale_pages_is_not_read(build):
    model = build()
    cache = new_cache(model)
    cache.storage[:, :, place(0)] = cache.storage[:, :, place(1)] = torch.nan
    check(model, cache, [(2, 0, 11), (3, 0, 6)])
    check(model, cache, [(2, 11, 12), (3, 6, 7)])


@torch.inference_mode()
def test_a_reused_page_is_cleared_of_nan(build):
    model = poison(build(), BAD)
    cache = new_cache(model)
    check(model, cache, [(0, 0, 9), (1, 0, 5)])
    assert logits_of(model, cache, [bad_part(1, 5, 14, at=2)])[0][2:].isnan().all()
    check(model, cache, [(1, 0, 1), (0, 9, 10)])
    check(model, cache, [(1, 1, 3), (0, 10, 16)])


@torch.inference_mode()
def test_no_memory_is_read_before_it_is_written(build, monkeypatch):
    model = build()
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan)
    )
    cache = new_cache(model)
    assert cache.storage.isnan().all()
    check(model, cache, [(0, 0, 9), (1, 0, 5)])
    check(model, cache, [(0, 9, 10), (1, 5, 6)])

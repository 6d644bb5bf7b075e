"""The page pool, and a pass over pages of several sequences: each has the logits of its own."""

import tracemalloc

import pytest
import torch
from conftest import random_tokens
from engines import poison
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Span
from engine.cache import PagedCache
from engine.pages import PagePool, page_count

BAD = 60  # a token that is in none of them
TEXTS = [random_tokens(16, BAD, seed=seed) for seed in range(4)]


@given(
    page_size=st.integers(1, 4),
    history=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=40),
)
def test_each_page_is_free_or_in_one_table(page_size, history):
    pool = PagePool(11, page_size)
    tables = [[] for _ in range(4)]
    for row, length in history:
        table = tables[row]
        before = list(table)
        pages = len({position // page_size for position in range(length)})
        assert pool.page_count(length) == page_count(length, page_size) == pages
        fits = pages - len(before) <= pool.num_free_pages
        assert pool.allocate(table, length) == fits
        assert table[: len(before)] == before
        assert len(table) == (max(pages, len(before)) if fits else len(before))
        pool.free_tail(table, length)
        assert table[:pages] == table
        held = [page for table in tables for page in table]
        assert sorted([*held, *pool.free_pages]) == list(range(pool.first_unused))
        assert pool.num_free_pages + len(held) == pool.num_pages == 11


def test_a_freed_page_is_taken_before_an_unused_one():
    pool = PagePool(9, 4)
    first, second = [], []
    pool.allocate(first, 12)
    pool.free_tail(first, 4)
    assert pool.allocate(second, 12)
    assert sorted(second) == [1, 2, 3] and pool.first_unused == 4


def test_ten_million_pages_take_no_memory_before_they_are_used():
    tracemalloc.start()
    pool = PagePool(10**7, 1)
    pool.allocate([], 9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7 and pool.num_free_pages == 10**7 - 9


def new_cache(model):
    return PagedCache(model, 17, page_size=4)


def part(text, start, end, bad=None):
    """Return a span of one of TEXTS on pages in no order, with BAD as token `bad`."""
    tokens = TEXTS[text][start:end]
    if bad is not None:
        tokens[bad] = BAD
    return Span([5 * (4 * text + page) % 17 for page in range(4)], start, tokens)


def logits_of(model, cache, spans):
    """Return the logits at all positions of each span, in the model's dtype."""
    tokens, positions, ends = cache.prepare(spans)
    logits = model.head(model.hidden(tokens, positions, cache.attend))
    return [logits[end - len(span.tokens) : end] for span, end in zip(spans, ends)]


def check(model, cache, parts):
    found = logits_of(model, cache, [part(*each) for each in parts])
    for (text, start, end), ours in zip(parts, found):
        alone = model(torch.tensor([TEXTS[text][:end]]))[0, start:]
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


COUNTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 16)), min_size=1, max_size=4)


@given(st.lists(COUNTS, max_size=12))
@settings(max_examples=15)
@torch.inference_mode()
def test_logits_of_any_chunks(build, passes):
    """Memory that was not written is NaN: allocators hand it out as others left it."""
    model = build()
    ends = [0] * 4
    cache = new_cache(model)
    cache.storage.fill_(torch.nan)
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
def test_nan_stays_in_its_sequence_and_leaves_its_pages_when_they_are_reused(build):
    model = poison(build(), BAD)
    cache = new_cache(model)
    check(model, cache, [(0, 0, 9), (1, 0, 5)])
    bad, other = logits_of(model, cache, [part(1, 5, 14, bad=2), part(2, 0, 9)])
    assert bad[2:].isnan().all() and other.isfinite().all()
    check(model, cache, [(1, 0, 1), (0, 9, 10)])
    check(model, cache, [(1, 1, 3), (0, 10, 16)])


LENGTHS = (1, 3, 4, 5, 9, 16, 17, 30, 31, 60, 63, 64)


def spans_of(lengths) -> list:
    first = 0
    spans = []
    for length in lengths:
        pages = list(range(first, first + page_count(length, 4)))
        spans.append(Span(pages[::-1], length - 1, random_tokens(1, seed=length)))
        first += len(pages)
    return spans


@torch.inference_mode()
def test_a_sequence_reads_less_than_twice_its_pages(tiny, attended):
    spans = spans_of(LENGTHS)
    model = tiny(n_layer=1, block_size=64)
    used = sum(len(span.pages) for span in spans)
    logits_of(model, PagedCache(model, used, 4), spans)
    shapes = [(k.shape[0], k.shape[2]) for _, k, _ in attended]
    assert sum(count for count, _ in shapes) == len(spans)
    assert used <= sum(count * positions // 4 for count, positions in shapes) < 2 * used


@torch.inference_mode()
def test_spans_of_equal_length_attend_together(tiny, attended):
    model = tiny(n_layer=1)
    cache = new_cache(model)
    logits_of(model, cache, [part(text, 0, 8 + text) for text in range(4)])
    attended.clear()
    logits_of(model, cache, [part(0, 8, 9), part(1, 9, 12), part(2, 10, 11), part(3, 11, 12)])
    # Sequences, new tokens, positions that they may see.
    calls = [(len(q), q.shape[2], k.shape[2]) for q, k, _ in attended]
    assert calls == [(3, 1, 12), (1, 3, 12)]

"""Texts of similar length attend together, and what they read is copied into room that stays."""

import torch
from conftest import random_tokens

from cache import Span
from engine.cache import PagedCache

LENGTHS = (1, 3, 4, 5, 9, 16, 17, 30, 31, 60, 63, 64)
PAGE_SIZE = 4


def spans_of(lengths) -> list:
    """The newest token of texts of these lengths, each on pages of its own."""
    first = 0
    spans = []
    for length in lengths:
        count = -(-length // PAGE_SIZE)
        pages = list(range(first, first + count))
        spans.append(Span(pages[::-1], length - 1, random_tokens(1, seed=length)))
        first += count
    return spans


def run_pass(model, cache, spans) -> None:
    tokens, positions, _ = cache.prepare(spans)
    model.hidden(tokens, positions, cache.attend)


def shapes(attended) -> list[tuple[int, int]]:
    """How many texts and positions the keys of each call of attention had."""
    return [(k.shape[0], k.shape[2]) for _, k, _ in attended]


@torch.inference_mode()
def test_a_sequence_reads_less_than_twice_its_pages(tiny, attended):
    spans = spans_of(LENGTHS)
    model = tiny(n_layer=1, block_size=64)
    cache = PagedCache(model, sum(len(span.pages) for span in spans), PAGE_SIZE)
    run_pass(model, cache, spans)
    used = sum(len(span.pages) for span in spans)
    assert sum(texts for texts, _ in shapes(attended)) == len(spans)
    read = sum(texts * positions // PAGE_SIZE for texts, positions in shapes(attended))
    assert used <= read < 2 * used


@torch.inference_mode()
def test_spans_of_equal_length_attend_together(tiny, attended):
    model = tiny(n_layer=1)
    cache = PagedCache(model, 16, PAGE_SIZE)
    texts = [random_tokens(16, seed=seed) for seed in range(4)]
    pages = [list(range(4 * text, 4 * text + 4)) for text in range(4)]
    run_pass(model, cache, [Span(pages[text], 0, texts[text][: 8 + text]) for text in range(4)])
    attended.clear()
    parts = [(0, 8, 9), (1, 9, 12), (2, 10, 11), (3, 11, 12)]
    run_pass(model, cache, [Span(pages[text], a, texts[text][a:b]) for text, a, b in parts])
    # texts, new tokens, positions that they may see
    calls = [(len(q), q.shape[2], k.shape[2]) for q, k, _ in attended]
    assert calls == [(3, 1, 12), (1, 3, 12)]


@torch.inference_mode()
def test_the_scratch_buffer_is_reused(build):
    model = build(block_size=64)
    cache = PagedCache(model, 200, PAGE_SIZE)
    places = []
    for lengths in ([3], [40, 41], [9], [40, 38], [64, 1], [64] * 2, [3, 40]):
        run_pass(model, cache, spans_of(lengths))
        places.append((cache.scratch.data_ptr(), cache.scratch.numel()))
    assert places[1] == places[2] == places[3]
    assert places[5] == places[6]
    assert places[0][1] < places[1][1] < places[5][1]
    config = model.config
    assert places[5][1] == 2 * (2 * 64) * config.n_kv_head * config.head_dim

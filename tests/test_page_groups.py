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
def test_a_text_reads_less_than_twice_the_pages_it_has(tiny, attended):
    """However long the longest one beside it is."""
    spans = spans_of(LENGTHS)
    model = tiny(n_layer=1, block_size=64)
    cache = PagedCache(model, sum(len(span.pages) for span in spans), PAGE_SIZE)
    run_pass(model, cache, spans)
    used = sum(len(span.pages) for span in spans)
    assert sum(texts for texts, _ in shapes(attended)) == len(spans)
    read = sum(texts * positions // PAGE_SIZE for texts, positions in shapes(attended))
    assert used <= read < 2 * used


@torch.inference_mode()
def test_texts_of_the_same_number_of_pages_attend_together(tiny, attended):
    model = tiny(n_layer=1, block_size=64)
    spans = spans_of([33, 36, 34, 35])
    run_pass(model, PagedCache(model, 36, PAGE_SIZE), spans)
    assert shapes(attended) == [(4, 36)]


@torch.inference_mode()
def test_texts_with_as_many_new_tokens_attend_together(tiny, attended):
    """Also where one of them has fewer positions than the longest."""
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
def test_a_step_copies_into_the_room_of_the_last_one(build):
    """It grows to the largest group, and then it stays where it is."""
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

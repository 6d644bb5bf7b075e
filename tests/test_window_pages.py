"""Lesson 123: pages before the windows of all layers go back to the pool."""

import pytest
import torch
from conftest import random_tokens
from engines import finish, make_engine, own_texts, request_params, step
from natives import native_in_dtype

from engine.pages import PagePool

BACKENDS = pytest.mark.parametrize("backend", ["torch", "native", "int8"])


def sliding_model(build, backend, sliding_windows=(5, 9), **shape):
    """A model whose layers all have windows."""
    model = build(
        dtype=torch.float64 if backend == "torch" else torch.float32,
        sliding_windows=sliding_windows,
        **shape,
    )
    if backend == "torch":
        return model
    return native_in_dtype(model, torch.int8 if backend == "int8" else torch.float32)


def run(engine) -> int:
    """Finish an engine. Returns the most pages that were held after a step."""
    pool = engine.scheduler.pool
    most = 0
    while engine.busy:
        step(engine)
        most = max(most, len(pool.ref_counts))
    assert pool.num_free_pages == pool.num_pages
    return most


@BACKENDS
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_sequence_holds_the_pages_of_its_sliding_windows(
    tiny_windows, compiled, backend, page_size
):
    model = sliding_model(tiny_windows, backend, block_size=200)
    params = request_params(1, max_new_tokens=180)
    engine, (request,) = make_engine(model, [[1, 2, 3]], params, page_size=page_size)
    # After a step up to position p: p - 7 to p, which p + 1 sees besides itself.
    assert run(engine) == {1: 8, 4: 3}[page_size]
    assert [request.output] == own_texts(model, [[1, 2, 3]], params)


@BACKENDS
def test_a_prefix_is_found_without_its_first_pages(tiny_windows, compiled, backend):
    model = sliding_model(tiny_windows, backend, block_size=200)
    prompt = random_tokens(60)
    params = request_params(3, max_new_tokens=30)
    engine, (first,) = make_engine(model, [prompt], params[:1], page_size=4, num_pages=26)
    finish(engine)
    pool = engine.scheduler.pool
    taken = []
    assert pool.allocate(taken, 4 * (pool.num_pages - 12))  # the first ones were given back first
    assert pool.find_cached(prompt[:-1], "") == []
    assert [p is None for p in pool.find_cached(prompt[:-1], "", 9)] == [True] * 12 + [False] * 2
    pool.free_after(taken, 0)
    before = engine.num_computed_tokens
    second = engine.add(prompt, params[1])
    third = engine.add(prompt + first.output[:8], params[2])
    finish(engine)
    assert engine.num_computed_tokens - before == (4 + 29) + (4 + 29)
    prompts = [prompt, prompt, prompt + first.output[:8]]
    outputs = [request.output for request in (first, second, third)]
    assert outputs == own_texts(model, prompts, params)


def test_find_cached_with_a_sliding_window():
    pool = PagePool(20, 4)
    tokens = list(range(40))
    pages = []
    pool.allocate(pages, 40)
    page_hashes = []
    pool.cache_pages(pages, page_hashes, tokens, "")
    for index in (1, 5, 9):  # as if others had taken them
        del pool.page_to_hash[pages[index]]
        del pool.hash_to_page[page_hashes[index]]
    assert pool.find_cached(tokens, "") == pages[:1]
    # Position 36 sees 28 to 35 besides itself, in pages 7 and 8.
    assert pool.find_cached(tokens, "", 9) == [None] * 7 + pages[7:9]
    # With one more it sees 27, in page 6, and 26 to 13 with more; page 5 is gone.
    assert pool.find_cached(tokens, "", 10) == [None] * 6 + pages[6:9]
    assert pool.find_cached(tokens, "", 13) == [None] * 6 + pages[6:9]
    assert pool.find_cached(tokens, "", 14) == pages[:1]
    assert pool.find_cached(tokens, "", 1) == [None] * 10  # each sees itself alone
    assert pool.find_cached(tokens[:20], "", 9) == [None] * 3 + pages[3:5]
    assert pool.find_cached(tokens, "other", 9) == []
    pool.free_before(pages, 30)
    assert pages[:7] == [None] * 7 and None not in pages[7:]
    pool.free_before(pages, 30)
    pool.cache_pages(pages, [], tokens, "")  # nothing of a page that is gone
    assert None not in pool.hash_to_page.values()
    pool.free_after(pages, 0)
    assert pages == [] and pool.num_free_pages == 20

"""Lesson 123: pages before the windows of all layers go back to the pool."""

import pytest
import torch
from conftest import random_tokens
from engines import finish, make_engine, own_texts, request_params, step
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import native_in_dtype

from engine.drafter import PromptLookupDrafter
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
def test_a_long_text_holds_what_its_windows_see(tiny_windows, compiled, backend, page_size):
    model = sliding_model(tiny_windows, backend, block_size=200)
    params = request_params(1, max_new_tokens=180)
    engine, (request,) = make_engine(model, [[1, 2, 3]], params, page_size=page_size)
    # After a step up to position p: p - 7 to p, which p + 1 sees besides itself.
    assert run(engine) == {1: 8, 4: 3}[page_size]
    assert [request.output] == own_texts(model, [[1, 2, 3]], params)


def check_four_texts(tiny_windows, sliding_windows, all_run):
    """Whether four texts run at once, in pages for less than all of them."""
    model = tiny_windows(sliding_windows=sliding_windows, block_size=100)
    prompts = [random_tokens(3, seed=row) for row in range(4)]
    params = request_params(4, max_new_tokens=80)
    engine, requests = make_engine(model, prompts, params, page_size=4, num_pages=24)
    run(engine)
    assert (engine.scheduler.num_preemptions == 0) == all_run
    assert [request.output for request in requests] == own_texts(model, prompts, params)


def test_more_texts_run_at_once(tiny_windows):
    check_four_texts(tiny_windows, (5, 9), True)


def test_still_a_layer_that_sees_all_keeps_all_pages(tiny_windows):
    check_four_texts(tiny_windows, (5, None), False)


@BACKENDS
def test_a_prefix_is_found_without_its_first_pages(tiny_windows, compiled, backend):
    """Others have taken them since."""
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


def test_the_longest_prefix_that_can_go_on():
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


def test_still_no_page_goes_back_where_a_layer_sees_all(tiny_windows):
    model = tiny_windows(sliding_windows=(5, None), block_size=100)
    params = request_params(1, max_new_tokens=60)
    engine, _ = make_engine(model, [[1]], params, page_size=4)
    assert run(engine) == 15


TEXT = st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(1, 40))


@BACKENDS
@given(
    texts=st.lists(TEXT, min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 4]),
    pages=st.integers(45, 120),
    max_num_batched_tokens=st.sampled_from([3, 16, 100]),
    drafts=st.booleans(),
)
@settings(max_examples=15)
def test_still_any_texts_are_those_of_their_own_runs(
    tiny_windows, compiled, backend, texts, page_size, pages, max_num_batched_tokens, drafts
):
    """They share beginnings, are preempted, cut into chunks, drafted, and outgrow block_size."""
    if backend not in MODELS:
        MODELS[backend] = sliding_model(tiny_windows, backend)
    model = MODELS[backend]
    prompts = [random_tokens(length, 5, seed=seed) for seed, length, _ in texts]
    params = [request_params(1, max_new_tokens=count)[0] for _, _, count in texts]
    options = {
        "num_pages": -(-pages // page_size),
        "page_size": page_size,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    options["max_num_seqs"] = 3
    if drafts:
        options["drafter"] = PromptLookupDrafter()
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    assert [request.output for request in requests] == own_texts(model, prompts, params)


MODELS = {}

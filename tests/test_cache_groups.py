"""KV cache groups: pages of sliding-window layers, which are freed as the window moves."""

import pytest
import torch
from conftest import random_tokens
from engines import SMALL_ENGINE, check_texts, finish, make_engine, own_texts, request_params, step
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import native, native_in_dtype

from cache import Span
from engine.cache import PagedCache
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from engine.pages import PagePool


def kinds(build, backend="torch", **shape):
    """A model with sliding-window layers, and others unless all windows are given."""
    shape = {"sliding_windows": (5, None, 8), "block_size": 200} | shape
    model = build(dtype=torch.float64 if backend == "torch" else torch.float32, **shape)
    if backend == "torch":
        return model
    return native_in_dtype(model, torch.int8 if backend == "int8" else torch.float32)


def run(engine) -> list[int]:
    """Finish an engine, and return the most pages of each group that were held after a step."""
    most = [0 for _ in engine.scheduler.kv_cache_groups]
    while engine.busy:
        step(engine)
        held = [len(pool.ref_counts) for pool, _ in engine.scheduler.kv_cache_groups]
        most = list(map(max, most, held))
    return most


@pytest.mark.parametrize(
    "sliding_windows, pages, expected",
    [
        ((None,) * 6, 240, 6 * 240),
        ((8,) * 6, 240, 6 * 240),  # a single group has all pages
        ((8, None), 10, 2 * 10),  # as where the second one would have more
        ((8,) * 5 + (None,), 60, 60 + 5 * 13),
    ],
)
def test_pages_of_groups(tiny_gemma, sliding_windows, pages, expected):
    model = tiny_gemma(block_size=200, sliding_windows=sliding_windows)
    cache = Engine(model, **SMALL_ENGINE | {"num_pages": pages}).cache
    # Keys and values x 2 heads x 4 positions x 6 numbers x 8 bytes.
    page_bytes = 2 * 2 * 4 * 6 * 8
    assert sum(storage.nbytes for storage in cache.storages) == expected * page_bytes


@pytest.mark.parametrize(
    "sliding_windows, page_size, pages",
    [((5, None, 8), 1, [61, 7]), ((5, None, 8), 4, [16, 3]), ((5, 9), 1, [8]), ((5, 9), 4, [3])],
)
def test_a_long_sequence_holds_the_pages_that_each_group_sees(
    tiny_gemma, sliding_windows, page_size, pages
):
    model = kinds(tiny_gemma, sliding_windows=sliding_windows)
    params = request_params(1, max_new_tokens=60)
    options = SMALL_ENGINE | {"page_size": page_size, "num_pages": 240 // page_size}
    engine, (request,) = make_engine(model, [[1, 2, 3]], params, **options)
    # The next position p sees p - 7 to p, with a sliding window of 9 also p - 8.
    assert run(engine) == pages
    assert [request.output] == own_texts(model, [[1, 2, 3]], params)


def test_sliding_pages_are_allocated_chunk_by_chunk(tiny_gemma):
    model = kinds(tiny_gemma)
    prompts = [random_tokens(180), random_tokens(20, seed=1)]
    params = request_params(2, max_new_tokens=15)
    engine, requests = make_engine(model, prompts, params, **SMALL_ENGINE)
    step(engine)
    # A chunk of 16 positions.
    assert [len(table) for table in (requests[0].pages, requests[0].sliding_pages)] == [45, 4]
    run(engine)
    assert engine.scheduler.num_preemptions == 0
    assert [request.output for request in requests] == own_texts(model, prompts, params)


def test_a_prefix_is_cached_if_both_groups_have_its_pages(tiny_gemma):
    model = kinds(tiny_gemma)
    prompt = random_tokens(100)
    params = request_params(1, max_new_tokens=8)
    engine, (first,) = make_engine(model, [prompt], params, **SMALL_ENGINE)
    finish(engine)
    again = engine.add(prompt + first.output, params[0])
    step(engine)
    # Of 107 positions whose keys were computed, 26 pages are full. Position 104 sees 97 to 103.
    assert engine.scheduler.prefix_cache_hits == 104
    finish(engine)
    (_, _), (sliding_pool, _) = engine.scheduler.kv_cache_groups
    taken = []  # others take what the window needs
    assert sliding_pool.allocate(taken, 4 * sliding_pool.num_pages)
    sliding_pool.free_tail(taken, 0)
    assert len(engine.scheduler.pool.find_cached(prompt, "")) == 25
    third = engine.add(prompt, params[0])
    finish(engine)
    assert engine.scheduler.prefix_cache_hits == 104
    outputs = [request.output for request in (first, again, third)]
    assert outputs == own_texts(model, [prompt, prompt + first.output, prompt], params * 3)


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
    pool.free_skipped(pages, 30)
    assert pages[:7] == [None] * 7 and None not in pages[7:]
    pool.free_skipped(pages, 30)
    pool.cache_pages(pages, [], tokens, "")  # nothing of a page that is gone
    assert None not in pool.hash_to_page.values()
    pool.free_tail(pages, 0)
    assert pages == [] and pool.num_free_pages == 20


REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(1, 30))
MODELS = {}


@pytest.mark.parametrize("backend", ["torch", "native", "int8"])
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=5),
    sliding_windows=st.sampled_from([(5, None), (5, 9)]),
    sizes=st.tuples(st.sampled_from([1, 3, 4]), st.integers(50, 100), st.sampled_from([3, 8, 16])),
    drafts=st.sampled_from(["", "lookup", "model"]),
    aborted=st.integers(0, 20),
)
@settings(max_examples=10)
def test_outputs_equal_generate(
    tiny_windows, compiled, backend, requests, sliding_windows, sizes, drafts, aborted
):
    """Pages of the sliding-window group never run out."""
    if (backend, sliding_windows) not in MODELS:
        shape = {"sliding_windows": sliding_windows, "block_size": 40}
        made = [kinds(tiny_windows, backend, seed=seed, **shape) for seed in (0, 1)]
        MODELS[backend, sliding_windows] = made
    model, draft = MODELS[backend, sliding_windows]
    prompts = [random_tokens(length, 5, seed=seed) for seed, length, _ in requests]
    params = [request_params(1, max_new_tokens=count)[0] for _, _, count in requests]
    page_size, positions, budget = sizes
    options = {"page_size": page_size, "num_pages": positions // page_size, "max_num_seqs": 3}
    if drafts:
        lookup = drafts == "lookup"
        options["drafter"] = PromptLookupDrafter() if lookup else PagedModelDrafter(draft, model)
    engine, added = make_engine(model, prompts, params, max_num_batched_tokens=budget, **options)
    refused = []
    for pool, _ in engine.scheduler.kv_cache_groups[1:]:
        watch_refusals(pool, refused)
    for _ in range(aborted):
        step(engine)
    if aborted and not added[0].finish_reason:
        engine.abort(added[0])
    finish(engine)
    assert not refused
    check_texts(model, added)


def watch_refusals(pool, refused: list) -> None:
    allocate = pool.allocate
    pool.allocate = lambda *args: allocate(*args) or refused.append(args)


@torch.inference_mode()
def test_c_touches_no_page_outside_either_storage(tiny_gemma, compiled):
    model = native(tiny_gemma(dtype=torch.float32, sliding_windows=(3, None)))
    cache = PagedCache(model, 4, 2, 3)
    for storage in cache.storages:
        storage.fill_(torch.nan)
    for sliding_pages, message in ([3], "must be from 0 to 2"), ([], "must fit in 0 positions"):
        with pytest.raises(ValueError, match=message):
            model.runner.logits(model, cache, [Span([3], 0, [1], sliding_pages)], [1])
    assert all(storage.isnan().all() for storage in cache.storages)
    assert model.runner.logits(model, cache, [Span([3], 0, [1], [2])], [1]).isfinite().all()
    for storage, page in zip(cache.storages, (3, 2)):
        written = ~storage.isnan()
        assert written[:, :, page, :, 0].all() and not written[:, :, :page].any()

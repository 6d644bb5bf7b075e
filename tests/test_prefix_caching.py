"""Sequences that begin alike compute the full pages of their prefix once."""

import pytest
from conftest import random_tokens
from engines import check_pages, check_texts, failing, greedy, make_engine, poison, step
from engines import finish as finish_engine

from engine.pages import PagePool
from errors import UserError

BAD = 60  # a token that `poison` makes NaN, and that no text has by chance


def prompt_of(length, seed=0):
    return random_tokens(length, BAD, seed)


def engine_of(model, page_size=4, **options):
    return make_engine(model, [], [], page_size=page_size, **options)[0]


def add(engine, prompt, max_new_tokens=1, cache_salt=""):
    return engine.add(prompt, greedy(max_new_tokens), cache_salt)


def finish(engine, requests):
    finish_engine(engine)
    check_texts(engine.model, requests)


def shared(engine, prompt, max_new_tokens=1, cache_salt=""):
    """Return how many positions of a sequence were cached. All others must be computed."""
    before = engine.scheduler.prefix_cache_hits, engine.num_computed_tokens
    finish(engine, [add(engine, prompt, max_new_tokens, cache_salt)])
    found = engine.scheduler.prefix_cache_hits - before[0]
    computed = engine.num_computed_tokens - before[1]
    assert found + computed == len(prompt) + max_new_tokens - 1
    return found


def test_full_pages_of_a_beginning_are_computed_once(tiny):
    engine = engine_of(tiny())
    prompt = prompt_of(10)
    other = [(token + 1) % BAD for token in prompt]
    assert shared(engine, prompt) == 0
    assert shared(engine, prompt) == 8
    assert shared(engine, prompt + other[:5]) == 8
    assert shared(engine, prompt[:8] + other[8:]) == 8
    assert shared(engine, prompt[:7] + other[7:]) == 4
    assert shared(engine, prompt[:3] + other[3:]) == 0
    assert shared(engine, prompt[:5]) == 4
    assert shared(engine, prompt[:3]) == 0
    assert shared(engine, prompt[1:]) == 0  # the same tokens at other positions are something else
    # A page hash covers all tokens before.
    first = [1, 2, 3, 4]
    second = [5, 6, 7, 8]
    assert shared(engine, [*first, *second, 9]) == 0
    assert shared(engine, [11, 12, 13, 14, *second, 9]) == 0
    assert shared(engine, [*second, 9]) == 0
    assert shared(engine, [*second, *second, *second, 9]) == 4
    assert shared(engine, [*first, *second, *second, 9]) == 8


@pytest.mark.parametrize("page_size", [1, 5, 12])
def test_the_last_token_is_always_computed(tiny, page_size):
    engine = engine_of(tiny(), page_size)
    assert shared(engine, prompt_of(12), 4) == 0
    assert shared(engine, prompt_of(12), 4) == 11 // page_size * page_size


def test_generated_tokens_are_cached_but_for_the_last(tiny):
    for max_new_tokens, found in [(7, 8), (8, 12), (9, 12)]:
        engine = engine_of(tiny())
        request = add(engine, prompt_of(5), max_new_tokens)
        finish(engine, [request])
        assert shared(engine, request.tokens + [7]) == found


def test_pages_of_a_running_request_are_shared(tiny):
    engine = engine_of(tiny())
    first = add(engine, prompt_of(10), 6)
    engine.step()
    second = add(engine, prompt_of(10), 4)
    third = add(engine, prompt_of(9) + [7, 7], 4)
    step(engine)
    assert second.pages[:2] == third.pages[:2] == first.pages[:2]
    assert len({second.pages[2], third.pages[2], first.pages[2]}) == 3
    assert (engine.num_computed_tokens, engine.scheduler.prefix_cache_hits) == (10 + 1 + 2 + 3, 16)
    engine.abort(first)
    check_pages(engine)
    engine.step()
    engine.abort(third)
    check_pages(engine)
    finish(engine, [second])


def test_requests_of_one_step_share_pages_after_it(tiny):
    engine = engine_of(tiny())
    first, second = (add(engine, prompt_of(10), count) for count in (6, 3))
    step(engine)
    assert (engine.num_computed_tokens, engine.scheduler.prefix_cache_hits) == (20, 0)
    # Computed twice, kept once.
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    finish(engine, [first, second])


def test_cache_salts_separate_prefixes(tiny):
    engine = engine_of(tiny())
    prompt = prompt_of(10)
    for cache_salt in ("", "a", "ab", "?", "\ud800", "\ud801", r"\ud800"):
        assert shared(engine, prompt, cache_salt=cache_salt) == 0
        assert shared(engine, prompt, cache_salt=cache_salt) == 8
    assert shared(engine, prompt) == 8


def test_page_hashes_do_not_collide():
    """Some of these are the same as joined digits, bytes, remainders or Python's hash()."""
    ids = [(1, 23), (12, 3), (123, 0), (0, 123), (-1, 0), (-2, 0), (1, 0), (0, 1), (256, 0)]
    ids += [(0, 256), (2**32, 0), (0, 2**32), (2**61 - 1, 0), *((id, 7) for id in range(600))]
    pool = PagePool(len(ids), 2)
    pages = {}
    for part in ids:
        assert pool.find_cached([*part], "") == []
        pages[part] = []
        assert pool.allocate(pages[part], 2)
        pool.cache_pages(pages[part], [], [*part], "")
    assert all(pool.find_cached([*part, 5], "") == pages[part] for part in ids)
    assert sorted(page for (page,) in pages.values()) == [*range(len(ids))]


def test_lru_eviction_takes_the_last_page_of_a_prefix_first(tiny):
    engine = engine_of(tiny(), num_pages=5)
    # of three, three and two pages
    first, second, third = (prompt_of(*own) for own in ((9, 1), (9, 2), (5, 3)))
    assert [shared(engine, prompt) for prompt in (first, second)] == [0, 0]
    assert shared(engine, third) == 0  # takes the last pages of the first text
    assert shared(engine, first) == 4  # takes those of the second one again
    assert shared(engine, second) == 4


def test_cached_pages_are_not_reallocated_to_the_same_request(tiny):
    """The two that are found are the oldest free ones (vLLM's issue 11565)."""
    engine = engine_of(tiny(), 2, num_pages=4)
    prompt = prompt_of(5)
    assert shared(engine, prompt) == 0
    assert shared(engine, prompt_of(4, 1)) == 0
    assert [*engine.scheduler.pool.free_pages][:2] == [1, 0]
    assert shared(engine, prompt[:4] + [7, 8, 9]) == 4


def test_cached_pages_do_not_count_as_free(tiny):
    """Two are found and two are needed; three are free, the two among them (vLLM's issue 11565)."""
    engine = engine_of(tiny(), 2, num_pages=4)
    prompt = prompt_of(5)
    assert shared(engine, prompt) == 0
    requests = [add(engine, [7], 2), add(engine, prompt[:4] + [7, 8, 9], 2)]
    step(engine)
    assert requests[1].pages == [] and engine.scheduler.prefix_cache_hits == 0
    finish(engine, requests)
    assert engine.scheduler.prefix_cache_hits == 4 and engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("length", [13, 5])
def test_an_evicted_page_is_not_found_by_its_old_hash(tiny, length):
    """Whether it is full again (13 tokens) or only begun (5), as in nano-vllm's issue 163."""
    engine = engine_of(tiny(), num_pages=-(-length // 4))
    prompts = [prompt_of(length, seed) for seed in (1, 2)]
    for prompt in prompts * 2:
        assert shared(engine, prompt) == 0
    assert shared(engine, prompts[1]) == length - 1


def test_a_preempted_request_finds_its_remaining_pages(tiny):
    engine = engine_of(tiny(), num_pages=4)
    finish(engine, [add(engine, prompt_of(3, seed), 7) for seed in (1, 2)])
    # Both get eight positions. The ninth of the first takes the second page of the other, whose
    # first one is left.
    assert engine.scheduler.num_preemptions == 1
    assert (engine.num_computed_tokens, engine.scheduler.prefix_cache_hits) == (9 + 8 + 5, 4)


def test_page_hashes_start_at_the_context_window(tiny):
    engine = engine_of(tiny(seed=6))
    request = add(engine, prompt_of(14), 9)
    finish(engine, [request])
    tokens = request.tokens
    # 16 positions, then from 8 to 22.
    assert (engine.num_computed_tokens, engine.scheduler.prefix_cache_hits) == (14 + 2 + 9 + 5, 0)
    assert shared(engine, tokens[:14]) == 12
    assert shared(engine, tokens[8:22]) == 12
    assert shared(engine, tokens[16:22]) == 0
    long = add(engine, prompt_of(8, 1) + tokens[8:22], 1)  # its window is the same
    finish(engine, [long])
    assert engine.scheduler.prefix_cache_hits == 12 + 12 + 12


def test_an_interrupted_pass_caches_no_page(tiny):
    engine = engine_of(tiny())
    request = add(engine, prompt_of(10), 4)
    with failing(engine.model, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        step(engine)
    assert not engine.scheduler.pool.hash_to_page
    finish(engine, [request])
    assert shared(engine, prompt_of(10)) == 8


def test_a_failed_request_caches_no_page(tiny):
    engine = engine_of(poison(tiny(), BAD))
    add(engine, prompt_of(8) + [BAD])
    add(engine, prompt_of(9, 1))
    assert [bool(event.error) for event in step(engine)] == [True, False]
    assert shared(engine, prompt_of(9)) == 0
    assert shared(engine, prompt_of(9, 1)) == 8


def test_a_salt_is_a_string(tiny):
    engine = engine_of(tiny())
    with pytest.raises(UserError, match="cache_salt None: must be a string"):
        add(engine, [1], 2, None)
    assert not engine.busy

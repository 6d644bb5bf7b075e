"""Engines for tests: run them, and check their outputs and pages."""

import collections
import contextlib
import dataclasses
import functools

from conftest import random_tokens

from cache import first_visible_position
from engine.engine import Engine
from infer import generate
from sampling import SamplingParams, params_per_prompt

# Options of an engine that preempts and chunks: with a second KV cache group, 13 of its pages.
SMALL_ENGINE = {"page_size": 4, "num_pages": 60, "max_num_seqs": 3, "max_num_batched_tokens": 16}


def alone(model, prompt, params=None, stride=None, cache_dtype=None, **fields) -> list[int]:
    """Return the output of `generate`, the oracle of every engine. fields: of params None."""
    params = SamplingParams(**fields) if params is None else params
    asks = params.logprobs is not None or params.prompt_logprobs is not None
    if params.stop or asks:  # which generate refuses
        params = dataclasses.replace(params, stop=(), logprobs=None, prompt_logprobs=None)
    return list(remembered(model, tuple(prompt), params, stride, cache_dtype))


@functools.lru_cache(4000)
def remembered(model, prompt: tuple, params, stride, cache_dtype) -> list[int]:
    options = {"stride": stride} | ({"cache_dtype": cache_dtype} if cache_dtype else {})
    return [token for (token,) in generate(model, [list(prompt)], params, **options)]


def raise_once(model, error: BaseException, after: int) -> None:
    """Raise an error in a later pass, after its first layer has written keys and values."""
    passes = []

    def hook(module, args):
        passes.append(None)
        if len(passes) == after + 1:
            raise error

    model.h[1].register_forward_pre_hook(hook)


def own_texts(model, prompts, params, stride=None, cache_dtype=None) -> list[list[int]]:
    """Return `alone` for each prompt. params: for all of them, or one for each."""
    each = params_per_prompt(params, len(prompts))
    return [alone(model, *pair, stride, cache_dtype) for pair in zip(prompts, each, strict=True)]


def check_texts(model, requests, *options) -> None:
    """Check that outputs equal `generate`, or begin it. options: stride and cache_dtype."""
    for request in requests:
        text = alone(model, request.tokens[: request.prompt_length], request.params, *options)
        early = request.finish_reason in ("abort", "error")
        assert request.output == (text[: len(request.output)] if early else text)


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(count, ignore_eos=True, **fields)


def request_params(count: int, **fields) -> list[SamplingParams]:
    return [SamplingParams(ignore_eos=True, seed=100 + row, **fields) for row in range(count)]


def make_engine(model, prompts, params, **options) -> tuple:
    """Return an engine that lists its `passes`, and its requests. params: for all or each."""
    engine = Engine(model, **options)
    engine.passes = check_passes(engine.cache, model.config.block_size)
    each = params_per_prompt(params, len(prompts))
    return engine, [engine.add(*pair) for pair in zip(prompts, each, strict=True)]


def numbered(model, counts, **options) -> tuple:
    prompts = [[row + 1] for row in range(len(counts))]
    return make_engine(model, prompts, [greedy(count) for count in counts], **options)


def make_greedy(model, lengths, max_new_tokens: int, **options) -> tuple:
    """Return an engine with greedy requests for random prompts of these lengths."""
    prompts = [random_tokens(length, seed=row) for row, length in enumerate(lengths)]
    params = request_params(len(prompts), max_new_tokens=max_new_tokens)
    return make_engine(model, prompts, params, **options)


def check_passes(cache, block_size: int = 16) -> list[list[int]]:
    """Check the slots of each later pass; it adds its span lengths to the list returned."""
    prepare = cache.prepare
    passes = []

    def checked(spans):
        tables = zip(*((span.pages, span.sliding_pages) for span in spans))
        for storage, own in zip(cache.storages, tables):
            num_pages, _, page_size = storage.shape[2:5]
            slots = []
            for span, pages in zip(spans, own):
                end = span.start + len(span.tokens)
                assert 0 <= span.start < end <= min(block_size, len(pages) * page_size)
                assert all(0 <= page < num_pages for page in pages)
                places = range(span.start, end)
                slots += [(pages[place // page_size], place % page_size) for place in places]
            assert len(set(slots)) == len(slots)
        passes.append([len(span.tokens) for span in spans])
        return prepare(spans)

    cache.prepare = checked
    return passes


def check_pages(engine) -> None:
    """Check reference counts, free pages, and that no page table is too long or too short."""
    scheduler = engine.scheduler
    for number, (pool, sliding_window) in enumerate(scheduler.kv_cache_groups):
        held = collections.Counter()
        size = pool.page_size
        for request in scheduler.running:
            pages = request.page_tables[number]
            computed = request.num_computed_tokens
            assert pool.page_count(computed) <= len(pages) <= pool.page_count(request.length)
            unseen = first_visible_position(computed, sliding_window) // size
            assert pages[:unseen] == [None] * unseen
            table = pages[unseen:]
            assert None not in table and len(set(table)) == len(table)
            # Only full pages are cached, because others are still written.
            assert not pool.page_to_hash.keys() & pages[computed // size :]
            held.update(table)
        assert pool.ref_counts == held
        assert sorted([*held, *pool.free_pages]) == list(range(pool.first_unused))
        assert pool.num_free_pages + len(held) == pool.num_pages
        hashes = pool.hash_to_page.items()
        assert pool.page_to_hash == {page: own for own, page in hashes}
        assert len(pool.page_to_hash) == len(hashes)
    for request in scheduler.waiting:
        assert not (any(request.page_tables) or request.num_computed_tokens)


def step(engine) -> list:
    """Return the events of one step, and check all pages."""
    events = engine.step()
    for event in events:
        assert event.finish_reason == event.request.finish_reason
        assert not any(event.request.page_tables) or not event.finish_reason
    check_pages(engine)
    return events


def finish(engine) -> list[list]:
    """Return the events of all remaining steps, and check that all pages are free."""
    steps = []
    while engine.busy:
        steps.append(step(engine))
        assert len(steps) < 2000, "requests that never end"
    for pool, _ in engine.scheduler.kv_cache_groups:
        assert pool.num_free_pages == pool.num_pages
    return steps


def check_own_runs(model, lengths, max_new_tokens: int, **options) -> None:
    """Check that outputs of an engine with small limits equal `generate`."""
    prompts = [random_tokens(length, seed=length) for length in lengths]
    params = request_params(len(prompts), max_new_tokens=max_new_tokens, temperature=0.8)
    options = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 7} | options
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    own = own_texts(model, prompts, params, cache_dtype=options.get("cache_dtype"))
    assert [request.output for request in requests] == own


def events_of(engine) -> list:
    return [event for events in finish(engine) for event in events]


def outputs_of(engine, prompts, params) -> list[list[int]]:
    requests = [engine.add(*pair) for pair in zip(prompts, params_per_prompt(params, len(prompts)))]
    assert not any(event.error for event in events_of(engine))
    return [request.output for request in requests]


def lettered(engine, requests, count=2000) -> list[tuple[int, str]]:
    """Return (positions computed, letters of the requests that got a token) of each step."""
    steps = []
    while engine.busy and len(steps) < count:
        before = engine.num_computed_tokens
        got = "".join("ABCDEFGH"[requests.index(event.request)] for event in step(engine))
        steps.append((engine.num_computed_tokens - before, got))
    return steps


def letters(engine, requests, count=2000) -> list[str]:
    return [got for _, got in lettered(engine, requests, count)]


@contextlib.contextmanager
def failing(model, error=None):
    """Fail each pass after its keys and values are written; error None: logits are NaN."""

    def fail(module, args, out):
        if error is not None:
            raise error
        return out * float("nan")

    hook = model.lm_head.register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def poison(model, token: int):
    """Make every activation that depends on this token NaN, but no weight."""

    def spoil(module, args, out):
        return out.masked_fill((args[0] == token)[..., None], float("nan"))

    model.layer("embedding").register_forward_hook(spoil)
    return model

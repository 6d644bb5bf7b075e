"""Engines for tests: how they are run, the texts that they must write, and their pages."""

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
    """The tokens that `generate` writes for one prompt, which every engine must write.

    fields: those of the params, if none are given.
    """
    params = SamplingParams(**fields) if params is None else params
    if params.stop or params.logprobs is not None:  # for an engine alone
        params = dataclasses.replace(params, stop=(), logprobs=None)
    return list(remembered(model, tuple(prompt), params, stride, cache_dtype))


@functools.lru_cache(4000)
def remembered(model, prompt: tuple, params, stride, cache_dtype) -> list[int]:
    options = {"stride": stride} | ({"cache_dtype": cache_dtype} if cache_dtype else {})
    return [token for (token,) in generate(model, [list(prompt)], params, **options)]


def raise_once(model, error: BaseException, after: int) -> None:
    """A later pass fails in its second layer: the first one has written its keys and values."""
    passes = []

    def hook(module, args):
        passes.append(None)
        if len(passes) == after + 1:
            raise error

    model.h[1].register_forward_pre_hook(hook)


def own_texts(model, prompts, params, stride=None, cache_dtype=None) -> list[list[int]]:
    """`alone` for each prompt. params: for all of them, or one for each."""
    each = params_per_prompt(params, len(prompts))
    return [alone(model, *pair, stride, cache_dtype) for pair in zip(prompts, each, strict=True)]


def check_texts(model, requests, *options) -> None:
    """Requests have the texts of their own runs; one that ended early has a beginning of it.

    options: stride and cache_dtype of `alone`.
    """
    for request in requests:
        text = alone(model, request.tokens[: request.prompt_length], request.params, *options)
        early = request.finish_reason in ("abort", "error")
        assert request.output == (text[: len(request.output)] if early else text)


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(count, ignore_eos=True, **fields)


def request_params(count: int, **fields) -> list[SamplingParams]:
    """Parameters for `count` requests, each with a seed of its own."""
    return [SamplingParams(ignore_eos=True, seed=100 + row, **fields) for row in range(count)]


def make_engine(model, prompts, params, **options) -> tuple:
    """An engine that checks each pass, and its requests. params: for all, or one for each.

    Its attribute `passes` has how many tokens each span of each pass had.
    """
    engine = Engine(model, **options)
    engine.passes = check_passes(engine.cache, model.config.block_size)
    each = params_per_prompt(params, len(prompts))
    return engine, [engine.add(*pair) for pair in zip(prompts, each, strict=True)]


def numbered(model, counts, **options) -> tuple:
    """An engine with greedy requests. counts: the tokens of each."""
    prompts = [[row + 1] for row in range(len(counts))]
    return make_engine(model, prompts, [greedy(count) for count in counts], **options)


def make_greedy(model, lengths, max_new_tokens: int, **options) -> tuple:
    """An engine with greedy requests for random prompts of these lengths."""
    prompts = [random_tokens(length, seed=row) for row, length in enumerate(lengths)]
    params = request_params(len(prompts), max_new_tokens=max_new_tokens)
    return make_engine(model, prompts, params, **options)


def check_passes(cache, block_size: int = 16) -> list[list[int]]:
    """From now on, check that passes stay in the pages of their texts and write no place twice.

    Returns a list to which each pass adds one: how many tokens each of its spans has.
    """
    prepare = cache.prepare
    passes = []

    def check(storage, spans, tables):
        num_pages, _, page_size = storage.shape[2:5]
        slots = []
        for span, pages in zip(spans, tables):
            end = span.start + len(span.tokens)
            assert 0 <= span.start < end <= min(block_size, len(pages) * page_size)
            assert all(0 <= page < num_pages for page in pages)
            for position in range(span.start, end):
                slots.append((pages[position // page_size], position % page_size))
        assert len(set(slots)) == len(slots)

    def checked(spans):
        tables = zip(*((span.pages, span.sliding_pages) for span in spans))
        for storage, own in zip(cache.storages, tables):
            check(storage, spans, own)
        passes.append([len(span.tokens) for span in spans])
        return prepare(spans)

    cache.prepare = checked
    return passes


def check_pages(engine) -> None:
    """Each page is free or counts its references, and no text holds a page too many or too few."""
    scheduler = engine.scheduler
    for number, (pool, sliding_window) in enumerate(scheduler.kv_cache_groups):
        held = collections.Counter()
        for request in scheduler.running:
            pages = request.page_tables[number]
            assert (
                pool.page_count(request.num_computed_tokens)
                <= len(pages)
                <= pool.page_count(request.length)
            )
            unseen = (
                first_visible_position(request.num_computed_tokens, sliding_window)
                // pool.page_size
            )
            assert pages[:unseen] == [None] * unseen
            table = pages[unseen:]
            assert None not in table and len(set(table)) == len(table)
            # Only pages that are full are cached: the others are written.
            assert (
                not pool.page_to_hash.keys()
                & pages[request.num_computed_tokens // pool.page_size :]
            )
            held.update(table)
        assert pool.ref_counts == held
        assert sorted([*held, *pool.free_pages]) == list(range(pool.first_unused))
        assert pool.num_free_pages + len(held) == pool.num_pages
        assert pool.page_to_hash == {
            page: page_hash for page_hash, page in pool.hash_to_page.items()
        }
        assert len(pool.page_to_hash) == len(pool.hash_to_page)
    for request in scheduler.waiting:
        assert not (any(request.page_tables) or request.num_computed_tokens)


def step(engine) -> list:
    """The events of one step, after which all pages are where they belong."""
    events = engine.step()
    for event in events:
        assert event.finish_reason == event.request.finish_reason
        assert not any(event.request.page_tables) or not event.finish_reason
    check_pages(engine)
    return events


def finish(engine) -> list[list]:
    """The events of all steps that are left; all pages are free then."""
    steps = []
    while engine.busy:
        steps.append(step(engine))
        assert len(steps) < 2000, "requests that never end"
    assert all(
        pool.num_free_pages == pool.num_pages for pool, _ in engine.scheduler.kv_cache_groups
    )
    return steps


def check_own_runs(model, lengths, max_new_tokens: int, **options) -> None:
    """The engine, with few rows and tokens a step, writes the text of each own run.

    lengths: of the prompts. options: of the engine.
    """
    prompts = [random_tokens(length, seed=length) for length in lengths]
    params = request_params(len(prompts), max_new_tokens=max_new_tokens, temperature=0.8)
    options = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 7} | options
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    own = own_texts(model, prompts, params, cache_dtype=options.get("cache_dtype"))
    assert [request.output for request in requests] == own


def events_of(engine) -> list:
    """All events of all steps that are left."""
    return [event for events in finish(engine) for event in events]


def outputs_of(engine, prompts, params) -> list[list[int]]:
    """What an engine writes for these prompts. params: for all of them, or one for each."""
    requests = [engine.add(*pair) for pair in zip(prompts, params_per_prompt(params, len(prompts)))]
    assert not any(event.error for event in events_of(engine))
    return [request.output for request in requests]


def lettered(engine, requests, count=2000) -> list[tuple[int, str]]:
    """At most `count` steps: positions computed, and the letters of those that get a token.

    A stands for the first of the requests.
    """
    steps = []
    while engine.busy and len(steps) < count:
        before = engine.num_computed_tokens
        got = "".join("ABCDEFGH"[requests.index(event.request)] for event in step(engine))
        steps.append((engine.num_computed_tokens - before, got))
    return steps


def letters(engine, requests, count=2000) -> list[str]:
    """The letters of `count` steps."""
    return [got for _, got in lettered(engine, requests, count)]


@contextlib.contextmanager
def failing(model, error=None):
    """Each pass fails when its keys and values are written; with no error its logits are NaN."""

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
    """From now on, whatever sees this token is NaN; not its weights, which the head may share."""

    def spoil(module, args, out):
        return out.masked_fill((args[0] == token)[..., None], float("nan"))

    model.layer("embedding").register_forward_hook(spoil)
    return model

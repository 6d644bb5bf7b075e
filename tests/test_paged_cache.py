"""Keys and values lie in pages anywhere; a text has the pages it needs, and its own text."""

import tracemalloc

import pytest
import torch
from conftest import in_cache, random_tokens
from engines import (
    alone,
    check_pages,
    check_texts,
    finish,
    greedy,
    letters,
    make_engine,
    poison,
    step,
)

from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams

BLOCK_SIZE = 16  # of the tiny models
BAD = 60  # a token that `poison` makes NaN, and that no text has by chance
SIZES = pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 16])


def prompt_of(length, seed=0):
    return random_tokens(length, BAD, seed)


def engine_of(model, page_size, num_pages=None, max_rows=32):
    options = {"page_size": page_size, "num_pages": num_pages, "max_rows": max_rows}
    return make_engine(model, [], [], **options)[0]


def needed(page_size, positions):
    """How many pages hold positions 0, 1, 2, ..."""
    return len({position // page_size for position in range(positions)})


@pytest.fixture(scope="module")
def model(build):
    """One for many tests, so that `alone` remembers its texts."""
    return build(seed=6)


@SIZES
def test_the_texts_of_generate_for_any_page_size_and_pool(model, page_size):
    """Greedy and drawn, within the window and beyond, and prompts that fill their last page."""
    window = needed(page_size, BLOCK_SIZE)
    prompts = [prompt_of(length, length) for length in (3, 8, 12, 20, 1, 4, 14, 5)]
    params = [greedy(9)] * 4 + [greedy(7, temperature=1.0, seed=seed) for seed in range(3)]
    params.append(SamplingParams(12, repetition_penalty=1.3))
    for num_pages in (window, window + 1, 2 * window + 1, None):
        options = {"page_size": page_size, "num_pages": num_pages, "max_rows": 4}
        engine, requests = make_engine(model, prompts, params, **options)
        finish(engine)
        check_texts(model, requests)


@SIZES
@torch.inference_mode()
def test_the_logits_of_the_contiguous_cache(build, page_size):
    """The first page and the last are not theirs, and NaN: nothing is read there."""
    from cache import KVCache
    from engine.cache import PagedCache, Span

    model = build(n_head=4)
    texts = [prompt_of(BLOCK_SIZE, seed) for seed in range(4)]
    width = needed(page_size, BLOCK_SIZE)
    order = torch.randperm(4 * width, generator=torch.Generator().manual_seed(page_size))
    tables = (order + 1).view(4, width).tolist()
    cache = PagedCache(model, 4 * width + 2, page_size)
    rows = [KVCache(model) for _ in texts]
    cache.storage[:, :, [0, 4 * width + 1]] = torch.nan
    for ends in (
        [0, 0, 0, 0],
        [5, 8, 9, 12],
        [6, 9, 10, 13],
        [7, 10, 11, 14],
        [8, 11, 15, 16],
        [10, 16, 16, 16],
    ):
        spans = []
        for text, table, row, end in zip(texts, tables, rows, ends):
            (held,) = row.tokens
            if len(held) < end:
                spans.append((Span(table, len(held), text[len(held) : end]), row))
        if not spans:
            continue
        tokens, positions, ends = cache.arrange([span for span, _ in spans])
        logits = model.head(model.hidden(tokens, positions, cache.attend))
        for (span, row), end in zip(spans, ends):
            ours = logits[end - len(span.tokens) : end]
            contiguous = in_cache(model, row, span.tokens)[0]
            torch.testing.assert_close(ours, contiguous, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_attention_sees_the_pages_in_use(tiny, attended):
    """However many are reserved."""
    from engine.cache import PagedCache, Span

    model = tiny(n_layer=1)
    text = prompt_of(BLOCK_SIZE)
    cache = PagedCache(model, 8, 4)
    for length, width in [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12), (13, 16), (16, 16)]:
        span = Span([5, 7, 1, 2], length - 1, text[length - 1 : length])
        tokens, positions, _ = cache.arrange([span])
        model.hidden(tokens, positions, cache.attend)
        _, keys, _ = attended.pop()
        assert keys.shape[2] == width and not attended


def test_a_shorter_table_is_not_filled_up_with_pages_of_others(build):
    """Texts that attend together see as many positions; a mask would not hide NaN behind them."""
    model = build()
    prompts = [prompt_of(9, 1), prompt_of(5, 2)]  # of three and of two pages
    engine, requests = make_engine(model, prompts, greedy(3), page_size=4, num_pages=40)
    engine.step()
    held = {page for request in requests for page in request.pages}
    engine.cache.storage[:, :, [page for page in range(40) if page not in held]] = torch.nan
    finish(engine)
    check_texts(model, requests)


@SIZES
def test_a_text_takes_the_pages_of_its_positions_and_no_more(tiny, page_size):
    """Its last token has none: it is never passed. One page less is refused."""
    model = tiny()
    lengths = [(1, 1), (4, 1), (4, 2), (3, 2), (5, 4), (8, 5), (12, 5), (16, 1), (1, 16), (10, 9)]
    for length, max_new_tokens in lengths:
        positions = min(length + max_new_tokens - 1, BLOCK_SIZE)
        pages = needed(page_size, positions)
        engine = engine_of(model, page_size, num_pages=pages)
        request = engine.add(prompt_of(length), greedy(max_new_tokens))
        finish(engine)
        check_texts(model, [request])
        assert engine.scheduler.pool.begun == pages
        if pages > 1:
            with pytest.raises(UserError) as raised:
                less = engine_of(model, page_size, num_pages=pages - 1)
                less.add(prompt_of(length), greedy(max_new_tokens))
            needs = f"a text of up to {positions} positions needs {pages} pages"
            assert str(raised.value) == f"{needs}; there are {pages - 1} pages of {page_size}"


def test_what_can_never_fit_is_refused_at_once_and_the_others_go_on(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=3)
    requests = [engine.add(prompt_of(3, seed), greedy(10)) for seed in range(2)]  # all pages each
    engine.step()
    for length, positions in ((4, 13), (40, 16)):
        with pytest.raises(UserError) as raised:
            engine.add(prompt_of(length), greedy(10))
        needs = f"a text of up to {positions} positions needs 4 pages"
        assert str(raised.value) == f"{needs}; there are 3 pages of 4"
    finish(engine)
    check_texts(model, requests)


def test_the_same_memory_holds_more_short_texts(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=8)  # the positions of two windows
    requests = [engine.add(prompt_of(2, seed), greedy(3)) for seed in range(8)]
    assert letters(engine, requests) == ["ABCDEFGH"] * 3
    check_texts(model, requests)


def test_a_short_text_does_not_overtake_a_long_one_that_waits_for_pages(tiny):
    engine = engine_of(tiny(), 4, num_pages=4)
    shapes = enumerate([(10, 2), (13, 1), (2, 1)])
    requests = [engine.add(prompt_of(length, row), greedy(n)) for row, (length, n) in shapes]
    assert letters(engine, requests) == ["A", "A", "B", "C"]


def test_max_rows_still_counts_texts(tiny):
    engine = engine_of(tiny(), 1, num_pages=100, max_rows=3)
    requests = [engine.add(prompt_of(2, seed), greedy(2)) for seed in range(5)]
    assert letters(engine, requests) == ["ABC", "ABC", "DE", "DE"]


def test_pages_come_back_after_the_end_of_a_text(tiny):
    (eos,) = alone(tiny(seed=6), prompt_of(6), max_new_tokens=1)
    model = tiny(seed=6, eos_token_id=eos)
    engine = engine_of(model, 2, num_pages=16)
    ended = engine.add(prompt_of(6), SamplingParams(9))
    other = engine.add(prompt_of(3, 1), greedy(4))
    step(engine)
    assert ended.finish_reason == "stop" and ended.pages == [] and other.pages
    finish(engine)
    check_texts(model, [ended, other])


def test_pages_come_back_after_an_abort(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=4)
    requests = [engine.add(prompt_of(13, seed), greedy(4)) for seed in range(3)]
    engine.step()
    engine.abort(requests[1])  # it waits, and has none
    check_pages(engine)
    assert len(requests[0].pages) == 4
    engine.abort(requests[0])
    check_pages(engine)
    assert engine.scheduler.pool.available == 4
    assert letters(engine, requests) == ["C"] * 4
    check_texts(model, requests)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_nan_in_a_page_does_not_reach_the_next_text_that_gets_it(build, page_size):
    model = poison(build(seed=1), BAD)
    engine = engine_of(model, page_size, num_pages=needed(page_size, BLOCK_SIZE))
    engine.add([*prompt_of(4), BAD, *prompt_of(9)], greedy(3))
    (event,) = step(engine)
    assert event.finish_reason == "error"
    request = engine.add(prompt_of(1, 3), greedy(15))
    # It gets each page, and sees the end of one before it has written there.
    finish(engine)
    assert request.finish_reason == "length"
    check_texts(model, [request])


def test_nan_of_a_text_that_fails_later_leaves_the_others_alone(tiny):
    """It has written half of a page before. Then somebody else gets that page."""
    model = poison(tiny(seed=1), BAD)
    engine = engine_of(model, 4, num_pages=8)
    other = engine.add(prompt_of(9, 1), greedy(6))
    broken = engine.add(prompt_of(6, 2), greedy(8))
    engine.step()
    broken.tokens[-1] = BAD  # as if it had been drawn
    assert {event.finish_reason for event in step(engine)} == {None, "error"}
    late = engine.add(prompt_of(3, 3), greedy(9))
    finish(engine)
    assert late.finish_reason == other.finish_reason == "length"
    check_texts(model, [other, late])


def test_pages_of_which_size_and_how_many(tiny_llama):
    model = tiny_llama()
    # A page is a window here.
    assert Engine(model, max_rows=3).cache.storage.shape == (2, 2, 3, 2, 16, 6)
    assert Engine(model, max_rows=3, page_size=5).cache.storage.shape == (2, 2, 3 * 4, 2, 5, 6)
    assert Engine(model, num_pages=7, page_size=2).cache.storage.shape == (2, 2, 7, 2, 2, 6)


def test_ten_million_pages_take_no_time_and_no_memory_before_they_are_used(tiny):
    model = tiny(n_layer=1, n_head=1, n_embd=1)
    tracemalloc.start()
    engine = Engine(model, num_pages=10**7, page_size=1)
    request = engine.add(prompt_of(5), greedy(4))
    while engine.busy:
        engine.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7 and engine.scheduler.pool.available == 10**7
    check_texts(model, [request])


ARGS = ["--max-new-tokens", 9, "--ignore-eos"]
ARGS += ["--prompt", "Once upon a time", "--prompt", "Tom", "--prompt", "A big"]


@pytest.mark.parametrize(
    "options", [("--page-size", 1), ("--num-pages", 3), ("--page-size", 3, "--num-pages", 9)]
)
def test_the_command_line_takes_pages(cli, engine_cli, tiny_checkpoint, options):
    code, out, err = engine_cli("--model", tiny_checkpoint, *ARGS, *options)
    assert (code, out) == (0, cli("--model", tiny_checkpoint, *ARGS)[1])
    assert "27 tokens" in err and " steps, " in err


def test_on_the_command_line_texts_wait_for_pages(cli, engine_cli, tiny_checkpoint):
    """Three prompts of 6 or 7 tokens, and 9 positions: the texts run one after the other."""
    args = ["--model", tiny_checkpoint, "--max-new-tokens", 3, "--ignore-eos"]
    args += ["--prompt", "Once upon a time there was"]
    args += ["--prompt", "Tom and Lily went to the park"]
    args += ["--prompt", "A small bird sat in a tree"]
    for num_pages, steps in ((9, 9), (27, 3)):
        code, out, err = engine_cli(*args, "--page-size", 1, "--num-pages", num_pages)
        assert (code, out) == (0, cli(*args)[1]) and f"{steps} steps, 26 positions" in err

"""Keys and values lie in pages anywhere; a text has the pages it needs, and its own text."""

import tracemalloc

import pytest
import torch
from conftest import random_tokens
from engines import (
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
    for num_pages in (window, window + 1, None):
        options = {"page_size": page_size, "num_pages": num_pages, "max_rows": 4}
        engine, requests = make_engine(model, prompts, params, **options)
        finish(engine)
        check_texts(model, requests)


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


def test_a_short_text_does_not_overtake_a_long_one_that_waits_for_pages(tiny):
    engine = engine_of(tiny(), 4, num_pages=4)
    shapes = enumerate([(10, 2), (13, 1), (2, 1)])
    requests = [engine.add(prompt_of(length, row), greedy(n)) for row, (length, n) in shapes]
    assert letters(engine, requests) == ["A", "A", "B", "C"]


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

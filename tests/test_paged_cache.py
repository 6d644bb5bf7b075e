"""Keys and values lie in pages anywhere; a text has the pages it needs, and its own text."""

import tracemalloc

import pytest
import torch
from conftest import finish_checked, in_cache, own_run, random_tokens, run_rows

BLOCK_SIZE = 16  # of the tiny models
BAD = 60  # a token that `poison` makes NaN, and that no text has by chance


def prompt_of(length, seed=0):
    return random_tokens(length, BAD, seed)


def engine_of(model, page_size, num_pages=None, max_rows=32):
    """An engine that checks at each pass that it stays in its pages, and writes no place twice.

    tables: how many pages each text had in each pass.
    """
    from engine.engine import Engine

    engine = Engine(model, max_rows=max_rows, num_pages=num_pages, page_size=page_size)
    engine.tables = []
    pool = engine.scheduler.pool
    arrange = engine.cache.arrange

    def checked(spans):
        positions = [range(span.start, span.start + len(span.tokens)) for span in spans]
        written = [
            (span.pages[p // page_size], p % page_size)
            for span, ps in zip(spans, positions)
            for p in ps
        ]
        assert len(set(written)) == len(written)
        assert all(0 <= page < pool.num_pages for span in spans for page in span.pages)
        engine.tables += [len(span.pages) for span in spans]
        return arrange(spans)

    engine.cache.arrange = checked
    return engine


def add(engine, prompt, max_new_tokens, **params):
    from sampling import SamplingParams

    return engine.add(
        prompt, SamplingParams(**{"ignore_eos": True} | params, max_new_tokens=max_new_tokens)
    )


def needed(page_size, positions):
    """How many pages hold positions 0, 1, 2, ..."""
    return len({position // page_size for position in range(positions)})


def longest(request):
    """How many positions of a text are ever in the cache: its last token is not passed."""
    return min(request.prompt_length + request.params.max_new_tokens - 1, BLOCK_SIZE)


def check_pages(engine, requests):
    """Each page is free or in one table, and no table is longer than its text can get."""
    pool = engine.scheduler.pool
    held = {page for request in requests for page in request.pages}
    assert sorted([*pool.returned, *held]) == [*range(pool.begun)]
    assert pool.available + len(held) == pool.num_pages
    for request in requests:
        computed = 0 if request.finish_reason else request.computed
        held = range(needed(pool.page_size, computed), needed(pool.page_size, longest(request)) + 1)
        assert len(request.pages) in held
    assert not any(request.pages for request in engine.scheduler.waiting)


def finish(engine, requests):
    """Step to the end, checking the pages; they all are free then."""
    finish_checked(engine, lambda: check_pages(engine, requests))


@pytest.fixture(scope="module")
def model(build):
    """One for many tests, so that `own_run` remembers its texts."""
    return build(seed=6)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 16])
def test_the_texts_of_generate_for_any_page_size_and_pool(model, page_size):
    """Greedy and drawn, within the window and beyond, and prompts that fill their last page."""
    window = needed(page_size, BLOCK_SIZE)
    expected = []
    for num_pages in (window, window + 1, 2 * window + 1, None):
        engine = engine_of(model, page_size, num_pages, max_rows=4)
        requests = [add(engine, prompt_of(length, length), 9) for length in (3, 8, 12, 20)]
        requests += [
            add(engine, prompt_of(length, length), 7, temperature=1.0, seed=length)
            for length in (1, 4, 14)
        ]
        requests.append(add(engine, prompt_of(5), 12, ignore_eos=False, repetition_penalty=1.3))
        finish(engine, requests)
        expected = expected or [own_run(model, request) for request in requests]
        assert [request.output for request in requests] == expected


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 16])
@torch.inference_mode()
def test_the_logits_of_the_contiguous_cache(build, page_size):
    """The first page and the last are not theirs, and NaN: nothing is read there."""
    from cache import KVCache
    from engine.cache import PagedCache, Span

    model = build(n_head=4)
    texts = [prompt_of(BLOCK_SIZE, seed) for seed in range(4)]
    width = needed(page_size, BLOCK_SIZE)
    pages = (
        torch.randperm(4 * width, generator=torch.Generator().manual_seed(page_size)) + 1
    ).tolist()
    tables = [pages[row * width : (row + 1) * width] for row in range(4)]
    cache = PagedCache(model, 4 * width + 2, page_size)
    rows = [KVCache(model) for _ in texts]
    cache.storage[:, :, [0, 4 * width + 1]] = torch.nan
    for starts in (
        [0, 0, 0, 0],
        [5, 8, 9, 12],
        [6, 9, 10, 13],
        [7, 10, 11, 14],
        [8, 11, 15, 16],
        [10, 16, 16, 16],
    ):
        spans = []
        for text, table, row, start in zip(texts, tables, rows, starts):
            (held,) = row.tokens
            if len(held) < start:
                spans.append((Span(table, len(held), text[len(held) : start]), row))
        if not spans:
            continue
        tokens, positions, ends = cache.arrange([span for span, _ in spans])
        logits = model.head(model.hidden(tokens, positions, cache.attend))
        for (span, row), end in zip(spans, ends):
            contiguous = in_cache(model, row, span.tokens)[0]
            torch.testing.assert_close(
                logits[end - len(span.tokens) : end], contiguous, rtol=0, atol=1e-12
            )


@torch.inference_mode()
def test_attention_sees_the_pages_in_use(tiny, monkeypatch):
    """However many are reserved."""
    import torch.nn.functional as F

    from engine.cache import PagedCache, Span

    model = tiny(n_layer=1)
    text = prompt_of(BLOCK_SIZE)
    widths = []
    attention = F.scaled_dot_product_attention
    cache = PagedCache(model, 8, 4)

    def spy(q, k, *args, **options):
        widths.append(k.shape[2])
        return attention(q, k, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for length, width in [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12), (13, 16), (16, 16)]:
        span = Span([5, 7, 1, 2], length - 1, text[length - 1 : length])
        tokens, positions, _ = cache.arrange([span])
        model.hidden(tokens, positions, cache.attend)
        assert widths.pop() == width and not widths


def test_a_shorter_table_is_not_filled_up_with_pages_of_others(build):
    """Texts that attend together see as many positions; a mask would not hide NaN behind them."""
    model = build()
    engine = engine_of(model, 4, num_pages=40)
    # Of three and of two pages.
    requests = [add(engine, prompt_of(9, 1), 3), add(engine, prompt_of(5, 2), 3)]
    engine.step()
    held = {page for request in requests for page in request.pages}
    engine.cache.storage[:, :, [page for page in range(40) if page not in held]] = torch.nan
    finish(engine, requests)
    assert [request.output for request in requests] == [
        own_run(model, request) for request in requests
    ]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 16])
def test_a_text_takes_the_pages_of_its_positions_and_no_more(tiny, page_size):
    """Its last token has none: it is never passed. One page less is refused."""
    from errors import UserError

    model = tiny()
    for length, max_new_tokens in [
        (1, 1),
        (4, 1),
        (4, 2),
        (3, 2),
        (5, 4),
        (8, 5),
        (12, 5),
        (16, 1),
        (1, 16),
        (10, 9),
    ]:
        positions = min(length + max_new_tokens - 1, BLOCK_SIZE)
        pages = needed(page_size, positions)
        engine = engine_of(model, page_size, num_pages=pages)
        request = add(engine, prompt_of(length), max_new_tokens)
        finish(engine, [request])
        assert max(engine.tables) == pages and request.output == own_run(model, request)
        if pages > 1:
            with pytest.raises(UserError) as raised:
                add(
                    engine_of(model, page_size, num_pages=pages - 1),
                    prompt_of(length),
                    max_new_tokens,
                )
            needs = f"a text of up to {positions} positions needs {pages} pages"
            assert str(raised.value) == f"{needs}; there are {pages - 1} pages of {page_size}"


def test_what_can_never_fit_is_refused_at_once_and_the_others_go_on(tiny):
    from errors import UserError

    model = tiny()
    engine = engine_of(model, 4, num_pages=3)
    requests = [add(engine, prompt_of(3, seed), 10) for seed in range(2)]  # 12 positions, all pages
    engine.step()
    for prompt, needs in [
        (prompt_of(4), "13 positions needs 4 pages"),
        (prompt_of(40), "16 positions needs 4 pages"),
    ]:
        with pytest.raises(UserError) as raised:
            add(engine, prompt, 10)
        assert str(raised.value) == f"a text of up to {needs}; there are 3 pages of 4"
    finish(engine, requests)
    assert [request.output for request in requests] == [
        own_run(model, request) for request in requests
    ]


def test_the_same_memory_holds_more_short_texts(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=8)  # the positions of two windows
    requests = [add(engine, prompt_of(2, seed), 3) for seed in range(8)]
    assert len(engine.step()) == 8
    finish(engine, requests)
    assert engine.steps == 3
    for request in requests:
        assert request.output == own_run(model, request)


def test_a_short_text_does_not_overtake_a_long_one_that_waits_for_pages(tiny):
    engine = engine_of(tiny(), 4, num_pages=4)
    requests = [
        add(engine, prompt_of(10, 1), 2),
        add(engine, prompt_of(13, 2), 1),
        add(engine, prompt_of(2, 3), 1),
    ]
    for expected in ([0], [0], [1], [2]):
        assert [requests.index(event.request) for event in engine.step()] == expected
        check_pages(engine, requests)


def test_max_rows_still_counts_texts(tiny):
    engine = engine_of(tiny(), 1, num_pages=100, max_rows=3)
    requests = [add(engine, prompt_of(2, seed), 2) for seed in range(5)]
    assert [len(engine.step()) for _ in range(4)] == [3, 3, 2, 2]
    assert all(len(request.output) == 2 for request in requests)


def test_pages_come_back_after_the_end_of_a_text(tiny):
    model = tiny(seed=6)
    (eos,) = run_rows(model, [prompt_of(6)], max_new_tokens=1)[0]
    model = tiny(seed=6, eos_token_id=eos)
    engine = engine_of(model, 2, num_pages=16)
    ended = add(engine, prompt_of(6), 9, ignore_eos=False)
    other = add(engine, prompt_of(3, 1), 4)
    engine.step()
    assert ended.finish_reason == "stop" and ended.pages == [] and other.pages
    check_pages(engine, [ended, other])
    finish(engine, [ended, other])
    assert other.output == own_run(model, other)


def test_pages_come_back_after_an_abort(tiny):
    model = tiny()
    engine = engine_of(model, 4, num_pages=4)
    requests = [add(engine, prompt_of(13, seed), 4) for seed in range(3)]
    engine.step()
    engine.abort(requests[1])  # it waits, and has none
    check_pages(engine, requests)
    assert len(requests[0].pages) == 4
    engine.abort(requests[0])
    check_pages(engine, requests)
    assert engine.scheduler.pool.available == 4
    assert [event.request for event in engine.step()] == [requests[2]]
    finish(engine, requests)
    assert requests[2].output == own_run(model, requests[2])


def poison(model):
    """Make the embedding of BAD not a number. Not its weights: they may be those of the head."""
    embedding = model.layer("embedding")
    embedding.register_forward_hook(
        lambda module, args, x: x.masked_fill((args[0] == BAD)[..., None], torch.nan)
    )
    return model


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_nan_in_a_page_does_not_reach_the_next_text_that_gets_it(build, page_size):
    model = poison(build(seed=1))
    engine = engine_of(model, page_size, num_pages=needed(page_size, BLOCK_SIZE))
    broken = add(engine, [*prompt_of(4), BAD, *prompt_of(9)], 3)
    (event,) = engine.step()
    assert event.finish_reason == "error"
    check_pages(engine, [broken])
    request = add(engine, prompt_of(1, 3), 15)
    # It gets each page, and sees the end of one before it has written there.
    finish(engine, [broken, request])
    assert request.output == own_run(model, request)


def test_nan_of_a_text_that_fails_later_leaves_the_others_alone(tiny):
    """It has written half of a page before. Then somebody else gets that page."""
    model = poison(tiny(seed=1))
    engine = engine_of(model, 4, num_pages=8)
    other = add(engine, prompt_of(9, 1), 6)
    broken = add(engine, prompt_of(6, 2), 8)
    engine.step()
    broken.tokens[-1] = BAD  # as if it had been drawn
    assert {event.finish_reason for event in engine.step()} == {None, "error"}
    late = add(engine, prompt_of(3, 3), 9)
    finish(engine, [other, broken, late])
    assert other.output == own_run(model, other)
    assert late.output == own_run(model, late)


def test_pages_of_which_size_and_how_many(tiny_llama):
    from engine.engine import Engine

    model = tiny_llama()
    # A page is a window here.
    assert Engine(model, max_rows=3).cache.storage.shape == (2, 2, 3, 2, 16, 6)
    assert Engine(model, max_rows=3, page_size=5).cache.storage.shape == (2, 2, 3 * 4, 2, 5, 6)
    assert Engine(model, num_pages=7, page_size=2).cache.storage.shape == (2, 2, 7, 2, 2, 6)


@pytest.mark.parametrize("name", ["page_size", "num_pages"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "4"])
def test_a_bad_value_is_refused(tiny, name, value):
    from engine.engine import Engine
    from errors import UserError

    with pytest.raises(UserError) as raised:
        Engine(tiny(), **{name: value})
    assert str(raised.value) == f"{name} is {value!r}; it must be an integer >= 1"


@pytest.mark.parametrize("options", [{"num_pages": 10**20}, {"page_size": 10**20}])
def test_more_than_64_bits_do_not_fit_in_memory(tiny, options):
    from engine.engine import Engine
    from errors import UserError

    with pytest.raises(UserError, match="positions do not fit in memory: "):
        Engine(tiny(), **options)


def test_ten_million_pages_take_no_time_and_no_memory_before_they_are_used(tiny):
    from engine.engine import Engine

    model = tiny(n_layer=1, n_head=1, n_embd=1)
    tracemalloc.start()
    engine = Engine(model, num_pages=10**7, page_size=1)
    request = add(engine, prompt_of(5), 4)
    while engine.busy:
        engine.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7 and request.output == own_run(model, request)
    assert engine.scheduler.pool.available == 10**7


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
    prompts = (
        "Once upon a time there was",
        "Tom and Lily went to the park",
        "A small bird sat in a tree",
    )
    args = [arg for prompt in prompts for arg in ("--prompt", prompt)]
    args += ["--model", tiny_checkpoint, "--max-new-tokens", 3, "--ignore-eos"]
    code, out, err = engine_cli(*args, "--page-size", 1, "--num-pages", 9)
    assert (code, out) == (0, cli(*args)[1]) and "9 steps, 26 positions" in err
    code, out, err = engine_cli(*args, "--page-size", 1, "--num-pages", 27)
    assert (code, out) == (0, cli(*args)[1]) and "3 steps, 26 positions" in err


@pytest.mark.parametrize(
    "options, message",
    [
        (("--page-size", 0), "page_size is 0; it must be an integer >= 1"),
        (("--page-size", -4), "page_size is -4; it must be an integer >= 1"),
        (("--num-pages", 0), "num_pages is 0; it must be an integer >= 1"),
        (("--num-pages", "many"), "argument --num-pages: invalid int value: 'many'"),
        (("--page-size", "1.5"), "argument --page-size: invalid int value: '1.5'"),
        (("--num-pages", 2, "--page-size", 4), " pages; there are 2 pages of 4"),
        (("--num-pages", 10**12), f"{10**12} pages of 16 positions do not fit in memory"),
        (("--page-size", 10**12), f"32 pages of {10**12} positions do not fit in memory"),
    ],
)
def test_on_the_command_line_a_bad_value_is_one_line(engine_cli, tiny_checkpoint, options, message):
    code, out, err = engine_cli("--model", tiny_checkpoint, *ARGS, *options)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1

"""Pages are taken as texts grow; where none is free, the youngest gives its own back."""

import re

import pytest
from conftest import random_tokens
from engines import (
    check_pages,
    check_texts,
    finish,
    letters,
    make_engine,
    make_greedy,
    request_params,
    step,
)

SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.95}


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_are_equal_for_every_pool_size(build, params):
    model = build(seed=6)
    prompts = [random_tokens(length, seed=length) for length in (3, 21, 9)]
    each = request_params(3, max_new_tokens=20, **params)
    counts = []
    for num_pages in (6, 9, 18):  # of 3 positions; 6 hold a window of 16
        engine, requests = make_engine(model, prompts, each, num_pages=num_pages, page_size=3)
        finish(engine)
        check_texts(model, requests)
        counts.append(engine.scheduler.num_preemptions)
    assert counts[0] > 0 and counts[-1] == 0


def test_the_youngest_request_is_preempted_and_recomputed(tiny):
    engine, requests = make_greedy(tiny(), [4, 4], 5, num_pages=3, page_size=4)
    _, b = requests
    # A page each; then the first takes the last page, so none is left for b.
    assert letters(engine, requests, 2) == ["AB", "A"]
    assert list(engine.scheduler.waiting) == [b] and b.pages == [] and b.num_computed_tokens == 0
    assert len(b.output) == 1 and b.finish_reason is None  # its token stays
    assert engine.scheduler.num_preemptions == 1
    assert letters(engine, requests) == ["A"] * 3 + ["B"] * 4
    # Twice 4, 4 times 1 for each, and the 4 of b again, or found where they were.
    assert engine.num_computed_tokens + engine.scheduler.prefix_cache_hits == 8 + 8 + 4


def test_two_in_one_step_wait_in_their_order(tiny):
    engine, requests = make_greedy(tiny(), [2, 2, 2, 2], 4, num_pages=8, page_size=1)
    # All need a page. The first two have those of the fourth, and the third then has none but
    # its own to give.
    assert letters(engine, requests, 2) == ["ABCD", "AB"]
    assert list(engine.scheduler.waiting) == requests[2:] and engine.scheduler.num_preemptions == 2


def test_in_every_step_the_oldest_gets_a_token_and_none_overtakes(tiny):
    """However often one is preempted, running and waiting ones are in order of arrival."""
    for num_pages in (8, 10, 13):
        engine, requests = make_greedy(
            tiny(), [3, 11, 1, 20, 6, 2], 12, max_num_seqs=4, num_pages=num_pages, page_size=2
        )
        while engine.busy:
            left = [request for request in requests if request.finish_reason is None]
            got = [event.request for event in step(engine)]
            assert got == left[: len(got)] and got
            left = [request for request in requests if request.finish_reason is None]
            assert [*engine.scheduler.running, *engine.scheduler.waiting] == left
        assert engine.scheduler.num_preemptions > 2


def test_a_preempted_request_is_the_first_to_run_again(tiny):
    engine, requests = make_greedy(tiny(), [4, 7, 1], 5, max_num_seqs=2, num_pages=4, page_size=4)
    a, b, c = requests
    letters(engine, requests, 2)  # 4 + 1 positions, and 7 + 1: all four pages
    assert list(engine.scheduler.running) == [a, b] and list(engine.scheduler.waiting) == [c]
    assert letters(engine, requests, 1) == ["A"]
    assert list(engine.scheduler.waiting) == [b, c]
    # b needs three pages, and two are free. One of them would do for c.
    assert engine.scheduler.pool.num_free_pages == 2
    assert letters(engine, requests) == ["A", "A", "BC", "BC", "BC", "C", "C"]


def test_a_context_shift_frees_pages(tiny):
    engine, requests = make_greedy(tiny(), [14], 12, num_pages=8, page_size=2)
    held = []
    while len(requests[0].output) < 11:
        step(engine)
        held.append(len(requests[0].pages))
    # Lengths 14, 15, 16, which is cut at once; 9, 10, ...
    assert held == [7, 8, 0, 5, 5, 6, 6, 7, 7, 8, 0]


@pytest.mark.parametrize("row", range(3))
def test_an_aborted_request_leaves_no_page_behind(tiny, row):
    engine, requests = make_greedy(tiny(), [4, 3, 3], 6, num_pages=5, page_size=2)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.running and engine.scheduler.waiting
    output = list(requests[row].output)
    engine.abort(requests[row])
    check_pages(engine)
    finish(engine)
    assert requests[row].output == output
    assert [len(request.output) for request in requests if request is not requests[row]] == [6, 6]


def test_the_command_line_counts_preemptions_and_writes_the_same(cli, engine_cli, tiny_checkpoint):
    args = ["--model", tiny_checkpoint, "--max-new-tokens", 30, "--ignore-eos"]
    for prompt in ("Once upon a time", "One day, a big dog", "Tom and Lily"):
        args += ["--prompt", prompt]
    args += ["--temperature", 1, "--seed", 5]
    code, out, _ = cli(*args)
    assert code == 0
    for num_pages, preempted in ((16, True), (40, False)):  # of 4 positions
        code, text, err = engine_cli(*args, "--num-pages", num_pages, "--page-size", 4)
        assert code == 0 and text == out
        (count,) = re.findall(r"positions computed.*, (\d+) preemptions", err)
        assert (int(count) > 0) == preempted

"""Lesson 37: a step computes no more tokens than its budget; a long prompt comes in chunks, and the others go on."""

import re

import pytest
import torch
from conftest import CHECKPOINTS, make_engine, make_greedy, own_texts, random_tokens, request_params


def add(engine, prompt, max_new_tokens=4):
    """One more request, greedy."""
    return engine.add(prompt, request_params(1, max_new_tokens=max_new_tokens)[0])


def step(engine, requests) -> tuple[int, str]:
    """How many positions a step computes, and the letters of the requests that get a token, A for the first one."""
    before = engine.positions
    events = engine.step()
    return engine.positions - before, "".join("ABCDEFGH"[requests.index(event.request)] for event in events)


def finish(engine, requests) -> list[tuple[int, str]]:
    """All steps that are left."""
    steps = []
    while engine.busy:
        steps.append(step(engine, requests))
        assert len(steps) < 2000
    return steps


SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.95}


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["tiny", "tiny_llama"])
def test_the_same_texts_and_draws_for_every_budget(kind, params, request):
    """From one token a step to more than there ever are. Prompts longer than the window, and hops."""
    model = request.getfixturevalue(kind)(seed=6)
    prompts = [random_tokens(length, seed=length) for length in (0, 13, 3, 21)]
    each = request_params(4, max_new_tokens=12, **params)
    texts = own_texts(model, prompts, each)
    for budget in (1, 2, 3, 4, 5, 7, 8, 11, 16, 23, 40):
        engine, requests = make_engine(model, prompts, each, page_size=3, budget=budget)
        assert max(count for count, _ in finish(engine, requests)) <= budget
        assert [request.output for request in requests] == texts


def test_the_same_texts_where_budget_and_pages_are_short(tiny):
    """Requests are preempted while they are fed, and after it."""
    model = tiny(seed=12)
    prompts = [random_tokens(length, seed=length) for length in (14, 9, 5)]
    each, preemptions = request_params(3, max_new_tokens=14, temperature=1.0), 0
    texts = own_texts(model, prompts, each)
    for num_pages in (8, 11):
        for budget in (1, 2, 5, 9):
            engine, requests = make_engine(model, prompts, each, num_pages=num_pages, page_size=2, budget=budget)
            finish(engine, requests)
            assert [request.output for request in requests] == texts
            preemptions += engine.scheduler.preemptions
    assert preemptions > 4


def test_a_prompt_in_chunks_has_its_first_token_after_the_last_one(tiny):
    engine, requests = make_greedy(tiny(), [11], 3, budget=4)
    (request,) = requests
    for computed in (4, 8):
        assert engine.step() == [] and engine.busy
        assert request.computed == computed and request.output == [] and request.finish_reason is None
    assert finish(engine, requests) == [(3, "A"), (1, "A"), (1, "A")]


def test_a_budget_is_used_up_while_there_is_work(tiny):
    """The prompts are fed one after another, and the end of one shares its step with the begin of the next."""
    engine, requests = make_greedy(tiny(), [7, 6, 5], 3, budget=10)
    assert finish(engine, requests) == [(10, "A"), (1 + 3 + 5, "ABC"), (3, "ABC"), (2, "BC")]


def test_one_more_than_the_budget_is_a_chunk_and_as_many_are_none(tiny):
    assert finish(*make_greedy(tiny(), [8], 1, budget=8)) == [(8, "A")]
    assert finish(*make_greedy(tiny(), [9], 1, budget=8)) == [(8, ""), (1, "A")]


def gaps(engine, requests) -> tuple[int, int]:
    """Between two tokens of one of these requests at most: steps, and positions computed. All have just got one."""
    last, longest = dict.fromkeys(requests, (engine.steps, engine.positions)), [(0, 0)]
    while engine.busy:
        for event in engine.step():
            now = engine.steps, engine.positions
            if event.request in requests:
                longest.append(tuple(new - old for new, old in zip(now, last[event.request])))
                last[event.request] = now
    return tuple(max(each) for each in zip(*longest))


@pytest.mark.parametrize("budget, positions, steps", [(8, 8, 12), (23, 23, 3), (512, 63, 1)])
def test_those_that_decode_do_not_wait_for_a_long_prompt(tiny, budget, positions, steps):
    """Three texts get a token in every step, while 60 others come in what they leave of the budget."""
    model, prompt = tiny(block_size=64), random_tokens(60, seed=9)
    engine, requests = make_greedy(model, [2, 1, 2], 20, budget=budget)
    engine.step()
    begin = engine.steps
    late = add(engine, prompt, 3)
    while not late.output:
        before = engine.positions
        got = [event.request for event in engine.step()]
        assert got == requests + [late] * bool(late.output)
        assert engine.positions - before <= budget
    assert engine.steps - begin == steps  # 60 / (budget - 3)
    assert late.output == own_texts(model, [prompt], request_params(1, max_new_tokens=1))[0]

    engine, requests = make_greedy(model, [2, 1, 2], 20, budget=budget)
    engine.step()
    add(engine, prompt, 3)
    assert gaps(engine, requests) == (1, positions)


def test_a_window_that_moves_leaves_a_token_for_each_of_the_others(tiny):
    """The oldest computes 9 positions again, and the two behind it get their tokens all the same."""
    engine, requests = make_greedy(tiny(), [16, 2, 2], 6, budget=5)
    steps = finish(engine, requests)
    # Its 16, in the last of those steps with all of the second prompt and two of the third.
    assert steps[:3] == [(5, ""), (5, ""), (5, "")]
    assert steps[3] == (1 + 2 + 2, "ABC")
    # Then it is cut to 9: three at a time, beside two others.
    assert steps[4:7] == [(5, "BC"), (5, "BC"), (5, "ABC")]
    assert steps[7] == (3, "ABC")


def test_a_window_that_moves_in_the_middle_of_the_batch_waits_for_nobody(tiny):
    """A younger request that hops gets what the older one leaves, and the one behind it keeps a token."""
    engine, requests = make_greedy(tiny(), [1, 9, 1], 20, budget=4)
    assert [step(engine, requests) for _ in range(3)] == [(1 + 3, "A"), (1 + 3, "A"), (1 + 3, "AB")]
    assert [step(engine, requests) for _ in range(7)] == [(3, "ABC")] * 7
    assert requests[1].start == 8 and len(requests[1].window) == 9
    assert [step(engine, requests) for _ in range(6)] == [(1 + 2 + 1, "AC")] * 4 + [(3, "ABC")] * 2


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_below_the_number_of_rows(tiny, budget):
    """As many run as can have a token in each step; the oldest first."""
    model, prompts = tiny(seed=3), [random_tokens(3, seed=row) for row in range(5)]
    params = request_params(5, max_new_tokens=6)
    engine, requests = make_engine(model, prompts, params, max_rows=5, budget=budget)
    while engine.busy:
        left = [request for request in requests if request.finish_reason is None]
        count, got = step(engine, requests)
        assert count <= budget and len(engine.scheduler.running) <= budget
        decoding = [request for request in left[:budget] if len(request.output) > 1]
        assert all("ABCDE"[requests.index(request)] in got for request in decoding)
    assert [request.output for request in requests] == own_texts(model, prompts, params)


def test_chunks_count_as_rows(tiny):
    """One row: the second prompt does not begin while the first text runs."""
    engine, requests = make_greedy(tiny(), [6, 3], 2, max_rows=1, budget=4)
    assert finish(engine, requests) == [(4, ""), (2, "A"), (1, "A"), (3, "B"), (1, "B")]


def test_what_follows_a_chunk_is_not_a_token_of_the_text(tiny):
    """The logits after a chunk say what the model would write there; here each of them says EOS."""
    model = tiny(eos_token_ids=tuple(range(61)))
    from sampling import SamplingParams

    engine, requests = make_engine(model, [random_tokens(9)], [SamplingParams(max_new_tokens=5)], budget=2)
    assert finish(engine, requests) == [(2, "")] * 4 + [(1, "A")]
    assert requests[0].finish_reason == "stop" and len(requests[0].tokens) == 10


@pytest.mark.parametrize(
    "budget, steps, shared", [(3, 1, 0), (4, 1, 4), (5, 2, 8), (6, 3, 16), (7, 2, 12), (13, 1, 12)]
)
def test_chunks_of_a_prompt_are_shared_as_soon_as_they_are_computed(tiny, budget, steps, shared):
    """Whole pages of them, wherever a chunk ends. The first request is aborted before its first token."""
    model, prompt = tiny(block_size=32), random_tokens(22)
    engine, (first,) = make_greedy(model, [22], 3, page_size=4, budget=budget)
    for _ in range(steps):
        assert engine.step() == []
    engine.abort(first)
    late = add(engine, prompt)
    finish(engine, [late])
    assert engine.scheduler.shared == shared and engine.positions == steps * budget + 22 - shared + 3
    assert late.output == own_texts(model, [prompt], request_params(1, max_new_tokens=4))[0]


def test_chunks_are_shared_among_prompts_that_are_fed_together(tiny):
    """The second begins in the step of the first one's last chunk, and finds all chunks before that."""
    model, prompt = tiny(block_size=32), random_tokens(22)
    engine, requests = make_engine(model, [prompt] * 2, request_params(2, max_new_tokens=4), page_size=4, budget=8)
    assert finish(engine, requests)[:4] == [(8, ""), (8, ""), (6 + 2, "A"), (1 + 4, "AB")]
    assert engine.scheduler.shared == 16
    assert [request.output for request in requests] == own_texts(
        model, [prompt] * 2, request_params(2, max_new_tokens=4)
    )


def test_a_request_preempted_in_its_prompt_goes_on_where_it_was(tiny):
    """Its pages are found again, if nobody needed them."""
    model = tiny(block_size=32)
    engine, requests = make_greedy(model, [7, 18], 3, num_pages=7, page_size=4, budget=7)
    a, b = requests
    assert [step(engine, requests) for _ in range(2)] == [(7, "A"), (1 + 6, "A")]  # b holds the five pages of 18
    assert step(engine, requests) == (1, "A") and list(engine.scheduler.waiting) == [b] and a.finish_reason
    assert engine.scheduler.preemptions == 1 and b.output == [] and b.pages == []
    assert finish(engine, requests) == [(7, ""), (7, "B"), (1, "B"), (1, "B")]
    assert engine.scheduler.shared == 4


def test_an_aborted_chunk_gives_its_pages_back(tiny):
    model = tiny(block_size=32)
    engine, requests = make_greedy(model, [20, 9], 4, num_pages=8, page_size=4, budget=6)
    engine.step()
    assert list(engine.scheduler.running) == requests[:1]
    engine.abort(requests[0])
    assert len(engine.scheduler.pool.free) == 8
    assert [got for _, got in finish(engine, requests)] == ["", "B", "B", "B", "B"]


def with_nan(model, position):
    """A GPT-2 that returns NaN for texts that reach a position."""
    with torch.no_grad():
        model.wpe.weight[position] = torch.nan
    return model


def test_nan_in_a_chunk_ends_its_own_request_at_once(tiny):
    """Not after the last chunk, and the others go on."""
    model = with_nan(tiny(block_size=32), 9)
    engine, requests = make_greedy(model, [3, 20, 2], 6, page_size=4, budget=6)
    a, b, c = requests
    assert [step(engine, requests) for _ in range(2)] == [(6, "A"), (6, "A")]  # b: 3 and 5
    (first, second) = engine.step()  # b: positions 8 to 12
    assert first.request is a and first.error is None
    assert second.request is b and second.tokens == [] and second.finish_reason == b.finish_reason == "error"
    assert "NaN" in second.error and b.output == [] and b.pages == []
    finish(engine, requests)
    prompts = [request.tokens[: request.prompt_length] for request in (a, c)]
    assert [a.output, c.output] == own_texts(model, prompts, request_params(2, max_new_tokens=6))
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.num_pages


def test_nan_in_a_chunk_is_not_shared(tiny):
    """Another request with that prompt finds the chunks before it, and computes the broken one itself."""
    model, prompt = with_nan(tiny(block_size=32), 9), random_tokens(20)
    engine, requests = make_engine(model, [prompt], request_params(1, max_new_tokens=2), page_size=4, budget=4)
    steps = []
    while engine.busy:
        steps += [engine.step()]
    assert [len(events) for events in steps] == [0, 0, 1] and requests[0].finish_reason == "error"
    assert len(engine.scheduler.pool.published) == 2
    late = add(engine, prompt)
    assert engine.step()[0].finish_reason == "error" and late.output == []
    assert engine.scheduler.shared == 8 and engine.positions == 12 + 4


def test_nan_of_a_chunk_stays_in_no_page(tiny):
    """A mask does not hide NaN: the next text in those pages would be lost."""
    model = with_nan(tiny(block_size=32), 9)
    engine, _ = make_greedy(model, [20], 1, num_pages=5, page_size=4, budget=10)
    engine.step()
    assert not engine.busy
    params = request_params(2, max_new_tokens=6)
    prompts = [random_tokens(3, seed=5), random_tokens(2, seed=6)]
    requests = [engine.add(prompt, its) for prompt, its in zip(prompts, params)]
    finish(engine, requests)
    assert [request.output for request in requests] == own_texts(model, prompts, params)
    assert not engine.cache.storage.isnan().any()


def test_a_pass_that_fails_ends_a_request_in_its_prompt(tiny, monkeypatch):
    import engine.engine

    engine_, requests = make_greedy(tiny(block_size=32), [20, 2], 3, page_size=4, budget=8)
    engine_.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "last_logits", lambda *args: (_ for _ in ()).throw(RuntimeError("no memory")))
        (event,) = engine_.step()
    assert event.request is requests[0] and (event.tokens, event.error) == ([], "no memory")
    assert finish(engine_, requests) == [(2, "B"), (1, "B"), (1, "B")]  # it had not begun


def test_the_budget_is_512_if_not_given(tiny):
    from engine.engine import Engine

    engine = Engine(tiny(block_size=600), max_rows=2)
    add(engine, random_tokens(600), 1)
    assert [engine.step() == [], engine.positions] == [True, 512]
    assert len(engine.step()) == 1 and engine.positions == 600


@pytest.mark.parametrize("budget", [0, -1, True, 2.5, "8"])
def test_a_budget_is_a_positive_integer(tiny, budget):
    from checkpoint import UserError
    from engine.engine import Engine

    with pytest.raises(UserError, match=f"^budget is {re.escape(repr(budget))}; it must be an integer >= 1$"):
        Engine(tiny(), budget=budget)


@pytest.mark.parametrize("params", [(), ("--temperature", 1, "--seed", 5)], ids=["greedy", "sampled"])
def test_the_command_line_writes_the_same_in_more_steps(cli, params):
    args = ["--model", CHECKPOINTS / "stories-draft", "--max-new-tokens", 8, "--ignore-eos", *params]
    args += ["--prompt", "Once upon a time", "--prompt", "One day, a big dog", "--prompt", "Tom and Lily"]
    code, out, _ = cli(*args)
    assert code == 0
    steps, positions = [], set()
    for options in ((), ("--budget", 4), ("--budget", 1)):
        code, text, err = cli(*args, "--engine", *options)
        assert code == 0 and text == out
        count, computed = re.search(r"(\d+) steps, (\d+) positions computed", err).groups()
        steps.append(int(count))
        positions.add(int(computed))
    assert steps[0] == 8 < steps[1] < steps[2] and positions == {steps[2]}  # one position a step


@pytest.mark.parametrize("budget", ["0", "-3"])
def test_the_command_line_refuses_a_budget_out_of_range(cli, budget):
    code, out, err = cli("--model", CHECKPOINTS / "stories-draft", "--engine", "--budget", budget)
    assert code == 2 and out == "" and f"budget is {budget}; it must be an integer >= 1" in err


def test_the_command_line_takes_a_budget_for_the_engine_only(cli):
    code, out, err = cli("--model", CHECKPOINTS / "stories-draft", "--budget", 8)
    assert code == 2 and out == "" and "--budget is for --engine only" in err
    code, out, err = cli("--model", CHECKPOINTS / "stories-draft", "--engine", "--budget", "many")
    assert code == 2 and out == "" and "argument --budget: invalid int value: 'many'" in err


def test_the_command_line_shows_the_time_of_the_first_token_not_of_the_first_chunk(cli, monkeypatch):
    """A clock that counts passes: a prompt of six tokens, one a step."""
    import types

    import engine.engine
    import infer

    passes, last_logits = [], engine.engine.last_logits
    monkeypatch.setattr(engine.engine, "last_logits", lambda *args: passes.append(0) or last_logits(*args))
    monkeypatch.setattr(infer, "time", types.SimpleNamespace(perf_counter=lambda: float(len(passes))))
    args = ["--model", CHECKPOINTS / "stories-draft", "--max-new-tokens", 3, "--prompt", "Once upon a time there was"]
    code, _, err = cli(*args, "--engine", "--budget", 1)
    assert code == 0 and "the first after 6.000 s" in err and "8 steps, 8 positions" in err

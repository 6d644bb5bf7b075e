"""A text that cannot be computed ends alone; the others go on."""

import math

import pytest
import torch
from conftest import PROMPTS, is_one_line, random_tokens
from engines import (
    check_texts,
    events_of,
    finish,
    greedy,
    make_engine,
    numbered,
    own_texts,
    poison,
    raise_once,
    step,
)

from loading.load import save_model
from sampling import NOT_FINITE as NAN

LINE = "\n" + "-" * 40 + "\n"
BAD = 60  # a token that `poison` makes NaN, and that no text has by chance


def test_nan_fails_its_own_request_only(build):
    prompts = [random_tokens(10, 20), random_tokens(8, 20, seed=1), [1], [2, 3]]
    lengths = [20, 20, 9, 9]
    params = [greedy(length, temperature=1.0, seed=1 + row) for row, length in enumerate(lengths)]
    texts = own_texts(build(seed=8), prompts, params)
    others = {token for row in (0, 2, 3) for token in prompts[row] + texts[row]} | set(prompts[1])
    cut, token = next((cut, token) for cut, token in enumerate(texts[1]) if token not in others)
    # So the first text attends to more positions than the next one, in the step after.
    assert cut < 5
    engine, added = make_engine(poison(build(seed=8), token), prompts, params, max_num_seqs=2)
    events = [event for event in events_of(engine) if event.request is added[1]]
    assert [event.tokens for event in events] == [[token] for token in texts[1][: cut + 1]] + [[]]
    assert [event.error for event in events] == [None] * (cut + 1) + [NAN]
    assert events[-1].finish_reason == "error" and added[1].output == texts[1][: cut + 1]
    for row in (0, 2, 3):
        assert (added[row].output, added[row].finish_reason) == (texts[row], "length")


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_infinite_logits_are_an_error_too(tiny, bad, monkeypatch):
    engine, _ = numbered(tiny(), [2, 2])
    logits = torch.tensor([[0.0] * 61, [0.0] * 60 + [bad]])
    monkeypatch.setattr(engine.model, "head", lambda x: logits)
    assert [event.error for event in engine.step()] == [None, NAN]


@pytest.mark.parametrize(
    "error, after", [(RuntimeError("CUDA out of memory"), 0), (MemoryError(), 2)], ids=repr
)
def test_a_pass_without_memory_ends_its_requests_and_the_waiting_ones_go_on(tiny, error, after):
    model = tiny()
    raise_once(model, error, after)
    engine, requests = numbered(model, [5] * 5, max_num_seqs=2)
    for _ in range(after):
        engine.step()
    events = step(engine)
    assert [event.request for event in events] == requests[:2] and engine.scheduled == []
    for event in events:
        assert (event.tokens, event.finish_reason) == ([], "error")
        assert event.error == "the sequences of this step do not fit in memory"
    finish(engine)
    check_texts(tiny(), requests)
    assert [len(request.output) for request in requests] == [after, after, 5, 5, 5]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_nan_in_a_page_does_not_reach_its_next_owner(build, page_size):
    model = poison(build(seed=1), BAD)
    options = {"page_size": page_size, "num_pages": -(-16 // page_size)}
    prompt = [*random_tokens(4, BAD), BAD, *random_tokens(9, BAD)]
    engine, _ = make_engine(model, [prompt], greedy(3), **options)
    (event,) = step(engine)
    assert event.finish_reason == "error"
    request = engine.add(random_tokens(1, BAD, seed=3), greedy(15))
    # It gets each page, and sees the end of one before it has written there.
    finish(engine)
    assert request.finish_reason == "length"
    check_texts(model, [request])


# The command line


@pytest.fixture
def broken(tiny, tiny_checkpoint):
    model = tiny(dtype=torch.float32, vocab_size=4096, block_size=64, eos_token_id=4095)
    model.wpe.weight.data[12] = math.nan
    save_model(model, tiny_checkpoint)
    return tiny_checkpoint


def test_errors_follow_the_output_of_other_requests(cli, engine_cli, broken, prompts_file):
    args = ("--model", broken, "--prompt-file", prompts_file, "--max-new-tokens", 5)
    code, out, err = engine_cli(*args, "--max-num-seqs", 2)
    assert code == 2 and err.endswith(f": error: sequence 3: {NAN}\n") and err.count("\n") == 3
    texts = out.removesuffix("\n").split(LINE)
    for row, prompt in enumerate(PROMPTS):
        assert row == 2 or texts[row] + "\n" == cli(*args[:2], "--prompt", prompt, *args[4:])[1]
    assert texts[2] == PROMPTS[2] and len(texts) == 5
    assert cli(*args)[:2] == (2, "")  # without the engine, it ends all of them
    long = "A dog and a cat and a bird and a fish and a frog"
    result = engine_cli("--model", broken, "--prompt", long, "--prompt", long)
    assert is_one_line(result, f": error: sequence 1: {NAN}; sequence 2: {NAN}\n")

"""An engine that requests join and leave at any step: each has the text of its own run."""

import io
import math
import sys

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths, random_tokens
from engines import (
    alone,
    check_texts,
    events_of,
    failing,
    finish,
    greedy,
    letters,
    make_engine,
    outputs_of,
    own_texts,
    poison,
    step,
)

from engine.engine import Engine
from errors import UserError
from loading.load import save_model
from loading.tokenizer import load_encoding
from sampling import SamplingParams

NAN = "the model returned logits that are NaN or infinite: broken weights, or a dtype too small"
ENDS = (7, 19, 23, 42, 60)  # tokens that end a text, in models whose texts are to end early
LINE = "\n" + "-" * 40 + "\n"


def sampled(count: int, seed: int = 1) -> SamplingParams:
    return greedy(count, temperature=1.0, seed=seed)


def mixture(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds, prompts within and beyond the window of 16, texts that hop."""
    kinds = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"temperature": 1.5, "top_p": 0.8, "frequency_penalty": 0.5},
    )
    lengths = (3, 17, 1, 12, 0, 30, 16)
    counts = (9, 1, 25, 4, 16, 12)
    prompts = [random_tokens(lengths[k % 7], seed=k) for k in range(count)]
    return prompts, [
        SamplingParams(counts[k % 6], ignore_eos=k % 3 == 0, seed=k, **kinds[k % 5])
        for k in range(count)
    ]


# The texts


@pytest.mark.parametrize("max_rows, stride", [(1, 1), (3, None), (32, 16)])
def test_many_requests_on_few_rows_have_the_texts_of_their_own_runs(build, max_rows, stride):
    model = build(seed=4, eos_token_ids=ENDS)
    engine, requests = make_engine(model, *mixture(12), max_rows=max_rows, stride=stride)
    finish(engine)
    check_texts(model, requests, stride)
    assert {request.finish_reason for request in requests} == {"stop", "length"}


def test_requests_join_between_steps(build):
    model = build(seed=4, eos_token_ids=ENDS)
    engine, requests = make_engine(model, [], [], max_rows=4)
    left = list(zip(*mixture(12)))
    for arriving, steps in ((1, 3), (3, 1), (0, 4), (4, 0), (1, 5), (2, 60), (1, 2)):
        requests += [engine.add(*left.pop(0)) for _ in range(arriving)]
        for _ in range(steps):
            step(engine)
    finish(engine)
    check_texts(model, requests)


def test_an_empty_prompt_starts_from_the_token_that_begins_a_text(tiny_llama):
    model = tiny_llama()
    (text,) = outputs_of(Engine(model), [[]], greedy(5))
    assert text == alone(model, [], greedy(5)) == alone(model, [59], greedy(5))


@pytest.mark.parametrize("ends", [(60, 7, 9), (9, 60, 7)])
def test_of_several_ends_the_first_begins_a_text(tiny, ends):
    """A GPT-2 has no other token for that. Each of them ends one."""
    model = tiny(seed=4, eos_token_ids=ends)
    params = [SamplingParams(40, temperature=1.0, seed=seed) for seed in range(20)]
    engine, empty = make_engine(model, [[]] * 20, params)
    begun = [engine.add([ends[0]], own) for own in params]
    finish(engine)
    check_texts(model, empty)
    assert [request.output for request in empty] == own_texts(model, [[]] * 20, params)
    assert [request.tokens for request in empty] == [request.tokens for request in begun]
    stopped = [request.output for request in empty if request.finish_reason == "stop"]
    assert {output[-1] for output in stopped} == set(ends)
    assert not any(token in ends for output in stopped for token in output[:-1])


def test_a_prompt_is_left_as_it_is(tiny):
    prompt = [1, 2, 3]
    engine, requests = make_engine(tiny(), [prompt], greedy(4))
    prompt.append(9)
    finish(engine)
    assert prompt == [1, 2, 3, 9] and requests[0].output == alone(tiny(), [1, 2, 3], greedy(4))


def test_a_prompt_may_end_in_the_end_of_a_text(tiny):
    model = tiny(seed=5)
    (text,) = outputs_of(Engine(model), [[1, 60]], SamplingParams(4))
    assert text == alone(model, [1, 60], max_new_tokens=4) != []


# Steps


def numbered(model, counts, **options) -> tuple:
    """An engine with greedy requests for so many tokens each."""
    prompts = [[row + 1] for row in range(len(counts))]
    return make_engine(model, prompts, [greedy(count) for count in counts], **options)


def test_an_idle_row_is_taken_in_the_very_next_step(tiny):
    """Which request has a token in which step, on two rows: first come, first served."""
    engine, requests = numbered(tiny(), [5, 2, 1, 4, 3, 1], max_rows=2)
    steps = ["AB", "AB", "AC", "AD", "AD", "DE", "DE", "EF"]
    assert ["".join(sorted(got)) for got in letters(engine, requests)] == steps


def test_a_request_runs_in_the_step_after_it_was_added(tiny):
    engine, requests = numbered(tiny(), [9], max_rows=2)
    assert letters(engine, requests, 1) == ["A"]
    requests.append(engine.add([2], greedy(9)))
    assert letters(engine, requests, 1) == ["AB"]


def test_a_step_is_one_pass_over_what_its_requests_lack(tiny):
    model, passes = passed_widths(tiny(), shapes=True)
    prompts = [random_tokens(length, seed=length) for length in (15, 5)]
    engine, _ = make_engine(model, prompts, greedy(4), max_rows=3)
    step(engine)
    engine.add([1, 2, 3], greedy(2))
    finish(engine)
    # The first text grows from 15 to 16, then to 17 tokens, of which its window keeps 9. Its
    # fourth token is not computed.
    assert passes == [(20,), (1 + 1 + 3,), (9 + 1 + 1,), (2,)]
    assert (engine.steps, engine.positions) == (4, 38)


def test_a_step_with_nothing_to_do(tiny):
    engine = Engine(tiny())
    assert engine.step() == [] and not engine.busy and (engine.steps, engine.positions) == (0, 0)
    outputs_of(engine, [[1]], greedy(2))
    assert engine.step() == [] and engine.steps == 2


class Queue(list):
    """Waiting requests, of which a step may look at the first one alone."""

    popleft = property(lambda self: lambda: self.pop(0))

    def __iter__(self):
        raise AssertionError("a step goes through the queue")

    def __contains__(self, request):
        raise AssertionError("a step searches the queue")


def test_no_step_looks_at_2000_waiting_requests(tiny):
    """They are no requests: each use would be an error."""
    engine, requests = numbered(tiny(), [20, 3, 30], max_rows=2)
    engine.scheduler.waiting = Queue([*engine.scheduler.waiting, *[object()] * 2000])
    for _ in range(19):
        engine.step()
    assert [len(request.output) for request in requests] == [19, 3, 16]
    assert len(engine.scheduler.waiting) == 2000


# Events


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_event_for_each_request_and_step(tiny, temperature):
    model = tiny(seed=6)
    prompts = [[1], [2, 3], [4] * 9]
    params = SamplingParams(max_new_tokens=7, temperature=temperature, seed=3)
    texts = own_texts(model, prompts, params)
    model = tiny(seed=6, eos_token_id=texts[1][4])  # it ends the second text
    texts = own_texts(model, prompts, params)
    engine, added = make_engine(model, prompts, params)
    steps = finish(engine)
    assert all(len({event.request for event in events}) == len(events) for events in steps)
    for text, request in zip(texts, added, strict=True):
        events = [event for events in steps for event in events if event.request is request]
        assert [event.tokens for event in events] == [[token] for token in text]
        assert request.output == text and not any(event.error for event in events)
        reason = "stop" if text[-1] in model.config.eos_token_ids else "length"
        assert [event.finish_reason for event in events] == [None] * (len(text) - 1) + [reason]
    assert {request.finish_reason for request in added} == {"stop", "length"}


def test_an_end_of_text_as_the_last_token_is_a_stop(tiny):
    (first,) = alone(tiny(), [1], greedy(1))
    for ignore, reason in ((False, "stop"), (True, "length")):
        model = tiny(eos_token_ids=(60, first))
        engine, _ = make_engine(model, [[1]], SamplingParams(1, ignore_eos=ignore))
        (event,) = events_of(engine)
        assert (event.tokens, event.finish_reason, event.error) == ([first], reason, None)


def test_a_request_for_no_tokens_is_over_at_once(tiny):
    engine, (running,) = numbered(tiny(), [3], max_rows=1)
    request = engine.add([1, 2], greedy(0))
    assert (request.output, request.finish_reason, request.prompt_length) == ([], "length", 2)
    assert [event.request for event in events_of(engine)] == [running] * 3
    with pytest.raises(ValueError, match="this request is over already, with the reason 'length'"):
        engine.abort(request)


def test_a_request_without_a_seed_gets_one_that_repeats_it(tiny):
    model = tiny()
    engine, requests = make_engine(model, [[1]] * 2, greedy(12, temperature=1.0))
    finish(engine)
    first, second = requests
    assert first.params.seed != second.params.seed and first.output != second.output
    check_texts(model, requests)


# Abort


def test_abort_frees_the_row(tiny):
    model = tiny()
    engine, requests = numbered(model, [9, 9, 9], max_rows=2)
    assert letters(engine, requests, 4) == ["AB"] * 4
    engine.abort(requests[0])
    assert requests[0].finish_reason == "abort" and len(requests[0].output) == 4
    assert letters(engine, requests) == ["BC"] * 5 + ["C"] * 4
    check_texts(model, requests)


# What is wrong with a request or the options


@pytest.mark.parametrize("wrong", [61, -1, 10**30, 1.0, "1", None, torch.tensor(1)])
def test_an_id_that_is_none_is_refused_and_the_engine_goes_on(tiny, wrong):
    engine, requests = numbered(tiny(), [4])
    engine.step()
    for prompt in ([wrong], [1, wrong, 2]):
        with pytest.raises(UserError) as error:
            engine.add(prompt, greedy(4))
        ids = "ids of this model are integers from 0 to 60"
        assert str(error.value) == f"the prompt has the id {wrong!r}; {ids}"
    assert letters(engine, requests) == ["A"] * 3


def test_the_smallest_and_the_largest_id(tiny):
    (text,) = outputs_of(Engine(tiny()), [[0, 60]], greedy(3))
    assert text == alone(tiny(), [0, 60], greedy(3))


# A pass that fails


def test_nan_ends_its_own_text_only(build):
    """Neither its mates nor the next text in its row see it, which see as many positions."""
    prompts = [random_tokens(10, 20), random_tokens(8, 20, seed=1), [1], [2, 3]]
    params = [sampled(20), sampled(20, 2), sampled(9, 3), sampled(9, 4)]
    texts = own_texts(build(seed=8), prompts, params)
    others = {token for row in (0, 2, 3) for token in prompts[row] + texts[row]} | set(prompts[1])
    cut, token = next((cut, token) for cut, token in enumerate(texts[1]) if token not in others)
    # So the first text attends to more positions than the next one, in the step after.
    assert cut < 5
    engine, added = make_engine(poison(build(seed=8), token), prompts, params, max_rows=2)
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


def raise_once(model, error: BaseException, after: int) -> None:
    """A later pass fails in its second layer: the first one has written its keys and values."""
    passes = []

    def hook(module, args):
        passes.append(None)
        if len(passes) == after + 1:
            raise error

    model.h[1].register_forward_pre_hook(hook)


@pytest.mark.parametrize(
    "error, after", [(RuntimeError("CUDA out of memory"), 0), (MemoryError(), 2)], ids=repr
)
def test_a_pass_without_memory_ends_its_requests_and_the_waiting_ones_go_on(tiny, error, after):
    model = tiny()
    raise_once(model, error, after)
    engine, requests = numbered(model, [5] * 5, max_rows=2)
    for _ in range(after):
        engine.step()
    events = step(engine)
    assert [event.request for event in events] == requests[:2]
    for event in events:
        assert event.tokens == [] and event.finish_reason == "error"
        assert event.error == "the texts of this step do not fit in memory"
    finish(engine)
    check_texts(tiny(), requests)
    assert [len(request.output) for request in requests] == [after, after, 5, 5, 5]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_what_a_failed_pass_wrote_is_forgotten(tiny, error):
    """It may be NaN, which a mask does not hide. An interrupted request is aborted."""
    model = poison(tiny(), 13)
    engine, requests = make_engine(model, [[13] * 14] * 2, greedy(3), max_rows=2)
    with failing(model, error):
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            for request in requests:
                engine.abort(request)
        else:
            assert [event.finish_reason for event in step(engine)] == ["error"] * 2
    prompts = [[1], [5] * 12]
    assert outputs_of(engine, prompts, greedy(4)) == own_texts(tiny(), prompts, greedy(4))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 14])
def test_after_any_other_exception_the_next_step_computes_the_same_again(tiny, error, after):
    """In a step that takes requests from the queue, one that decodes, and one with a hop.

    A RuntimeError that says nothing of memory is a mistake in the code, and not one of a request.
    """
    model = tiny(seed=4, eos_token_ids=ENDS)
    raise_once(model, error("stopped"), after)
    engine, requests = make_engine(model, *mixture(9), max_rows=3)
    for _ in range(after):
        engine.step()
    before = [(list(request.tokens), request.finish_reason) for request in requests]
    with pytest.raises(error, match="stopped"):
        engine.step()
    assert [(request.tokens, request.finish_reason) for request in requests] == before
    finish(engine)
    check_texts(tiny(seed=4, eos_token_ids=ENDS), requests)


# The command line

PROMPTS = [
    "Once upon a time",
    "A dog",
    "Tom and Lily went to the park to play with a big red ball",
    "One",
    "The sun",
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


SEEDED = ("--max-new-tokens", 12, "--temperature", 1, "--num-samples", 2, "--seed", 5)
FILTERED = ("--max-new-tokens", 12, "--temperature", 0.9, "--top-p", 0.9, "--seed", 2**64 - 1)


@pytest.mark.parametrize(
    "args, rows",
    [
        (("--max-new-tokens", 12), ()),
        (("--max-new-tokens", 60, "--ignore-eos", "--stride", 5), ("--max-rows", 2)),
        (SEEDED, ("--max-rows", 3)),
        ((*FILTERED, "--repetition-penalty", 2), ()),
        (("--max-new-tokens", 0), ()),
        (("--max-new-tokens", 5, "--prompt", "", "--dtype", "int8"), ("--max-rows", 1)),
    ],
)
def test_the_engine_prints_what_is_printed_without_it(
    cli, engine_cli, tiny_checkpoint, file, args, rows
):
    args = ("--model", tiny_checkpoint, "--prompt-file", file, *args)
    code, out, err = engine_cli(*args, *rows)
    assert code == 0, err
    assert (code, out) == cli(*args)[:2]


def test_a_single_text_is_printed_as_it_comes(cli, engine_cli, tiny_checkpoint, monkeypatch):
    args = ("--model", tiny_checkpoint, "--prompt", "Once", "--max-new-tokens", 6)
    step = Engine.step
    shown = []
    expected = cli(*args)[1]
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(Engine, "step", lambda self: shown.append(out.getvalue()) or step(self))
    engine_cli(*args)
    assert shown[0] == "" and len(set(shown)) > 3 and out.getvalue() == expected
    assert all(expected.startswith(part) for part in shown)


def test_replies_of_a_chat_model(cli, engine_cli, file, monkeypatch):
    args = ["--model", CHECKPOINTS / "stories-llama", "--chat", "--max-new-tokens", 6]
    args += ["--temperature", 1, "--seed", 7]
    expected = cli(*args, "--prompt-file", file)[:2]
    assert engine_cli(*args, "--prompt-file", file, "--max-rows", 2)[:2] == expected
    outs = []
    for script in (cli, engine_cli):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"dog, park\ncat, tree\n")))
        code, out, err = script(*args)
        assert code == 0 and err.count(" tokens, ") == 2
        outs.append(out)
    assert outs[0] == outs[1] != ""
    # The second line of steps counts those of both replies.
    steps = [line for line in err.splitlines() if " steps, " in line]
    assert [line.split()[0] for line in steps] == ["6", "12"]
    assert [line.endswith(", in all") for line in steps] == [False, True]


@pytest.mark.parametrize("max_rows, steps", [(None, 7), (5, 7), (2, 3 * 7), (1, 5 * 7)])
def test_statistics(engine_cli, tiny_checkpoint, file, max_rows, steps):
    args = ["--model", tiny_checkpoint, "--prompt-file", file, "--max-new-tokens", 7]
    args += ["--ignore-eos", "--seed", 3, "--temperature", 1]
    args += [] if max_rows is None else ["--max-rows", max_rows]
    code, _, err = engine_cli(*args)
    tokens = sum(len(load_encoding(tiny_checkpoint, 4096).encode(prompt)) for prompt in PROMPTS)
    first, second = err.splitlines()
    assert code == 0 and first.startswith("35 tokens, ") and first.endswith(", seed 3")
    assert f"{second},".startswith(f"{steps} steps, {tokens + 5 * 6} positions computed,")


@pytest.fixture
def broken(tiny, tiny_checkpoint):
    """A model in which a text of more than 12 tokens is NaN."""
    model = tiny(dtype=torch.float32, vocab_size=4096, block_size=64, eos_token_id=4095)
    model.wpe.weight.data[12] = math.nan
    save_model(model, tiny_checkpoint)
    return tiny_checkpoint


def test_a_text_that_fails_is_said_after_the_others_are_written(cli, engine_cli, broken, file):
    args = ("--model", broken, "--prompt-file", file, "--max-new-tokens", 5)
    code, out, err = engine_cli(*args, "--max-rows", 2)
    assert code == 2 and err.endswith(f": error: text 3: {NAN}\n") and err.count("\n") == 3
    texts = out.removesuffix("\n").split(LINE)
    for row, prompt in enumerate(PROMPTS):
        assert row == 2 or texts[row] + "\n" == cli(*args[:2], "--prompt", prompt, *args[4:])[1]
    assert texts[2] == PROMPTS[2] and len(texts) == 5
    assert cli(*args)[:2] == (2, "")  # without the engine, it ends all of them


def test_where_every_text_fails_the_error_is_all_that_is_said(engine_cli, broken):
    long = "A dog and a cat and a bird and a fish and a frog"
    code, out, err = engine_cli("--model", broken, "--prompt", long, "--prompt", long)
    assert (code, out) == (2, "")
    assert err.endswith(f": error: text 1: {NAN}; text 2: {NAN}\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA error: out of memory\nCompile with more.\n")]
)
def test_a_pass_that_fails_is_one_line(cli, engine_cli, tiny_checkpoint, monkeypatch, error):
    from engine.cache import PagedCache

    arrange = PagedCache.arrange
    passes = []

    def fail_once(*args):
        passes.append(None)
        if len(passes) == 3:
            raise error
        return arrange(*args)

    monkeypatch.setattr(PagedCache, "arrange", fail_once)
    args = ("--model", tiny_checkpoint, "--max-new-tokens", 4, "--backend", "torch")
    args += ("--prompt", "Two")
    code, out, err = engine_cli("--prompt", "One", *args, "--max-rows", 1)
    first, second = out.removesuffix("\n").split(LINE)
    assert code == 2 and err.count("\n") == 3
    assert err.endswith(": error: text 1: the texts of this step do not fit in memory\n")
    assert second + "\n" == cli(*args)[1] and first.startswith("One") and len(passes) == 7

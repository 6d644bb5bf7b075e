"""Lesson 40: the log-probability of each token, and the most likely tokens in its place."""

import itertools
import math
import re

import pytest
import torch
from conftest import CHECKPOINTS, make_engine, own_texts, random_tokens, request_params

from checkpoint import UserError

DRAFT = CHECKPOINTS / "stories-draft"
STORY = ["--engine", "--model", DRAFT, "--prompt", "Once upon a time"]
PARAMS = [
    {},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]


def by_hand(model, tokens, prompt_length) -> list[torch.Tensor]:
    """The log-probabilities of all tokens at each place of the output: a whole pass over each window."""
    from cache import window_start
    from infer import next_logits

    size, found = model.config.block_size, []
    for length in range(prompt_length, len(tokens)):
        window = tokens[window_start(length, size, size // 2) : length]
        found.append(next_logits(model, [window], None)[0, 0].double().log_softmax(dim=-1))
    return found


def check(model, request, count):
    """The log-probabilities of a request are those by hand; no two of these random models' are equal."""
    wanted = by_hand(model, request.tokens, request.prompt_length)
    assert len(request.logprobs) == len(request.output) == len(wanted)
    for token, its, row in zip(request.output, request.logprobs, wanted):
        assert its.logprob == pytest.approx(row[token].item(), abs=2e-6)
        best = row.topk(count)
        assert [token for token, _ in its.top] == best.indices.tolist()
        assert [value for _, value in its.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def add(engine, prompt, params, count):
    return engine.add(prompt, params, logprobs=count)


def finish(engine) -> list:
    events = []
    while engine.busy:
        events += engine.step()
    return events


# Of a text


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalties"])
def test_they_are_the_models_own(build, params):
    """Whatever the temperature, the filters and the penalties are. The window moves."""
    from engine.engine import Engine

    model = build(seed=3)
    engine = Engine(model)
    prompts = [random_tokens(length, seed=length) for length in (1, 14, 30)]
    each = request_params(3, max_new_tokens=20, **params)
    requests = [add(engine, prompt, its, 4) for prompt, its in zip(prompts, each)]
    finish(engine)
    assert [request.output for request in requests] == own_texts(model, prompts, each)
    for request in requests:
        check(model, request, 4)


@pytest.mark.parametrize(
    "options",
    [{"num_pages": 6}, {"budget": 3}, {"max_rows": 1}, {"drafter": "lookup"}, {"drafter": "model", "gamma": 5}],
    ids=str,
)
def test_pages_chunks_and_drafts_change_nothing(tiny, options):
    """One for each token, also of a text that was preempted, and none for a draft that was refused."""
    from engine.drafter import LookupDrafter, ModelDrafter
    from engine.engine import Engine

    model, same = tiny(seed=8), random_tokens(3, seed=1) * 3
    if "drafter" in options:
        draft = ModelDrafter(tiny(seed=8, n_layer=1), model, 3, 3)
        options = options | {"drafter": LookupDrafter() if options["drafter"] == "lookup" else draft}
    engine = Engine(model, **{"max_rows": 3, "page_size": 3} | options)
    each = request_params(3, max_new_tokens=40, temperature=0.3)
    requests = [add(engine, prompt, its, 2) for prompt, its in zip([same, same + [5], [7]], each)]
    finish(engine)
    if "num_pages" in options:
        assert engine.scheduler.preemptions
    if "drafter" in options:
        assert engine.accepted and engine.drafted > engine.accepted
    assert [request.output for request in requests] == own_texts(model, [same, same + [5], [7]], each)
    for request in requests:
        check(model, request, 2)


def test_each_request_has_as_many_as_it_asked_for(tiny):
    from engine.engine import Engine

    model = tiny(seed=5)
    engine, each = Engine(model), request_params(4, max_new_tokens=6)
    requests = [add(engine, [9], its, count) for its, count in zip(each, (None, 0, 1, 20))]
    finish(engine)
    for request, count in zip(requests, (0, 0, 1, 20)):
        assert all(len(its.top) == count for its in request.logprobs)
    assert [len(request.logprobs) for request in requests] == [0, 6, 6, 6]
    check(model, requests[3], 20)
    assert all(its.top[0] == (token, its.logprob) for token, its in zip(requests[2].output, requests[2].logprobs))


def test_events_bring_those_of_their_tokens(tiny):
    from engine.drafter import ModelDrafter
    from engine.engine import Engine

    model = tiny(seed=2)
    engine = Engine(model, drafter=ModelDrafter(model, model))
    asked, other = [add(engine, [4], its, count) for its, count in zip(request_params(2, max_new_tokens=9), (1, None))]
    events = finish(engine)
    assert all(len(event.logprobs) == len(event.tokens) for event in events if event.request is asked)
    assert any(len(event.tokens) > 1 for event in events)
    assert asked.logprobs == [its for event in events if event.request is asked for its in event.logprobs]
    assert not any(event.logprobs for event in events if event.request is other)


def test_a_text_that_ends_in_mid_draft_has_none_for_the_rest(tiny):
    """At EOS, and that has one too."""
    from engine.drafter import ModelDrafter
    from engine.engine import Engine
    from sampling import SamplingParams

    model = tiny(seed=2)
    text = own_texts(model, [[4]], [SamplingParams(12, True)])[0]
    model = tiny(seed=2, eos_token_id=text[6])
    engine = Engine(model, drafter=ModelDrafter(model, model), gamma=16)
    request = add(engine, [4], SamplingParams(12), 1)
    finish(engine)
    assert request.finish_reason == "stop" and len(request.output) == text.index(text[6]) + 1
    check(model, request, 1)


@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_of_a_stop_string_have_theirs(cli, drafts):
    """Also where it is found in mid-draft, and the text ends there."""
    from engine.drafter import ModelDrafter
    from engine.engine import Engine
    from load import load_model
    from sampling import SamplingParams
    from tokenizer import load_encoding

    model, encoding = load_model(DRAFT, torch.float64, "cpu"), load_encoding(DRAFT, 4096)
    engine = Engine(model, drafter=ModelDrafter(model, model) if drafts else None, gamma=7, encoding=encoding)
    prompt = encoding.encode("Once upon a time")
    request = engine.add(prompt, SamplingParams(40), stop=[" girl named"], logprobs=2)
    finish(engine)
    assert request.finish_reason == "stop" and encoding.decode(request.output).endswith(" girl named")
    assert request.text.endswith(" little")
    check(model, request, 2)


@pytest.mark.parametrize("error", [MemoryError("too much"), KeyboardInterrupt()], ids=repr)
def test_an_error_in_them_is_one_of_the_pass(tiny, monkeypatch, error):
    """No text has changed: a request that has no memory ends, and after Ctrl-C both go on."""
    from engine import engine as module

    model, calls, real = tiny(), [], module.token_logprob
    engine, params = module.Engine(model), request_params(2, max_new_tokens=6)
    requests = [add(engine, [row], its, 1) for row, its in enumerate(params)]
    engine.step()

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return real(*args)

    monkeypatch.setattr(module, "token_logprob", failing)
    if isinstance(error, MemoryError):
        assert [event.error for event in engine.step()] == ["too much"] * 2
    else:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert [len(request.output) for request in requests] == [1, 1]
        finish(engine)
        assert [request.output for request in requests] == own_texts(model, [[0], [1]], params)
    for request in requests:
        check(model, request, 1)


def test_a_request_that_fails_keeps_those_it_has(tiny, monkeypatch):
    from engine import engine as module

    model = tiny()
    engine, real = module.Engine(model), module.last_logits
    request = add(engine, [1], request_params(1, max_new_tokens=9)[0], 1)
    engine.step()
    monkeypatch.setattr(module, "last_logits", lambda *args: real(*args) * math.nan)
    (event,) = engine.step()
    assert event.finish_reason == "error" and not event.logprobs
    check(model, request, 1)


def test_nothing_is_computed_where_nobody_asked(tiny, monkeypatch):
    from engine import engine as module

    calls, real = [], module.token_logprob
    monkeypatch.setattr(module, "token_logprob", lambda *args: calls.append(args) or real(*args))
    engine, requests = make_engine(tiny(), [[1], [2]], request_params(2, max_new_tokens=4))
    finish(engine)
    assert calls == [] and all(request.logprobs == [] for request in requests)
    add(engine, [1], request_params(1, max_new_tokens=4)[0], 0)
    finish(engine)
    assert len(calls) == 4


@pytest.mark.parametrize("count", [-1, 21, 1.0, True, "3"])
def test_a_number_out_of_range_is_refused(tiny, count):
    from engine.engine import Engine

    engine = Engine(tiny())
    for length in (0, 3):
        with pytest.raises(UserError, match=r"^logprobs is .*; it must be None or an integer from 0 to 20$"):
            add(engine, [1], request_params(1, max_new_tokens=length)[0], count)
    assert not engine.busy


# Other ways to the same numbers


def test_equals_transformers():
    from transformers import AutoModelForCausalLM

    from engine.engine import Engine
    from load import load_model
    from sampling import SamplingParams
    from tokenizer import load_encoding

    model, prompt = load_model(DRAFT, torch.float64, "cpu"), load_encoding(DRAFT, 4096).encode("One day, a cat")
    peer = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float64)
    theirs = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=40,
        output_logits=True,
        return_dict_in_generate=True,
    )
    engine = Engine(model)
    request = add(engine, prompt, SamplingParams(40), 5)
    finish(engine)
    assert request.tokens == theirs.sequences[0].tolist()
    for token, its, logits in zip(request.output, request.logprobs, theirs.logits):
        row = logits[0].double().log_softmax(dim=-1)  # their compute_transition_scores takes it in float32
        best = row.topk(5)
        assert its.logprob == pytest.approx(row[token].item(), abs=2e-6)
        assert [token for token, _ in its.top] == best.indices.tolist()
        assert [value for _, value in its.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_their_sum_is_the_score_of_beam_search(tiny):
    """With one beam and no penalty for its length."""
    from engine.engine import Engine
    from infer import beam_search
    from sampling import SamplingParams

    model = tiny(seed=6)
    (beam,) = beam_search(model, [3, 4], 1, 18, length_penalty=0.0)
    engine = Engine(model)
    request = add(engine, [3, 4], SamplingParams(18), 0)
    finish(engine)
    assert request.output == beam.tokens
    assert sum(its.logprob for its in request.logprobs) == pytest.approx(beam.score, abs=1e-5)


# Of logits


def test_by_hand():
    from sampling import token_logprob

    logits = torch.tensor([1.0, 6.0, 3.0, 2.0]).log()  # of 12
    logprob, top = token_logprob(logits, 3, 3)
    assert math.exp(logprob) == pytest.approx(2 / 12, rel=1e-6)
    assert [token for token, _ in top] == [1, 2, 3]
    assert [math.exp(value) for _, value in top] == pytest.approx([6 / 12, 3 / 12, 2 / 12], rel=1e-6)


@pytest.mark.parametrize("count", range(1, 8))
def test_of_equal_ones_the_lower_id_comes_first(count):
    """Also where only some of them have room; more than there are tokens is all."""
    from sampling import token_logprob

    for logits in itertools.permutations([5.0, 2.0, 2.0, 2.0, 0.0]):
        _, top = token_logprob(torch.tensor(logits), 0, count)
        order = sorted(range(5), key=lambda token: (-logits[token], token))
        assert [token for token, _ in top] == order[:count]


def test_the_first_is_the_greedy_token_where_all_are_equal():
    from sampling import token_logprob

    logprob, top = token_logprob(torch.zeros(50_257), 9, 5)
    assert [token for token, _ in top] == [0, 1, 2, 3, 4]
    assert logprob == pytest.approx(-math.log(50_257), rel=1e-12) and {value for _, value in top} == {logprob}


def test_the_first_is_the_greedy_token_where_logarithms_round_to_one():
    from sampling import token_logprob

    logits = torch.tensor([1e-20, 2e-20], dtype=torch.float64)
    assert [token for token, _ in token_logprob(logits, 0, 2).top] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits(dtype):
    """Probabilities that round to 0 still have a logarithm, and logits of 16 bits are not rounded again."""
    from sampling import token_logprob

    logits = torch.tensor([60_000, -60_000, 59_000], dtype=dtype)
    gap = (logits[0].double() - logits[1].double()).item()
    logprob, top = token_logprob(logits, 1, 3)
    assert logprob == -gap and top[0] == (0, 0.0) and top[2] == (1, -gap)


# The command line


def test_the_command_line_shows_each_token_with_the_best(cli):
    """After the line of steps. The end of the text is a token too."""
    from infer import load_encoding
    from load import load_model

    model, encoding = load_model(DRAFT, torch.float32, "cpu"), load_encoding(DRAFT, 4096)
    args = [*STORY, "--max-new-tokens", 300, "--temperature", 1, "--seed", 3]
    code, out, err = cli(*args, "--logprobs", 2)
    assert code == 0 and out == cli(*args)[1]
    prompt, ends = encoding.encode("Once upon a time"), list(model.config.eos_token_ids)
    tokens, lines = encoding.encode(out[:-1]) + ends, err.splitlines()[2:]
    assert tokens[: len(prompt)] == prompt and len(lines) == len(tokens) - len(prompt) > 20
    for token, row, line in zip(tokens[len(prompt) :], by_hand(model, tokens, len(prompt)), lines):
        best = [repr(encoding.decode([its])) for its in row.topk(2).indices.tolist()]
        cells = [cell.strip() for cell in re.split(r"  +(?=['\"])", line)]
        texts, values = [cells[1]], [cells[0]]
        for cell in cells[2:]:
            texts, values = [*texts, cell.rpartition(" ")[0]], [*values, cell.rpartition(" ")[2]]
        assert texts == [repr(encoding.decode([token])), *best] and all(re.fullmatch(r"-\d+\.\d{3}", v) for v in values)
        wanted = [row[token].item(), *row.topk(2).values.tolist()]
        assert [float(value) for value in values] == pytest.approx(wanted, abs=1e-3)
    assert "'<|endoftext|>'" in lines[-1]


def test_several_texts_are_told_apart(cli):
    args = [*STORY, "--prompt", "One", "--max-new-tokens", 3, "--logprobs", 0]
    lines = cli(*args)[2].splitlines()[2:]
    assert [lines[0], lines[4]] == ["text 1", "text 2"] and len(lines) == 8
    assert all(re.fullmatch(r" +-\d+\.\d{3}  '.+'", line) for line in lines[1:4] + lines[5:])


def test_those_of_the_others_are_shown_where_a_text_failed(cli, monkeypatch):
    """Then the error. The one that failed is the first, and has none."""
    from engine import engine as module

    real = module.last_logits

    def first_fails(model, cache, spans, keep):
        logits = real(model, cache, spans, keep)
        return (
            logits
            * torch.tensor([math.nan if len(spans) == 2 and row == 0 else 1 for row in range(len(logits))])[:, None]
        )

    monkeypatch.setattr(module, "last_logits", first_fails)
    code, _, err = cli(*STORY, "--prompt", "One", "--max-new-tokens", 2, "--logprobs", 0)
    lines = err.splitlines()[2:]
    assert code == 2 and lines[:2] == ["text 1", "text 2"] and len(lines) == 5
    assert " error: text 1: the model returned logits that are NaN" in lines[4]


def test_a_token_is_one_line_whatever_it_prints(capsys):
    """A line break of any kind, an escape of a terminal, quotation marks, half a character, an id without text."""
    from types import SimpleNamespace

    from engine.request import Request
    from infer import print_logprobs
    from sampling import SamplingParams, TokenLogprob

    pieces = [text.encode() for text in ("\n", "\u2028", "\x85", "\x9b", "\x7f", "'", "é")] + ["é".encode()[:1]]
    encoding = SimpleNamespace(decode_single_token_bytes=dict(enumerate(pieces)).__getitem__)
    request = Request(list(range(9)), 0, SamplingParams(), logprobs=[TokenLogprob(-1.5, [(6, -0.25)])] * 9)
    print_logprobs(encoding, [request])
    shown = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    texts = [r"'\n'", r"'\u2028'", r"'\x85'", r"'\x9b'", r"'\x7f'", '"\'"', "'é'", r"b'\xc3'", "id 8"]
    assert [[cell.strip() for cell in line if cell] for line in shown] == [
        ["-1.500", text, "'é' -0.250"] for text in texts
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--logprobs", 3], "--logprobs is for --engine only\n"),
        (["--engine", "--logprobs", 21], "logprobs is 21; it must be None or an integer from 0 to 20\n"),
        (["--engine", "--logprobs", -1], "logprobs is -1; it must be None or an integer from 0 to 20\n"),
        (["--engine", "--logprobs", "x"], "argument --logprobs: invalid int value: 'x'\n"),
    ],
)
def test_bad_input_is_one_line(cli, arguments, words):
    code, out, err = cli("--model", DRAFT, *arguments)
    assert (code, out) == (2, "") and err.endswith(words) and err.count("\n") == 1

"""The log-probability of each token, and the most likely tokens in its place."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import alone, check_texts, finish, make_engine, request_params, step

from cache import ContextWindow
from engine import engine as module
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.request import Request
from infer import next_logits
from infer_engine import print_logprobs
from loading.load import load_model
from model import GPT
from sampling import SamplingParams, TokenLogprob, token_logprob
from text.tokenizer import load_encoding

DRAFT = CHECKPOINTS / "stories-draft"
STORY = ["--model", DRAFT, "--prompt", "Once upon a time"]
PARAMS = [
    {},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.5, "presence_penalty": 1.0},
]


def by_hand(model, tokens, prompt_length) -> list[torch.Tensor]:
    """The log-probabilities of all tokens at each place of the output, each by a pass."""
    context_window = ContextWindow(model.config.block_size)
    found = []
    for length in range(prompt_length, len(tokens)):
        window = context_window.crop(tokens[:length])
        found.append(next_logits(model, [window], None)[0, 0].double().log_softmax(dim=-1))
    return found


def check(model, request, count):
    """The log-probabilities of a request are those by hand; no two of a random model are equal."""
    wanted = by_hand(model, request.tokens, request.prompt_length)
    assert len(request.logprobs) == len(request.output) == len(wanted)
    for token, (logprob, top), row in zip(request.output, request.logprobs, wanted):
        assert logprob == pytest.approx(row[token].item(), abs=2e-6)
        best = row.topk(count)
        assert [other for other, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=2e-6)


def ask(model, prompts, params, counts, **options) -> tuple:
    """An engine, and requests for log-probabilities. counts: how many likely tokens of each."""
    each = [
        dataclasses.replace(own, logprobs=count) for own, count in zip(params, counts, strict=True)
    ]
    return make_engine(model, prompts, each, **options)


def add(engine, prompt, params, count):
    return engine.add(prompt, dataclasses.replace(params, logprobs=count))


@pytest.fixture
def computed(monkeypatch):
    """To this list each computing of log-probabilities adds its arguments."""
    calls = []
    real = module.token_logprob
    monkeypatch.setattr(module, "token_logprob", lambda *args: calls.append(args) or real(*args))
    return calls


# A text


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalties"])
def test_logprobs_are_of_unprocessed_logits(build, params):
    model = build(seed=3)
    prompts = [random_tokens(length, seed=length) for length in (1, 14, 30)]
    engine, requests = ask(model, prompts, request_params(3, max_new_tokens=20, **params), [4] * 3)
    finish(engine)
    check_texts(model, requests)
    for request in requests:
        check(model, request, 4)


OPTIONS = [{"num_pages": 6}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 1}]
OPTIONS += [{"drafter": "lookup"}, {"drafter": "model", "gamma": 5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logprobs_with_preemption_chunks_and_drafts(tiny, options):
    model = tiny(seed=8)
    same = random_tokens(3, seed=1) * 3
    drafters = {"lookup": PromptLookupDrafter()}
    drafters["model"] = PagedModelDrafter(tiny(seed=8, n_layer=1), model, 3, 3)
    if "drafter" in options:
        options = options | {"drafter": drafters[options["drafter"]]}
    each = request_params(3, max_new_tokens=40, temperature=0.3)
    prompts = [same, same + [5], [7]]
    engine, requests = ask(
        model, prompts, each, [2] * 3, **{"max_num_seqs": 3, "page_size": 3} | options
    )
    finish(engine)
    if "num_pages" in options:
        assert engine.scheduler.num_preemptions
    if "drafter" in options:
        assert engine.num_accepted_tokens and engine.num_draft_tokens > engine.num_accepted_tokens
    check_texts(model, requests)
    for request in requests:
        check(model, request, 2)


def test_each_request_has_its_number_of_top_tokens(tiny):
    model = tiny(seed=5)
    each = request_params(4, max_new_tokens=6)
    engine, requests = ask(model, [[9]] * 4, each, (None, 0, 1, 20))
    finish(engine)
    for request, count in zip(requests, (0, 0, 1, 20)):
        assert all(len(top) == count for _, top in request.logprobs)
    assert [len(request.logprobs) for request in requests] == [0, 6, 6, 6]
    check(model, requests[3], 20)
    for token, (logprob, top) in zip(requests[2].output, requests[2].logprobs):
        assert top == [(token, logprob)]


def test_no_logprobs_after_a_drafted_eos(tiny, computed):
    params = SamplingParams(12, temperature=1.0, seed=3)
    text = alone(tiny(seed=2), [4], dataclasses.replace(params, ignore_eos=True))
    model = tiny(seed=2, eos_token_id=text[6])
    drafter = PagedModelDrafter(model, model)
    engine, (request,) = ask(model, [[4]], [params], [1], drafter=drafter, gamma=16)
    finish(engine)
    assert request.finish_reason == "stop" and request.output == text[:7]
    assert len(computed) == len(request.output) < engine.num_accepted_tokens
    check(model, request, 1)


@pytest.mark.parametrize("error", [MemoryError("full"), IndexError("x"), KeyboardInterrupt()])
def test_an_error_in_logprobs_fails_its_request_only(tiny, monkeypatch, error):
    model = tiny()
    calls = []
    real = module.token_logprob
    params = request_params(2, max_new_tokens=6)
    engine, requests = ask(model, [[0], [1]], params, [1, 1])
    engine.step()

    def broken(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return real(*args)

    monkeypatch.setattr(module, "token_logprob", broken)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    else:
        errors = [event.error for event in step(engine)]
        assert errors == [None, f"{type(error).__name__}: {error}"]
        assert requests[1].finish_reason == "error"
    finish(engine)
    check_texts(model, requests)
    for request in requests:
        check(model, request, 1)


# Other ways to the same numbers


# Logits


def test_by_hand():
    logits = torch.tensor([1.0, 6.0, 3.0, 2.0]).log()  # of 12
    logprob, top = token_logprob(logits, 3, 3)
    assert math.exp(logprob) == pytest.approx(2 / 12, rel=1e-6)
    assert [token for token, _ in top] == [1, 2, 3]
    assert [math.exp(value) for _, value in top] == pytest.approx(
        [6 / 12, 3 / 12, 2 / 12], rel=1e-6
    )


@pytest.mark.parametrize("count", range(1, 8))
def test_ties_are_broken_by_token_id(count):
    for logits in itertools.permutations([5.0, 2.0, 2.0, 2.0, 0.0]):
        _, top = token_logprob(torch.tensor(logits), 0, count)
        order = sorted(range(5), key=lambda token: (-logits[token], token))
        assert [token for token, _ in top] == order[:count]


def test_the_first_is_the_greedy_token_where_logarithms_round_to_one():
    logits = torch.tensor([1e-20, 2e-20], dtype=torch.float64)
    assert [token for token, _ in token_logprob(logits, 0, 2).top] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits(dtype):
    logits = torch.tensor([60_000, -60_000, 59_000], dtype=dtype)
    gap = (logits[0].double() - logits[1].double()).item()
    logprob, top = token_logprob(logits, 1, 3)
    assert logprob == -gap and top[0] == (0, 0.0) and top[2] == (1, -gap)


# The command line


def test_the_command_line_shows_each_token_with_the_best(engine_cli):
    model = load_model(DRAFT, torch.float32, "cpu")
    encoding = load_encoding(DRAFT, 4096)
    args = [*STORY, "--max-new-tokens", 300, "--temperature", 1, "--seed", 3]
    code, out, err = engine_cli(*args, "--logprobs", 2)
    assert code == 0 and out == engine_cli(*args)[1]
    prompt = encoding.encode("Once upon a time")
    ends = list(model.config.eos_token_ids)
    tokens = encoding.encode(out[:-1]) + ends
    lines = err.splitlines()[2:]
    assert tokens[: len(prompt)] == prompt and len(lines) == len(tokens) - len(prompt) > 20
    rows = by_hand(model, tokens, len(prompt))
    for token, row, line in zip(tokens[len(prompt) :], rows, lines):
        best = [repr(encoding.decode([other])) for other in row.topk(2).indices.tolist()]
        cells = [cell.strip() for cell in re.split(r"  +(?=['\"])", line)]
        texts = [cells[1]]
        values = [cells[0]]
        for cell in cells[2:]:
            texts = [*texts, cell.rpartition(" ")[0]]
            values = [*values, cell.rpartition(" ")[2]]
        assert texts == [repr(encoding.decode([token])), *best]
        assert all(re.fullmatch(r"-\d+\.\d{3}", value) for value in values)
        wanted = [row[token].item(), *row.topk(2).values.tolist()]
        assert [float(value) for value in values] == pytest.approx(wanted, abs=1e-3)
    assert "'<|endoftext|>'" in lines[-1]


def test_logprobs_are_shown_beside_failed_requests(engine_cli, monkeypatch):
    head = GPT.head

    def first_fails(self, x):
        logits = head(self, x)
        if len(x) == 2:
            logits[0] = math.nan
        return logits

    monkeypatch.setattr(GPT, "head", first_fails)
    args = [*STORY, "--prompt", "One", "--max-new-tokens", 2, "--logprobs", 0]
    args += ["--backend", "torch"]
    code, _, err = engine_cli(*args)
    lines = err.splitlines()[2:]
    assert code == 2 and lines[:2] == ["sequence 1", "sequence 2"] and len(lines) == 5
    assert " error: sequence 1: the model returned logits that are NaN" in lines[4]


def test_a_token_is_one_line_whatever_it_prints(capsys):
    from types import SimpleNamespace

    pieces = [text.encode() for text in ("\n", "\u2028", "\x85", "\x9b", "\x7f", "'", "é")]
    pieces.append(pieces[-1][:1])
    encoding = SimpleNamespace(decode_single_token_bytes=dict(enumerate(pieces)).__getitem__)
    logprobs = [TokenLogprob(-1.5, [(6, -0.25)])] * 9
    request = Request(list(range(9)), 0, SamplingParams(), logprobs=logprobs)
    print_logprobs(encoding, [request])
    shown = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    texts = [
        r"'\n'",
        r"'\u2028'",
        r"'\x85'",
        r"'\x9b'",
        r"'\x7f'",
        '"\'"',
        "'é'",
        r"b'\xc3'",
        "id 8",
    ]
    assert [[cell.strip() for cell in line if cell] for line in shown] == [
        ["-1.500", text, "'é' -0.250"] for text in texts
    ]

"""A draft head in the engine: each request's text, whatever the batch, and its drafts."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens
from constrained import END, letters
from draft_heads import head_of
from drafting import GREEDY, write
from engines import check_texts, finish, make_engine
from families import EACH_FAMILY, family
from lora_files import with_adapters
from pretend_gpu import PretendGraph, gpu, no_inference_mode_fixture  # noqa: F401
from test_captured_step import replaying
from test_draft_head import HEAD, LLAMA
from test_saved_prefixes import parse
from test_speculative_decoding import tokens

from engine.engine import Engine
from engine.options import load_engine
from errors import UserError
from infer import generate
from infer_engine import main
from infer_speculative import generate_speculative
from loading.load import resolve_source
from sampling import SamplingParams


def engine_drafter(target, head=None, **options):
    from engine.drafter import PagedHeadDrafter

    return PagedHeadDrafter(head or head_of(target), target, page_size=4, **options)


def check_same_drafts(target, head) -> None:
    """Check that a drafter in an engine drafts for one request what `generate_speculative` does."""
    params = SamplingParams(50, ignore_eos=True)
    drafter = engine_drafter(target, head)
    drafter.max_len = 64
    drafts = []
    propose = drafter.propose

    def recorded(requests, counts):
        proposed = propose(requests, counts)
        drafts.extend(filter(None, proposed))
        return proposed

    drafter.propose = recorded
    engine = Engine(target, drafter=drafter, gamma=3)
    request = engine.add([1, 2, 3], params)
    finish(engine)
    steps = list(generate_speculative(target, head, [1, 2, 3], params, 3))
    assert request.output == tokens(steps)
    assert drafts == [step.drafts for step in steps if step.drafts]


@pytest.mark.step(1)
@EACH_FAMILY
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"cache_dtype": torch.int8}], ids=str)
def test_batches(kind, options, request):
    """Contexts shift, requests are preempted, and their states begin again."""
    target = family(request, kind)(block_size=16)
    drafter = engine_drafter(target, **options)
    small = {"num_pages": 12, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    engine, _ = write(target, drafter, **small)
    assert engine.num_draft_tokens > 50
    drafter.propose([], [])
    assert drafter.pool.num_free_pages == drafter.pool.num_pages


@pytest.mark.step(1)
def test_an_engine_drafts_what_one_sequence_drafts(tiny_llama):
    """With the same states: greedy, without rounding, and all of the vocabulary."""
    target = tiny_llama(block_size=64)
    for window in (3, 100):
        check_same_drafts(target, head_of(target, 61, window=window))


@pytest.mark.step(1)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 1}], ids=str)
def test_constraints(tiny, count, fields):
    """Jump-forward tokens have no states, and the head may know none of the allowed tokens."""
    target = tiny(vocab_size=8, eos_token_id=END)
    choices = ("abc", "acb", "cab"), (), ("ccc", "ab")
    params = [SamplingParams(12, choices=each, **fields) for each in choices]
    engine = Engine(
        target, drafter=engine_drafter(target, head_of(target, count)), encoding=letters()
    )
    requests = [engine.add([1, 2], each) for each in params]
    finish(engine)
    for request in requests:
        steps = generate(target, [[1, 2]], request.params, encoding=letters())
        assert request.output == [token for (token,) in steps]
    assert engine.num_draft_tokens > 3


@pytest.mark.step(1)
def test_adapters(tiny):
    target = with_adapters(tiny())
    engine = Engine(target, drafter=engine_drafter(target))
    names = ["a", "", "b"]
    requests = [engine.add([1, 2], SamplingParams(20), "", name) for name in names]
    finish(engine)
    for request, name in zip(requests, names):
        steps = generate(target, [[1, 2]], request.params, adapter=name)
        assert request.output == [token for (token,) in steps]
    assert engine.num_draft_tokens > 20


@pytest.mark.step(1)
def test_chunked_prefill_prefix_caching_and_pauses(tiny_llama):
    """A second wave finds its prompt cached; the drafter is not asked in every other step."""
    target = tiny_llama(block_size=64)
    drafter = engine_drafter(target, head_of(target, 61))
    propose = drafter.propose
    calls = []

    def sometimes(requests, counts):
        calls.append(counts)
        return propose(requests, counts) if len(calls) % 3 == 0 else [[] for _ in requests]

    drafter.propose = sometimes
    prompts = [random_tokens(30), random_tokens(30), random_tokens(45, seed=1)]
    options = {"page_size": 4, "max_num_batched_tokens": 11, "num_pages": 60}
    engine, requests = make_engine(target, prompts, [GREEDY] * 3, drafter=drafter, **options)
    finish(engine)
    more = [engine.add(prompt, GREEDY) for prompt in prompts]
    finish(engine)
    assert all(request.num_cached_tokens > 20 for request in more)
    check_texts(target, requests + more)
    assert engine.num_draft_tokens > 50


@pytest.mark.step(1)
def test_steps_without_drafts_keep_little(tiny_llama):
    """Of running requests only, and of each at most two sliding windows and a step."""
    target = tiny_llama(block_size=64)
    adaptive = SimpleNamespace(should_draft=lambda _: False, record_step=lambda *_: None)
    drafter = engine_drafter(target)
    engine = Engine(target, drafter=drafter, adaptive_speculation=adaptive)
    requests = [engine.add([1, 2], SamplingParams(60, ignore_eos=True))]
    for _ in range(10):
        requests.append(engine.add([3], SamplingParams(2, ignore_eos=True)))
        for _ in range(4):
            engine.step()
        assert drafter.states.keys() == set(requests[:1])
    assert 3 < len(drafter.states[requests[0]].tokens) <= 7 and engine.num_draft_tokens == 0
    adaptive.should_draft = lambda _: True
    finish(engine)
    assert engine.num_draft_tokens > 10
    check_texts(target, requests)


@pytest.mark.step(1)
def test_a_head_whose_output_is_not_finite_drafts_nothing(tiny):
    """Until its output is finite again."""
    target = tiny()
    head = head_of(target)
    good = head.fc.weight.data.clone()
    head.fc.weight.data[0, 0] = torch.nan
    engine = Engine(target, drafter=engine_drafter(target, head))
    request = engine.add([1, 2], SamplingParams(40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert engine.num_draft_tokens == 0
    head.fc.weight.data = good
    finish(engine)
    assert engine.num_draft_tokens > 10
    check_texts(target, [request])


@pytest.mark.step(1)
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(tiny_llama, graphs):
    """States of a replayed graph are valid until the next step."""
    model = gpu().move(tiny_llama(block_size=32))
    drafter = engine_drafter(replaying(model, PretendGraph) if graphs else model)
    prompts = [[1, 2, 3], [5], random_tokens(9)]
    engine, requests = make_engine(model, prompts, [GREEDY] * 3, drafter=drafter, max_num_seqs=4)
    finish(engine)
    check_texts(tiny_llama(block_size=32), requests)
    assert engine.num_draft_tokens > 20


@pytest.mark.step(2)
def test_the_command_line_writes_the_same_text(run_main):
    options = "--model", LLAMA, "--prompt", "Once upon a time", "--prompt", "Tom", "--gamma", 4
    options += "--max-new-tokens", 40, "--temperature", 0.8, "--seed", 3
    code, expected, _ = run_main(main, *options[:6], *options[8:])
    result = run_main(main, *options, "--draft", HEAD)
    assert code == 0 and result[:2] == (0, expected)
    assert re.search(r"[1-9]\d* of \d+ drafts accepted", result[2]), result[2]


@pytest.mark.step(2)
@pytest.mark.parametrize("script", ["infer_engine", "serve"])
def test_a_head_of_another_target_is_one_line(run_main, script):
    options = "--model", CHECKPOINTS / "stories-draft", "--draft", HEAD
    prompt = ("--prompt", "Tom") if script == "infer_engine" else ()
    result = run_main(importlib.import_module(script).main, *options, *prompt)
    words = f"{HEAD / 'config.json'}: hidden_size 192: must be the target's (128)"
    assert is_one_line(result, words), result


@pytest.mark.step(2)
def test_several_ranks_are_refused():
    args = parse(LLAMA)
    args.draft = str(HEAD)
    said = ""
    try:
        load_engine(args, resolve_source(args.model), "cpu", SimpleNamespace(rank=1))
    except (UserError, AttributeError) as error:
        said = str(error)
    assert said == f"--draft {HEAD}: a draft head requires a single process"

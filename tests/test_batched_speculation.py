"""Drafts by a smaller model for all texts at once; it draws with the target's random numbers."""

import dataclasses
import itertools
import re

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from drafting import GREEDY, MIXED, Scripted, spoil, write
from engines import alone, check_passes, greedy, make_engine, step

from engine.drafter import PagedModelDrafter
from engine.request import Request
from sampling import SamplingParams


def paged_drafter(*args, **options):
    return PagedModelDrafter(*args, **options)


@pytest.fixture(scope="module")
def model(tiny):
    """One for many tests, so that `alone` remembers its texts."""
    return tiny()


@pytest.mark.parametrize(
    "kind, gamma", [("small", 1), ("llama", 3), ("short window", 16), ("long window", 3)]
)
def test_outputs_equal_generate(model, tiny, tiny_llama, kind, gamma):
    small = {"small": tiny(1, n_layer=1, n_head=1, n_embd=8), "llama": tiny_llama(2)}
    small["short window"] = tiny(1, n_layer=1, block_size=7)
    small["long window"] = tiny(1, n_layer=1, block_size=64)
    drafter = paged_drafter(small[kind], model, page_size=3)
    engine, _ = write(model, drafter, page_size=4, gamma=gamma)
    assert engine.num_draft_tokens > 0


def test_all_drafts_of_the_target_itself_are_accepted(model):
    each = [dataclasses.replace(params, ignore_eos=True) for params in MIXED]
    engine, _ = write(model, paged_drafter(model, model), params=each, gamma=4)
    assert engine.num_accepted_tokens == engine.num_draft_tokens > 50


def test_a_draft_model_computes_all_requests_in_batches(tiny):
    model = tiny(block_size=64)
    drafter = paged_drafter(model, model)
    passes = check_passes(drafter.cache, 64)
    write(model, drafter, [[5, 6], [7, 8, 9]], greedy(9))
    # After a step of which all was accepted, two tokens lack: the last draft, and what followed it.
    assert passes == [[3, 4], [1, 1], [1, 1], [2, 2], [1, 1], [1, 1]]


@pytest.mark.parametrize("block_size", [7, 16, 64])
def test_a_draft_model_writes_what_it_would_write_alone(model, tiny, block_size):
    draft = tiny(1, block_size=block_size)
    params = SamplingParams(24, True, temperature=1.0, seed=3)
    drafter = paged_drafter(draft, model, page_size=4)
    drafted = []
    passes = check_passes(drafter.cache, block_size)

    def propose(requests, counts):
        spoil(drafter.cache, [(held.pages, len(held.tokens)) for held in drafter.states.values()])
        drafts = drafter.propose(requests, counts)
        drafted.extend((list(request.tokens), tokens) for request, tokens in zip(requests, drafts))
        return drafts

    scripted = Scripted(None)
    scripted.propose = propose
    engine, _ = write(model, scripted, params=params)
    for text, tokens in drafted:
        own = dataclasses.replace(params, max_new_tokens=len(tokens))
        assert tokens == alone(draft, text, own)
    assert (
        max(len(text) for text, _ in drafted) > 20
        and 0 < engine.num_accepted_tokens < engine.num_draft_tokens
    )
    # It keeps what it computed.
    assert sum(sum(tokens) for tokens in passes) < sum(len(text) for text, _ in drafted)


def test_a_draft_model_computes_what_was_refused_anew_and_nothing_else(tiny):
    model = tiny(block_size=64)
    params = SamplingParams(30, True, temperature=1.0, seed=3)
    drafter = paged_drafter(tiny(1, block_size=64), model, page_size=4)
    passes = check_passes(drafter.cache, 64)
    engine, _ = write(model, drafter, [[5, 6]], params)
    assert passes[0] == [3] and max(tokens for (tokens,) in passes[1:]) <= 2
    assert 0 < engine.num_accepted_tokens < engine.num_draft_tokens


def test_a_draft_model_with_a_smaller_max_num_seqs(model):
    drafter = paged_drafter(model, model, max_num_seqs=2, page_size=4)
    passes = check_passes(drafter.cache)
    assert drafter.pool.num_pages == 2 * 4
    engine, _ = write(model, drafter, params=GREEDY)
    assert (
        engine.num_accepted_tokens == engine.num_draft_tokens > 0
        and max(len(tokens) for tokens in passes) == 2
    )


def test_a_draft_model_frees_pages_of_finished_requests(model, tiny):
    drafter = paged_drafter(tiny(1), model, max_num_seqs=3)
    prompts = [random_tokens(5, seed=seed) for seed in range(12)]  # many more texts than rows
    params = [greedy(4 + seed % 3) for seed in range(12)]
    engine, _ = make_engine(model, prompts, params, max_num_seqs=3, drafter=drafter)
    while engine.busy:
        step(engine)
        assert len(drafter.states) <= 3
        held = [page for kept in drafter.states.values() for page in kept.pages]
        assert sorted([*held, *drafter.pool.free_pages]) == list(range(drafter.pool.first_unused))
    assert drafter.propose([], []) == []
    assert drafter.pool.num_free_pages == drafter.pool.num_pages == 3 and not drafter.states


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr
)
def test_a_draft_model_out_of_memory_changes_no_output(model, tiny, monkeypatch, error):
    draft = tiny()
    calls = itertools.count()
    params = SamplingParams(24, True, temperature=1.0, seed=7)
    hidden = draft.hidden

    def sometimes(*args):
        if next(calls) % 7 in (0, 3):  # the first pass of three, and the last
            raise error
        return hidden(*args)

    monkeypatch.setattr(draft, "hidden", sometimes)
    engine, _ = write(model, paged_drafter(draft, model, page_size=4), params=params, page_size=4)
    assert (
        engine.num_accepted_tokens == engine.num_draft_tokens > 0 and next(calls) > 10
    )  # it goes on where it was


def test_draft_states_stay_while_no_drafts_are_requested(tiny):
    model = tiny(block_size=64)
    requests = [
        Request(random_tokens(length, seed=length), length, SamplingParams(30, True, seed=0))
        for length in (12, 4, 7)
    ]
    drafter = paged_drafter(tiny(1, block_size=64), model, max_num_seqs=2, page_size=4)
    passes = check_passes(drafter.cache, 64)
    drafter.propose(requests, [2, 1, 0])
    assert drafter.propose(requests, [0, 3, 3])[::2] == [[], []]  # the third has no room
    assert list(drafter.states) == requests[:2]
    for request in requests:
        request.tokens += [1, 2]
    drafts = drafter.propose(requests, [1, 0, 0])
    assert passes == [[12, 4], [1], [1], [1], [1], [2]]
    assert drafts == paged_drafter(drafter.model, model).propose(requests, [1, 0, 0])


def test_drafts_before_the_first_that_is_no_number_are_kept(tiny):
    model = tiny()
    draft = tiny(seed=1)
    texts = [Request(random_tokens(n, seed=n), n, SamplingParams(seed=0)) for n in (8, 3)]
    whole = paged_drafter(draft, model).propose(texts, [3, 3])
    draft.wpe.weight.data[8] = torch.nan
    drafter = paged_drafter(draft, model)
    assert drafter.propose(texts, [3, 3]) == [whole[0][:1], whole[1]]
    assert list(drafter.states) == [texts[1]]


# Bad values


# The command line

WRITE = ["--prompt", "Lily and Tom and Lily and", "--prompt", " the" * 50, "--max-new-tokens", 24]
DRAWN = ["--ignore-eos", "--temperature", 1, "--top-k", 50, "--seed", 3]
SMALL = ["--num-pages", 24, "--page-size", 4, "--max-num-batched-tokens", 9]


@pytest.mark.parametrize(
    "draft", ["itself", CHECKPOINTS / "stories-draft"], ids=["itself", "another"]
)
def test_drafts_do_not_change_the_command_lines_output(engine_cli, tiny_checkpoint, draft):
    args = ["--model", tiny_checkpoint, *WRITE, *DRAWN, *SMALL]
    name = tiny_checkpoint if draft == "itself" else draft
    code, out, err = engine_cli(*args, "--draft", name, "--gamma", 5)
    assert (code, out) == (0, engine_cli(*args)[1])
    found = re.search(r" preemptions, (\d+) of (\d+) drafts accepted\n$", err)
    accepted, drafted = map(int, found.groups())
    assert drafted > 20 and accepted <= drafted
    assert accepted == drafted or draft != "itself"


def test_the_draft_model_gets_the_engines_options(engine_cli, tiny_checkpoint, monkeypatch):
    made = []
    init = PagedModelDrafter.__init__

    def watched(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(PagedModelDrafter, "__init__", watched)
    args = ["--model", tiny_checkpoint, "--draft", tiny_checkpoint, "--max-new-tokens", 2]
    assert engine_cli(*args, "--max-num-seqs", 5, "--page-size", 7)[0] == 0
    (drafter,) = made
    assert (drafter.max_num_seqs, drafter.pool.page_size, drafter.pool.num_pages) == (5, 7, 5 * 10)

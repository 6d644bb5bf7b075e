"""Drafts in the engine, of any drafter and of a smaller model, and in which steps they pay."""

import dataclasses
import itertools
import re
import time

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from drafting import ALWAYS, GREEDY, MIXED, PROMPTS, Scripted, knowing, spoil, write
from engines import alone, check_passes, check_texts, finish, greedy, make_engine, step

from engine.drafter import AdaptiveSpeculation, PagedModelDrafter, SpeculationTrial
from engine.engine import Engine
from engine.request import Request
from sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tiny):
    """One for many tests, so that `alone` remembers its outputs."""
    return tiny()


def tokens_of(steps) -> list[list[int]]:
    return [[len(event.tokens) for event in events] for events in steps]


def test_drafts_are_counted_and_save_steps_if_they_are_right(model):
    for wrong, expected in (((), (3, 9, 5, 5)), (ALWAYS, (8, 2 + 7 + 15, 15, 0))):
        engine, steps = write(model, knowing(model, wrong), [[5, 6]], greedy(8), gamma=3)
        drafts = engine.num_draft_tokens, engine.num_accepted_tokens
        assert (engine.steps, engine.num_computed_tokens, *drafts) == expected
        # The prompt gives one token, then 3 drafts and what follows; of 3 more that lack, the last
        # comes without a draft.
        assert tokens_of(steps) == ([[1]] * 8 if wrong else [[1], [4], [3]])
    assert engine.drafter.counts == [[], *([count] for count in (3, 3, 3, 3, 2, 1, 0))]


def test_excess_drafts_are_cut(tiny):
    model = tiny(block_size=64)
    _, steps = write(model, knowing(model, more=20), params=greedy(9), gamma=3)
    assert {event.finish_reason for events in steps for event in events} == {None, "length"}


def test_no_more_drafts_are_asked_for_than_can_be_used(model):
    drafter = knowing(model, wrong=ALWAYS)
    write(model, drafter, [random_tokens(12)], greedy(12), gamma=5)
    # The lengths of the window, from the first generated token on: it has room for 3, 2, 1, 0,
    # then 7, 6, ... tokens. In the step after a context shift no drafts are asked for.
    room = [*range(12 + 1, 16 + 1), *range(9, 16)]
    left = range(12 - 1 - 1, -1, -1)
    asked = [[min(5, 16 - length, end)] for length, end in zip(room, left)]
    assert drafter.counts == [[], *asked[:4], [], *asked[5:]]
    # Nor more than the budget leaves beside the other requests.
    drafter = knowing(model, wrong=ALWAYS)
    options = {"max_num_batched_tokens": 6, "drafter": drafter, "gamma": 16}
    engine, requests = make_engine(model, [[5, 6], [7, 8]], greedy(9), **options)
    engine.step()
    engine.step()
    engine.abort(requests[0])
    engine.step()
    assert drafter.counts[1:] == [[4, 4], [5]]


def test_other_errors_of_a_drafter_propagate(model):
    drafter = knowing(model)
    propose = drafter.propose
    engine, requests = make_engine(model, PROMPTS, MIXED, drafter=drafter)
    engine.step()

    def fail(requests, counts):
        drafter.propose = propose
        raise RuntimeError("shapes")

    drafter.propose = fail
    with pytest.raises(RuntimeError, match="shapes"):
        engine.step()
    finish(engine)
    check_texts(model, requests)
    engine.add([1, 2], GREEDY)
    drafter.propose = lambda requests, counts: []
    engine.step()
    with pytest.raises(ValueError, match="shorter"):  # a list of drafts is missing
        engine.step()


def test_drafts_of_a_step_that_failed_are_not_tried_again(model):
    """One of them is no id of the model; then there is no memory for others."""
    drafter = Scripted(lambda request, count: [model.config.vocab_size] * count)
    engine, requests = make_engine(model, PROMPTS, MIXED, drafter=drafter)
    engine.step()
    with pytest.raises(IndexError):
        engine.step()

    def fail(request, count):
        raise MemoryError

    drafter.function = fail
    finish(engine)
    check_texts(model, requests)
    assert engine.num_draft_tokens == 0


def test_no_token_is_written_where_logits_after_a_draft_are_not_finite(tiny, monkeypatch):
    model = tiny()
    params = greedy(8, seed=0)
    expected = alone(model, [5, 6], params)
    head = model.head

    def broken(x):
        logits = head(x)
        logits[2:3] = torch.nan  # of the 4 that a pass with 3 drafts needs
        return logits

    monkeypatch.setattr(model, "head", broken)
    engine, (request,) = make_engine(model, [[5, 6]], params, drafter=knowing(model))
    finish(engine)
    assert request.finish_reason == "error"
    assert 0 not in expected and request.output == expected[: len(request.output)]


def test_rejected_drafts_evict_nothing_that_can_be_found(model):
    options = {"page_size": 1, "num_pages": 32, "drafter": knowing(model, ALWAYS)}
    engine, (first,) = make_engine(model, PROMPTS[1:2], greedy(6), **options)
    for _ in range(2):
        finish(engine)
        assert len(engine.scheduler.pool.find_cached(first.tokens[:14], "")) == 14
        engine.add(PROMPTS[0], greedy(12))
    assert engine.num_draft_tokens > 20


def test_drafts_preempt_no_request(model):
    pool = {"num_pages": 2 * (3 + 8 - 1), "page_size": 1}
    prompts = [[5, 6, 7], [8, 9, 10]]
    engine, steps = write(model, knowing(model, ALWAYS), prompts, greedy(8), gamma=16, **pool)
    assert tokens_of(steps) == [[1, 1]] * 8
    assert engine.scheduler.num_preemptions == 0 and engine.num_draft_tokens > 20


@pytest.mark.parametrize(
    "options",
    [
        # 6 pages are held, and each needs one more: 3 are left, and the oldest takes them.
        {"num_pages": 12, "page_size": 1, "gamma": 6},
        {"max_num_batched_tokens": 6},
    ],
    ids=["page", "token"],
)
def test_drafts_leave_each_younger_request_a_page_and_a_token(model, options):
    prompts = [[5, 6], [7, 8], [9, 10]]
    drafter = knowing(model, ALWAYS)
    engine, _ = make_engine(model, prompts, greedy(8), drafter=drafter, **options)
    assert [len(step(engine)) for _ in range(2)] == [3] * 2
    assert engine.passes == [[2, 2, 2], [4, 1, 1]] and engine.scheduler.num_preemptions == 0


def test_drafts_do_not_delay_waiting_requests(model):
    options = {"max_num_batched_tokens": 4, "drafter": knowing(model, wrong=ALWAYS)}
    engine, _ = make_engine(model, [[1]], greedy(12), **options)
    step(engine)
    step(engine)
    late = engine.add([2], greedy(2))
    step(engine)
    assert len(late.output) == 1


SAMPLED = SamplingParams(24, True, temperature=1.0, seed=3)


@pytest.mark.parametrize("kind", ["llama", "short window", "long window"])
def test_a_draft_model_drafts_its_own_output(model, tiny, tiny_llama, kind):
    sizes = {"short window": 7, "long window": 64}
    draft = tiny_llama(2) if kind == "llama" else tiny(1, block_size=sizes[kind])
    drafter = PagedModelDrafter(draft, model, page_size=4)
    drafted = []
    passes = check_passes(drafter.cache, draft.config.block_size)

    def propose(requests, counts):
        spoil(drafter.cache, [(held.pages, len(held.tokens)) for held in drafter.states.values()])
        drafts = drafter.propose(requests, counts)
        drafted.extend((list(request.tokens), tokens) for request, tokens in zip(requests, drafts))
        return drafts

    scripted = Scripted(None)
    scripted.propose = propose
    engine, _ = write(model, scripted, params=SAMPLED)
    for text, tokens in drafted:
        own = dataclasses.replace(SAMPLED, max_new_tokens=len(tokens))
        assert tokens == alone(draft, text, own)
    assert max(len(text) for text, _ in drafted) > 20
    assert 0 < engine.num_accepted_tokens < engine.num_draft_tokens
    assert sum(map(sum, passes)) < sum(len(text) for text, _ in drafted)


def test_what_a_draft_model_computes(tiny):
    model = tiny(block_size=64)
    drafter = PagedModelDrafter(model, model)
    passes = check_passes(drafter.cache, 64)
    write(model, drafter, [[5, 6], [7, 8, 9]], greedy(9))
    # After a step of which all was accepted, two tokens lack: the last draft, and what followed it.
    assert passes == [[3, 4], [1, 1], [1, 1], [2, 2], [1, 1], [1, 1]]
    # What was rejected is computed anew, and nothing else.
    drafter = PagedModelDrafter(tiny(1, block_size=64), model, page_size=4)
    passes = check_passes(drafter.cache, 64)
    engine, _ = write(model, drafter, [[5, 6]], SAMPLED)
    assert passes[0] == [3] and max(tokens for (tokens,) in passes[1:]) <= 2
    assert 0 < engine.num_accepted_tokens < engine.num_draft_tokens


def test_a_draft_model_frees_pages_of_finished_requests(model, tiny):
    drafter = PagedModelDrafter(tiny(1), model, max_num_seqs=3)
    prompts = [random_tokens(5, seed=seed) for seed in range(12)]  # many more than rows
    params = [greedy(4 + seed % 3) for seed in range(12)]
    engine, _ = make_engine(model, prompts, params, max_num_seqs=3, drafter=drafter)
    while engine.busy:
        step(engine)
        assert len(drafter.states) <= 3
        held = [page for kept in drafter.states.values() for page in kept.pages]
        assert sorted([*held, *drafter.pool.free_pages]) == list(range(drafter.pool.first_unused))
    assert drafter.propose([], []) == []
    assert drafter.pool.num_free_pages == drafter.pool.num_pages == 3 and not drafter.states


def test_a_draft_model_out_of_memory_changes_no_output(model, tiny, monkeypatch):
    draft = tiny()
    calls = itertools.count()
    hidden = draft.hidden

    def sometimes(*args):
        if next(calls) % 7 in (0, 3):  # the first pass of three, and the last
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(*args)

    monkeypatch.setattr(draft, "hidden", sometimes)
    drafter = PagedModelDrafter(draft, model, page_size=4)
    engine, _ = write(model, drafter, params=SAMPLED, page_size=4)
    assert engine.num_accepted_tokens == engine.num_draft_tokens > 0  # it goes on where it was
    assert next(calls) > 10


def test_draft_states_stay_while_no_drafts_are_requested(tiny):
    model = tiny(block_size=64)
    requests = [
        Request(random_tokens(length, seed=length), length, SamplingParams(30, True, seed=0))
        for length in (12, 4, 7)
    ]
    drafter = PagedModelDrafter(tiny(1, block_size=64), model, max_num_seqs=2, page_size=4)
    passes = check_passes(drafter.cache, 64)
    drafter.propose(requests, [2, 1, 0])
    assert drafter.propose(requests, [0, 3, 3])[::2] == [[], []]  # the third has no room
    assert list(drafter.states) == requests[:2]
    for request in requests:
        request.tokens += [1, 2]
    drafts = drafter.propose(requests, [1, 0, 0])
    assert passes == [[12, 4], [1], [1], [1], [1], [2]]
    assert drafts == PagedModelDrafter(drafter.model, model).propose(requests, [1, 0, 0])


def test_drafts_before_the_first_that_is_not_finite_are_kept(model, tiny):
    draft = tiny(seed=1)
    requests = [Request(random_tokens(n, seed=n), n, SamplingParams(seed=0)) for n in (8, 3)]
    whole = PagedModelDrafter(draft, model).propose(requests, [3, 3])
    draft.wpe.weight.data[8] = torch.nan
    drafter = PagedModelDrafter(draft, model)
    assert drafter.propose(requests, [3, 3]) == [whole[0][:1], whole[1]]
    assert list(drafter.states) == [requests[1]]


LONG = greedy(400)


class Timed:
    """A drafter. seconds: (rows, drafting) to the time of a step. asked: whether steps drafted."""

    def __init__(self, monkeypatch, seconds, propose=lambda request, count: []):
        self.seconds = seconds
        self.scripted = Scripted(propose)
        self.asked = []
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def propose(self, requests, counts):
        self.asked[-1] = True
        return self.scripted.propose(requests, counts)

    def step(self, engine, count=1) -> None:
        for _ in range(count):
            self.asked.append(False)
            engine.step()

    def run(self, engine) -> list[tuple[bool, int]]:
        """Finish the engine; returns whether steps asked for drafts, and how many in a row."""
        compute = engine.compute

        def timed(scheduled):
            self.now += self.seconds(len(scheduled), self.asked[-1])
            return compute(scheduled)

        engine.compute = timed
        while engine.busy:
            self.step(engine)
        return [(value, len(list(group))) for value, group in itertools.groupby(self.asked)]


def slower(rows, drafting) -> float:
    return 2.0 if drafting else 1.0


@pytest.fixture
def trials_engine(tiny):
    def make(drafter, *params, rows=1, **options) -> Engine:
        model = tiny(n_layer=1, block_size=512)
        options |= {"max_num_seqs": rows, "adaptive_speculation": AdaptiveSpeculation()}
        engine = Engine(model, page_size=16, drafter=drafter, **options)
        for row, own in enumerate(params):
            engine.add([1 + row, 2], own)
        return engine

    return make


def test_drafts_that_do_not_pay_stop_and_are_tried_again(trials_engine, monkeypatch):
    drafter = Timed(monkeypatch, slower)
    # The prompt, a first step of drafts that does not count, then 16 and 16 and 256 that do.
    steps = [(True, 1 + 1 + 16), (False, 16 + 256), (True, 17), (False, 93)]
    assert drafter.run(trials_engine(drafter, LONG)) == steps


def test_drafts_that_pay_stay(trials_engine, monkeypatch):
    drafter = Timed(monkeypatch, lambda rows, drafting: 1.0 if drafting else 1.1)
    first = [(True, 1 + 1 + 16), (False, 16), (True, 1 + 256 + 16), (False, 16)]
    assert drafter.run(trials_engine(drafter, LONG))[:4] == first


def test_each_batch_size_has_its_own_trial(trials_engine, monkeypatch):
    drafter = Timed(monkeypatch, lambda rows, drafting: 1.0 + (rows > 1) * drafting - drafting / 2)
    engine = trials_engine(drafter, *map(greedy, (60, 80, 400)), rows=3)
    # 80 steps together. Alone: a first step that does not count, 16 and 16, and then they pay.
    steps = [(True, 1 + 1 + 16), (False, 80 - 18), (True, 17), (False, 16), (True, 257 + 16)]
    assert drafter.run(engine)[:5] == steps


def test_only_steps_that_decode_count(trials_engine, monkeypatch):
    drafter = Timed(monkeypatch, slower)
    engine = trials_engine(drafter, LONG, rows=2, max_num_batched_tokens=8)
    drafter.step(engine, 10)
    trial = engine.adaptive_speculation.trials[1]
    assert trial.steps == 8  # of ten, without the prompt and the first with drafts
    engine.add(random_tokens(53), LONG)
    drafter.step(engine, 8)  # seven positions each
    assert (trial.steps, engine.adaptive_speculation.trials[2].steps) == (8, 0)


def trial_of(*steps) -> SpeculationTrial:
    trial = SpeculationTrial()
    for drafts, count, tokens, seconds in steps:
        for _ in range(count):
            trial.record_step(drafts, tokens, seconds)
    return trial


PAID = [(True, 16, 3, 2.0), (False, 16, 1, 1.0)]


@pytest.mark.parametrize(
    "steps, drafting",
    [
        (PAID, True),
        # Older steps count, though hardly a draft is accepted in this part of the output.
        ([*PAID, (True, 256, 3, 2.0), (True, 16, 1, 2.0), (False, 16, 1, 1.0)], True),
        ([*PAID, (True, 16, 1, 2.0)], False),  # 2 tokens on average, in 2 seconds
        ([*PAID, (True, 16, 1, 2.0), (False, 64, 1, 1.1)], True),
        ([*PAID, (True, 15, 0, 100.0)], True),  # it decides every 16 steps
        ([*PAID, (True, 16, 0, 100.0)], False),
    ],
)
def test_a_trial_compares_mean_tokens_by_median_seconds(steps, drafting):
    assert trial_of(*steps).should_draft == drafting


def test_throughput_is_of_the_last_64_steps():
    steps = (False, 1, 1, 1.0), (True, 10, 100, 9.0), (True, 63, 1, 2.0), (True, 1, 65, 50.0)
    assert trial_of(*steps).throughput(True) == 2 / 2.0


LILY = ["--prompt", "Lily and Tom and Lily and", "--ignore-eos"]
DRAWN = ["--prompt", " the" * 50, "--temperature", 0.5, "--top-k", 50, "--seed", 3]
SMALL = ["--num-pages", 24, "--page-size", 4, "--max-num-batched-tokens", 9]


def drafted(err: str) -> tuple[int, int]:
    found = re.search(r" preemptions, (\d+) of (\d+) drafts accepted\n$", err)
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("draft", ["lookup", "itself", CHECKPOINTS / "stories-draft"], ids=str)
def test_drafts_do_not_change_the_command_lines_output(engine_cli, tiny_checkpoint, draft):
    args = ["--model", tiny_checkpoint, *LILY, "--max-new-tokens", 24, *DRAWN, *SMALL]
    name = tiny_checkpoint if draft == "itself" else draft
    _, expected, err = engine_cli(*args)
    assert err.endswith(" preemptions\n")
    code, out, err = engine_cli(*args, "--draft", name, "--gamma", 5)
    assert (code, out) == (0, expected)
    accepted, count = drafted(err)
    assert accepted <= count > 0 and (accepted == count or draft != "itself")


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


def test_the_command_line_drafts_where_it_pays_unless_gamma_is_given(engine_cli, tiny_checkpoint):
    args = ["--model", tiny_checkpoint, "--draft", tiny_checkpoint, *LILY, "--max-new-tokens", 90]
    code, always, err = engine_cli(*args, "--gamma", 3)
    assert (code, drafted(err)[1]) == (0, 65)
    code, out, err = engine_cli(*args)
    assert (code, out) == (0, always)
    assert 0 < drafted(err)[1] < 65  # steps without drafts were tried

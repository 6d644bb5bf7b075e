"""Drafts for many texts at once: fewer steps, and each text is still the one of its own run in `generate`."""

import dataclasses
import functools
import itertools

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens

from checkpoint import UserError
from engine.engine import Engine
from sampling import SamplingParams

PROMPTS = [random_tokens(length, seed=seed) for length, seed in ((3, 0), (9, 1), (1, 2), (14, 3), (5, 4))]
MIXED = [
    SamplingParams(24, ignore_eos=True),  # longer than a window of 16: texts hop
    SamplingParams(24, temperature=1.0, seed=1),
    SamplingParams(20, ignore_eos=True, temperature=0.8, top_k=20, repetition_penalty=1.3, seed=2),
    SamplingParams(24, ignore_eos=True, temperature=1.2, top_p=0.7, presence_penalty=1.0, seed=2**64 - 1),
    SamplingParams(17, ignore_eos=True, frequency_penalty=1.5),
]
GREEDY = MIXED[0]


@pytest.fixture(scope="module")
def model(tiny):
    """One for many tests, so that `own_run` remembers its texts."""
    return tiny()


def own_run(model, prompt, params, stride=None) -> list[int]:
    """What `generate` writes."""
    return list(remembered_run(model, tuple(prompt), params, stride))


@functools.cache
def remembered_run(model, prompt, params, stride):
    from infer import generate

    return tuple(step[0] for step in generate(model, [prompt], params, stride=stride))


def own_runs(model, prompts, params, stride=None) -> list[list[int]]:
    """The same for each prompt. params: for all of them, or one for each."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return [own_run(model, *one, stride) for one in zip(prompts, each, strict=True)]


class Scripted:
    """A drafter that calls a function: (request, count) to drafts. counts: how many it was asked for, a list a step."""

    def __init__(self, function):
        self.function, self.counts = function, []

    def propose(self, requests, counts):
        self.counts.append(counts)
        return [self.function(request, count) for request, count in zip(requests, counts)]


def knowing(model, wrong=(), more=0) -> Scripted:
    """Drafts what `generate` writes next, also after an EOS: `more` tokens than asked for.

    wrong: indices of the output at which it drafts another token.
    """

    def propose(request, count):
        length = request.params.max_new_tokens + more
        params = dataclasses.replace(request.params, ignore_eos=True, max_new_tokens=length)
        text = own_run(model, request.tokens[: request.prompt_length], params)
        indices = range(len(request.output), min(len(request.output) + count + more, length))
        return [(text[index] + (index in wrong)) % model.config.vocab_size for index in indices]

    return Scripted(propose)


ALWAYS = range(10**9)


def check_passes(cache, block_size: int = 16) -> list[list[int]]:
    """From now on it is checked what each pass may touch. Returns a list to which each adds its tokens a span."""
    plan, (num_pages, _, page_size), passes = cache.plan, cache.storage.shape[2:5], []

    def checked(spans):
        slots = []
        for span in spans:
            end = span.start + len(span.tokens)
            assert 0 <= span.start < end <= min(block_size, len(span.pages) * page_size)
            assert all(0 <= page < num_pages for page in span.pages)
            slots += [(span.pages[position // page_size], position % page_size) for position in range(span.start, end)]
        assert len(set(slots)) == len(slots)
        passes.append([len(span.tokens) for span in spans])
        return plan(spans)

    cache.plan = checked
    return passes


def check_pages(engine) -> None:
    """Each page is free or held, and a running text holds no more than its tokens need."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    held = [page for request in scheduler.running for page in request.pages]
    assert sorted([*set(held), *pool.free]) == list(range(pool.num_pages))
    assert pool.holders == [held.count(page) for page in range(pool.num_pages)]
    assert all(len(request.pages) <= pool.count(len(request.window)) for request in scheduler.running)


def finish(engine) -> list:
    """The events of each step; between steps, all pages are where they belong."""
    steps = []
    while engine.busy:
        steps.append(engine.step())
        check_pages(engine)
    return steps


def spoil(cache, texts) -> None:
    """Fill all slots but the first `length` of these (pages, length) with numbers that would change any text."""
    size, unused = cache.storage.shape[4], torch.ones(cache.storage.shape[2], cache.storage.shape[4], dtype=torch.bool)
    for pages, length in texts:
        for index, page in enumerate(pages):
            unused[page, : max(length - index * size, 0)] = False
    cache.storage.masked_fill_(unused[:, None, :, None], 1e3)


# Texts


@pytest.mark.parametrize("gamma", [1, 3, 16])
@pytest.mark.parametrize("kind", ["lookup", "small", "llama", "short window", "long window"])
def test_each_text_is_that_of_its_own_run(model, tiny, tiny_llama, kind, gamma):
    from engine.drafter import LookupDrafter, ModelDrafter

    small = {"small": tiny(1, n_layer=1, n_head=1, n_embd=8), "llama": tiny_llama(2)}
    small |= {"short window": tiny(1, n_layer=1, block_size=7), "long window": tiny(1, n_layer=1, block_size=64)}
    drafter = LookupDrafter() if kind == "lookup" else ModelDrafter(small[kind], model, page_size=3)
    engine = Engine(model, page_size=4, drafter=drafter, gamma=gamma)
    assert engine.run(PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert engine.drafted > 0


def test_each_text_of_a_llama_is_that_of_its_own_run(tiny, tiny_llama):
    from engine.drafter import ModelDrafter

    model = tiny_llama()
    engine = Engine(model, page_size=2, num_pages=20, drafter=ModelDrafter(tiny(block_size=9), model), gamma=4)
    assert engine.run(PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert engine.drafted > 0


@pytest.mark.parametrize(("page_size", "stride"), [(1, 3), (3, 16)])
def test_in_tiny_pools_under_small_budgets(model, page_size, stride):
    from engine.drafter import LookupDrafter, ModelDrafter

    texts = list(zip(PROMPTS, MIXED))[:4]
    expected = own_runs(model, *zip(*texts), stride)
    for budget, right in ((2, False), (5, True), (64, False)):
        drafter = ModelDrafter(model, model, page_size=2) if right else LookupDrafter()
        pool = {"num_pages": -(-16 // page_size) + 2, "page_size": page_size}
        engine = Engine(model, max_rows=3, **pool, budget=budget, stride=stride, drafter=drafter, gamma=5)
        passes = check_passes(engine.cache)
        requests = [engine.add(*each) for each in texts]
        finish(engine)
        assert [request.output for request in requests] == expected
        assert len(engine.scheduler.pool.free) == pool["num_pages"]
        assert max(sum(tokens) for tokens in passes) <= budget


def test_all_drafts_of_the_target_itself_are_accepted(model):
    from engine.drafter import ModelDrafter

    each = [dataclasses.replace(params, ignore_eos=True) for params in MIXED]
    engine = Engine(model, drafter=ModelDrafter(model, model), gamma=4)
    assert engine.run(PROMPTS, each) == own_runs(model, PROMPTS, each)
    assert engine.accepted == engine.drafted > 50


def test_prefixes_are_shared_with_texts_that_drafts_wrote(tiny):
    model, params = tiny(block_size=64), SamplingParams(20, True)
    right = knowing(model, wrong=range(0, 20, 3))
    engine = Engine(model, page_size=2, drafter=right, gamma=5)
    (first,) = engine.run(PROMPTS[:1], params)
    prompts = [PROMPTS[0] + first[:17], PROMPTS[0] + first[:12] + PROMPTS[1]]
    assert engine.run(prompts, params) == own_runs(model, prompts, params)
    assert engine.scheduler.shared == (3 + 17 - 1) // 2 * 2 + (3 + 12) // 2 * 2


def test_sequences_have_the_probabilities_of_the_target(tiny):
    from engine.drafter import LookupDrafter, ModelDrafter

    model = tiny(vocab_size=5, eos_token_id=4, block_size=8)
    prompt, size, number = [1, 2, 1], 5, 1500
    sequences = torch.tensor(list(itertools.product(range(size), repeat=3)))
    texts = torch.cat([torch.tensor([prompt]).expand(size**3, -1), sequences], dim=1)
    log_probs = (model(texts) / 1.5).log_softmax(dim=-1)[:, len(prompt) - 1 : -1]
    expected = log_probs.gather(-1, sequences[..., None]).sum(dim=1).exp()[:, 0] * number
    for drafter in LookupDrafter(), ModelDrafter(tiny(1, vocab_size=5, eos_token_id=4, block_size=4), model, 500):
        engine = Engine(model, max_rows=500, budget=4000, page_size=4, drafter=drafter)
        outputs = engine.run([prompt] * number, [SamplingParams(3, True, 1.5, seed=seed) for seed in range(number)])
        counts = torch.zeros(len(sequences), dtype=torch.float64)
        for a, b, c in outputs:
            counts[(a * size + b) * size + c] += 1
        rare = expected < 5  # together
        seen, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
        freedom = len(seen) - 1
        statistic = ((seen - wanted) ** 2 / wanted).sum()
        assert freedom > 20 and statistic < freedom + 4 * (2 * freedom) ** 0.5
        assert 0 < engine.accepted < engine.drafted


# Drafters that are wrong, right, or strange


def test_right_drafts_save_steps_and_are_counted(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model), gamma=3)
    passes, request = check_passes(engine.cache), engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params)
    # The prompt gives one token, then 3 drafts and what follows; of 3 more that lack, the last comes without a draft.
    assert [[len(event.tokens) for event in events] for events in steps] == [[1], [4], [3]]
    assert passes == [[2], [4], [3]]
    assert (engine.steps, engine.positions, engine.drafted, engine.accepted) == (3, 9, 5, 5)


def test_wrong_drafts_are_counted_and_give_a_token_a_step(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    request = engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params) and [len(events[0].tokens) for events in steps] == [1] * 8
    assert engine.drafter.counts == [[], *([count] for count in (3, 3, 3, 3, 2, 1, 0))]
    assert (engine.steps, engine.positions, engine.drafted, engine.accepted) == (8, 2 + 7 + 15, 15, 0)


def test_drafts_behind_a_wrong_one_are_refused_even_where_they_are_right(model):
    params = SamplingParams(8, True)
    engine = Engine(model, drafter=knowing(model, wrong=[3]), gamma=4)
    request = engine.add([5, 6], params)
    steps = finish(engine)
    assert request.output == own_run(model, [5, 6], params)
    assert [len(events[0].tokens) for events in steps] == [1, 3, 4]
    assert (engine.drafted, engine.accepted) == (4 + 3, 2 + 3)


@pytest.mark.parametrize("wrong", [(), ALWAYS, range(0, 24, 2), range(0, 24, 5)], ids=["no", "all", "every 2nd", "5th"])
def test_no_drafts_change_a_text(model, wrong):
    engine = Engine(model, num_pages=20, page_size=2, drafter=knowing(model, wrong), gamma=6)
    check_passes(engine.cache)
    requests = [engine.add(*each) for each in zip(PROMPTS, MIXED)]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED)


def test_no_drafts_at_all_are_a_plain_step(model):
    engine = Engine(model, drafter=Scripted(lambda request, count: []))
    assert engine.run(PROMPTS, GREEDY) == own_runs(model, PROMPTS, GREEDY)
    assert (engine.drafted, engine.steps) == (0, 24)


def test_more_drafts_than_asked_for_do_not_lengthen_a_text(tiny):
    model, params = tiny(block_size=64), SamplingParams(9, True)
    knows = knowing(model, more=20)  # also what comes after the end
    engine = Engine(model, drafter=knows, gamma=3)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, params)
    assert {request.finish_reason for request in requests} == {"length"}


def test_no_more_drafts_are_asked_for_than_can_be_used(model):
    """Not past the window, as a hop comes then, and not for the last token."""
    params = SamplingParams(12, True)
    engine = Engine(model, drafter=knowing(model, wrong=ALWAYS), gamma=5)
    engine.run([random_tokens(12)], params)
    room = [*range(12 + 1, 16 + 1), *range(9, 16)]  # the lengths of the window, from the first generated token on
    assert [16 - length for length in room] == [3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1]
    # In the step after a hop the window is computed, and nobody is asked for drafts.
    left = range(12 - 1 - 1, -1, -1)
    asked = [min(5, 16 - length, end) for length, end in zip(room, left)]
    assert engine.drafter.counts == [[], *([count] for count in asked[:4]), [], *([count] for count in asked[5:])]


# Ends of texts


ENDED = SamplingParams(14, temperature=1.0, seed=3)
ENDLESS = dataclasses.replace(ENDED, ignore_eos=True)


@pytest.fixture(scope="module")
def ending(model, tiny):
    """A model that ends its text on the prompt [5, 6] with the fifth token, an EOS, and what it would write else."""
    text = own_run(model, [5, 6], ENDLESS)
    assert text.index(text[4]) == 4
    return tiny(eos_token_id=text[4]), text


def test_nothing_follows_an_eos_that_was_drafted(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=10)
    request = engine.add([5, 6], ENDED)
    events = [event for step in finish(engine) for event in step]
    assert request.output == own_run(model, [5, 6], ENDED) == text[:5]
    assert [event[1:3] for event in events] == [(text[:1], None), (text[1:5], "stop")]
    assert request.finish_reason == "stop" and len(engine.scheduler.pool.free) == engine.scheduler.pool.num_pages


def test_an_eos_that_follows_the_drafts_ends_the_text(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=3)
    assert engine.run([[5, 6]], ENDED) == [text[:5]]
    assert (engine.steps, engine.drafted, engine.accepted) == (2, 3, 3)


def test_a_drafted_eos_is_ignored_if_that_is_asked_for(ending):
    model, text = ending
    engine = Engine(model, drafter=knowing(model), gamma=16)
    assert engine.run([[5, 6]], ENDLESS) == [text] and engine.steps == 2


def test_a_refused_eos_ends_nothing(ending):
    model, text = ending
    engine = Engine(model, drafter=Scripted(lambda request, count: [text[4]] * count), gamma=3)
    request = engine.add([5, 6], ENDED)
    finish(engine)
    assert (request.output, request.finish_reason) == (text[:5], "stop")


# Pages, keys and the budget


@pytest.mark.parametrize("page_size", [1, 4])
def test_refused_drafts_give_their_pages_back(tiny, page_size):
    model, params = tiny(block_size=64), SamplingParams(12, True)
    engine = Engine(model, page_size=page_size, drafter=knowing(model, wrong=ALWAYS), gamma=16)
    passes = check_passes(engine.cache)
    engine.add([5, 6, 7], params)
    while engine.step()[0].finish_reason is None:
        check_pages(engine)  # no more pages than for the tokens that it has
    assert max(tokens for (tokens,) in passes) == 11


def test_keys_of_refused_drafts_are_never_seen_again(tiny, tiny_llama):
    for model in tiny(), tiny_llama():
        drafter = knowing(model, wrong=range(0, 24, 3))
        engine = Engine(model, page_size=4, drafter=drafter, gamma=7)
        requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        while engine.busy:
            engine.step()
            spoil(engine.cache, [(request.pages, request.computed) for request in engine.scheduler.running])
        assert [request.output for request in requests] == own_runs(model, PROMPTS, GREEDY)


def test_drafts_preempt_nobody(model):
    """Both texts just fit side by side, without drafts."""
    params = SamplingParams(8, True)
    drafter, prompts = knowing(model, wrong=ALWAYS), [[5, 6, 7], [8, 9, 10]]
    engine = Engine(model, num_pages=2 * (3 + 8 - 1), page_size=1, drafter=drafter, gamma=16)
    requests = [engine.add(prompt, params) for prompt in prompts]
    assert all(len(events) == 2 for events in finish(engine))
    assert [request.output for request in requests] == own_runs(model, prompts, params)
    assert engine.scheduler.preemptions == 0 and engine.drafted > 20


def test_drafts_leave_each_younger_text_a_page(model):
    params = SamplingParams(8, True)
    drafter = knowing(model, wrong=ALWAYS)
    engine = Engine(model, num_pages=12, page_size=1, drafter=drafter, gamma=6)
    passes = check_passes(engine.cache)
    for prompt in ([5, 6], [7, 8], [9, 10]):
        engine.add(prompt, params)
    engine.step()
    engine.step()  # 6 pages are held, and each needs one more: 3 are left for drafts, and the oldest takes them
    assert passes[1] == [4, 1, 1] and engine.scheduler.preemptions == 0


def test_drafts_need_no_free_page_where_they_have_room(model):
    prompts, params = [[5, 6], [7, 8]], SamplingParams(8, True)
    engine = Engine(model, num_pages=2, page_size=16, drafter=knowing(model), gamma=3)
    assert engine.run(prompts, params) == own_runs(model, prompts, params)
    assert (engine.steps, engine.drafted) == (3, 10)


def test_drafts_leave_each_younger_text_its_token_of_the_budget(model):
    params = SamplingParams(8, True)
    engine = Engine(model, budget=6, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    passes = check_passes(engine.cache)
    for prompt in ([5, 6], [7, 8], [9, 10]):
        engine.add(prompt, params)
    steps = [engine.step() for _ in range(4)]
    assert passes == [[2, 2, 2], [4, 1, 1], [4, 1, 1], [4, 1, 1]] and all(len(events) == 3 for events in steps)


def test_a_drafted_text_that_is_preempted_or_aborted_takes_nothing_along(model):
    engine = Engine(model, num_pages=17, page_size=1, drafter=knowing(model, wrong=range(0, 24, 4)), gamma=4)
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(6):
        engine.step()
    engine.abort(requests[1])
    finish(engine)
    assert engine.scheduler.preemptions > 0
    for request, prompt in zip(requests, PROMPTS):
        expected = own_run(model, prompt, GREEDY)
        assert request.output == (expected[: len(request.output)] if request is requests[1] else expected)


# Drafts by a model


def test_a_draft_model_computes_the_drafts_of_all_texts_side_by_side(tiny):
    from engine.drafter import ModelDrafter

    model = tiny(block_size=64)
    drafter = ModelDrafter(model, model)
    engine, passes = Engine(model, drafter=drafter, gamma=3), check_passes(drafter.cache, 64)
    engine.run([[5, 6], [7, 8, 9]], SamplingParams(9, True))
    # After a step of which all was accepted, two tokens lack: the last draft, and what followed it.
    assert passes == [[3, 4], [1, 1], [1, 1], [2, 2], [1, 1], [1, 1]]


@pytest.mark.parametrize("block_size", [7, 16, 64])
def test_a_draft_model_writes_what_it_would_write_alone(model, tiny, block_size):
    """After refusals, hops of the target and hops of its own, whatever lies in the slots that it does not hold."""
    from engine.drafter import ModelDrafter

    draft, params = tiny(1, block_size=block_size), SamplingParams(24, True, temperature=1.0, seed=3)
    drafter, drafted = ModelDrafter(draft, model, page_size=4), []
    passes = check_passes(drafter.cache, block_size)

    def propose(requests, counts):
        spoil(drafter.cache, [(held.pages, len(held.tokens)) for held in drafter.held.values()])
        drafts = drafter.propose(requests, counts)
        drafted.extend((list(request.tokens), tokens) for request, tokens in zip(requests, drafts))
        return drafts

    engine = Engine(model, drafter=Scripted(None), gamma=3)
    engine.drafter.propose = propose
    assert engine.run(PROMPTS, params) == own_runs(model, PROMPTS, params)
    for text, tokens in drafted:
        assert tokens == own_run(draft, text, dataclasses.replace(params, max_new_tokens=len(tokens)))
    assert max(len(text) for text, _ in drafted) > 20 and 0 < engine.accepted < engine.drafted
    assert sum(sum(tokens) for tokens in passes) < sum(len(text) for text, _ in drafted)  # it keeps what it computed


def test_a_draft_model_computes_what_was_refused_anew_and_nothing_else(tiny):
    from engine.drafter import ModelDrafter

    model, params = tiny(block_size=64), SamplingParams(30, True, temperature=1.0, seed=3)
    drafter = ModelDrafter(tiny(1, block_size=64), model, page_size=4)
    engine, passes = Engine(model, drafter=drafter, gamma=3), check_passes(drafter.cache, 64)
    engine.run([[5, 6]], params)
    assert passes[0] == [3] and max(tokens for (tokens,) in passes[1:]) <= 2 and 0 < engine.accepted < engine.drafted


def test_a_draft_model_goes_on_where_its_drafts_did_not_fit_the_budget(model):
    from engine.drafter import ModelDrafter

    engine = Engine(model, budget=4, drafter=ModelDrafter(model, model), gamma=3)
    for prompt in ([5, 6], [7, 8]):
        engine.add(prompt, SamplingParams(8, True))
    steps = finish(engine)
    assert [[len(event.tokens) for event in events] for events in steps] == [[1, 1], [3, 1], [3, 1], [1, 3], [2]]
    assert engine.accepted == engine.drafted == 2 + 2 + 2 + 1


def test_a_draft_model_of_fewer_rows_than_the_engine(model):
    from engine.drafter import ModelDrafter

    drafter = ModelDrafter(model, model, max_rows=2, page_size=4)
    engine, passes = Engine(model, drafter=drafter, gamma=3), check_passes(drafter.cache)
    assert drafter.pool.num_pages == 2 * 4
    assert engine.run(PROMPTS, GREEDY) == own_runs(model, PROMPTS, GREEDY)
    assert engine.accepted == engine.drafted > 0 and max(len(tokens) for tokens in passes) == 2


def test_a_draft_model_gives_the_pages_of_finished_texts_back(model, tiny):
    from engine.drafter import ModelDrafter

    drafter = ModelDrafter(tiny(1), model, max_rows=3)
    engine = Engine(model, max_rows=3, drafter=drafter)
    for seed in range(12):  # many more texts than rows
        engine.add(random_tokens(5, seed=seed), SamplingParams(4 + seed % 3, True))
    while engine.busy:
        engine.step()
        assert len(drafter.held) <= 3
        held = [page for its in drafter.held.values() for page in its.pages]
        assert sorted([*held, *drafter.pool.free]) == list(range(drafter.pool.num_pages))
    assert drafter.propose([], []) == []
    assert len(drafter.pool.free) == drafter.pool.num_pages == 3 and not drafter.held
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.num_pages


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("full"), MemoryError()], ids=repr)
def test_a_draft_pass_that_fails_leaves_the_texts_as_they_are(model, tiny, monkeypatch, error):
    from engine.drafter import ModelDrafter

    draft, calls, params = tiny(), itertools.count(), SamplingParams(24, True, temperature=1.0, seed=7)
    hidden = draft.hidden

    def sometimes(*args):
        if next(calls) % 7 in (0, 3):  # the first pass of three, and the last
            raise error
        return hidden(*args)

    monkeypatch.setattr(draft, "hidden", sometimes)
    engine = Engine(model, page_size=4, drafter=ModelDrafter(draft, model, page_size=4), gamma=3)
    assert engine.run(PROMPTS, params) == own_runs(model, PROMPTS, params)
    assert engine.accepted == engine.drafted > 0 and next(calls) > 10  # it goes on where it was


def test_a_draft_model_without_a_number_leaves_the_texts_as_they_are(model, tiny):
    from engine.drafter import ModelDrafter

    draft = tiny(1)
    draft.ln_f.weight.data[3] = torch.nan
    engine = Engine(model, drafter=ModelDrafter(draft, model), gamma=3)
    requests = [engine.add(*each) for each in zip(PROMPTS, MIXED)]
    finish(engine)
    assert [request.output for request in requests] == own_runs(model, PROMPTS, MIXED)


def test_logits_behind_drafts_that_are_no_numbers_end_that_text_alone(tiny_llama):
    model, params = tiny_llama(), SamplingParams(24, True, seed=0)
    expected, drafter = own_runs(model, PROMPTS, params), knowing(model)
    others = set().union(*PROMPTS, *expected[1:])
    broken = next(token for token in expected[0] if token not in others)
    model.embed_tokens.weight.data[broken] = torch.nan
    engine = Engine(model, page_size=2, drafter=drafter, gamma=4)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    events = [event for step in finish(engine) for event in step if event.error]
    assert [event.request for event in events] == requests[:1] and "NaN or infinite" in events[0].error
    for index, (request, text) in enumerate(zip(requests, expected)):
        assert request.output == (text[: len(request.output)] if index == 0 else text)
    assert not engine.cache.storage.isnan().any() and len(engine.scheduler.pool.free) == engine.scheduler.pool.num_pages


def test_no_token_is_written_where_logits_in_the_middle_are_no_numbers(tiny, monkeypatch):
    model, params = tiny(), SamplingParams(8, True, seed=0)
    expected, drafter = own_run(model, [5, 6], params), knowing(model)
    head = model.head

    def broken(x):
        logits = head(x)
        logits[2:3] = torch.nan  # of the 4 that a pass with 3 drafts needs
        return logits

    monkeypatch.setattr(model, "head", broken)
    engine = Engine(model, drafter=drafter, gamma=3)
    request = engine.add([5, 6], params)
    while engine.busy:
        engine.step()
    assert request.finish_reason == "error"
    assert 0 not in expected and request.output == expected[: len(request.output)]


# Bad values


@pytest.mark.parametrize("shape", [{"vocab_size": 62}, {"eos_token_id": 59}])
def test_another_vocabulary_is_refused(tiny, shape):
    from engine.drafter import ModelDrafter

    with pytest.raises(UserError, match="^target and draft need the same vocabulary: the target has 61 tokens, EOS "):
        ModelDrafter(tiny(**shape), tiny())


@pytest.mark.parametrize("gamma", [-1, 0, 17])
def test_gamma_out_of_range_is_refused(tiny, gamma):
    from engine.drafter import LookupDrafter

    with pytest.raises(UserError, match=f"^gamma is {gamma}; it must be an integer from 1 to 16$"):
        Engine(tiny(), drafter=LookupDrafter(), gamma=gamma)


# The command line

WRITE = ("--engine", "--prompt", "Lily and Tom and Lily and", "--prompt", " the" * 50, "--max-new-tokens", 24)
DRAWN = ("--temperature", 1, "--top-k", 50, "--seed", 3, "--num-pages", 24, "--page-size", 4, "--budget", 9)


@pytest.mark.parametrize(
    ("draft", "options"),
    [("lookup", ()), ("lookup", DRAWN), ("itself", DRAWN), (CHECKPOINTS / "stories-draft", DRAWN)],
    ids=["lookup", "lookup, drawn", "itself", "another"],
)
def test_the_text_is_that_without_drafts(cli, tiny_checkpoint, draft, options):
    arguments = ("--model", tiny_checkpoint, *WRITE, "--ignore-eos", *options)
    code, out, err = cli(*arguments, "--draft", tiny_checkpoint if draft == "itself" else draft, "--gamma", 5)
    assert (code, out) == cli(*arguments)[:2]
    accepted, of, drafted, *words = err.splitlines()[-1].split(", ")[-1].split()
    assert code == 0 and of == "of" and words == ["drafts", "accepted"]
    assert int(accepted) == int(drafted) > 20 if draft == "itself" else int(accepted) <= int(drafted)


def test_the_statistics_count_drafts(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--engine", "--prompt", "Once", "--max-new-tokens", 9, "--ignore-eos")
    code, out, err = cli(*arguments, "--draft", tiny_checkpoint)
    assert code == 0 and out == cli(*arguments)[1]
    # 1 token, then 4 and 4: --gamma is 3 if it is not given
    assert err.splitlines()[-1].startswith("3 steps, ") and err.endswith(" preemptions, 6 of 6 drafts accepted\n")


def test_the_draft_model_has_rows_and_pages_like_those_of_the_engine(cli, tiny_checkpoint, monkeypatch):
    import infer

    made, engine = [], infer.Engine
    monkeypatch.setattr(infer, "Engine", lambda *args, **options: made.append(engine(*args, **options)) or made[0])
    arguments = ("--model", tiny_checkpoint, "--engine", "--draft", tiny_checkpoint, "--max-new-tokens", 2)
    assert cli(*arguments, "--max-rows", 5, "--page-size", 7)[0] == 0
    assert (made[0].drafter.max_rows, made[0].drafter.pool.page_size, made[0].drafter.pool.num_pages) == (5, 7, 5 * 10)


def test_still_no_drafts_in_the_statistics_of_a_plain_run(cli, tiny_checkpoint):
    _, _, err = cli("--model", tiny_checkpoint, "--engine", "--prompt", "Once", "--max-new-tokens", 3)
    assert err.endswith(" preemptions\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "lookup"), "--draft is for --engine only"),
        (("--gamma", 3), "--gamma is for --draft only"),
        (("--engine", "--gamma", 3), "--gamma is for --draft only"),
        (("--engine", "--draft", "lookup", "--gamma", 0), "gamma is 0; it must be an integer from 1 to 16"),
        (("--engine", "--draft", "lookup", "--gamma", 17), "gamma is 17; it must be an integer from 1 to 16"),
        (("--engine", "--draft", "missing"), "missing"),
        (("--engine", "--draft", "itself", "--max-rows", 0), "max_rows is 0; it must be an integer >= 1"),
    ],
)
def test_bad_options_are_one_line(cli, tiny_checkpoint, options, message):
    options = [tiny_checkpoint if option == "itself" else option for option in options]
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", "Once", *options)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and message in err
    assert "unrecognized arguments" not in err


def test_a_draft_of_another_vocabulary_is_one_line(cli, tiny_checkpoint, checkpoint):
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", "Once", "--engine", "--draft", checkpoint)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "need the same vocabulary" in err


def test_refused_drafts_evict_nothing_that_can_be_found(model):
    engine = Engine(model, page_size=1, num_pages=32, drafter=knowing(model, ALWAYS), gamma=3)
    first = engine.add(PROMPTS[1], SamplingParams(6, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(engine.scheduler.pool.find(first.tokens[:14], "")) == 14
    engine.add(PROMPTS[0], SamplingParams(12, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(engine.scheduler.pool.find(first.tokens[:14], "")) == 14 and engine.drafted > 20


def test_drafts_leave_a_text_that_hops_the_pages_of_its_window(model):
    """Without drafts both fit side by side: the younger text, whose window hops in each step, and the older one."""
    old, young = [1, 2], random_tokens(16)
    drafter = knowing(model, wrong=ALWAYS)
    engine = Engine(model, num_pages=16 + 6, page_size=1, stride=1, drafter=drafter, gamma=16)
    engine.add(old, SamplingParams(12, True))
    engine.add(young, SamplingParams(5, True))
    finish(engine)
    assert engine.scheduler.preemptions == 0 and engine.drafted > 0


def test_drafts_keep_no_waiting_text_from_its_first_token(model):
    engine = Engine(model, budget=4, drafter=knowing(model, wrong=ALWAYS), gamma=3)
    engine.add([1], SamplingParams(12, True))
    engine.step()
    engine.step()
    late = engine.add([2], SamplingParams(2, True))
    engine.step()
    assert len(late.output) == 1


def test_more_drafts_than_asked_for_cross_no_hop(model):
    engine = Engine(model, drafter=knowing(model, more=20), gamma=3)
    passes = check_passes(engine.cache)
    assert engine.run(PROMPTS, MIXED) == own_runs(model, PROMPTS, MIXED)
    assert max(tokens for spans in passes[1:] for tokens in spans if tokens != 9) <= 4  # 9 in a hop


def test_an_accepted_eos_is_counted_and_so_is_what_follows_it(ending):
    """As in `infer_speculative`: how many the target accepts, also where the text ends before the last of these."""
    model, _ = ending
    engine = Engine(model, drafter=knowing(model), gamma=10)
    engine.run([[5, 6]], ENDED)
    assert (engine.steps, engine.drafted, engine.accepted) == (2, 10, 10)


@pytest.mark.parametrize("gamma", [2.5, True, "3", None])
def test_a_gamma_that_is_no_integer_is_refused(model, gamma):
    with pytest.raises(UserError, match="^gamma is .*; it must be an integer from 1 to 16$"):
        Engine(model, gamma=gamma)


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"max_rows": -1}, {"page_size": 0}, {"page_size": -2}])
def test_a_draft_model_needs_rows_and_pages(model, options):
    from engine.drafter import ModelDrafter

    with pytest.raises(UserError, match="^(max_rows|page_size) is -?[0-2]; it must be an integer >= 1$"):
        ModelDrafter(model, model, **options)


def test_a_page_size_of_zero_is_one_line(cli, tiny_checkpoint):
    code, out, err = cli("--model", tiny_checkpoint, "--engine", "--draft", tiny_checkpoint, "--page-size", 0)
    assert (code, out) == (2, "") and err.endswith(" error: page_size is 0; it must be an integer >= 1\n")


def test_a_draft_that_was_no_number_spoils_no_later_drafts(tiny_llama):
    from engine.drafter import ModelDrafter

    model, draft = tiny_llama(), tiny_llama()
    draft.embed_tokens.weight.data[5] = torch.nan
    engine = Engine(model, max_rows=1, drafter=ModelDrafter(draft, model, max_rows=1), gamma=3)
    prompt, params = [1, 2, 3], SamplingParams(8, True)
    assert 5 not in own_run(model, prompt, params)
    engine.run([[5, 5, 5]], params)
    drafted, accepted = engine.drafted, engine.accepted
    assert engine.run([prompt], params) == [own_run(model, prompt, params)]
    assert engine.accepted - accepted == engine.drafted - drafted > 0


def test_still_a_pass_for_which_there_is_no_memory_ends_its_requests(model, monkeypatch):
    """The cache is cleared without memory."""
    engine = Engine(model)
    request = engine.add([1, 2, 3], GREEDY)

    def full(spans):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(engine.cache, "plan", full)
    (event,) = engine.step()
    assert (event.request, event.error, request.finish_reason) == (request, "full", "error")


def test_nan_of_one_text_costs_no_other_its_drafts(tiny):
    """A mask does not hide NaN: what the draft model wrote for the first text is cleared before its pages are used."""
    from engine.drafter import ModelDrafter
    from engine.request import Request
    from sampling import SamplingParams

    model, draft = tiny(), tiny(seed=1)
    draft.wpe.weight.data[9] = torch.nan
    long, short = (Request(random_tokens(length), length, SamplingParams(seed=0)) for length in (12, 4))
    drafter = ModelDrafter(draft, model, 1, 16)
    assert drafter.propose([long], [3]) == [[]]
    drafts = drafter.propose([short], [3])
    assert drafts == ModelDrafter(draft, model, 1, 16).propose([short], [3]) and len(drafts[0]) == 3

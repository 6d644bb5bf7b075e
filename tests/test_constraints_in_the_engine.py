"""Constrained requests in the engine, beside free ones, against each one's run of `generate`."""

import dataclasses

import pytest
import torch
from constrained import END, letters, spelled
from engines import finish
from natives import random_numbers

from constraints.choices import ChoiceMatcher
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from infer import generate
from native import use_native
from native.draw import draw
from sampling import SamplingParams, apply_token_mask, sample

CHOICES = [("abcab", "abc", "cc"), ("bca", "b" * 9), ("", "abab"), (), ("cab",)]


def own_run(model, prompt, params, stride=None, encoding=None) -> list[int]:
    options = {"stride": stride, "encoding": encoding or letters()}
    return [token for (token,) in generate(model, [list(prompt)], params, **options)]


def pairs() -> list[tuple]:
    made = []
    for seed in range(15):
        fields = {"choices": CHOICES[seed % 5], "max_new_tokens": [30, 2][seed % 7 == 6]}
        fields |= {"temperature": [1.0, 0.0, 2.5][seed % 3], "top_k": [0, 2][seed % 2]}
        fields |= {"repetition_penalty": [1.0, 1.5][seed % 4 == 3], "seed": seed}
        made.append(([1, 2, 0, seed % 6] * (1 + seed % 3), SamplingParams(**fields)))
    return made


def check(engine) -> None:
    requests = [engine.add(*pair) for pair in pairs()]
    finish(engine)
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        stride = engine.scheduler.context_window.stride
        assert request.output == own_run(engine.model, prompt, request.params, stride)
        whole = request.output[-1:] == [END]
        assert request.finish_reason == ("stop" if whole else "length")
        if request.params.choices and whole:
            assert spelled(request.output[:-1]) == request.text in request.params.choices


@pytest.fixture(params=["torch", "native"])
def model(request, tiny_llama):
    options = {"vocab_size": 8, "block_size": 16, "eos_token_id": END, "bos_token_id": END}
    made = tiny_llama(**options)
    if request.param == "native":
        request.getfixturevalue("compiled")
        use_native(made.float())
    return made


ENGINES = [{"max_num_seqs": 1}, {"max_num_batched_tokens": 3, "page_size": 2}, {"stride": 2}]
ENGINES.append({"num_pages": 6, "page_size": 4})


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_outputs_equal_generate(model, options):
    engine = Engine(model, encoding=letters(), **options)
    check(engine)
    assert bool(engine.scheduler.num_preemptions) == ("num_pages" in options)


class Wrong:
    def propose(self, requests, counts):
        return [[5, 0, 1, 2, 4, 3][:count] for count in counts]


@pytest.mark.parametrize("kind", ["model", "lookup", "wrong"])
def test_drafts_that_the_constraint_rejects_are_not_computed(model, tiny_llama, kind):
    small = tiny_llama(n_layer=1, vocab_size=8, block_size=16, eos_token_id=END)
    drafters = {"lookup": PromptLookupDrafter(), "wrong": Wrong()}
    drafters["model"] = PagedModelDrafter(small, model)
    engine = Engine(model, encoding=letters(), drafter=drafters[kind], gamma=4)
    sample_batch = model.runner.sample_batch
    seen = []

    def watched(logits, sequences, *rest):
        for sequence in sequences:
            choices = sequence.params.choices
            if choices and END not in sequence.output:  # what follows an end is drafted in vain
                begun = spelled(sequence.output)
                seen.append(any(choice.startswith(begun) for choice in choices))
        return sample_batch(logits, sequences, *rest)

    model.runner.sample_batch = watched
    try:
        check(engine)
    finally:
        model.runner.sample_batch = sample_batch
    assert seen and all(seen) and engine.num_draft_tokens


def test_an_error_of_one_request_ends_that_one(model, monkeypatch):
    own = [own_run(model, *pair) for pair in pairs()]
    token_mask = ChoiceMatcher.token_mask

    def stuck(matcher, output):
        mask = token_mask(matcher, output)
        return mask & False if END in matcher.choices.next_token_ids(matcher.nodes[0]) else mask

    monkeypatch.setattr(ChoiceMatcher, "token_mask", stuck)  # where an output may be empty
    engine = Engine(model, encoding=letters())
    requests = [engine.add(*pair) for pair in pairs()]
    errors = {event.request: event.error for events in finish(engine) for event in events}
    for request, tokens in zip(requests, own):
        if "" in request.params.choices:
            said = errors[request]
            assert said.startswith("no token is allowed after 0 output tokens:")
            assert request.finish_reason == "error" and request.output == []
        else:
            assert (request.output, errors[request]) == (tokens, None)


def test_jump_forward_tokens_need_no_step(model):
    grammar = 'start: "cccc" ("a" | "b") "aa"'
    steps = []
    outputs = []
    for logprobs in (None, 2):
        engine = Engine(model, encoding=letters())
        params = SamplingParams(20, grammar=grammar, temperature=1.0, seed=1, logprobs=logprobs)
        request = engine.add([1, 2], params)
        events = [event for events in finish(engine) for event in events]
        steps.append(engine.steps)
        assert engine.num_sampled_tokens == engine.steps
        outputs.append(request.output)
        assert [token for event in events for token in event.tokens] == request.output
        assert len(request.logprobs) == (0 if logprobs is None else len(request.output))
    assert steps == [2, 8]  # after the prompt c, with ccc; after these a or b, with aa and the end
    assert outputs[0] == outputs[1]
    cut = engine.add([1, 2], SamplingParams(3, grammar=grammar))
    finish(engine)
    assert cut.output == [2, 2, 2] and cut.finish_reason == "length"


def test_jump_forward_holds_no_other_request_up(model):
    """A constraint may leave no choice for 40,000 tokens; all others wait for a step."""
    engine = Engine(model, encoding=letters())
    params = SamplingParams(300, grammar='start: "cc"{200} "a"')
    forced = engine.add([1, 2], params)
    other = engine.add([3], SamplingParams(20, ignore_eos=True))
    while engine.busy:
        before = len(forced.output), len(other.output)
        engine.step()
        assert len(forced.output) - before[0] < 100
        assert len(other.output) == min(before[1] + 1, 20)
    assert forced.output == own_run(model, [1, 2], params) == [2] * 300
    assert engine.steps == 20


def test_masks_are_for_the_draws_in_c_too(library):
    """Greedy or drawn, from a few tokens or from most: the tokens that torch chooses."""
    logits = random_numbers(24, 3001, seed=1) * 4
    masks = [None, *(torch.rand(23, 3001) < torch.linspace(0.001, 1, 23)[:, None])]
    for mask in masks[1:]:
        mask[7] = True
    for fields in ({}, {"temperature": 0.9}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.7}):
        params = SamplingParams(**{"temperature": 1.0} | fields) if fields else SamplingParams()
        each = [dataclasses.replace(params, seed=row) for row in range(24)]
        found = draw(library, logits, each, [3] * 24, masks)
        expected = [
            sample(apply_token_mask(logits[row : row + 1], [mask]), own, None, [(row, 3)]).item()
            for row, (own, mask) in enumerate(zip(each, masks))
        ]
        assert found == expected
        assert all(mask is None or mask[token] for mask, token in zip(masks, found))
    with pytest.raises(ValueError, match="bool"):
        draw(library, logits, each, [3] * 24, [masks[1].float()] * 24)

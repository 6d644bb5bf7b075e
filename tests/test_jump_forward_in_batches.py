"""Tokens without a pass, for each request by itself, and masks for the draws in C."""

import dataclasses

import pytest
import torch
from constrained import END, letters
from natives import random_numbers
from test_structured_output_in_batches import own_run

from engine.drafter import AdaptiveSpeculation, PromptLookupDrafter
from engine.engine import Engine
from native import use_native
from sampling import SamplingParams, apply_token_mask, sample


@pytest.fixture(params=["torch", "native"])
def model(request, tiny_llama):
    options = {"vocab_size": 8, "block_size": 16, "eos_token_id": END, "bos_token_id": END}
    made = tiny_llama(**options)
    if request.param == "native":
        request.getfixturevalue("compiled")
        use_native(made.float())
    return made


def test_tokens_that_must_follow_need_no_step(model):
    grammar = 'start: "cccc" ("a" | "b") "aa"'
    steps = []
    outputs = []
    for logprobs in (None, 2):
        engine = Engine(model, encoding=letters())
        params = SamplingParams(20, grammar=grammar, temperature=1.0, seed=1, logprobs=logprobs)
        request = engine.add([1, 2], params)
        events = []
        while engine.busy:
            events += engine.step()
        steps.append(engine.steps)
        outputs.append(request.output)
        assert [token for event in events for token in event.tokens] == request.output
        assert len(request.logprobs) == (0 if logprobs is None else len(request.output))
    assert steps == [2, 8]  # after the prompt c, with ccc; after these a or b, with aa and the end
    assert outputs[0] == outputs[1]
    cut = engine.add([1, 2], SamplingParams(3, grammar=grammar))
    while engine.busy:
        engine.step()
    assert cut.output == [2, 2, 2] and cut.finish_reason == "length"


def test_a_text_that_must_follow_holds_no_other_one_up(model):
    """A constraint may leave no choice for 40,000 tokens; all other texts wait for a step."""
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


def test_tokens_without_a_pass_are_no_merit_of_drafts(model):
    class Watched(AdaptiveSpeculation):
        def record_step(self, scheduled, tokens):
            noted.append(tokens)
            assert 1 <= tokens <= sum(len(entry.drafts) + 1 for entry in scheduled)

    noted = []
    engine = Engine(
        model, encoding=letters(), drafter=PromptLookupDrafter(), adaptive_speculation=Watched()
    )
    grammar = 'start: ("cccc" ("a" | "b") "aa"){4}'
    request = engine.add([1, 2], SamplingParams(40, grammar=grammar))
    while engine.busy:
        engine.step()
    assert sum(noted) == engine.num_sampled_tokens < len(request.output)


def test_masks_are_for_the_draws_in_c_too(library):
    """Greedy or drawn, from a few tokens or from most: the tokens that torch chooses."""
    from native import draw

    logits = random_numbers(24, 3001, seed=1) * 4
    masks = [None, *(torch.rand(23, 3001) < torch.linspace(0.001, 1, 23)[:, None])]
    for mask in masks[1:]:
        mask[7] = True
    for fields in ({}, {"temperature": 0.9}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.7}):
        params = SamplingParams(**{"temperature": 1.0} | fields) if fields else SamplingParams()
        each = [dataclasses.replace(params, seed=row) for row in range(24)]
        found = draw.draw(library, logits, each, [3] * 24, masks)
        expected = [
            sample(apply_token_mask(logits[row : row + 1], [mask]), own, None, [(row, 3)]).item()
            for row, (own, mask) in enumerate(zip(each, masks))
        ]
        assert found == expected
        assert all(mask is None or mask[token] for mask, token in zip(masks, found))
    with pytest.raises(ValueError, match="bool"):
        draw.draw(library, logits, each, [3] * 24, [masks[1].float()] * 24)

"""Constrained texts in the engine, beside free ones. Oracle: each text's own run in `generate`."""

import dataclasses
import json
import random

import jsonschema
import pytest
import torch
from constrained import END, letters, schema_of, spelled
from natives import random_numbers
from serving import small_encoding, small_engine

import infer_engine
from constraints.choices import ChoiceMatcher
from engine.drafter import AdaptiveSpeculation, PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from errors import UserError
from infer import generate
from native import use_native
from sampling import SamplingParams, apply_token_mask, sample

CHOICES = [("abcab", "abc", "cc"), ("bca", "b" * 9), ("", "abab"), (), ("cab",)]


def own_run(model, prompt, params, stride=None) -> list[int]:
    steps = generate(model, [list(prompt)], params, stride=stride, encoding=letters())
    return [token for (token,) in steps]


def make_requests(count: int = 15) -> list[tuple]:
    made = []
    for seed in range(count):
        params = SamplingParams(
            choices=CHOICES[seed % len(CHOICES)],
            max_new_tokens=[30, 2][seed % 7 == 6],
            temperature=[1.0, 0.0, 2.5][seed % 3],
            top_k=[0, 2][seed % 2],
            repetition_penalty=[1.0, 1.5][seed % 4 == 3],
            seed=seed,
        )
        made.append(([1, 2, 0, seed % 6] * (1 + seed % 3), params))
    return made


def check(model, engine) -> list:
    """Run all requests; each has the text of its own run. Returns them."""
    requests = [engine.add(*pair) for pair in make_requests()]
    while engine.busy:
        engine.step()
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        assert request.output == own_run(
            model, prompt, request.params, engine.scheduler.context_window.stride
        )
        if request.params.choices and request.finish_reason == "stop":
            assert spelled(request.output[:-1]) in request.params.choices
            assert request.text in request.params.choices
        whole = request.output[-1:] == [END]
        assert request.finish_reason == ("stop" if whole else "length")
    return requests


@pytest.fixture(params=["torch", "native"])
def model(request, tiny_llama):
    options = {"vocab_size": 8, "block_size": 16, "eos_token_id": END, "bos_token_id": END}
    made = tiny_llama(**options)
    if request.param == "native":
        request.getfixturevalue("compiled")
        use_native(made.float())
    return made


ENGINES = [
    {},
    {"max_num_seqs": 1},
    {"num_pages": 6, "page_size": 4},
    {"max_num_batched_tokens": 3, "page_size": 2},
    {"stride": 2},
]


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_each_text_is_that_of_its_own_run(model, options):
    engine = Engine(model, encoding=letters(), **options)
    check(model, engine)
    assert bool(engine.scheduler.num_preemptions) == ("num_pages" in options)


@pytest.mark.parametrize("kind", ["model", "lookup", "wrong"])
def test_drafts_that_may_not_follow_are_not_computed(model, tiny_llama, kind):
    class Wrong:
        def propose(self, requests, counts):
            return [[5, 0, 1, 2, 4, 3][:count] for count in counts]

    if kind == "model":
        small = tiny_llama(n_layer=1, vocab_size=8, block_size=16, eos_token_id=END)
        drafter = PagedModelDrafter(small, model)
    else:
        drafter = PromptLookupDrafter() if kind == "lookup" else Wrong()
    engine = Engine(model, encoding=letters(), drafter=drafter, gamma=4)
    sample_batch = model.runner.sample_batch
    seen = []

    def watched(logits, sequences):
        for sequence in sequences:
            choices = sequence.params.choices
            if choices and END not in sequence.output:  # what follows an end is drafted in vain
                begun = spelled(sequence.output)
                seen.append(any(choice.startswith(begun) for choice in choices))
        return sample_batch(logits, sequences)

    model.runner.sample_batch = watched
    try:
        requests = [engine.add(*pair) for pair in make_requests()]
        while engine.busy:
            engine.step()
    finally:
        model.runner.sample_batch = sample_batch
    assert seen and all(seen)
    assert engine.num_draft_tokens
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        assert request.output == own_run(model, prompt, request.params)


def test_an_error_of_one_text_ends_that_one(model, monkeypatch):
    texts = make_requests()
    own = [own_run(model, *pair) for pair in texts]
    token_mask = ChoiceMatcher.token_mask

    def stuck(matcher, output):
        mask = token_mask(matcher, output)
        return mask & False if END in matcher.choices.next_token_ids(matcher.nodes[0]) else mask

    monkeypatch.setattr(ChoiceMatcher, "token_mask", stuck)  # where a text may be empty
    engine = Engine(model, encoding=letters())
    requests = [engine.add(*pair) for pair in texts]
    errors = {}
    while engine.busy:
        errors |= {event.request: event.error for event in engine.step() if event.error}
    for request, tokens in zip(requests, own):
        if "" in request.params.choices:
            assert errors.pop(request).startswith("no token may follow after 0 tokens of output:")
            assert request.finish_reason == "error" and request.output == []
        else:
            assert request.output == tokens
    assert not errors


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


@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 40, "max_num_seqs": 9}, {"max_num_batched_tokens": 7}], ids=str
)
def test_json_beside_other_texts(tiny_llama, options):
    """With stop strings, too, which end a text before its constraint does."""
    engine = small_engine(tiny_llama, page_size=4, **options)
    draw = random.Random(1)
    schemas = [schema_of(draw) for _ in range(12)]
    constraints = [{"json_schema": json.dumps(schema)} for schema in schemas] + [
        {},
        {"regex": "[a-f]+"},
    ]
    requests = []
    for seed, constraint in enumerate(constraints):
        params = SamplingParams(60, temperature=1.2, seed=seed, **constraint)
        prompt = [draw.randrange(4095) for _ in range(1 + seed * 5)]
        requests.append(engine.add(prompt, params))
    while engine.busy:
        engine.step()
    whole = 0
    for request, schema in zip(requests, schemas + [None] * 2):
        prompt = request.tokens[: request.prompt_length]
        steps = generate(engine.model, [prompt], request.params, encoding=small_encoding())
        assert request.output == [token for (token,) in steps]
        if schema is not None and request.finish_reason == "stop":
            jsonschema.validate(json.loads(request.text), schema)
            whole += 1
    assert whole > 6
    params = SamplingParams(60, seed=1, json_schema='{"enum": ["one two three"]}', stop=("two",))
    stopped = engine.add([5], params)
    while engine.busy:
        engine.step()
    assert (stopped.text, stopped.finish_reason) == ('"one ', "stop")


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


def test_the_command_line(run_main, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["a cat", "a dog"]}')
    said = ["--prompt", "Tom", "--num-samples", 5, "--temperature", 1, "--seed", 3]
    _, out, err = run_main(infer_engine.main, *said, "--json-schema", file)
    texts = set(out.splitlines()) - {"-" * 40}
    assert texts <= {'Tom"a cat"', 'Tom"a dog"'} and texts
    assert "note" not in err
    said += ["--max-new-tokens", 2]
    _, out, err = run_main(infer_engine.main, *said, "--json-schema", file)
    assert "note: --max-new-tokens 2 truncated 5 of 5 constrained outputs" in err


def test_a_constraint_needs_an_encoding(model):
    engine = Engine(model)
    with pytest.raises(UserError, match="needs? an encoding"):
        engine.add(*make_requests()[0])
    assert not engine.busy

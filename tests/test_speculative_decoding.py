"""Lesson 18: drafts change no greedy text, token for token, and no sampled one, in distribution."""

import itertools
import math

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens
from engines import alone
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from errors import UserError
from infer_speculative import generate_speculative, main
from loading.load import save_model
from sampling import SamplingParams, sampling_probs

DRAFT = CHECKPOINTS / "stories-draft"


def passes(target, draft, prompt, gamma=3, generator=None, stride=None, **params):
    """All passes of a run. There are drafts, unless a window that moves each time has no room."""
    sampling = SamplingParams(**params)
    steps = list(generate_speculative(target, draft, prompt, sampling, gamma, generator, stride))
    assert any(step.drafts for step in steps) or stride == 1 or len(steps) == 1
    return steps


def tokens(steps):
    return [token for step in steps for token in step.tokens]


def p_value(observed, probs):
    """The chance of counts this far from their expectation, or farther (Pearson's chi-square).

    Rare ones are pooled.
    """
    expected = observed.sum() * probs.double()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    distance = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor(len(expected) - 1).double()
    return torch.special.gammaincc(freedom / 2, distance / 2).item()


# Greedy: token for token.


def test_greedy_is_a_distribution_too():
    """All of the mass on the best token, so that one rule accepts greedy and sampled drafts."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 9.0, 0.0]])
    assert sampling_probs(logits, SamplingParams()).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


PENALTIES = [
    {},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]


@given(
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    length=st.integers(0, 40),
    eos=st.integers(0, 60),
    window=st.sampled_from([5, 16, 30]),
    penalties=st.sampled_from(PENALTIES),
)
@settings(max_examples=15, phases=[Phase.generate])  # a smaller example would take minutes
def test_greedy_text_is_the_targets(tiny, gamma, stride, length, eos, window, penalties):
    target = tiny(seed=12, eos_token_id=eos)
    draft = tiny(seed=6, n_layer=1, block_size=window, eos_token_id=eos)
    prompt = random_tokens(length, seed=length)
    params = {"max_new_tokens": 30, **penalties}
    expected = alone(target, prompt, stride=stride, **params)
    assert tokens(passes(target, draft, prompt, gamma, stride=stride, **params)) == expected


@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.2}])
def test_greedy_at_several_windows_with_a_draft_model_that_is_often_right(tiny, penalties):
    """The draft model is the target with noise: long runs of drafts are right, and some are not."""
    target = tiny(seed=12)
    draft = tiny(seed=12)
    noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    draft.wpe.weight.data += 0.02 * noise.double()
    params = {"max_new_tokens": 48, "ignore_eos": True, **penalties}
    expected = alone(target, [1, 2], **params)
    for gamma in (1, 3, 8, 16):
        steps = passes(target, draft, [1, 2], gamma, **params)
        assert tokens(steps) == expected
        assert 0 < sum(step.accepted for step in steps) < sum(len(step.drafts) for step in steps)


@pytest.mark.parametrize(
    "penalties",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 3.0}],
)
def test_a_draft_model_that_is_the_target_is_always_right(tiny, penalties):
    """Its drafts carry the same penalties, those for earlier drafts of the pass included."""
    params = {"max_new_tokens": 40, "ignore_eos": True, **penalties}
    steps = passes(tiny(), tiny(), random_tokens(4), gamma=4, **params)
    assert all(step.accepted == len(step.drafts) for step in steps)


def test_a_pass_stays_in_the_window_and_in_the_budget(tiny):
    target = tiny(seed=12)
    steps = passes(target, target, [1, 2], 6, max_new_tokens=41, ignore_eos=True)
    length = 2
    for step in steps:
        # The draft model is the target, so it is always right.
        assert step.accepted == len(step.drafts) == len(step.tokens) - 1
        hops = max(0, math.ceil((length - 16) / 8))
        last = 16 + 8 * hops  # position before the next hop
        assert len(step.drafts) == min(6, last - length, 43 - length - 1)
        length += len(step.tokens)
    assert length == 43


def test_a_pass_computes_its_drafts_and_one_position_more(tiny):
    target = tiny(seed=12, block_size=64)
    draft = tiny(seed=6, block_size=64)
    widths = []
    target.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    steps = passes(target, draft, [1, 2], 4, max_new_tokens=30, ignore_eos=True)
    assert widths[0] == 2 + len(steps[0].drafts)
    assert widths[1:] == [len(step.drafts) + 1 for step in steps[1:]]


@torch.inference_mode()
def test_refused_drafts_leave_the_draft_models_cache(tiny):
    """Each draft is the draft model's best token after the text and the drafts before it."""
    target = tiny(seed=12, block_size=64)
    draft = tiny(seed=6, block_size=64)
    text = [1, 2]
    refused = 0
    for step in passes(target, draft, text, 4, max_new_tokens=60, ignore_eos=True):
        for index, token in enumerate(step.drafts):
            assert draft(torch.tensor([text + step.drafts[:index]]))[0, -1].argmax() == token
        text = text + step.tokens
        refused += step.accepted < len(step.drafts)
    assert refused > 5


def test_an_eos_among_the_accepted_drafts_ends_the_text(tiny):
    target = tiny(seed=12)
    eos = alone(target, [1, 2], max_new_tokens=30, ignore_eos=True)[4]
    target = tiny(seed=12, eos_token_ids=(60, eos))
    steps = passes(target, target, [1, 2], 8, max_new_tokens=30)
    assert tokens(steps) == alone(target, [1, 2], max_new_tokens=30)
    assert tokens(steps)[-1] == eos
    assert len(tokens(steps)) < 9
    ignored = passes(target, target, [1, 2], 8, max_new_tokens=30, ignore_eos=True)
    assert tokens(ignored) == alone(target, [1, 2], max_new_tokens=30, ignore_eos=True)


# Sampled: in distribution.


def sequence_probs(target, prompt, length, params):
    """Exact probabilities of all sequences of `length` tokens, or fewer if they end in EOS."""
    (eos,) = target.config.eos_token_ids
    probs = {}
    with torch.inference_mode():
        for sequence in itertools.product(range(target.config.vocab_size), repeat=length):
            sequence = sequence[: sequence.index(eos) + 1] if eos in sequence else sequence
            if sequence not in probs:
                logits = target(torch.tensor([prompt + list(sequence[:-1])]))[0, len(prompt) - 1 :]
                chosen = torch.tensor(sequence)[:, None]
                each = sampling_probs(logits, SamplingParams(**params)).gather(1, chosen)
                probs[sequence] = each.prod().item()
    assert abs(sum(probs.values()) - 1) < 1e-9
    return probs


def test_hundreds_of_texts_follow_the_targets_probabilities(tiny):
    """Whole runs, EOS and both caches included, against the exact probability of each sequence."""
    params = {"temperature": 0.9, "top_k": 3, "top_p": 0.95}
    shape = {"vocab_size": 4, "eos_token_id": 3, "n_layer": 1, "n_embd": 8, "block_size": 8}
    target = tiny(seed=3, **shape)
    draft = tiny(seed=4, **shape)
    probs = sequence_probs(target, [0, 1], 3, params)
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(probs, 0)
    for _ in range(600):
        steps = passes(target, draft, [0, 1], 2, generator, max_new_tokens=3, **params)
        counts[tuple(tokens(steps))] += 1
    assert all(probs[text] > 0 for text, count in counts.items() if count)
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


def test_the_same_seed_gives_the_same_text(tiny):
    params = {"max_new_tokens": 20, "temperature": 1.0}

    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return tokens(passes(tiny(seed=12), tiny(seed=6), [1], 4, generator, **params))

    assert text(1) == text(1) != text(2)


# What is refused.


@pytest.mark.parametrize("gamma", [2.5, True, None, 0, -1, 17])
def test_gamma_out_of_range_is_refused(tiny, gamma):
    with pytest.raises(UserError, match=f"^gamma {gamma}: .* from 1 to 16$"):
        list(generate_speculative(tiny(), tiny(), [1], SamplingParams(), gamma))


def test_a_bad_gamma_is_one_line(run_main):
    result = run_main(main, "--target", DRAFT, "--gamma", 17, "--prompt", "Once")
    assert is_one_line(result, "gamma 17: must be an integer from 1 to 16")


@pytest.mark.parametrize(
    "shape, word",
    [
        ({}, "61"),
        ({"vocab_size": 4097, "eos_token_id": 4095}, "the draft 4097"),
        ({"vocab_size": 4096, "eos_token_id": 7}, "EOS [7]"),
    ],
)
def test_a_draft_with_another_vocabulary_is_refused(run_main, tiny, tmp_path, shape, word):
    save_model(tiny(**shape), tmp_path)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", tmp_path)
    assert (code, out) == (2, "")
    assert "4096 tokens, EOS [4095]" in err and word in err and err.count("\n") == 1

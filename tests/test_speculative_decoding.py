"""Lesson 17: drafts change the speed and nothing else: greedy text token for token, sampled text in distribution."""

import itertools

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT


def alone(target, prompt, stride=None, **params):
    """The target's own tokens."""
    return run_rows(target, [prompt], options={"stride": stride}, **params)[0]


def passes(target, draft, prompt, gamma=3, generator=None, stride=None, **params):
    """All passes of a run. There are drafts, unless the window moves with each token and leaves no room for them."""
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    sampling = SamplingParams(**params)
    steps = list(generate_speculative(target, draft, prompt, sampling, gamma, generator, stride))
    assert any(step.drafts for step in steps) or stride == 1 or len(steps) == 1
    return steps


def tokens(steps):
    return [token for step in steps for token in step.tokens]


def p_value(observed, probs):
    """The chance of counts at least this far from their expectation (Pearson's chi-square). Rare ones are pooled."""
    expected = observed.sum() * probs.double()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    distance = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), distance / 2).item()


# Greedy: token for token.


@given(
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    length=st.integers(0, 40),
    eos=st.integers(0, 60),
    window=st.sampled_from([5, 16, 30]),
    penalty=st.sampled_from(
        [
            {},
            {"presence_penalty": 1.5},
            {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        ]
    ),
)
@settings(max_examples=30)
def test_greedy_text_is_the_targets(tiny, gamma, stride, length, eos, window, penalty):
    target, draft = tiny(seed=12, eos_token_id=eos), tiny(seed=6, n_layer=1, block_size=window, eos_token_id=eos)
    prompt, params = random_tokens(length, seed=length), {"max_new_tokens": 30, **penalty}
    expected = alone(target, prompt, stride, **params)
    assert tokens(passes(target, draft, prompt, gamma, stride=stride, **params)) == expected


@pytest.mark.parametrize("penalties", [{}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.2}])
def test_greedy_at_four_windows_with_a_draft_model_that_is_often_right(tiny, penalties, gammas=(1, 2, 3, 5, 8, 16)):
    """The draft model is the target with some noise: long runs of drafts are accepted, and some are not."""
    target, draft = tiny(seed=12), tiny(seed=12)
    draft.wpe.weight.data += 0.02 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).double()
    expected = alone(target, [1, 2], max_new_tokens=64, ignore_eos=True, **penalties)
    for gamma in gammas:
        steps = passes(target, draft, [1, 2], gamma, max_new_tokens=64, ignore_eos=True, **penalties)
        assert tokens(steps) == expected
        assert 0 < sum(step.accepted for step in steps) < sum(len(step.drafts) for step in steps)


@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 3.0}]
)
def test_a_draft_model_that_is_the_target_is_always_right(tiny, penalties):
    """Its drafts carry the same penalties, those for earlier drafts of the pass included."""
    steps = passes(tiny(), tiny(), random_tokens(4), gamma=4, max_new_tokens=40, ignore_eos=True, **penalties)
    assert all(step.accepted == len(step.drafts) for step in steps)


def test_greedy_on_the_embedded_pair(stories):
    draft, prompt = GPT.from_pretrained(CHECKPOINTS / "stories-draft"), [385, 271, 4, 14]
    expected = alone(stories, prompt, max_new_tokens=24)
    for gamma in (1, 3, 8, 16):
        steps = passes(stories, draft, prompt, gamma, max_new_tokens=24)
        assert tokens(steps) == expected and len(steps) < 24


def test_a_pass_stays_in_the_window_and_in_the_budget(tiny):
    target = tiny(seed=12)
    steps = passes(target, target, [1, 2], 6, max_new_tokens=41, ignore_eos=True)
    length = 2
    for step in steps:
        assert step.accepted == len(step.drafts) == len(step.tokens) - 1  # a draft model that is the target
        in_window = 16 if length <= 16 else 16 + -(-(length - 16) // 8) * 8  # the last position before the next hop
        assert len(step.drafts) == min(6, in_window - length, 43 - length - 1)
        length += len(step.tokens)
    assert length == 43


def test_a_pass_computes_its_drafts_and_one_position_more(tiny):
    target, widths = tiny(seed=12, block_size=64), []
    draft = tiny(seed=6, block_size=64)
    target.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    steps = passes(target, draft, [1, 2], 4, max_new_tokens=30, ignore_eos=True)
    assert widths[0] == 2 + len(steps[0].drafts)
    assert widths[1:] == [len(step.drafts) + 1 for step in steps[1:]]


@torch.inference_mode()
def test_refused_drafts_leave_the_draft_models_cache(tiny):
    """Each draft is the draft model's best token after the text and the drafts before it."""
    target, draft = tiny(seed=12, block_size=64), tiny(seed=6, block_size=64)
    text, refused = [1, 2], 0
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
    assert tokens(steps)[-1] == eos and len(tokens(steps)) < 9
    ignored = passes(target, target, [1, 2], 8, max_new_tokens=30, ignore_eos=True)
    assert tokens(ignored) == alone(target, [1, 2], max_new_tokens=30, ignore_eos=True)


# Sampled: in distribution.


def sequence_probs(target, prompt, length, eos):
    """Exact probabilities of all sequences of at most `length` tokens that end in EOS or are that long."""
    vocabulary = range(target.config.vocab_size)
    probs = {}
    with torch.inference_mode():
        for sequence in itertools.product(vocabulary, repeat=length):
            sequence = sequence[: sequence.index(eos) + 1] if eos in sequence else sequence
            if sequence not in probs:
                logits = target(torch.tensor([prompt + list(sequence[:-1])]))[0, len(prompt) - 1 :]
                chosen = torch.tensor(sequence)[:, None]
                probs[sequence] = logits.softmax(dim=1).gather(1, chosen).prod().item()
    assert abs(sum(probs.values()) - 1) < 1e-9
    return probs


def check_draws(tiny, runs):
    """Whole runs, EOS and both caches included, against the exact probability of each sequence."""
    shape = {"vocab_size": 4, "eos_token_id": 3, "n_layer": 1, "n_embd": 8, "block_size": 8}
    target, draft = tiny(seed=3, **shape), tiny(seed=4, **shape)
    probs = sequence_probs(target, [0, 1], 3, eos=3)
    generator, counts = torch.Generator().manual_seed(0), dict.fromkeys(probs, 0)
    for _ in range(runs):
        steps = passes(target, draft, [0, 1], 2, generator, max_new_tokens=3, temperature=1.0)
        counts[tuple(tokens(steps))] += 1
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


def test_a_thousand_texts_follow_the_targets_probabilities(tiny):
    check_draws(tiny, runs=1000)


@torch.inference_mode()
def test_first_tokens_of_an_embedded_model_follow_direct_sampling():
    """The target is the small one, and its draft model the same with some noise."""
    from sampling import SamplingParams, sampling_probs

    params = {"temperature": 0.9, "top_k": 5, "top_p": 0.95}
    target, draft = (GPT.from_pretrained(CHECKPOINTS / "stories-draft") for _ in range(2))
    draft.wpe.weight.data += 0.05 * torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    prompt, runs = [385, 271, 4], 200

    def probs(text):
        return sampling_probs(target(torch.tensor([text]))[0, -1], SamplingParams(**params)).double()

    first = probs(prompt)
    pairs = {
        (one, two): first[one] * prob
        for one in first.nonzero()[:, 0].tolist()
        for two, prob in enumerate(probs(prompt + [one]).tolist())
        if prob
    }
    generator, counts = torch.Generator().manual_seed(0), dict.fromkeys(pairs, 0)
    for _ in range(runs):
        steps = passes(target, draft, prompt, 2, generator, max_new_tokens=3, ignore_eos=True, **params)
        counts[tuple(tokens(steps)[:2])] += 1
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(pairs.values()))) > 0.001


def test_the_same_seed_gives_the_same_text(tiny):
    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return tokens(passes(tiny(seed=12), tiny(seed=6), [1], 4, generator, max_new_tokens=20, temperature=1.0))

    assert text(1) == text(1) != text(2)


# The checks can fail: here are two common mistakes.


def test_a_draw_from_p_after_a_refusal_is_noticed(monkeypatch, tiny):
    import infer_speculative

    monkeypatch.setattr(infer_speculative, "residual", lambda p, q: p)
    with pytest.raises(AssertionError, match="assert .* > 0.001"):
        check_draws(tiny, runs=500)


def test_a_draft_cache_that_is_not_rolled_back_is_noticed(monkeypatch, tiny):
    import infer_speculative
    from cache import KVCache

    class NoRollback(KVCache):
        """Takes whatever it holds for the beginning of the window."""

        def match(self, windows, keep=1):
            return [min(len(held), len(window) - keep) for held, window in zip(self.tokens, windows)]

    monkeypatch.setattr(infer_speculative, "KVCache", NoRollback)
    with pytest.raises((AssertionError, ValueError)):
        test_greedy_at_four_windows_with_a_draft_model_that_is_often_right(tiny, {}, gammas=[3])

"""Lesson 17: drafts change the speed and nothing else: greedy text token for token, sampled text in distribution."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT

ROOT = Path(__file__).resolve().parent.parent


def alone(target, prompt, stride=None, **params):
    """The target's own tokens."""
    from infer import SamplingParams, generate

    return [token for (token,) in generate(target, [prompt], SamplingParams(**params), stride=stride)]


def passes(target, draft, prompt, gamma=3, generator=None, stride=None, **params):
    from infer import SamplingParams
    from infer_speculative import generate_speculative

    return list(generate_speculative(target, draft, prompt, SamplingParams(**params), gamma, generator, stride))


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


def random_prompt(length, seed=0):
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_one_command_tells_the_targets_story(cli):
    args = ["--prompt", "Once upon a time", "--max-new-tokens", "30", "--device", "cpu"]
    command = [sys.executable, ROOT / "infer_speculative.py", *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stdout == cli(*args)[1]
    assert "drafts accepted" in result.stderr and "tokens a target pass" in result.stderr


# Greedy: token for token.


@given(
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    length=st.integers(0, 40),
    eos=st.integers(0, 60),
    window=st.sampled_from([5, 16, 30]),
    penalty=st.sampled_from([{}, {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}]),
)
@settings(max_examples=60)
def test_greedy_text_is_the_targets(tiny, gamma, stride, length, eos, window, penalty):
    target, draft = tiny(seed=12, eos_token_id=eos), tiny(seed=6, n_layer=1, block_size=window, eos_token_id=eos)
    prompt, params = random_prompt(length, seed=length), {"max_new_tokens": 30, **penalty}
    assert tokens(passes(target, draft, prompt, gamma, stride=stride, **params)) == alone(
        target, prompt, stride, **params
    )


@pytest.mark.parametrize("gamma", range(1, 17))
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.2, "frequency_penalty": 0.2}])
def test_greedy_at_four_windows_with_a_draft_model_that_is_often_right(tiny, gamma, penalties):
    """The draft model is the target with some noise: long runs of drafts are accepted, and some are not."""
    target, draft = tiny(seed=12), tiny(seed=12)
    draft.wpe.weight.data += 0.02 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).double()
    steps = passes(target, draft, [1, 2], gamma, max_new_tokens=64, ignore_eos=True, **penalties)
    assert tokens(steps) == alone(target, [1, 2], max_new_tokens=64, ignore_eos=True, **penalties)
    assert 0 < sum(step.accepted for step in steps) < sum(len(step.drafts) for step in steps)


def test_greedy_on_the_embedded_pair_for_every_gamma(stories):
    draft = GPT.from_pretrained(CHECKPOINTS / "stories-draft")
    prompt = [385, 271, 4, 14]
    expected = alone(stories, prompt, max_new_tokens=24)
    for gamma in range(1, 17):
        steps = passes(stories, draft, prompt, gamma, max_new_tokens=24)
        assert tokens(steps) == expected, gamma
        assert len(steps) < len(expected)


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


@torch.inference_mode()
def check_drafts(draft, prompt, steps):
    """Each draft is the draft model's best token after the text and the drafts before it."""
    text = list(prompt)
    for step in steps:
        for index, token in enumerate(step.drafts):
            assert draft(torch.tensor([text + step.drafts[:index]]))[0, -1].argmax() == token
        text += step.tokens


def test_refused_drafts_leave_the_draft_models_cache(tiny):
    target, draft = tiny(seed=12, block_size=64), tiny(seed=6, block_size=64)
    steps = passes(target, draft, [1, 2], 4, max_new_tokens=60, ignore_eos=True)
    assert any(step.accepted < len(step.drafts) for step in steps)
    check_drafts(draft, [1, 2], steps)


def test_an_eos_among_the_accepted_drafts_ends_the_text(tiny):
    target = tiny(seed=12)
    eos = alone(target, [1, 2], max_new_tokens=30, ignore_eos=True)[4]
    target = tiny(seed=12, eos_token_id=eos)
    steps = passes(target, target, [1, 2], 8, max_new_tokens=30)
    assert tokens(steps) == alone(target, [1, 2], max_new_tokens=30)
    assert tokens(steps)[-1] == eos and len(steps[-1].tokens) < steps[-1].accepted  # counted before the text was cut


# Sampled: in distribution.


def distributions(size):
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    weights = st.lists(weight, min_size=size, max_size=size).filter(any)
    return weights.map(lambda values: torch.tensor(values, dtype=torch.float64) / sum(values))


def check_rule(p, q):
    """All ways to a token: drafted and accepted, or another drafted and refused and this one drawn instead."""
    from infer_speculative import acceptance, residual

    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * acceptance(p[drafted], q[drafted])
    result = accepted + (1 - accepted.sum()) * residual(p, q)
    assert (result - p).abs().max() < 1e-10


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
def test_accept_and_residual_give_the_targets_distribution(pair):
    check_rule(*pair)


def test_the_residual_of_equal_distributions_is_a_distribution():
    from infer_speculative import residual

    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert residual(p, p).tolist() == p.tolist()
    check_rule(p[0], p[0])
    check_rule(p[1], p[1])


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


def check_draws(tiny, runs=5000):
    """Whole runs, EOS and both caches included, against the exact probability of each sequence."""
    shape = {"vocab_size": 4, "eos_token_id": 3, "n_layer": 1, "n_embd": 8, "block_size": 8}
    target, draft = tiny(seed=3, **shape), tiny(seed=4, **shape)
    probs = sequence_probs(target, [0, 1], 3, eos=3)
    generator, counts = torch.Generator().manual_seed(0), dict.fromkeys(probs, 0)
    for _ in range(runs):
        steps = passes(target, draft, [0, 1], 2, generator, max_new_tokens=3, temperature=1.0)
        assert tuple(tokens(steps)) in counts
        counts[tuple(tokens(steps))] += 1
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


def test_five_thousand_texts_follow_the_targets_probabilities(tiny):
    check_draws(tiny)


@torch.inference_mode()
def test_first_tokens_of_the_embedded_pair_follow_direct_sampling(stories):
    from infer import SamplingParams, sampling_probs

    params = {"temperature": 0.9, "top_k": 5, "top_p": 0.95}
    draft, prompt, runs = GPT.from_pretrained(CHECKPOINTS / "stories-draft"), [385, 271, 4], 250

    def probs(text):
        return sampling_probs(stories(torch.tensor([text]))[0, -1], SamplingParams(**params)).double()

    first = probs(prompt)
    pairs = {
        (one, two): first[one] * prob
        for one in first.nonzero()[:, 0].tolist()
        for two, prob in enumerate(probs(prompt + [one]).tolist())
        if prob
    }
    generator, counts = torch.Generator().manual_seed(0), dict.fromkeys(pairs, 0)
    for _ in range(runs):
        steps = passes(stories, draft, prompt, 2, generator, max_new_tokens=3, ignore_eos=True, **params)
        counts[tuple(tokens(steps)[:2])] += 1
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(pairs.values()))) > 0.001


def test_the_same_seed_gives_the_same_text(tiny):
    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return tokens(passes(tiny(seed=12), tiny(seed=6), [1], 4, generator, max_new_tokens=20, temperature=1.0))

    assert text(1) == text(1) != text(2)


# The checks can fail: each of these mistakes was made in earlier work of this kind.


def test_a_residual_that_is_not_normalised_is_noticed(monkeypatch):
    import infer_speculative

    monkeypatch.setattr(infer_speculative, "residual", lambda p, q: (p - q).clamp(min=0))
    with pytest.raises(AssertionError):
        check_rule(torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double())


def test_a_draw_from_p_after_a_refusal_is_noticed(monkeypatch, tiny):
    import infer_speculative

    monkeypatch.setattr(infer_speculative, "residual", lambda p, q: p)
    with pytest.raises(AssertionError):
        check_draws(tiny, runs=1000)


def test_a_draft_cache_that_is_not_rolled_back_is_noticed(monkeypatch, tiny):
    import infer_speculative

    class NoRollback(infer_speculative.Decoder):
        """Goes on from all it was ever passed, refused drafts included."""

        passed = None

        def logits(self, texts, keep=1):
            if keep == 1:
                self.passed = (self.passed or []) + texts[0][len(self.passed or []) :]
                texts = [self.passed or texts[0]]
            return super().logits(texts, keep)

    monkeypatch.setattr(infer_speculative, "Decoder", NoRollback)
    with pytest.raises(AssertionError):
        test_refused_drafts_leave_the_draft_models_cache(tiny)


# The command line.


@pytest.mark.parametrize("gamma", [0, -1, 17])
def test_gamma_out_of_range_is_refused(tiny, gamma):
    with pytest.raises(ValueError, match=f"gamma is {gamma}; it must be an integer from 1 to 16"):
        passes(tiny(), tiny(), [1], gamma, max_new_tokens=1)


def test_bad_input_is_one_line(run_main, tiny, tmp_path):
    from infer_speculative import main

    code, out, err = run_main(main, "--gamma", 0, "--prompt", "Once")
    assert code == 2 and out == "" and err.count("\n") == 1
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    code, out, err = run_main(main, "--draft", tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1 and "4096" in err and "61" in err


@pytest.mark.parametrize("terminal", [True, False])
def test_colours_are_for_terminals(capsys, monkeypatch, terminal):
    import infer_speculative

    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    infer_speculative.main(["--prompt", "Once", "--max-new-tokens", "12", "--show", "--device", "cpu"])
    out = capsys.readouterr().out
    assert ("\033[32m" in out and "\033[35m" in out) == ("\033" in out) == terminal


def test_the_report_counts_before_the_text_is_cut():
    from infer_speculative import Pass, report

    text = report([Pass([1, 2, 3], [1, 2], 2), Pass([4], [5, 6], 0), Pass([7], [7, 8], 1)], [0.0, 0.5, 1.0, 2.0])
    assert "3 of 6 drafts accepted (50%), 1.67 tokens a target pass" in text
    assert "passes by accepted drafts: 0: 1, 1: 1, 2: 1" in text
    assert "5 tokens, 2.5 tokens/s, the first after 0.500 s" in text

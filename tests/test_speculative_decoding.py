"""Speculative decoding: greedy output is the target's, sampled output has its distribution."""

import itertools
import math

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens
from draws import seeded
from engines import alone
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from drafts import prompt_lookup
from errors import UserError
from infer_speculative import (
    acceptance,
    draw,
    generate_speculative,
    main,
    propose_prompt_lookup,
    residual,
    verify,
)
from loading.load import save_model
from sampling import SamplingParams, Sequence, sampling_probs

DRAFT = CHECKPOINTS / "stories-draft"


def passes(target, draft, prompt, gamma=3, generator=None, stride=None, **params):
    sampling = SamplingParams(**params)
    return list(generate_speculative(target, draft, prompt, sampling, gamma, generator, stride))


def tokens(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


def distributions(size):
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    weights = st.lists(weight, min_size=size, max_size=size).filter(any)
    return weights.map(lambda values: torch.tensor(values, dtype=torch.float64) / sum(values))


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
def test_accept_and_residual_give_the_targets_distribution(pair):
    """All ways to a token: drafted and accepted, or drawn where another one was rejected."""
    p, q = pair
    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * acceptance(p[drafted], q[drafted])
    result = accepted + (1 - accepted.sum()) * residual(p, q)
    assert (result - p).abs().max() < 1e-10
    assert torch.equal(residual(p[None], p[None]), p[None])


def test_draw_inverts_the_cumulative_sums(monkeypatch):
    """At both ends too, where rounding could reach an index of probability 0."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    below = torch.tensor([1.0], dtype=torch.float64).nextafter(torch.zeros(1, dtype=torch.float64))
    for uniform, index in ((0.0, 1), (0.24, 1), (0.26, 3), (0.9, 3), (below.item(), 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, uniform=uniform, **__: below * 0 + uniform)
        for scale in (1.0, 1 / 3, 1e-30):
            assert draw(probs * scale, None) == index


def test_drafts_are_accepted_from_the_left_up_to_the_first_rejection():
    certain, wrong, never = torch.eye(3)
    p = torch.stack([certain, certain, certain, never])
    # All accepted: the last draw is from p after the last draft.
    assert verify(p, p[:3], [0, 0, 0]) == (3, 2)
    # One is rejected: the draw is from the residual.
    assert verify(p, torch.stack([certain, wrong, certain]), [0, 1, 0]) == (1, 0)
    assert verify(never[None], p[:0], []) == (0, 2)


def lookup_by_hand(text, count, max_ngram_size, min_ngram_size):
    for size in range(min_ngram_size, max_ngram_size + 1)[::-1]:
        newest = text[len(text) - size :]
        ends = [end for end in range(size, len(text)) if text[end - size : end] == newest]
        if ends:
            return text[max(ends) :][:count]
    return []


@given(
    text=st.lists(st.integers(0, 2), max_size=14),
    count=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_lookup_finds_what_a_search_by_hand_finds(text, count, sizes):
    least, most = sizes
    assert prompt_lookup(text, count, most, least) == lookup_by_hand(text, count, most, least)
    expected = lookup_by_hand(text, count, 3, 2)
    assert prompt_lookup(text, count) == expected
    sequence = Sequence(text, len(text), SamplingParams())
    assert propose_prompt_lookup(sequence, count) == (expected, None)  # q is one-hot


PENALTIES = [{}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4, "frequency_penalty": 0.3}]


@given(
    kind=st.sampled_from(["small", "noisy", "itself", "lookup"]),
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    period=st.integers(0, 12),
    times=st.integers(0, 5),
    eos=st.integers(0, 30),
    window=st.sampled_from([5, 16, 30]),
    penalties=st.sampled_from(PENALTIES),
)
@settings(max_examples=40, phases=[Phase.generate])  # a smaller example would take minutes
def test_greedy_output_is_the_targets(
    tiny, kind, gamma, stride, period, times, eos, window, penalties
):
    """noisy: the target itself with noise, so that long runs of drafts are right."""
    shape = {"vocab_size": 31, "eos_token_id": eos}
    target = tiny(seed=12, **shape)
    draft = tiny(seed=12, **shape)
    if kind == "noisy":
        draft.wpe.weight.data += 0.02 * torch.randn(16, 16, generator=seeded(0)).double()
    elif kind == "small":
        draft = tiny(seed=6, n_layer=1, block_size=window, **shape)
    elif kind == "lookup":
        draft = propose_prompt_lookup
    prompt = random_tokens(period, 31, seed=period) * times
    params = {"max_new_tokens": 30, **penalties}
    expected = alone(target, prompt, stride=stride, **params)
    assert tokens(passes(target, draft, prompt, gamma, stride=stride, **params)) == expected


def test_a_pass_stays_in_the_window_and_in_the_budget(tiny):
    """Drafts of the target itself are all accepted; lookup sees what the window has left, too."""
    target = tiny(seed=11, vocab_size=8, eos_token_id=7)
    for draft in (target, propose_prompt_lookup):
        text = [1, 2, 3, 4, 5] * 6
        end = len(text) + 40
        for step in passes(target, draft, text, 6, max_new_tokens=40, ignore_eos=True):
            last = 16 + 8 * math.ceil((len(text) - 16) / 8)  # position before the next shift
            count = min(6, last - len(text), end - len(text) - 1)
            if draft is target:
                assert step.accepted == len(step.drafts) == len(step.tokens) - 1 == count
            else:
                assert step.drafts == prompt_lookup(text, count)
            text = text + step.tokens
        assert len(text) == end


@torch.inference_mode()
def test_a_pass_computes_its_drafts_and_one_position_more(tiny):
    """Rejected drafts leave the draft model's cache: each draft is its best token."""
    target = tiny(seed=12, block_size=64)
    draft = tiny(seed=6, block_size=64)
    widths = []
    target.wte.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    text = [1, 2]
    steps = passes(target, draft, text, 4, max_new_tokens=60, ignore_eos=True)
    assert widths == [len(step.drafts) + (1 if index else 2) for index, step in enumerate(steps)]
    for step in steps:
        for index, token in enumerate(step.drafts):
            assert draft(torch.tensor([text + step.drafts[:index]]))[0, -1].argmax() == token
        text = text + step.tokens
    assert sum(step.accepted < len(step.drafts) for step in steps) > 5


def p_value(observed, probs):
    """Return the chance of counts this far from their expectation (chi-square), or farther."""
    expected = observed.sum() * probs.double()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    distance = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor(len(expected) - 1).double()
    return torch.special.gammaincc(freedom / 2, distance / 2).item()


def sequence_probs(target, prompt, length, params):
    """Return exact probabilities of all outputs of `length` tokens, or fewer up to EOS."""
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


@pytest.mark.parametrize(
    "kind, params",
    [
        ("model", {"temperature": 0.9, "top_k": 3, "top_p": 0.95}),
        ("lookup", {"temperature": 1.0}),  # each run begins with drafts, as the prompt repeats
    ],
)
def test_hundreds_of_outputs_follow_the_targets_probabilities(tiny, kind, params):
    """Whole runs, EOS and both caches included, against the probability of each output."""
    shape = {"vocab_size": 4, "eos_token_id": 3, "n_layer": 1, "n_embd": 8, "block_size": 8}
    target = tiny(seed=3, **shape)
    draft = tiny(seed=4, **shape) if kind == "model" else propose_prompt_lookup
    prompt = [0, 1] if kind == "model" else [0, 1, 0, 1, 0, 1]
    probs = sequence_probs(target, prompt, 3, params)
    generator = seeded(0)
    state = torch.get_rng_state()
    counts = dict.fromkeys(probs, 0)
    accepted = set()
    for _ in range(600):
        steps = passes(target, draft, prompt, 2, generator, max_new_tokens=3, **params)
        counts[tuple(tokens(steps))] += 1
        accepted.add(steps[0].accepted)
    assert accepted == {0, 1, 2}
    assert all(probs[output] > 0 for output, count in counts.items() if count)
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001
    assert torch.equal(torch.get_rng_state(), state)  # all draws are the generator's


AGAIN = "Once upon a time, there was a little girl named Lily. She loved to play with her toys"
AGAIN += " and eat yummy food. One day, she found a big, red ball in her room."
AGAIN += "<|endoftext|>Once upon a time"  # the beginning of that story once more


def test_lookup_is_no_directory_unless_its_path_says_so(run_main, cli, tiny, tmp_path, monkeypatch):
    arguments = ("--prompt", AGAIN, "--prompt", "Lily and Tom", "--max-new-tokens", 8)
    expected = cli("--model", DRAFT, *arguments)[:2]
    (tmp_path / "lookup").mkdir()
    save_model(tiny(), tmp_path / "lookup")
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", "lookup", *arguments)
    assert (code, out) == expected and "tokens per target pass" in err
    result = run_main(main, "--target", DRAFT, "--draft", "./lookup")
    assert is_one_line(result, "the same vocabulary", "the draft 61")


@pytest.mark.parametrize("gamma", [2.5, True, None, 0, 17])
def test_gamma_out_of_range_is_refused(tiny, gamma):
    with pytest.raises(UserError, match=f"^gamma {gamma}: .* from 1 to 16$"):
        passes(tiny(), tiny(), [1], gamma)


@pytest.mark.parametrize(
    "shape, word",
    [
        ({"vocab_size": 4097, "eos_token_id": 4095}, "the draft 4097"),
        ({"vocab_size": 4096, "eos_token_id": 7}, "EOS [7]"),
    ],
)
def test_a_draft_with_another_vocabulary_is_refused(run_main, tiny, tmp_path, shape, word):
    save_model(tiny(**shape), tmp_path)
    result = run_main(main, "--target", DRAFT, "--draft", tmp_path)
    assert is_one_line(result, "4096 tokens, EOS [4095]", word)
    result = run_main(main, "--target", DRAFT, "--gamma", 17, "--prompt", "Once")
    assert is_one_line(result, "gamma 17: must be an integer from 1 to 16")

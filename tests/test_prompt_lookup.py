"""Lesson 19: drafts copied from the text change the speed and nothing else."""

import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import alone
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculative_decoding import p_value, sequence_probs, tokens

from drafts import prompt_lookup
from infer_speculative import generate_speculative, main, propose_prompt_lookup
from loading.load import save_model
from sampling import SamplingParams, Sequence
from text.tokenizer import load_encoding

DRAFT = CHECKPOINTS / "stories-draft"
STORY = "Once upon a time, there was a little girl named Lily. She loved to play with her toys"
STORY += " and eat yummy food. One day, she found a big, red ball in her room."
AGAIN = STORY + "<|endoftext|>Once upon a time"  # the beginning of that story once more


def passes(target, prompt, gamma=3, generator=None, stride=None, **params):
    """All passes of a run without a draft model."""
    run = (prompt, SamplingParams(**params), gamma, generator, stride)
    return list(generate_speculative(target, propose_prompt_lookup, *run))


# What followed the newest n-gram.


def by_hand(text, count, max_ngram_size, min_ngram_size):
    """All earlier places of each n-gram, the longest first: what follows the last of them."""
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
    before = list(text)
    min_ngram_size, max_ngram_size = sizes
    assert prompt_lookup(text, count, max_ngram_size, min_ngram_size) == by_hand(
        text, count, max_ngram_size, min_ngram_size
    )
    assert prompt_lookup(text, count) == by_hand(text, count, 3, 2)
    assert text == before


@pytest.mark.parametrize(
    "text, drafts",
    [
        ([], []),
        ([1], []),
        ([1, 1], []),  # one token is too little
        ([5, 1, 2, 3, 4], []),  # the end of the text is no earlier occurrence
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the last occurrence, not the first
        ([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], [7, 9, 2]),  # three tokens, though two are found nearer
        # Three, though four are found farther back.
        ([1, 2, 3, 4, 7, 9, 2, 3, 4, 8, 1, 2, 3, 4], [8, 1, 2]),
        ([2, 3, 8, 1, 2, 3], [8, 1, 2]),  # three are not found, two are
        ([4, 4, 4, 4], [4]),  # an occurrence that overlaps the end
        ([4, 5, 4, 5, 4], [5, 4]),
    ],
)
def test_lookup_on_texts_that_one_can_read(text, drafts):
    assert prompt_lookup(text, 3) == drafts


@pytest.mark.parametrize("text, drafts", [([1, 2, 7, 1, 2], [7, 1]), ([1, 2], [])])
def test_nothing_is_drawn(text, drafts):
    """None in the place of q: it is all on the drafts."""
    sequence = Sequence(text, len(text), SamplingParams())
    assert propose_prompt_lookup(sequence, 2) == (drafts, None)


# Greedy: token for token.

PENALTIES = [{}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4, "frequency_penalty": 0.3}]


@given(
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    period=st.integers(0, 6),
    times=st.integers(0, 5),
    eos=st.integers(0, 7),
    penalties=st.sampled_from(PENALTIES),
)
@settings(max_examples=10)
def test_greedy_text_is_the_targets(tiny, gamma, stride, period, times, eos, penalties):
    target = tiny(seed=11, vocab_size=8, eos_token_id=eos)
    prompt = random_tokens(period, 8, 1) * times
    params = {"max_new_tokens": 20, **penalties}
    expected = alone(target, prompt, stride=stride, **params)
    assert tokens(passes(target, prompt, gamma, stride=stride, **params)) == expected


@pytest.mark.parametrize("gamma, penalties", [(1, {}), (3, {"frequency_penalty": 0.2}), (16, {})])
def test_greedy_at_several_windows(tiny, gamma, penalties):
    target = tiny(seed=11, vocab_size=8, eos_token_id=7)
    params = {"max_new_tokens": 48, "ignore_eos": True, **penalties}
    steps = passes(target, [1, 2], gamma, **params)
    assert tokens(steps) == alone(target, [1, 2], **params)
    assert 0 < sum(step.accepted for step in steps) < sum(len(step.drafts) for step in steps)


def test_drafts_are_looked_up_in_prompt_and_output(tiny):
    """Also in what the window has left; never more than window and budget have room for."""
    target = tiny(seed=11, vocab_size=8, eos_token_id=7)
    text = [1, 2, 3, 4, 5] * 6
    end = len(text) + 40
    for step in passes(target, text, 6, max_new_tokens=40, ignore_eos=True):
        last = 16 + 8 * math.ceil((len(text) - 16) / 8)  # position before the next hop
        assert step.drafts == prompt_lookup(text, min(6, last - len(text), end - len(text) - 1))
        text = text + step.tokens
    assert len(text) == end


# Sampled: in distribution.


def test_texts_follow_the_targets_probabilities(tiny):
    """The prompt repeats itself: the first token has a draft in each run, later ones in some."""
    target = tiny(seed=3, vocab_size=4, eos_token_id=3, n_layer=1, n_embd=8, block_size=8)
    prompt = [0, 1, 0, 1, 0, 1]
    probs = sequence_probs(target, prompt, 3, {"temperature": 1.0})
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(probs, 0)
    accepted = set()
    for _ in range(400):
        steps = passes(target, prompt, 2, generator, max_new_tokens=3, temperature=1.0)
        assert steps[0].drafts == [0, 1]
        counts[tuple(tokens(steps))] += 1
        accepted.add(steps[0].accepted)
    assert accepted == {0, 1, 2}
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


# The embedded model, and the command line.


@pytest.fixture(scope="module")
def again():
    return load_encoding(CHECKPOINTS / "stories", 4096).encode(AGAIN, allowed_special="all")


def test_the_embedded_model_takes_fewer_passes_for_a_story_it_has_seen(stories, again):
    steps = passes(stories, again, max_new_tokens=20)
    assert tokens(steps) == alone(stories, again, max_new_tokens=20)
    assert len(steps) <= 8
    assert max(step.accepted for step in steps) == 3


def test_the_command_line_prints_the_text_of_the_target(run_main, cli):
    arguments = ("--prompt", AGAIN, "--prompt", "Lily and Tom", "--max-new-tokens", 8)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", "lookup", *arguments)
    assert (code, out) == cli("--model", DRAFT, *arguments)[:2], err
    assert "drafts accepted" in err and "tokens per target pass" in err


def test_lookup_is_no_directory(run_main, tmp_path, monkeypatch):
    (tmp_path / "lookup").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main(main, "--target", DRAFT, "--draft", "lookup", "--max-new-tokens", 2)
    assert code == 0, err


def test_still_a_directory_of_that_name_is_a_model(run_main, tiny, tmp_path, monkeypatch):
    (tmp_path / "lookup").mkdir()
    save_model(tiny(), tmp_path / "lookup")
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", "./lookup")
    assert (code, out) == (2, "")
    assert "the same vocabulary" in err and "the draft 61" in err

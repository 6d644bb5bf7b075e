"""Lesson 22: drafts copied from the text change the speed and nothing else, and they are what followed there."""

import dataclasses

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculative_decoding import alone, p_value, sequence_probs, tokens

DRAFT = CHECKPOINTS / "stories-draft"
STORY = "Once upon a time, there was a little girl named Lily. She loved to play with her toys and eat yummy food."
STORY += " One day, she found a big, red ball in her room."
AGAIN = STORY + "<|endoftext|>Once upon a time"  # the beginning of that story once more


def passes(target, prompt, gamma=3, generator=None, stride=None, **params):
    """All passes of a run without a draft model."""
    from infer_speculative import generate_speculative, propose_lookup
    from sampling import SamplingParams

    sampling = SamplingParams(**params)
    return list(generate_speculative(target, propose_lookup, prompt, sampling, gamma, generator, stride))


# What followed the newest n-gram.


def by_hand(text, count, longest, shortest):
    """All earlier places of each n-gram, the longest first: what follows the last of them."""
    for size in range(shortest, longest + 1)[::-1]:
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            return text[max(ends) :][:count]
    return []


@given(
    text=st.lists(st.integers(0, 2), max_size=14),
    count=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_lookup_finds_what_a_search_by_hand_finds(text, count, sizes):
    from engine.drafter import lookup

    before, (shortest, longest) = list(text), sizes
    assert lookup(text, count, longest, shortest) == by_hand(text, count, longest, shortest)
    assert lookup(text, count) == by_hand(text, count, 3, 2)
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
        ([1, 2, 3, 4, 7, 9, 2, 3, 4, 8, 1, 2, 3, 4], [8, 1, 2]),  # three, though four are found farther back
        ([2, 3, 8, 1, 2, 3], [8, 1, 2]),  # three are not found, two are
        ([4, 4, 4, 4], [4]),  # an occurrence that overlaps the end
        ([4, 5, 4, 5, 4], [5, 4]),
    ],
)
def test_lookup_on_texts_that_one_can_read(text, drafts):
    from engine.drafter import lookup

    assert lookup(text, 3) == drafts


@pytest.mark.parametrize("text, drafts", [([1, 2, 7, 1, 2], [7, 1]), ([1, 2], [])])
def test_all_of_q_is_on_the_drafts(text, drafts):
    from infer_speculative import propose_lookup

    counts = torch.zeros(9, dtype=torch.int64)
    proposed, q = propose_lookup(text, 2, counts, counts > 0)
    assert proposed == drafts and q.shape == (len(drafts), 9) and q.dtype == torch.float32
    assert [row.nonzero().tolist() for row in q] == [[[token]] for token in drafts] and q.sum() == len(drafts)


# Greedy: token for token.


@given(
    gamma=st.integers(1, 16),
    stride=st.integers(1, 16),
    prompt=st.tuples(st.integers(0, 6), st.integers(0, 5)).map(lambda pair: random_tokens(pair[0], 8, 1) * pair[1]),
    eos=st.integers(0, 7),
    penalty=st.sampled_from([{}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4, "frequency_penalty": 0.3}]),
)
@settings(max_examples=20)
def test_greedy_text_is_the_targets(tiny, gamma, stride, prompt, eos, penalty):
    target, params = tiny(seed=11, vocab_size=8, eos_token_id=eos), {"max_new_tokens": 30, **penalty}
    assert tokens(passes(target, prompt, gamma, stride=stride, **params)) == alone(target, prompt, stride, **params)


@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.2}])
def test_greedy_at_four_windows(tiny, gamma, penalties):
    target, params = tiny(seed=11, vocab_size=8, eos_token_id=7), {"max_new_tokens": 64, "ignore_eos": True}
    steps = passes(target, [1, 2], gamma, **params, **penalties)
    assert tokens(steps) == alone(target, [1, 2], **params, **penalties)
    assert 0 < sum(step.accepted for step in steps) < sum(len(step.drafts) for step in steps)


def test_drafts_are_looked_up_in_prompt_and_output(tiny):
    """Also in what the window has left behind, and never more than the window and the budget have room for."""
    from engine.drafter import lookup

    text = [1, 2, 3, 4, 5] * 6
    end = len(text) + 40
    for step in passes(tiny(seed=11, vocab_size=8, eos_token_id=7), text, 6, max_new_tokens=40, ignore_eos=True):
        in_window = 16 + -(-(len(text) - 16) // 8) * 8  # the last position before the next hop
        assert step.drafts == lookup(text, min(6, in_window - len(text), end - len(text) - 1))
        text = text + step.tokens
    assert len(text) == end


def test_a_text_that_repeats_itself_takes_fewer_passes(tiny):
    target = tiny(seed=8, vocab_size=8, eos_token_id=7, block_size=128)
    params = {"max_new_tokens": 60, "ignore_eos": True}
    steps = passes(target, [1, 2], 4, **params)
    assert tokens(steps) == alone(target, [1, 2], **params)
    assert len(set(tokens(steps)[-50:])) == 1 and len(steps) <= 32


# Sampled: in distribution.


def test_texts_follow_the_targets_probabilities(tiny):
    """The prompt repeats itself, so the first token has a draft in each run, and later ones in some."""
    target = tiny(seed=3, vocab_size=4, eos_token_id=3, n_layer=1, n_embd=8, block_size=8)
    prompt = [0, 1, 0, 1, 0, 1]
    probs = sequence_probs(target, prompt, 3, eos=3)
    generator, counts, accepted = torch.Generator().manual_seed(0), dict.fromkeys(probs, 0), set()
    for _ in range(700):
        steps = passes(target, prompt, 2, generator, max_new_tokens=3, temperature=1.0)
        assert steps[0].drafts == [0, 1]
        counts[tuple(tokens(steps))] += 1
        accepted.add(steps[0].accepted)
    assert accepted == {0, 1, 2}
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


# The embedded model, and the command line.


@pytest.fixture(scope="module")
def again():
    from tokenizer import load_encoding

    return load_encoding(CHECKPOINTS / "stories", 4096).encode(AGAIN, allowed_special="all")


def test_the_embedded_model_takes_fewer_passes_for_a_story_it_has_seen(stories, again):
    steps = passes(stories, again, max_new_tokens=20)
    assert tokens(steps) == alone(stories, again, max_new_tokens=20)
    assert len(steps) <= 8 and max(step.accepted for step in steps) == 3


def test_an_eos_among_the_accepted_drafts_ends_the_text(stories, again, monkeypatch):
    first, second, *_ = alone(stories, again, max_new_tokens=4)
    monkeypatch.setattr(stories, "config", dataclasses.replace(stories.config, eos_token_ids=(second,)))
    (step,) = passes(stories, again, max_new_tokens=20)
    assert step.tokens == [first, second] and step.accepted == 3


@pytest.mark.parametrize("arguments", [("--prompt", AGAIN), ("--prompt", "Once", "--prompt", "Lily and Tom"), ()])
def test_the_command_line_prints_the_text_of_the_target(run_main, cli, arguments):
    from infer_speculative import main

    arguments = (*arguments, "--max-new-tokens", 8)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", "lookup", *arguments)
    assert (code, out) == cli("--model", DRAFT, *arguments)[:2], err
    assert "drafts accepted" in err and "tokens a target pass" in err


def test_the_report_of_a_text_without_drafts(run_main):
    from infer_speculative import main

    args = ("--target", DRAFT, "--draft", "lookup", "--prompt", "Once upon a time", "--max-new-tokens", 4)
    code, _, err = run_main(main, *args)
    assert code == 0, err
    assert err.splitlines()[:2] == [
        "0 of 0 drafts accepted (0%), 1.00 tokens a target pass",
        "passes by accepted drafts: 0: 4",
    ]


def test_lookup_is_no_directory(run_main, tmp_path, monkeypatch):
    from infer_speculative import main

    (tmp_path / "lookup").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main(main, "--target", DRAFT, "--draft", "lookup", "--max-new-tokens", 2)
    assert code == 0, err


def test_still_a_directory_of_that_name_is_a_model(run_main, tiny, tmp_path, monkeypatch):
    from infer_speculative import main

    (tmp_path / "lookup").mkdir()
    tiny().save_pretrained(tmp_path / "lookup")
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", "./lookup")
    assert code == 2 and out == "" and "the same vocabulary" in err and "the draft 61" in err

"""Lesson 21: scores that weigh the length, against all texts and transformers."""

import math

import pytest
from test_beam_search import (
    Chain,
    all_texts,
    log_probability,
    of_transformers,
    padded,
    search,
    several_ends,
)

from errors import UserError
from loading.load import load_model, save_model

PENALTIES = (-1, 0, 0.6, 1, 2)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("ends", [(), (3,), (0, 2), (0, 1, 2, 3)])
def test_with_room_for_all_texts_it_ranks_them_all(tiny, ends, penalty):
    model = tiny(seed=1, vocab_size=4, eos_token_ids=ends or (3,))
    prompt = [2, 1]
    scored = [
        (tokens, total / len(tokens) ** penalty)
        for tokens, total in all_texts(model, prompt, 4, ends)
    ]
    scored.sort(key=lambda text: -text[1])
    options = {"length_penalty": penalty, "ignore_eos": not ends}
    tokens, scores = search(model, prompt, 256, 4, **options)
    assert tokens == [tokens for tokens, _ in scored]
    assert [score for _, score in scored] == scores
    if ends:
        assert search(model, prompt, 40, 4, **options)[0] == tokens[:40]


def test_equals_transformers(tiny, tmp_path):
    save_model(tiny(seed=5), tmp_path)
    prompt = [3, 1, 4]
    lengths = set()
    for ends in several_ends(tiny(seed=5), prompt):
        model = tiny(seed=5, eos_token_ids=ends)
        for penalty in PENALTIES:
            expected, expected_scores = of_transformers(
                tmp_path, prompt, ends, length_penalty=float(penalty)
            )
            tokens, scores = search(model, prompt, 4, 9, length_penalty=penalty)
            assert padded(tokens, ends, len(expected[0])) == expected
            assert expected_scores == scores
            lengths |= {len(row) for row in tokens}
    assert len(lengths) > 4


def test_a_penalty_above_0_looks_ahead_to_the_longest_text():
    """The end has 0.6 now. The other text starts with 0.3, loses little, and wins by its length."""
    model = Chain([1, 0, 0], [0.01, 0.99, 0], [0.6, 0.3, 0.1])
    tokens, scores = search(model, [2], 1, 5, length_penalty=1, use_cache=False)
    assert tokens == [[1] * 5] and [(math.log(0.3) + 4 * math.log(0.99)) / 5] == scores


@pytest.mark.parametrize("end", [0.03, 0.35])
def test_a_penalty_below_0_looks_ahead_to_the_next_length(end):
    """When two texts are finished, a third one on its way beats one of them, if it ends soon.

    With 0.35 it does so if it ends at once, and would not one token later.
    """
    rows = [[1, 0, 0, 0, 0], [end, 0, 0, 1 - end, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    model = Chain(*rows, [0.3, 0.6, 0.1, 0, 0])
    tokens, scores = search(model, [4], 2, 10, length_penalty=-1, use_cache=False)
    assert tokens == [[0], [1, 3, 0]] and [math.log(0.3), 3 * math.log(0.6 * (1 - end))] == scores


@pytest.mark.parametrize("penalty, passes", [(-1, 1), (0, 1), (0.2, 1), (1, 16), (2, 50)])
def test_it_stops_when_no_text_can_get_better(penalty, passes):
    """The end has 0.8. A text that goes on halves each time; the penalty says how long it may."""
    model = Chain([1, 0, 0], [0.49, 0.51, 0], [0.8, 0.2, 0])
    search(model, [2], 1, 50, length_penalty=penalty, use_cache=False)
    assert model.passes == passes


def test_the_eos_counts_in_the_length():
    model = Chain([1, 0, 0], [1, 0, 0], [0.4, 0.6, 0])
    tokens, scores = search(model, [2], 2, 9, length_penalty=2, use_cache=False)
    assert tokens == [[1, 0], [0]] and [math.log(0.6) / 4, math.log(0.4)] == scores


@pytest.mark.parametrize("max_new_tokens", [10**31, 10**400])
def test_a_limit_that_nobody_reaches_overflows_nothing(max_new_tokens):
    """With the largest penalty the search has to go on for ever; here a pass ends it."""

    class Enough(Exception):
        pass

    class Finite(Chain):
        def head(self, tokens):
            if self.passes == 9:
                raise Enough
            return super().head(tokens)

    model = Finite([1, 0, 0], [0.9, 0.1, 0], [0.4, 0.6, 0])
    with pytest.raises(Enough):
        search(model, [2], 1, max_new_tokens, length_penalty=10, use_cache=False)


@pytest.mark.parametrize("value", [math.nan, -11, 10.5, True, "1"])
def test_a_bad_value_is_named_with_its_range(tiny, value):
    with pytest.raises(UserError) as error:
        search(tiny(), [1], 2, 2, length_penalty=value)
    assert str(error.value) == f"length_penalty is {value!r}; it must be a number in [-10, 10]"


def test_the_command_line_takes_a_penalty(cli, tiny_checkpoint):
    from loading.tokenizer import load_encoding

    encoding = load_encoding(tiny_checkpoint, 4096)
    model = load_model(tiny_checkpoint)
    args = ("--model", tiny_checkpoint, "--prompt", "Tom", "--max-new-tokens", 12)
    code, out, err = cli(*args, "--num-beams", 4, "--length-penalty", 0.5)
    tokens, scores = search(model, encoding.encode("Tom"), 4, 12, length_penalty=0.5)
    assert (code, out) == (0, "Tom" + encoding.decode(tokens[0]) + "\n")
    score = scores.expected[0]
    count = len(tokens[0])
    total = f"sum of log-probabilities {score * count**0.5:.6g}"
    found = err.splitlines()[1]
    assert found == f"score {score:.6g}, {total}, {count} tokens, the best of 4 texts"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--num-beams", 2, "--length-penalty", "nan"],
            "length_penalty is nan; it must be a number in [-10, 10]",
        ),
        (["--length-penalty", 1], "--length-penalty is for --num-beams only"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(cli, tiny_checkpoint, arguments, words):
    code, out, err = cli("--model", tiny_checkpoint, "--max-new-tokens", 2, *arguments)
    assert code == 2 and out == "" and err.endswith(words + "\n") and err.count("\n") == 1


def test_still_the_sum_without_a_penalty(tiny):
    tokens, scores = search(tiny(seed=6), [1, 2], 3, 12)
    again, same = search(tiny(seed=6), [1, 2], 3, 12, length_penalty=0)
    assert again == tokens and same.expected == scores.expected
    assert [log_probability(tiny(seed=6), [1, 2], row) for row in tokens] == scores

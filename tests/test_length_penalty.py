"""Lesson 23: scores that weigh the length, against all texts and transformers."""

import math

import pytest
from conftest import is_one_line
from test_beam_search import ENDS, Chain, check_ranks, check_transformers, search

from errors import UserError
from loading.load import load_model
from text.tokenizer import load_encoding

PENALTIES = pytest.mark.parametrize("penalty", [-1, 0.6, 1, 2])


@PENALTIES
@ENDS
def test_with_room_for_all_texts_it_ranks_them_all(tiny, ends, penalty):
    check_ranks(tiny, ends, penalty, length_penalty=penalty)


@PENALTIES
def test_equals_transformers(tiny, tmp_path, penalty):
    lengths = check_transformers(tiny, tmp_path, penalty, length_penalty=penalty)
    assert len(lengths) > 2 or penalty > 0  # then all are as long as can be


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
def test_a_limit_that_no_run_reaches_overflows_nothing(max_new_tokens):
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
    assert str(error.value) == f"length_penalty {value!r}: must be a number in [-10, 10]"


def test_the_command_line_takes_a_penalty(cli, tiny_checkpoint):
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
    assert found == f"score {score:.6g}, {total}, {count} tokens, the best of 4 beams"


def test_a_penalty_without_beams_is_one_line(cli, tiny_checkpoint):
    result = cli("--model", tiny_checkpoint, "--max-new-tokens", 2, "--length-penalty", 1)
    assert is_one_line(result, "--length-penalty requires --num-beams")

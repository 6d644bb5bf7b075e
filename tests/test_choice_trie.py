"""Tokens that may come next towards one of several strings. Oracle: all spellings by hand."""

import itertools

import pytest
from conftest import refused
from constrained import CHOICE_LISTS, END, PIECES, letters, may_follow, spelled


def test_what_cannot_be_written_is_refused():
    from importlib.util import find_spec

    assert find_spec("constraints")
    from constraints.choices import ChoiceTrie
    from constraints.vocabulary import Vocabulary

    vocabulary = Vocabulary(letters(), 8, (END,))
    message = refused(ChoiceTrie, ("abc", "a d", "é"), vocabulary)
    assert message == "choices: the vocabulary lacks these bytes: 20 64 a9 c3"
    assert "no EOS token" in refused(Vocabulary, letters(), 8, (60,))


@pytest.mark.parametrize("choices", CHOICE_LISTS, ids=str)
def test_the_allowed_tokens_are_those_that_may_follow(choices):
    """After each beginning of up to four tokens, also where the last call asked for another one."""
    from constraints.choices import ChoiceTrie
    from constraints.vocabulary import Vocabulary

    matcher = ChoiceTrie(choices, Vocabulary(letters(), 8, (END,))).matcher()
    beginnings = [()]
    checked = 0
    for length in range(5):
        for tokens in itertools.product(range(len(PIECES)), repeat=length):
            if tokens and tokens[:-1] not in beginnings:
                continue
            if not any(choice.startswith(spelled(tokens)) for choice in choices):
                assert matcher.token_mask(list(tokens)).all()  # whoever left is not led
                continue
            beginnings.append(tokens)
            allowed = matcher.token_mask(list(tokens)).nonzero()[:, 0].tolist()
            assert set(allowed) == may_follow(tokens, choices)
            checked += 1
    assert checked >= 1


class Spelled:
    """An encoding of a few tokens: an empty one, one without text, two with the same text."""

    added_token_ids = {"<s>": 0}
    special_tokens_set = {"<s>"}
    pieces = {0: b"<s>", 1: b"a", 2: b"", 4: b"a", 5: b"b"}

    def decode_single_token_bytes(self, token):
        return self.pieces[token]


def test_a_vocabulary_leaves_out_what_is_no_text():
    """And every token that ends a text may end it."""
    from constraints.choices import ChoiceTrie
    from constraints.vocabulary import Vocabulary

    vocabulary = Vocabulary(Spelled(), 6, (5, 1000, 0))
    assert vocabulary.pieces == [None, b"a", None, None, b"a", None]
    matcher = ChoiceTrie(("a", "aa"), vocabulary).matcher()
    for output, expected in [([], {1, 4}), ([1], {0, 1, 4, 5}), ([1, 4], {0, 5})]:
        assert set(matcher.token_mask(output).nonzero()[:, 0].tolist()) == expected

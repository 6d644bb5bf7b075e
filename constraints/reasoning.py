"""Reasoning before a constrained answer."""

import functools

import torch

from cache import common_prefix_length
from constraints.matcher import Matcher
from constraints.vocabulary import Vocabulary
from sampling import SamplingParams
from text.reasoning import ReasoningState, ReasoningTracker


class ReasoningMatcher(Matcher):
    """Matcher of a constrained answer that a reasoning block precedes or may precede.

    In the block all tokens are allowed, EOS only if the answer may be empty. The answer follows
    `matcher`. A reply that is not in the block yet must open it, or follow `matcher` from its first
    token on.
    """

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary, matcher: Matcher):
        super().__init__(vocabulary)
        self.matcher = matcher
        self.grammar = matcher.grammar
        self.start, self.end, _ = params.reasoning
        self.opening = next_marker_tokens(vocabulary, self.start)
        self.tracker = ReasoningTracker(params, vocabulary.encoding)
        # A constraint begins with a token, not within one.
        is_text = self.tracker.parser.end == self.end
        self.overlapping = overlapping_token_ids(vocabulary, self.end) if is_text else None
        # Before the first token, and after each: the state, and whether `matcher` allows the text
        # before the block.
        self.states = [(self.tracker.start, True)]

    @functools.cached_property
    def may_be_empty(self) -> bool:
        """Return whether `matcher` allows an empty answer."""
        return self.matcher.is_accepting([])

    def advance(self, output: list[int]) -> tuple[ReasoningState, bool]:
        """Return the entry of `states` after an output."""
        known = common_prefix_length(self.tokens, output)
        del self.tokens[known:]
        del self.states[known + 1 :]
        for token in output[known:]:
            state, fits = self.states[-1]
            if fits and state.section == "start":
                fits = self.matcher.token_mask(self.tokens)[token].item()
            self.states.append((self.tracker.advance(state, token), fits))
            self.tokens.append(token)
        return self.states[-1]

    def token_mask(self, output: list[int]) -> torch.Tensor:
        state, fits = self.advance(output)
        token_mask = self.vocabulary.token_mask
        if state.in_answer:
            return self.matcher.token_mask(output[state.length :])
        if state.section == "start":
            written = state.spelled_bytes(self.start)
            # After a cut character, such as a byte of the answer, no marker opens the block.
            is_cut = bool(state.undecoded[0]) and not written
            opening = token_mask([] if is_cut else self.opening[written])
            return opening | self.matcher.token_mask(output) if fits else opening
        allowed = token_mask(slice(None))
        if self.overlapping:
            allowed[self.overlapping[state.spelled_bytes(self.end)]] = False
        if not self.may_be_empty:
            allowed[self.vocabulary.eos_token_ids] = False
        return allowed

    def is_accepting(self, output: list[int]) -> bool:
        is_inside = self.advance(output)[0].is_inside
        if is_inside and output and output[-1] not in self.vocabulary.eos_token_ids:
            return False
        return super().is_accepting(output)

    def reason(self) -> str:
        return self.matcher.reason()


@functools.lru_cache(64)
def next_marker_tokens(vocabulary: Vocabulary, marker: str) -> list[list[int]]:
    """Return the id of the token that continues a marker, if any, after each number of its bytes.

    A marker that is one token is written whole.
    """
    data = marker.encode()
    token = vocabulary.encoding.added_token_ids.get(marker)
    if token is not None:
        return [[token]] * len(data)
    texts = {len(marker[:index].encode()): marker[index:] for index in range(len(marker))}
    return [
        (
            vocabulary.tokenize(texts[start])
            if start in texts
            else vocabulary.tokenize_longest_first(data[start:])
        )[:1]
        for start in range(len(data))
    ]


@functools.lru_cache(64)
def overlapping_token_ids(vocabulary: Vocabulary, marker: str) -> list[list[int]]:
    """Return the ids of tokens that spell the rest of a marker and more, after each of its bytes.

    The marker is text.
    """
    end = marker.encode()
    names = vocabulary.encoding.added_token_texts  # special tokens have no pieces
    texts = [
        piece or names.get(token, "").encode() for token, piece in enumerate(vocabulary.pieces)
    ]
    longer = [token for token, text in enumerate(texts) if end[-1:] in text[:-1]]
    return [
        [token for token in longer if (end[:start] + texts[token]).partition(end)[2]]
        for start in range(len(end))
    ]

"""Reasoning before a constrained answer, and its token budget."""

import functools

import torch

from cache import common_prefix_length
from constraints.matcher import Matcher
from constraints.vocabulary import Vocabulary
from errors import UserError
from sampling import SamplingParams, all_stop_token_ids
from text.reasoning import ReasoningState, ReasoningTracker


class ReasoningMatcher(Matcher):
    """Matcher of a reply that has or may begin with a reasoning block.

    The answer follows `matcher`; None: it is unconstrained. A reply that is not in the block yet
    must open it, or follow `matcher` from its first token on. In the block all tokens are allowed,
    EOS only if the answer may be empty. Once the block has params.thinking_token_budget tokens,
    only the end marker is allowed. Raises UserError if a budget cannot force this marker.
    """

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary, matcher: Matcher | None):
        super().__init__(vocabulary)
        self.matcher = matcher
        self.grammar = matcher.grammar if matcher else None
        self.start, self.end, _ = params.reasoning
        self.budget = params.thinking_token_budget
        self.opening = next_marker_tokens(vocabulary, self.start)
        self.closing = next_marker_tokens(vocabulary, self.end)
        if self.budget is not None:
            check_forced_tokens(params, vocabulary, self.closing)
        self.tracker = ReasoningTracker(params, vocabulary.encoding)
        # A constraint begins with a token, not within one.
        is_text = self.tracker.parser.end == self.end
        self.overlapping = None
        if matcher and is_text:
            self.overlapping = overlapping_token_ids(vocabulary, self.end)
        # Before the first token, and after each: the state, and whether `matcher` allows the text
        # before the block.
        self.states = [(self.tracker.start, True)]

    @functools.cached_property
    def may_be_empty(self) -> bool:
        """Return whether an empty answer is allowed."""
        return self.matcher is None or self.matcher.is_accepting([])

    def advance(self, output: list[int]) -> tuple[ReasoningState, bool]:
        """Return the entry of `states` after an output."""
        known = common_prefix_length(self.tokens, output)
        del self.tokens[known:]
        del self.states[known + 1 :]
        for token in output[known:]:
            state, fits = self.states[-1]
            if self.matcher and fits and state.section == "start":
                fits = self.matcher.token_mask(self.tokens)[token].item()
            self.states.append((self.tracker.advance(state, token), fits))
            self.tokens.append(token)
        return self.states[-1]

    def token_mask(self, output: list[int]) -> torch.Tensor:
        state, fits = self.advance(output)
        token_mask = self.vocabulary.token_mask
        if state.is_inside and self.budget is not None:
            if state.num_tokens + len(state.pending) >= self.budget:
                return token_mask(self.closing[state.spelled_bytes(self.end)])
        if self.matcher and state.in_answer:
            return self.matcher.token_mask(output[state.length :])
        if self.matcher and state.section == "start":
            written = state.spelled_bytes(self.start)
            # After a cut character, such as a byte of the answer, no marker opens the block.
            is_cut = bool(state.undecoded[0]) and not written
            opening = token_mask([] if is_cut else self.opening[written])
            return opening | self.matcher.token_mask(output) if fits else opening
        allowed = token_mask(slice(None))
        if self.overlapping:
            allowed[self.overlapping[state.spelled_bytes(self.end)]] = False
        if state.is_inside and not self.may_be_empty:
            allowed[self.vocabulary.eos_token_ids] = False
        return allowed

    def is_accepting(self, output: list[int]) -> bool:
        is_inside = self.advance(output)[0].is_inside
        if is_inside and output and output[-1] not in self.vocabulary.eos_token_ids:
            return False
        return super().is_accepting(output)

    def reason(self) -> str:
        return self.matcher.reason() if self.matcher else super().reason()


def check_forced_tokens(
    params: SamplingParams, vocabulary: Vocabulary, closing: list[list[int]]
) -> None:
    """Raise UserError if a marker cannot be forced, or if min_tokens may ban a token of it.

    closing: `next_marker_tokens` of the end marker.
    """
    if not all(closing):
        reason = f"the vocabulary cannot spell {params.reasoning.end}"
        raise UserError(f"thinking_token_budget: {reason}, which ends the reasoning")
    stops = all_stop_token_ids(params, tuple(vocabulary.eos_token_ids))
    if params.min_tokens and any([token] in closing for token in stops):
        reason = f"a token of {params.reasoning.end} ends the output"
        raise UserError(f"thinking_token_budget conflicts with min_tokens: {reason}")


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

"""Requests, and the events that a step emits."""

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from constraints.matcher import Matcher, single_allowed_token
from errors import UserError
from sampling import SamplingParams, Sequence, TokenLogprob
from text.detokenizer import StopStringDetokenizer


@dataclass(eq=False)  # compare and hash by identity
class Request(Sequence):
    """A prompt, its output and its state in the engine; read-only for callers."""

    adapter: str = ""  # name of its LoRA adapter; "": none
    cache_salt: str = ""  # limits prefix caching to requests with the same one
    finish_reason: str | None = None  # "stop", "length", "abort" or "error" when finished
    start: int = 0  # of the context window in tokens
    admission_time: int = 0  # nanoseconds since the epoch
    num_computed_tokens: int = 0  # positions of the context window in the KV cache
    # Prompt positions that no pass computed before the first output token; None: not admitted yet.
    num_cached_tokens: int | None = None
    # Page table; None: a null page, before all sliding windows.
    pages: list[int | None] = field(default_factory=list)
    # Page table of the sliding-window group, if there is one.
    sliding_pages: list[int | None] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of its full pages
    drafts: list[int] = field(default_factory=list)  # draft tokens for the next step
    matcher: Matcher | None = None  # of its constraint; None: unconstrained
    last_mask: tuple = ([], None)  # tokens and result of the last `compute_token_mask` call
    # Output text without a held-back possible stop string, and its detokenizer; "" and None if the
    # engine has no encoding.
    text: str = ""
    stream: StopStringDetokenizer | None = None
    # One per output token, if params.logprobs is set.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # One per prompt token so far, if params.prompt_logprobs is set; None for the first token.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    def compute_token_mask(self, tokens: list[int]) -> torch.Tensor | UserError | None:
        """Return the constraint's mask of allowed next tokens after these, (vocab_size,) bools.

        tokens: prompt and output. None: no constraint. A UserError, returned rather than raised, if
        no token is allowed.
        """
        if self.matcher is None:
            return None
        if tokens != self.last_mask[0]:
            try:
                token_mask = self.matcher.checked_token_mask(tokens[self.prompt_length :])
            except UserError as error:
                token_mask = error
            self.last_mask = list(tokens), token_mask
        return self.last_mask[1]

    def masked_sequence(self, drafts: list[int]) -> tuple[Sequence, UserError | None]:
        """Return the sequence with these drafts and its token mask; without drafts, the request.

        If the constraint allows no token, the mask is None and an error is returned.
        """
        sequence = self.with_drafts(drafts) if drafts else self
        token_mask = self.compute_token_mask(sequence.tokens)
        error = token_mask if isinstance(token_mask, UserError) else None
        sequence.token_mask = None if error else token_mask
        return sequence, error

    def jump_forward_token(self, tokens: list[int]) -> int | None:
        """Return the only token allowed after these, prompt and output; None if not exactly one.

        None if log-probabilities are requested, because these need a pass.
        """
        if self.matcher is None or self.params.logprobs is not None:
            return None
        token_mask = self.compute_token_mask(tokens)
        return None if isinstance(token_mask, UserError) else single_allowed_token(token_mask)

    def validate_drafts(self, drafts: list[int]) -> list[int]:
        """Cut drafts at the first token that the constraint rejects or that is a dead end."""
        if self.matcher is None:
            return drafts
        fits = 0
        for count in range(len(drafts) + 1):
            token_mask = self.compute_token_mask(self.tokens + drafts[:count])
            if isinstance(token_mask, UserError):
                break
            fits = count
            if count < len(drafts) and not token_mask[drafts[count]]:
                break
        return drafts[:fits]

    @property
    def page_tables(self) -> tuple[list[int | None], ...]:
        """Return the page table of each KV cache group."""
        return self.pages, self.sliding_pages

    @property
    def context_window(self) -> list[int]:
        """Return the tokens of the context window."""
        return self.tokens[self.start :]

    @property
    def length(self) -> int:
        """Return the number of tokens in the context window."""
        return len(self.tokens) - self.start

    @property
    def needs_prompt_logits(self) -> bool:
        """Return whether log-probabilities of prompt tokens are requested and not yet known."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.prompt_length

    def is_scored_by(self, other: "Request") -> bool:
        """Return whether another request computes the same prompt log-probabilities.

        Only one without output does.
        """
        return (
            self.needs_prompt_logits
            and self.tokens == other.tokens
            and self.cache_salt == other.cache_salt
            and self.params.prompt_logprobs == other.params.prompt_logprobs
        )

    @property
    def first_logits_position(self) -> int:
        """Return the first position of the context window whose logits are needed.

        It is the position of the newest token, or the one before the first prompt token without a
        log-probability. Positions before it may come from the prefix cache.
        """
        if self.needs_prompt_logits:
            return len(self.prompt_logprobs) - 1
        return self.length - 1

    @property
    def uncomputed_tokens(self) -> list[int]:
        """Return the tokens of the context window that are not computed yet."""
        return self.tokens[self.start + self.num_computed_tokens :]


class Event(NamedTuple):
    """New tokens of a request in a step, or its end."""

    request: Request
    tokens: list[int]  # new tokens, EOS included
    finish_reason: str | None  # set in the last event of a request
    error: str | None = None  # message, if finish_reason is "error"
    constraint_failed: bool = False  # whether the constraint caused the error


def make_request(prompt: list[int], params: SamplingParams, config) -> Request:
    """Return a request for a prompt of token ids; an empty prompt becomes the BOS token.

    params without a seed get a random one. Raises UserError for an id outside the vocabulary.
    """
    size = config.vocab_size
    tokens = list(prompt) or [config.bos_token_id]
    wrong = [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]
    if wrong:
        allowed = f"must be an integer from 0 to {size - 1}"
        raise UserError(f"the prompt has the id {wrong[0]!r}: {allowed}")
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    request = Request.from_prompt(tokens, params, config)
    if params.prompt_logprobs is not None:
        if len(tokens) > config.block_size:
            allowed = f"must be at most block_size ({config.block_size})"
            raise UserError(f"prompt_logprobs: the prompt has {len(tokens)} tokens, {allowed}")
        request.prompt_logprobs = [None]  # nothing predicts the first token
    return request

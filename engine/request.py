"""A text that the engine writes, and what a step did to it."""

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from constraints import Matcher, single_allowed_token
from errors import UserError
from loading.tokenizer import StopStringDetokenizer
from sampling import SamplingParams, TokenLogprob, check_token_ids


@dataclass(eq=False)  # two requests are never the same one
class Request:
    """A prompt and what follows it. Read it at any time, but do not change it."""

    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    params: SamplingParams
    adapter: str = ""  # that the model has for it
    cache_salt: str = ""  # it shares pages with requests of the same cache_salt only
    finish_reason: str | None = None  # "stop", "length", "abort" or "error", once it is over
    start: int = 0  # the window on its text begins here
    # How many positions of the window have their keys and values in the cache;
    # as in vLLM.
    num_computed_tokens: int = 0
    # Where they are, page after page; that is its page table. None: before all windows.
    pages: list[int | None] = field(default_factory=list)
    # The same of layers with a window, if these have pages of their own.
    sliding_pages: list[int | None] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of its cached pages
    drafts: list[int] = field(default_factory=list)  # guesses at its next tokens
    matcher: Matcher | None = None  # says which tokens may follow; None: all may
    last_mask: tuple = ([], None)  # the last text that it was asked for, and what it said
    # The output as text, up to what may yet become a stop string; and what makes it of tokens,
    # None for an engine without an encoding: then there is no text.
    text: str = ""
    stream: StopStringDetokenizer | None = None
    # One for each token of the output, if params ask for them.
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """What was generated, EOS included."""
        return self.tokens[self.prompt_length :]

    def token_mask(self, text: list[int]) -> torch.Tensor | UserError | None:
        """Which tokens may follow a text that begins with its prompt, (vocab_size,) bools.

        None: all may. The error if none may.
        """
        if self.matcher is None:
            return None
        if text != self.last_mask[0]:
            try:
                token_mask = self.matcher.checked_token_mask(text[self.prompt_length :])
            except UserError as error:
                token_mask = error
            self.last_mask = text, token_mask
        return self.last_mask[1]

    def jump_forward_token(self, text: list[int]) -> int | None:
        """The token that must follow a text that begins with its prompt; None if not one must.

        None where log-probabilities are asked for, because these need a pass.
        """
        if self.matcher is None or self.params.logprobs is not None:
            return None
        token_mask = self.token_mask(text)
        return None if isinstance(token_mask, UserError) else single_allowed_token(token_mask)

    def validate_drafts(self, drafts: list[int]) -> list[int]:
        """The drafts before the first that may not follow the text, or after which none may."""
        if self.matcher is None:
            return drafts
        fits = 0
        for count in range(len(drafts) + 1):
            token_mask = self.token_mask(self.tokens + drafts[:count])
            if isinstance(token_mask, UserError):
                break
            fits = count
            if count < len(drafts) and not token_mask[drafts[count]]:
                break
        return drafts[:fits]

    @property
    def page_tables(self) -> tuple[list[int | None], ...]:
        """Its page tables, for each KV cache group."""
        return self.pages, self.sliding_pages

    @property
    def context_window(self) -> list[int]:
        """What the model sees."""
        return self.tokens[self.start :]

    @property
    def length(self) -> int:
        """Tokens in the window."""
        return len(self.tokens) - self.start

    @property
    def uncomputed_tokens(self) -> list[int]:
        """What is not computed of the window."""
        return self.tokens[self.start + self.num_computed_tokens :]


class Event(NamedTuple):
    """What a step did to a request."""

    request: Request
    tokens: list[int]  # new ones, EOS included
    finish_reason: str | None  # of the request, if this is its last event
    error: str | None = None  # what went wrong, if that is "error"
    constraint_failed: bool = False  # whether the request's constraint is why


def make_request(prompt: list[int], params: SamplingParams, config) -> Request:
    """A request to continue a prompt: token ids, of which none means the BOS token.

    Draws without a seed get a random one. Raises UserError for an id that the model does not have.
    """
    tokens = list(prompt) or [config.bos_token_id]
    size = config.vocab_size
    wrong = [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]
    if wrong:
        allowed = f"ids of this model are integers from 0 to {size - 1}"
        raise UserError(f"the prompt has the id {wrong[0]!r}; {allowed}")
    check_token_ids(params, config)
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    return Request(tokens, len(tokens), params)

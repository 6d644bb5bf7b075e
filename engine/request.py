"""A text that the engine writes, and what a step did to it."""

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from errors import UserError
from loading.tokenizer import StopStream
from sampling import SamplingParams, TokenLogprob, check_ids


@dataclass(eq=False)  # two requests are never the same one
class Request:
    """A prompt and what follows it. Read it at any time, but do not change it."""

    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    params: SamplingParams
    salt: str = ""  # it shares pages with requests of the same salt only
    finish_reason: str | None = None  # "stop", "length", "abort" or "error", once it is over
    start: int = 0  # the window on its text begins here
    # How many positions of the window have their keys and values in the cache;
    # num_computed_tokens in vLLM.
    computed: int = 0
    # Where they are, page after page; elsewhere called the block table. None: before all windows.
    pages: list[int | None] = field(default_factory=list)
    # The same of layers with a window, if these have pages of their own.
    windowed: list[int | None] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its published pages
    drafts: list[int] = field(default_factory=list)  # guesses at its next tokens
    # The output as text, up to what may yet become a stop string; and what makes it of tokens,
    # None for an engine without an encoding: then there is no text.
    text: str = ""
    stream: StopStream | None = None
    # One for each token of the output, if params ask for them.
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """What was generated, EOS included."""
        return self.tokens[self.prompt_length :]

    @property
    def tables(self) -> tuple[list[int | None], ...]:
        """Its block tables, for each kind of layers."""
        return self.pages, self.windowed

    @property
    def window(self) -> list[int]:
        """What the model sees."""
        return self.tokens[self.start :]

    @property
    def length(self) -> int:
        """Tokens in the window."""
        return len(self.tokens) - self.start

    @property
    def lacking(self) -> list[int]:
        """What is not computed of the window."""
        return self.tokens[self.start + self.computed :]


class Event(NamedTuple):
    """What a step did to a request."""

    request: Request
    tokens: list[int]  # new ones, EOS included
    finish_reason: str | None  # of the request, if this is its last event
    error: str | None = None  # what went wrong, if that is "error"


def make_request(prompt: list[int], params: SamplingParams, config) -> Request:
    """A request to continue a prompt: token ids, of which none means the BOS token.

    Draws without a seed get a random one. Raises UserError for an id that the model does not have,
    and for a form, which the engine does not support.
    """
    tokens = list(prompt) or [config.bos_token_id]
    size = config.vocab_size
    wrong = [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]
    if wrong:
        allowed = f"ids of this model are integers from 0 to {size - 1}"
        raise UserError(f"the prompt has the id {wrong[0]!r}; {allowed}")
    check_ids(params, config)
    if params.form:
        raise UserError(f"{params.form}: for generate and generate_speculative alone")
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    return Request(tokens, len(tokens), params)

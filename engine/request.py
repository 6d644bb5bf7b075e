"""A text that the engine writes, and what a step did to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sampling import SamplingParams, TokenLogprob
from tokenizer import StopStream


@dataclass(eq=False)  # two requests are never the same one
class Request:
    """A prompt and what follows it. Read it at any time; only the engine changes it."""

    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    params: SamplingParams
    salt: str = ""  # it shares pages with requests of the same salt only
    finish_reason: str | None = None  # None until it is over, then "stop" (EOS, stop), "length", "abort" or "error"
    start: int = 0  # the window on its text begins here
    computed: int = 0  # so many positions of the window have their keys and values in the cache
    pages: list[int] = field(default_factory=list)  # where they are, page after page
    digests: list[bytes] = field(default_factory=list)  # of its published pages
    drafts: list[int] = field(default_factory=list)  # guesses at its next tokens
    stream: StopStream | None = None  # makes text of the output; None for an engine without an encoding
    text: str = ""  # the output, up to what may yet become a stop string
    top: int | None = None  # how many of the most likely tokens come with each log-probability; None: none is kept
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each token of the output, if they are kept

    @property
    def output(self) -> list[int]:
        """What was generated, EOS included."""
        return self.tokens[self.prompt_length :]

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
    text: str = ""  # new too, as far as it is certain
    logprobs: Sequence[TokenLogprob] = ()  # of each new token, if the request asked for them

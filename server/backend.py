"""Interface between the API's handlers and the engine that generates."""

from typing import NamedTuple

from sampling import SamplingParams, TokenLogprob


class GenerateInput(NamedTuple):
    """Sequences to generate for one API request."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one per prompt
    cache_salt: str = ""


class Update(NamedTuple):
    """New output of a sequence. Immutable, unlike the Request that it comes from."""

    tokens: tuple[int, ...]  # EOS included
    text: str
    logprobs: tuple[TokenLogprob, ...]  # one per token, if requested
    finish_reason: str | None  # "stop", "length" or "error" in the last update

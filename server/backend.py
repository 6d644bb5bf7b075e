"""Interface between the API's handlers and what generates: one engine, or several replicas."""

import itertools
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from constraints.matcher import Matcher
from sampling import SamplingParams, TokenLogprob
from text.tokenizer import Encoding


class EngineDead(Exception):
    """The engine is not running: not yet, or no longer."""


class RequestFailed(Exception):
    """A request failed while the engine computed it."""


class ConstraintFailed(RequestFailed):
    """A request failed because of its constraint."""


class GenerateInput(NamedTuple):
    """Sequences to generate for one API request."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one per prompt, all with the same constraint
    cache_salt: str = ""
    request_id: str = ""
    adapter: str = ""  # "": the model itself

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all prompts."""
        return sum(map(len, self.prompts))


class Update(NamedTuple):
    """New output of a sequence. Immutable, unlike the Request that it comes from."""

    tokens: tuple[int, ...]  # EOS included
    text: str
    logprobs: tuple[TokenLogprob, ...]  # one per token, if requested
    finish_reason: str | None  # "stop" or "length" in the last update
    num_cached_tokens: int = 0  # as in Request
    # One per prompt token in the first update, if requested; None for the first token.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @staticmethod
    def join(parts: list["Update"]) -> "Update":
        """Join consecutive updates of a sequence into one."""
        if len(parts) == 1:
            return parts[0]
        tokens = itertools.chain.from_iterable(part.tokens for part in parts)
        text = "".join(part.text for part in parts)
        logprobs = itertools.chain.from_iterable(part.logprobs for part in parts)
        first, last = parts[0], parts[-1]
        return Update(
            tuple(tokens),
            text,
            tuple(logprobs),
            last.finish_reason,
            last.num_cached_tokens,
            first.prompt_logprobs,
        )


class Backend(Protocol):
    """What generates for a ServedModel: an EngineThread, or a ReplicaClient."""

    error: str | None  # why nothing can be generated; None if it can

    @property
    def config(self):
        """Return the configuration of the model."""

    @property
    def encoding(self) -> Encoding:
        """Return the encoding of the model."""

    @property
    def stall_reason(self) -> str | None:
        """Return why a running backend seems to be stuck; None if it does not."""

    def admit(self, num_requests: int, num_tokens: int = 0) -> None:
        """Check that the queue has room for more requests, with `num_tokens` prompt tokens in all.

        Raises QueueFull if it has no room now, UserError if it never could, and EngineDead.
        """

    def generate(
        self, inputs: GenerateInput, matcher: Matcher | None = None
    ) -> AsyncIterator[dict[int, Update]]:
        """Yield new output of the prompts, by index, until all are finished.

        matcher: keeps the compiled constraint alive; None: it is compiled first, if there is one.
        Raises what `admit` raises, before any work.
        """


class MetricsReader(Protocol):
    """What /metrics shows."""

    async def read(self) -> bytes:
        """Return the metrics in Prometheus' text format."""


class Monitor(Protocol):
    """What /live streams."""

    def subscribe(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the engine or the client ends."""

    def close(self) -> None:
        """End all streams and refuse new ones."""

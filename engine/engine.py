"""The engine: requests in, events out."""

import torch

from cache import check_stride
from engine.cache import PagedCache, Span, last_logits
from engine.pages import PagePool, page_count
from engine.request import Event, Request, make_request
from engine.scheduler import Scheduler, Work
from errors import UserError, check_limits, memory_for
from model import Model
from sampling import NOT_FINITE, SamplingParams, choose

LIMITS = {  # argument: its type, which values are valid, how to say that
    "max_rows": (int, lambda value: value >= 1, "an integer >= 1"),
    "num_pages": (int, lambda value: value >= 1, "an integer >= 1"),
    "page_size": (int, lambda value: value >= 1, "an integer >= 1"),
    "budget": (int, lambda value: value >= 1, "an integer >= 1"),
}


class Engine:
    """Writes many texts together, each the one that `generate` writes, but for rounding.

    max_rows: how many are computed in one step, at most. num_pages: the cache, in pages of
    page_size positions; None: so many that max_rows whole windows fit. budget: tokens in one step,
    at most. stride: as in `generate`.
    Only one thread at a time may use it. Raises UserError for a value out of range, or if the cache
    does not fit in memory.
    After Yu et al. 2022, "Orca: A distributed serving system for transformer-based generative
    models".
    """

    def __init__(
        self,
        model: Model,
        max_rows: int = 32,
        num_pages: int | None = None,
        page_size: int = 16,
        budget: int = 512,
        stride: int | None = None,
    ):
        check_limits(LIMITS, max_rows=max_rows, page_size=page_size, budget=budget)
        block_size = model.config.block_size
        if num_pages is None:
            num_pages = max_rows * page_count(block_size, page_size)
        check_limits(LIMITS, num_pages=num_pages)
        self.model = model
        self.cache = PagedCache(model, num_pages, page_size)
        pool = PagePool(num_pages, page_size)
        stride = check_stride(stride, block_size)
        self.scheduler = Scheduler(pool, max_rows, budget, block_size, stride)
        self.steps = 0  # so far
        self.positions = 0  # computed so far

    def add(self, prompt: list[int], params: SamplingParams, salt: str = "") -> Request:
        """Queue a text: token ids, of which none means the BOS token.

        salt: computed prefixes are shared among requests of one salt only; the time to the first
        token tells whether somebody else had the same.
        Draws without a seed get a random one. A request for no new tokens is over at once, without
        an event.
        Raises UserError for an id out of range, a salt that is no string, and if the text can never
        fit into the cache.
        """
        if not isinstance(salt, str):
            raise UserError(f"salt is {salt!r}; it must be a string")
        request = make_request(prompt, params, self.model.config)
        request.salt = salt
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request: Request) -> None:
        """End a request now; it has no further event.

        Raises ValueError if it is over, or of another engine.
        """
        self.scheduler.finish(request, "abort")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One pass: an event for each request that got a token, or that failed.

        A pass without memory ends its requests; logits that are not finite end theirs alone.
        Waiting ones go on. Any other exception, such as KeyboardInterrupt, leaves `step`: its
        events are lost, but no text is wrong, and the next step goes on from there.
        """
        works = self.scheduler.schedule()
        if not works:
            return []
        try:
            with memory_for("the texts of this step"):
                tokens = self.compute(works)
        except UserError as error:
            return [self.fail(work.request, str(error)) for work in works]
        events = [self.update(work, token) for work, token in zip(works, tokens)]
        return [event for event in events if event]  # a chunk has none

    def compute(self, works: list[Work]) -> list[int | None]:
        """The token that follows each text; None where logits are not finite."""
        spans = [Span(work.request.pages, work.request.computed, work.tokens) for work in works]
        logits = last_logits(self.model, self.cache, spans)  # (works, vocab_size)
        self.steps += 1
        self.positions += sum(len(work.tokens) for work in works)
        finite = logits.isfinite().all(dim=-1)
        logits[~finite] = 0  # whatever is chosen there is not used
        requests = [work.request for work in works]
        texts = [request.tokens for request in requests]
        params = [request.params for request in requests]
        tokens = choose(logits, params, texts, [request.prompt_length for request in requests])
        return [token if good else None for token, good in zip(tokens, finite.tolist())]

    def update(self, work: Work, token: int | None) -> Event | None:
        """Add a token to a text, or end it: None is an error. A chunk of a prompt has no event."""
        request = work.request
        if token is None:  # also of a chunk: what it wrote would be shared
            return self.fail(request, NOT_FINITE)
        if not work.complete:
            self.scheduler.advance(work, None)
            return None
        self.scheduler.advance(work, token)
        reason = None
        if token in self.model.config.eos_token_ids and not request.params.ignore_eos:
            reason = "stop"
        elif len(request.output) == request.params.max_new_tokens:
            reason = "length"
        if reason:
            self.scheduler.finish(request, reason)
        return Event(request, [token], reason)

    def fail(self, request: Request, error: str) -> Event:
        """End a request that could not be computed."""
        self.scheduler.finish(request, "error")
        return Event(request, [], "error", error)

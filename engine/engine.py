"""The engine: requests in, events out."""

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Sequence

import tiktoken
import torch

from cache import check_stride, shared_length
from checkpoint import UserError
from engine.cache import PagedCache, Span, last_logits
from engine.drafter import Drafter
from engine.pages import PagePool
from engine.request import Event, Request
from engine.scheduler import Scheduler, Work
from model import Model
from sampling import NOT_FINITE, SamplingParams, TokenLogprob, check_limits, choose, params_of_each, token_logprob
from tokenizer import StopStream


class Engine:
    """Writes many texts together, each the one that `generate` writes from the same prompt, parameters and seed.

    max_rows: how many are computed in one step, at most. num_pages: the cache, in pages of page_size positions; None:
    so many that max_rows whole windows fit. budget: tokens in one step, at most. stride: as in `generate`.
    drafter: proposes up to gamma tokens, 1 to 16, to follow each text; they change no text.
    encoding: makes text of tokens; None if only tokens are wanted.
    Raises UserError for a value out of range, or if the cache does not fit in memory.
    After Yu et al. 2022, "Orca: A distributed serving system for transformer-based generative models".
    """

    def __init__(
        self,
        model: Model,
        max_rows: int = 32,
        num_pages: int | None = None,
        page_size: int = 16,
        budget: int = 512,
        stride: int | None = None,
        drafter: Drafter | None = None,
        gamma: int = 3,
        encoding: tiktoken.Encoding | None = None,
    ):
        block_size = model.config.block_size
        check_limits(max_rows=max_rows, page_size=page_size, budget=budget, gamma=gamma)
        num_pages = max_rows * -(-block_size // page_size) if num_pages is None else num_pages
        check_limits(num_pages=num_pages)
        self.model, self.cache = model, PagedCache(model, num_pages, page_size)
        pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(pool, max_rows, budget, block_size, check_stride(stride, block_size))
        self.drafter, self.gamma, self.encoding = drafter, gamma, encoding
        self.steps = self.positions = self.drafted = self.accepted = 0  # so far

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        salt: str = "",
        stop: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Request:
        """Queue a text: token ids, of which none means the BOS token. Draws without a seed get a random one.

        salt: computed prefixes are shared among requests of one salt only; the time to the first token tells whether
        somebody else had the same. stop: strings; the text ends before the first of them. logprobs: how many of the
        most likely tokens, 0 to 20, come with the log-probability of each token of the output, those of a stop string
        too; None: no log-probabilities. A request for no new tokens is over at once, without an event.
        Raises UserError for an id or a number out of range, an empty stop string or any without an encoding, and if the
        text can never fit into the cache.
        """
        check_limits(logprobs=logprobs)
        tokens, size = list(prompt) or [self.model.config.bos_token_id], self.model.config.vocab_size
        wrong = [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]
        if wrong:
            raise UserError(f"the prompt has the id {wrong[0]!r}; ids of this model are integers from 0 to {size - 1}")
        if not isinstance(salt, str):
            raise UserError(f"salt is {salt!r}; it must be a string")
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        request = Request(tokens, len(tokens), params, salt, stream=self.stream(params, stop), top=logprobs)
        if params.max_new_tokens == 0:
            request.finish_reason = "length"
        else:
            self.scheduler.add(request)
        return request

    def stream(self, params: SamplingParams, stop: Sequence[str]) -> StopStream | None:
        """What makes text of a request's tokens. Raises UserError if it cannot stop there."""
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop is {stop!r}; it must be a list of strings that are not empty")
        if self.encoding:
            silent = () if params.ignore_eos else self.model.config.eos_token_ids
            return StopStream(self.encoding, silent, tuple(stop))
        if stop:
            raise UserError("an engine without an encoding does not know stop strings")

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request: Request) -> None:
        """End a request now; it has no further event, and text that is held back is lost.

        Raises ValueError if it is over, or of another engine.
        """
        self.scheduler.finish(request, "abort")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One pass: an event for each request that got tokens, or that failed.

        A pass that fails with a MemoryError or a RuntimeError, as torch does without memory, ends its requests; logits
        that are not finite, also behind a draft, end theirs alone; waiting ones go on. If the pass fails with anything
        else, such as KeyboardInterrupt, no text has changed, and the next step goes on from there.
        """
        self.draft()
        works = self.scheduler.schedule()
        if not works:
            return []
        spans = [Span(work.request.pages, work.request.computed, work.tokens) for work in works]
        try:
            results = self.compute(works, spans)
        except (MemoryError, RuntimeError) as error:
            reason = str(error) or "out of memory"  # MemoryError has no text
            return [self.fail(work.request, span, reason) for work, span in zip(works, spans)]
        self.steps += 1
        self.positions += sum(len(span.tokens) for span in spans)
        events = []
        for work, span, result in zip(works, spans, results):
            if result is None:  # also of a chunk: what it wrote would be shared
                events.append(self.fail(work.request, span, NOT_FINITE))
            elif work.complete:
                events.append(self.advance(work, *result))
            else:
                self.scheduler.advance(work, [])
        return events

    def draft(self) -> None:
        """Ask for drafts for the requests that lack nothing but their newest token, and have none yet."""
        if self.drafter is None:
            return
        asking = [its for its in self.scheduler.running if len(its.lacking) == 1 and not its.drafts]
        # No pass crosses a hop: all of its positions see one window. The last token comes without a draft.
        room = [self.model.config.block_size - its.length for its in asking]
        left = [its.params.max_new_tokens - len(its.output) - 1 for its in asking]
        budget = self.scheduler.budget - len(self.scheduler.running)
        counts = [min(self.gamma, budget, *most) for most in zip(room, left)]
        with contextlib.suppress(MemoryError, RuntimeError):  # then there are no drafts
            for its, count, drafts in zip(asking, counts, self.drafter.propose(asking, counts)):
                its.drafts = drafts[:count]

    def compute(self, works: list[Work], spans: list[Span]) -> list[tuple[list[int], list[TokenLogprob]] | None]:
        """The tokens that follow each text, accepted drafts first, and their log-probabilities if they are wanted.

        None for a text whose logits are not finite.
        """
        keep = [len(work.drafts) + 1 for work in works]
        logits = last_logits(self.model, self.cache, spans, keep)
        requests = [work.request for work, count in zip(works, keep) for _ in range(count)]
        texts = [its.request.tokens + its.drafts[:index] for its, count in zip(works, keep) for index in range(count)]
        lengths = [request.prompt_length for request in requests]
        tokens, finite = choose(logits, [its.params for its in requests], texts, lengths), logits.isfinite().all(dim=-1)
        results = []
        for work, count, end in zip(works, keep, itertools.accumulate(keep)):
            part, top = slice(end - count, end), work.request.top
            chosen, logprobs = tokens[part][: shared_length(tokens[part], work.drafts) + 1], []
            if top is not None and work.complete:
                logprobs = [token_logprob(row, token, top) for row, token in zip(logits[part], chosen)]
            results.append((chosen, logprobs) if finite[part].all() else None)
        return results

    def advance(self, work: Work, chosen: list[int], logprobs: list[TokenLogprob]) -> Event:
        """Add tokens to a text, up to the one that ends it."""
        request, tokens, text, reason = work.request, [], "", None
        for token in chosen:
            tokens.append(token)
            text += request.stream.add(token) if request.stream else ""
            ends = token in self.model.config.eos_token_ids and not request.params.ignore_eos
            if ends or request.stream and request.stream.stopped:
                reason = "stop"
            elif len(request.output) + len(tokens) == request.params.max_new_tokens:
                reason = "length"
            if reason:
                break
        self.drafted += len(work.drafts)
        self.accepted += len(chosen) - 1  # also where the text ends before the last of these
        self.scheduler.advance(work, tokens)
        if reason:
            text += self.end(request, reason)
        request.text += text
        request.logprobs += logprobs[: len(tokens)]
        return Event(request, tokens, reason, text=text, logprobs=logprobs[: len(tokens)])

    def fail(self, request: Request, span: Span, error: str) -> Event:
        """End a request that could not be computed."""
        self.cache.clear(span)
        text = self.end(request, "error")
        request.text += text
        return Event(request, [], "error", error, text)

    def end(self, request: Request, reason: str) -> str:
        """A request is over: the text that was held back."""
        self.scheduler.finish(request, reason)
        return request.stream.end() if request.stream else ""

    def run(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """The outputs for a list of prompts, in its order. params: for all of them, or one for each.

        Events of requests that were added before are lost. Raises UserError if one is refused, and then none is queued,
        or if one failed, after all others are done; ValueError if params are not as many as prompts.
        """
        requests, errors = [], []
        try:
            for prompt, its in zip(prompts, params_of_each(params, len(prompts))):
                requests.append(self.add(prompt, its))
        except UserError:
            for request in requests:
                if not request.finish_reason:  # one for no new tokens is over already
                    self.abort(request)
            raise
        while self.busy:
            errors += [event.error for event in self.step() if event.error]
        if errors:
            raise UserError(errors[0])
        return [request.output for request in requests]

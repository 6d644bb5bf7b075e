"""Which tokens of which requests the next step computes."""

from collections import deque
from typing import NamedTuple

import torch

from cache import Span, first_visible_position, window_start
from engine.pages import PagePool
from engine.request import Request
from errors import UserError

LIMITS = {  # argument of an engine: its type, which values are valid, how to say that
    "max_num_seqs": (int, lambda value: value >= 1, "an integer >= 1"),
    "num_pages": (int, lambda value: value >= 1, "an integer >= 1"),
    "page_size": (int, lambda value: value >= 1, "an integer >= 1"),
    "max_num_batched_tokens": (int, lambda value: value >= 1, "an integer >= 1"),
    "gamma": (int, lambda value: 1 <= value <= 16, "an integer from 1 to 16"),
}


class ScheduledRequest(NamedTuple):
    """What a step computes of a request: tokens from `request.num_computed_tokens` on."""

    request: Request
    tokens: list[int]
    drafts: list[int]  # the last of them

    @property
    def complete(self) -> bool:
        """Whether they reach the newest token, so that another one follows."""
        return (
            self.request.num_computed_tokens + len(self.tokens) - len(self.drafts)
            == self.request.length
        )

    @property
    def span(self) -> Span:
        """Where they stand in the cache."""
        pages, sliding_pages = map(fill_null_pages, self.request.page_tables)
        return Span(
            pages,
            self.request.num_computed_tokens,
            self.tokens,
            sliding_pages,
            self.request.adapter,
        )

    def token_masks(self) -> list[torch.Tensor | UserError | None]:
        """Which tokens may follow each of its texts, (vocab_size,); None for all.

        The error where none may. None for a chunk, whose token is not used.
        """
        return [self.request.token_mask(text) if self.complete else None for text in self.texts]

    @property
    def texts(self) -> list[list[int]]:
        """The text, and the text with one draft more each: a token is chosen to follow each."""
        tokens = self.request.tokens
        return [tokens + self.drafts[:count] for count in range(len(self.drafts) + 1)]


class Scheduler:
    """First come, first served.

    A waiting request runs when fewer than max_num_seqs do, and there are pages for its window.
    Running requests take pages as they grow. Where none is free, the youngest gives all of its
    pages back.
    There is no prefill and no decode phase. A request has tokens and a count of those computed,
    and in each step some catch up, under one budget of tokens. A scheduler knows no model: call
    `schedule`, compute, then `advance` or `finish` each request.
    sliding_window: how many positions a token sees in any layer, itself included; None: all in some
    layer. Pages before it are given back. sliding_pool: pages of layers with this window, if these
    have their own; those of `pool` are then of layers that see all.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        token_budget: int,
        block_size: int,
        stride: int,
        sliding_window: int | None = None,
        sliding_pool: PagePool | None = None,
    ):
        self.pool = pool
        self.sliding_pool = sliding_pool
        # Of each KV cache group: their pages, and how many positions they see.
        self.kv_cache_groups = (
            [(pool, None), (sliding_pool, sliding_window)]
            if sliding_pool
            else [(pool, sliding_window)]
        )
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.block_size = block_size
        self.stride = stride
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # by the last step; they may be running again
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # positions of requests when they begin to run
        self.prefix_cache_hits = 0  # of these, those found instead of computed

    def add(self, request: Request) -> None:
        """Queue a request; one for no new tokens is over at once.

        Raises UserError if its longest window may not fit.
        """
        if request.params.max_new_tokens == 0:
            request.finish_reason = "length"
            return
        pool = self.pool
        longest = min(len(request.tokens) + request.params.max_new_tokens - 1, self.block_size)
        needed = pool.page_count(longest)
        if needed > pool.num_pages:
            allowed = f"there are {pool.num_pages} pages of {pool.page_size}"
            raise UserError(f"a text of up to {longest} positions needs {needed} pages; {allowed}")
        self.shift_context(request)
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledRequest]:
        """What to compute next: what running requests lack, the oldest first, then waiting ones."""
        self.preempted = []
        scheduled = []
        token_budget = self.token_budget
        while len(scheduled) < len(self.running):
            request = self.running[len(scheduled)]
            younger = len(self.running) - len(scheduled) - 1
            tokens = request.uncomputed_tokens[: token_budget - younger]  # leave each a token
            if not self.allocate(request, len(tokens)):
                # Perhaps the request itself, but never the oldest: it fits alone.
                self.preempt(self.running[-1])
                continue
            scheduled.append(ScheduledRequest(request, tokens, []))
            token_budget -= len(tokens)
        while self.waiting and token_budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.admit(request, token_budget):
                break  # strict FIFO: a long request cannot starve
            self.running.append(self.waiting.popleft())
            tokens = request.uncomputed_tokens[:token_budget]
            scheduled.append(ScheduledRequest(request, tokens, []))
            token_budget -= len(tokens)
        return self.schedule_drafts(scheduled, token_budget)

    def schedule_drafts(
        self, scheduled: list[ScheduledRequest], token_budget: int
    ) -> list[ScheduledRequest]:
        """Add the drafts that fit into the rest of the budget and the pages."""
        result = []
        for request, tokens, _ in scheduled:
            drafts = request.drafts[:token_budget]
            while drafts and not self.allocate(request, len(tokens) + len(drafts), len(drafts)):
                drafts.pop()
            token_budget -= len(drafts)
            result.append(ScheduledRequest(request, tokens + drafts, drafts))
        return result

    def allocate(self, request: Request, count: int, drafts: int = 0) -> bool:
        """Take pages for the window of a request and drafts; False if too few are free.

        Layers with pages of their own take those of the next `count` positions.
        """
        if not self.pool.allocate(request.pages, request.length + drafts):
            return False
        return not self.sliding_pool or self.sliding_pool.allocate(
            request.sliding_pages, request.num_computed_tokens + count
        )

    def admit(self, request: Request, token_budget: int) -> bool:
        """Give a waiting request pages for its window; False if too few are free.

        Those of its longest computed prefix are found, and the others taken.
        """
        tokens = request.context_window[:-1]  # not the last: its logits are wanted
        cached = []
        for pool, sliding_window in self.kv_cache_groups:
            cached.append(pool.find_cached(tokens, request.cache_salt, sliding_window))
            tokens = tokens[: len(cached[-1]) * pool.page_size]
        count = min(token_budget, request.length - len(tokens))
        ends = request.length, len(tokens) + count
        for (pool, _), found, end in zip(self.kv_cache_groups, cached, ends):
            del found[len(cached[-1]) :]
            # Found pages that are free do not count as free.
            free = pool.num_free_pages - sum(page in pool.free_pages for page in found)
            if pool.page_count(end) - len(found) > free:
                return False
        for (pool, _), table, found in zip(self.kv_cache_groups, request.page_tables, cached):
            pool.acquire([page for page in found if page is not None])
            table += found
        request.num_computed_tokens = len(tokens)
        self.prefix_cache_queries += request.length
        self.prefix_cache_hits += request.num_computed_tokens
        return self.allocate(request, count)

    def preempt(self, request: Request) -> None:
        """Take all pages of a running request; it is the first to run again, and computed anew."""
        self.preempted.append(request)
        self.num_preemptions += 1
        self.free(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def free(self, request: Request) -> None:
        """Give back the pages of a request, with all that was computed."""
        for (pool, _), table in zip(self.kv_cache_groups, request.page_tables):
            pool.free_after(table, 0)
        request.num_computed_tokens = 0
        request.page_hashes = []
        request.drafts = []

    def advance(self, entry: ScheduledRequest, tokens: list[int], num_accepted: int = 0) -> None:
        """A scheduled request is computed.

        tokens: those that follow; none if it was not complete. num_accepted: how many of them were
        drafts, whose positions are computed; they are the first.
        """
        request = entry.request
        request.num_computed_tokens += len(entry.tokens) - len(entry.drafts) + num_accepted
        request.tokens += tokens
        request.drafts = []
        known = request.page_hashes
        filled = request.num_computed_tokens // self.pool.page_size > len(known)
        for (pool, sliding_window), table in zip(self.kv_cache_groups, request.page_tables):
            if filled:  # a page
                request.page_hashes = known[:]
                computed = request.context_window[: request.num_computed_tokens]
                pool.cache_pages(table, request.page_hashes, computed, request.cache_salt)
            pool.free_after(table, request.length)  # refused drafts may have taken more
            if sliding_window is not None:
                pool.free_before(
                    table, first_visible_position(request.num_computed_tokens, sliding_window)
                )
        self.shift_context(request)

    def shift_context(self, request: Request) -> None:
        """Cut a text that has outgrown its window: all positions change, so none is computed."""
        start = window_start(len(request.tokens), self.block_size, self.stride)
        if start != request.start:
            request.start = start
            self.free(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request. Raises ValueError if it is over, or not one of this scheduler's."""
        if request.finish_reason:
            past = request.finish_reason
            raise ValueError(f"this request is over already, with the reason {past!r}")
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("this request was added to another engine")
        self.free(request)
        request.finish_reason = reason


def fill_null_pages(pages: list[int | None]) -> list[int]:
    """A page table in which any page stands for one that nothing reads."""
    if pages and pages[0] is None:
        return [0 if page is None else page for page in pages]
    return pages

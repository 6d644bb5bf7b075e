"""Scheduler: selects the requests and tokens that the next step computes."""

import functools
import time
from collections import deque
from typing import NamedTuple

from cache import ContextWindow, Span, first_visible_position
from engine.pages import PagePool
from engine.request import Request
from errors import UserError
from loading.prefix_files import PrefixFiles
from sampling import Sequence


class ScheduledRequest(NamedTuple):
    """Tokens of a request that a step computes, starting at `request.num_computed_tokens`."""

    request: Request
    tokens: list[int]
    drafts: list[int]  # draft tokens at the end of `tokens`

    @property
    def complete(self) -> bool:
        """Return whether the step reaches the newest token, and so samples the next one."""
        return (
            self.request.num_computed_tokens + len(self.tokens) - len(self.drafts)
            == self.request.length
        )

    @property
    def num_logits(self) -> int:
        """Return how many of the last positions need logits.

        At least one does, because logits that are not finite fail the request.
        """
        end = self.request.num_computed_tokens + len(self.tokens)
        return max(end - self.request.first_logits_position, 1)

    @property
    def span(self) -> Span:
        """Return the tokens with their place in the KV cache."""
        pages, sliding_pages = map(fill_null_pages, self.request.page_tables)
        return Span(
            pages,
            self.request.num_computed_tokens,
            self.tokens,
            sliding_pages,
            self.request.adapter,
        )

    def sequences(self) -> list[tuple[Sequence, UserError | None]]:
        """Return the sequences to sample from: the request's tokens and its first 0, 1, ... drafts.

        Each comes with a UserError if its constraint allows no token. A prefill chunk has no mask,
        because its sampled token is not used.
        """
        if not self.complete:
            return [(self.request.with_drafts([]), None)]
        return [
            self.request.masked_sequence(self.drafts[:count])
            for count in range(len(self.drafts) + 1)
        ]


class Scheduler:
    """FIFO scheduler with chunked prefill and preemption.

    A waiting request is admitted when fewer than max_num_seqs run and its context window fits.
    Running requests allocate pages as they grow. If none is free, the youngest is preempted.
    Prompt log-probabilities are computed once for equal requests: the others wait until the first
    has them, and are overtaken meanwhile. Later ones copy them while the first has no output.
    There are no separate prefill and decode phases. A request has tokens and a count of computed
    ones, and each step computes some of the rest within token_budget. The scheduler needs no
    model: call `schedule`, compute, then `advance` or `finish` each request.
    sliding_window: the largest sliding window of any layer, in positions, the query included.
    Full pages before it are freed. None if a full-attention layer shares them. sliding_pool: pages
    of sliding-window layers, if these have their own; then `pool` is for the other layers.
    prefix_files: files of pages, which extend prefix caching; None: none.
    max_prompt_logits: positions per step of requests that need the logits of their whole prompt;
    None: token_budget.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        token_budget: int,
        context_window: ContextWindow,
        sliding_window: int | None = None,
        sliding_pool: PagePool | None = None,
        prefix_files: PrefixFiles | None = None,
        max_prompt_logits: int | None = None,
    ):
        self.pool = pool
        self.prefix_files = prefix_files
        self.sliding_pool = sliding_pool
        # Pool and sliding window of each KV cache group.
        self.kv_cache_groups = (
            [(pool, None), (sliding_pool, sliding_window)]
            if sliding_pool
            else [(pool, sliding_window)]
        )
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_prompt_logits = max_prompt_logits or token_budget
        self.context_window = context_window
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # in the last step; may be running again
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # positions of requests at admission
        self.prefix_cache_hits = 0  # of these, positions found in the cache

    def add(self, request: Request) -> None:
        """Queue a request; with max_new_tokens 0 and no logits to compute it finishes immediately.

        Raises UserError if its longest context window exceeds the pool.
        """
        for other in (*self.running, *self.waiting):
            if request.is_scored_by(other) and not other.needs_prompt_logits:
                request.prompt_logprobs = list(other.prompt_logprobs)
        if request.params.max_new_tokens == 0 and not request.needs_prompt_logits:
            request.finish_reason = "length"
            return
        pool = self.pool
        longest = max(request.max_length - 1, request.prompt_length)
        longest = min(longest, self.context_window.block_size)
        needed = pool.page_count(longest)
        if needed > pool.num_pages:
            need = f"a sequence of up to {longest} positions needs {needed} pages"
            raise UserError(f"{need}: num_pages is {pool.num_pages} (page_size {pool.page_size})")
        self.shift_context(request)
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledRequest]:
        """Schedule uncomputed tokens of running requests, oldest first, then admit waiting ones."""
        self.preempted = []
        scheduled = []
        token_budget = self.token_budget
        while len(scheduled) < len(self.running):
            request = self.running[len(scheduled)]
            younger = len(self.running) - len(scheduled) - 1
            # Leave each younger request a token.
            limit = self.chunk_limit(request, token_budget - younger, scheduled)
            tokens = request.uncomputed_tokens[:limit]
            if not self.allocate(request, len(tokens)):
                # This may be the request itself, but never the oldest one, which fits alone.
                self.preempt(self.running[-1])
                continue
            scheduled.append(ScheduledRequest(request, tokens, []))
            token_budget -= len(tokens)
        index = 0
        while index < len(self.waiting) and token_budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[index]
            if any(map(request.is_scored_by, self.running)):
                index += 1
                continue
            limit = self.chunk_limit(request, token_budget, scheduled)
            if not self.admit(request, limit):
                break  # strict FIFO: a long request cannot starve
            del self.waiting[index]
            self.running.append(request)
            tokens = request.uncomputed_tokens[:limit]
            scheduled.append(ScheduledRequest(request, tokens, []))
            token_budget -= len(tokens)
        return self.schedule_drafts(scheduled, token_budget)

    def chunk_limit(
        self, request: Request, token_budget: int, scheduled: list[ScheduledRequest]
    ) -> int:
        """Return how many tokens of a request a step may compute, of token_budget > 0.

        All requests that need prompt logits share max_prompt_logits, but each gets a token.
        """
        if not request.needs_prompt_logits:
            return token_budget
        used = sum(len(entry.tokens) for entry in scheduled if entry.request.needs_prompt_logits)
        return min(token_budget, max(self.max_prompt_logits - used, 1))

    def schedule_drafts(
        self, scheduled: list[ScheduledRequest], token_budget: int
    ) -> list[ScheduledRequest]:
        """Add the drafts that fit into the remaining token budget and the free pages."""
        result = []
        for request, tokens, _ in scheduled:
            drafts = request.drafts[:token_budget]
            while drafts and not self.allocate(request, len(tokens) + len(drafts), len(drafts)):
                drafts.pop()
            token_budget -= len(drafts)
            result.append(ScheduledRequest(request, tokens + drafts, drafts))
        return result

    def allocate(self, request: Request, count: int, num_drafts: int = 0) -> bool:
        """Allocate pages for the context window of a request and its drafts.

        The sliding-window group, if any, gets pages only for the next `count` positions. Returns
        False if too few pages are free.
        """
        if not self.pool.allocate(request.pages, request.length + num_drafts):
            return False
        return not self.sliding_pool or self.sliding_pool.allocate(
            request.sliding_pages, request.num_computed_tokens + count
        )

    def admit(self, request: Request, token_budget: int) -> bool:
        """Allocate pages for the context window of a waiting request, with prefix caching.

        Returns False if too few pages are free.
        """
        cached = self.find_cached(request)
        if not self.fits(request, cached, token_budget):
            return False
        if self.prefix_files:
            self.load_saved(request)
            cached = self.find_cached(request)
            if not self.fits(request, cached, token_budget):
                return False
        for (pool, _), table, found in zip(self.kv_cache_groups, request.page_tables, cached):
            pool.acquire([page for page in found if page is not None])
            table += found
        request.num_computed_tokens = len(cached[0]) * self.pool.page_size
        request.admission_time = time.time_ns()
        if not request.output:  # a later admission recomputes output, too
            # After a preemption the cache may have lost hits, or gained what this request computed.
            previous = request.num_cached_tokens
            hits = request.num_computed_tokens
            request.num_cached_tokens = hits if previous is None else min(previous, hits)
        self.prefix_cache_queries += request.length
        self.prefix_cache_hits += request.num_computed_tokens
        return self.allocate(request, self.first_chunk(request, cached, token_budget))

    def find_cached(self, request: Request, saved: bool = False) -> list[list]:
        """Return the pages of a request's longest cached prefix in each KV cache group.

        saved: whether to count saved pages, by their hashes, as cached.
        """
        # A cached position has no logits.
        tokens = request.context_window[: request.first_logits_position]
        cached = []
        for group, (pool, sliding_window) in enumerate(self.kv_cache_groups):
            is_saved = functools.partial(self.prefix_files.has, group) if saved else None
            cached.append(pool.find_cached(tokens, request.cache_salt, sliding_window, is_saved))
            tokens = tokens[: len(cached[-1]) * pool.page_size]
        return [found[: len(cached[-1])] for found in cached]

    def first_chunk(self, request: Request, cached: list[list], token_budget: int) -> int:
        """Return how many tokens of a request the step of its admission computes."""
        return min(token_budget, request.length - len(cached[0]) * self.pool.page_size)

    def fits(self, request: Request, cached: list[list], token_budget: int) -> bool:
        """Return whether enough pages are free to admit a request with this cached prefix."""
        num_cached = len(cached[0]) * self.pool.page_size
        ends = request.length, num_cached + self.first_chunk(request, cached, token_budget)
        for (pool, _), found, end in zip(self.kv_cache_groups, cached, ends):
            # Cache hits among the free pages cannot serve as new pages.
            free = pool.num_free_pages - sum(page in pool.free_pages for page in found)
            if pool.page_count(end) - len(found) > free:
                return False
        return True

    def load_saved(self, request: Request) -> None:
        """Load pages of a request's prefix from files into free pages, which are then cached."""
        complete = False
        while not complete:  # a file that fails is not found again, so the prefix gets shorter
            cached = self.find_cached(request, saved=True)
            complete = all(
                pool.load_pages(found, functools.partial(self.prefix_files.load, group))
                for group, ((pool, _), found) in enumerate(zip(self.kv_cache_groups, cached))
            )

    def share_prompt_logprobs(self, request: Request) -> None:
        """Copy the log-probabilities of a request's prompt to waiting requests that need them."""
        for other in self.waiting:
            if other.is_scored_by(request):
                other.prompt_logprobs = list(request.prompt_logprobs)

    def preempt(self, request: Request) -> None:
        """Free all pages of a running request, and put it first in the queue for recomputation."""
        self.preempted.append(request)
        self.num_preemptions += 1
        self.free(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def free(self, request: Request) -> None:
        """Free the pages of a request, and reset its computed tokens and drafts."""
        for (pool, _), table in zip(self.kv_cache_groups, request.page_tables):
            pool.free_tail(table, 0)
        request.num_computed_tokens = 0
        request.page_hashes = []
        request.drafts = []

    def advance(self, entry: ScheduledRequest, tokens: list[int], num_accepted: int = 0) -> None:
        """Record that a scheduled request was computed, and append its new tokens.

        tokens: empty if the entry was not complete. num_accepted: number of accepted drafts, which
        are the first of tokens, and whose positions are computed.
        """
        request = entry.request
        request.num_computed_tokens += len(entry.tokens) - len(entry.drafts) + num_accepted
        request.tokens += tokens
        request.drafts = []
        known = request.page_hashes
        filled = request.num_computed_tokens // self.pool.page_size > len(known)
        for group, (pool, sliding_window) in enumerate(self.kv_cache_groups):
            table = request.page_tables[group]
            if filled:  # at least one new full page
                request.page_hashes = known[:]
                computed = request.context_window[: request.num_computed_tokens]
                pool.cache_pages(table, request.page_hashes, computed, request.cache_salt)
                self.save_pages(request, group, len(known))
            pool.free_tail(table, request.length)  # rejected drafts may have allocated more
            if sliding_window is not None:
                pool.free_skipped(
                    table, first_visible_position(request.num_computed_tokens, sliding_window)
                )
        self.shift_context(request)

    def save_pages(self, request: Request, group: int, start: int) -> None:
        """Save the full pages of a request from index `start` on.

        All count as used when it was admitted, earlier pages slightly later: without its first page
        no other page of a prefix can be found.
        """
        if not self.prefix_files:
            return
        for index, page_hash in enumerate(request.page_hashes[start:], start):
            page = request.page_tables[group][index]
            if page is not None:
                used = request.admission_time - 1000 * index
                self.prefix_files.save(group, page_hash, page, used)

    def shift_context(self, request: Request) -> None:
        """Shift the context window of a sequence that outgrew it; all positions are recomputed."""
        start = self.context_window.start(len(request.tokens))
        if start != request.start:
            request.start = start
            self.free(request)

    def finish(self, request: Request, reason: str) -> None:
        """Finish a request. Raises ValueError if it is finished or belongs to another scheduler."""
        if request.finish_reason:
            past = request.finish_reason
            raise ValueError(f"this request has already finished, with finish_reason {past!r}")
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("this request belongs to another engine")
        self.free(request)
        request.finish_reason = reason


def fill_null_pages(pages: list[int | None]) -> list[int]:
    """Replace null pages of a page table with page 0; attention never reads these entries."""
    if pages and pages[0] is None:
        return [0 if page is None else page for page in pages]
    return pages

"""Which tokens of which requests the next step computes."""

from collections import deque
from typing import NamedTuple

from cache import window_start
from checkpoint import UserError
from engine.pages import PagePool
from engine.request import Request


class Work(NamedTuple):
    """What a step computes of a request: tokens from position `request.computed` of its window on."""

    request: Request
    tokens: list[int]


class Scheduler:
    """First come, first served: a waiting request runs when fewer than max_rows do, and there are pages for all of it.

    There is no prefill and no decode phase. A request has tokens and a count of those computed, and in each step it
    catches up. A scheduler knows no model: call `schedule`, compute, then `advance` or `finish` each request.
    """

    def __init__(self, pool: PagePool, max_rows: int, block_size: int, stride: int):
        self.pool, self.max_rows, self.block_size, self.stride = pool, max_rows, block_size, stride
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if its longest window may not fit."""
        longest, pool = self.longest(request), self.pool
        if pool.count(longest) > pool.num_pages:
            allowed = f"there are {pool.num_pages} pages of {pool.page_size}"
            raise UserError(f"a text of up to {longest} positions needs {pool.count(longest)} pages; {allowed}")
        self.move_window(request)
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """What to compute next: all that running requests lack."""
        while self.waiting and len(self.running) < self.max_rows:
            request = self.waiting[0]
            if not self.pool.grow(request.pages, self.longest(request)):
                break  # a shorter one behind it waits too: else a long one might wait for ever
            self.running.append(self.waiting.popleft())
        return [Work(request, request.lacking) for request in self.running]

    def longest(self, request: Request) -> int:
        """The most positions that a request ever has in the cache; its last token is not passed."""
        return min(request.prompt_length + request.params.max_new_tokens - 1, self.block_size)

    def advance(self, work: Work, token: int) -> None:
        """Its tokens are computed, and this one follows."""
        request = work.request
        request.computed += len(work.tokens)
        request.tokens.append(token)
        self.move_window(request)

    def move_window(self, request: Request) -> None:
        """Where the text has outgrown its window, cut it; all positions change, so all are computed again."""
        start = window_start(len(request.tokens), self.block_size, self.stride)
        if start != request.start:
            request.start, request.computed = start, 0

    def finish(self, request: Request, reason: str) -> None:
        """End a request. Raises ValueError if it is over already, or not one of this scheduler's."""
        if request.finish_reason:
            raise ValueError(f"this request is over already, with the reason {request.finish_reason!r}")
        if request in self.running:
            self.running.remove(request)
            self.pool.shrink(request.pages, 0)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("this request was added to another engine")
        request.finish_reason = reason

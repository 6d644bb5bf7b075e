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
    drafts: list[int]  # the last of them

    @property
    def complete(self) -> bool:
        """Whether they reach the newest token, so that another one follows."""
        return self.request.computed + len(self.tokens) - len(self.drafts) == self.request.length


class Scheduler:
    """First come, first served: a waiting request runs when fewer than max_rows do, and there are pages for its window.

    Running requests take pages as they grow. Where none is free, the youngest gives all of its pages back.
    There is no prefill and no decode phase. A request has tokens and a count of those computed, and in each step some
    catch up, under one budget of tokens. A scheduler knows no model: call `schedule`, compute, then `advance` or
    `finish` each request.
    """

    def __init__(self, pool: PagePool, max_rows: int, budget: int, block_size: int, stride: int):
        self.pool, self.max_rows, self.budget = pool, max_rows, budget
        self.block_size, self.stride = block_size, stride
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.shared = 0  # shared: positions found instead of computed

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if its longest window may not fit."""
        longest = min(len(request.tokens) + request.params.max_new_tokens - 1, self.block_size)
        needed, pool = self.pool.count(longest), self.pool
        if needed > pool.num_pages:
            allowed = f"there are {pool.num_pages} pages of {pool.page_size}"
            raise UserError(f"a text of up to {longest} positions needs {needed} pages; {allowed}")
        self.move_window(request)
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """What to compute next: what running requests lack, the oldest first, and then waiting ones."""
        works, budget = [], self.budget
        while len(works) < len(self.running):
            request, younger = self.running[len(works)], len(self.running) - len(works) - 1
            tokens = request.lacking[: budget - younger]  # a token is left for each of them
            if self.pool.grow(request.pages, request.length):
                works.append(Work(request, tokens, []))
                budget -= len(tokens)
            else:
                self.preempt(self.running[-1])  # perhaps the request itself, but never the oldest: it fits alone
        while self.waiting and budget and len(self.running) < self.max_rows:
            request = self.waiting[0]
            if not self.admit(request):
                break  # a shorter one behind it waits too: else a long one might wait for ever
            self.running.append(self.waiting.popleft())
            works.append(Work(request, request.lacking[:budget], []))
            budget -= len(works[-1].tokens)
        for index, (request, tokens, _) in enumerate(works):  # last: they get what all others leave
            drafts = self.fitting_drafts(request, budget)
            works[index] = Work(request, tokens + drafts, drafts)
            budget -= len(drafts)
        return works

    def fitting_drafts(self, request: Request, budget: int) -> list[int]:
        """The drafts of a request, as many as the budget and the free pages allow."""
        drafts = request.drafts[:budget]
        while drafts and not self.pool.grow(request.pages, request.length + len(drafts)):
            drafts.pop()
        return drafts

    def admit(self, request: Request) -> bool:
        """Give a waiting request pages for its window, computed ones if there are some; False if too few are free."""
        pool = self.pool
        shared = pool.find(request.window[:-1], request.salt)  # the last token is computed: its logits are wanted
        free = len(pool.free) - sum(page in pool.free for page in shared)  # those found are not there to be taken
        if pool.count(request.length) - len(shared) > free:
            return False
        pool.hold(shared)
        request.pages, request.computed = shared, len(shared) * pool.page_size
        self.shared += request.computed
        return pool.grow(request.pages, request.length)

    def preempt(self, request: Request) -> None:
        """Take back the pages of a running request; it is the first to run again, and then computed again."""
        self.preemptions += 1
        self.forget(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def forget(self, request: Request) -> None:
        """Give back the pages of a request, with all that was computed."""
        self.pool.shrink(request.pages, 0)
        request.computed, request.digests, request.drafts = 0, [], []

    def advance(self, work: Work, tokens: list[int]) -> None:
        """A work is computed. tokens: those that follow, accepted drafts first; none if it was not complete."""
        request = work.request
        request.computed += len(work.tokens) - len(work.drafts) + max(len(tokens) - 1, 0)
        request.tokens += tokens
        request.drafts = []
        if request.computed // self.pool.page_size > len(request.digests):  # a page has been filled
            self.pool.publish(request.pages, request.digests, request.window[: request.computed], request.salt)
        self.pool.shrink(request.pages, request.length)  # refused drafts may have taken more
        self.move_window(request)

    def move_window(self, request: Request) -> None:
        """Where the text has outgrown its window, cut it. All positions change, so all are computed again."""
        start = window_start(len(request.tokens), self.block_size, self.stride)
        if start != request.start:
            request.start = start
            self.forget(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request. Raises ValueError if it is over already, or not one of this scheduler's."""
        if request.finish_reason:
            raise ValueError(f"this request is over already, with the reason {request.finish_reason!r}")
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("this request was added to another engine")
        self.forget(request)
        request.finish_reason = reason

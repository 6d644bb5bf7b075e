"""Structured output on a server: constraints compiled and masks computed under time limits.

llguidance may compute for seconds, and cannot be stopped. It releases the GIL meanwhile.
"""

import asyncio
import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from constraints import compiler
from constraints.compiler import make_matcher
from constraints.matcher import Matcher
from errors import UserError
from sampling import SamplingParams

COMPILE_SECONDS = 10  # time limit for compiling a constraint
MASK_SECONDS = 2  # time limit per mask, for which the whole batch waits
# A mask's time beyond FAIR_SECONDS counts against a budget that the sequences of a request share.
# It is CPU time, so a busy machine ends no sequence. The budget stops ambiguous grammars.
FAIR_SECONDS = 0.005
BUDGET_SECONDS = 1
TOO_SLOW = (
    "computing the allowed tokens takes too long: make the grammar unambiguous, or use fewer "
    "alternatives"
)
MAX_TIMED_OUT = 4  # late calls that still run: each occupies a thread and a CPU core
MAX_BYTES = 2**29  # of compiled constraints, by `constraint_bytes`


class QueueFull(Exception):
    """Error for a request that the server has no capacity for now."""


class Deadline:
    """Executor with its own daemon threads that abandons calls after a timeout.

    seconds: timeout of a call. An abandoned thread ends when its function returns, and does not
    keep the process alive. While MAX_TIMED_OUT abandoned calls run, no new call is accepted.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.idle: list[queue.SimpleQueue] = []  # call queues of idle threads
        self.timed_out: set[Future] = set()

    @property
    def full(self) -> bool:
        """Return whether too many abandoned calls run to accept another."""
        return len(self.timed_out) >= MAX_TIMED_OUT

    def call(self, function: Callable, *args):
        """Call a function in a thread; return its result or raise its exception.

        Raises UserError after the timeout, QueueFull if too many abandoned calls run.
        """
        if self.full:
            raise QueueFull(
                f"{MAX_TIMED_OUT} constraints are still being computed: try again later"
            )
        try:
            calls = self.idle.pop()
        except IndexError:
            calls = queue.SimpleQueue()
            threading.Thread(
                target=run_calls, args=(calls,), name="constraints", daemon=True
            ).start()
        future = Future()
        calls.put((future, function, args))
        try:
            error = future.exception(self.seconds)
        except TimeoutError:
            calls.put(None)
            self.timed_out.add(future)
            future.add_done_callback(self.timed_out.discard)
            raise UserError(f"the constraint takes more than {self.seconds} s to compute") from None
        self.idle.append(calls)
        if error is not None:
            raise error
        return future.result()


def run_calls(calls: queue.SimpleQueue) -> None:
    """Run calls from a queue until it yields None."""
    while call := calls.get():
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, args  # do not keep them alive until the next call


COMPILER = Deadline(COMPILE_SECONDS)
MASKS = Deadline(MASK_SECONDS)


@functools.cache
def compile_pool(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process in which requests wait for constraints.

    It is separate from the event loop's executor, which also encodes prompts. process: process id,
    the cache key, because a forked child inherits no threads.
    """
    COMPILER.idle.clear()
    MASKS.idle.clear()
    return ThreadPoolExecutor(2, "compile")


def stall_reason() -> str | None:
    """Return why no more constraints are computed; None if they are."""
    full = COMPILER.full or MASKS.full
    return f"{MAX_TIMED_OUT} constraints are being computed without end" if full else None


def compile_matcher(params: SamplingParams, encoding, config) -> Matcher | None:
    """Return a matcher as `make_matcher` does, which keeps the compiled constraint alive.

    Return None without a constraint.
    Raises UserError as `make_matcher` does, and after COMPILE_SECONDS; QueueFull if constraints in
    use exceed MAX_BYTES or too many abandoned calls run.
    """
    constraint = params.constraint
    if constraint is None:
        return None
    known = any(key[:2] == constraint for key in compiler.compiled.copy())
    if not known and not has_capacity(constraint.source):
        compiler.clear_constraint_cache()
        if not has_capacity(constraint.source):
            held = compiler.compiled_bytes() // 2**20
            raise QueueFull(
                f"the constraints of waiting and running requests take {held} MB: try again later"
            )
    return COMPILER.call(make_matcher, params, encoding, config)


def has_capacity(source: str | tuple[str, ...]) -> bool:
    """Return whether a constraint with this source fits into MAX_BYTES."""
    return compiler.compiled_bytes() + compiler.constraint_bytes(source) <= MAX_BYTES


async def run_in_compile_pool(function: Callable, *args):
    """Run a function in a thread of the compile pool and await its result."""
    return await asyncio.get_running_loop().run_in_executor(
        compile_pool(os.getpid()), function, *args
    )


async def make_matcher_in_thread(params: SamplingParams, encoding, config) -> Matcher | None:
    """Return a matcher as `compile_matcher` does, or one of a thinking budget without a constraint.

    The latter compiles nothing, so it waits for no constraint of another request.
    """
    if not params.needs_matcher:
        return None
    if params.constraint is None:
        return await asyncio.to_thread(make_matcher, params, encoding, config)
    return await run_in_compile_pool(compile_matcher, params, encoding, config)


@dataclass
class MaskTimeBudget:
    """CPU time that the masks of a request have taken beyond FAIR_SECONDS each.

    clock: returns the CPU seconds of the calling thread.
    """

    clock: Callable[[], float] = time.thread_time
    used: float = 0.0  # seconds

    def call(self, function: Callable, *args):
        """Call a function, charge its time to the budget, and return its result."""
        began = self.clock()
        result = function(*args)
        self.used += max(0.0, self.clock() - began - FAIR_SECONDS)
        return result


class TimedMatcher(Matcher):
    """Matcher that fails its sequence when masks take too long.

    That is when a mask takes longer than MASK_SECONDS, or the budget is used up. From then on
    `token_mask` always raises UserError. budget: shared budget; None: a new one.
    """

    def __init__(self, matcher: Matcher, budget: MaskTimeBudget | None = None):
        super().__init__(matcher.vocabulary)
        self.matcher = matcher
        self.budget = budget or MaskTimeBudget()
        self.error: UserError | None = None
        self.busy = False  # the error is due to constraints of other requests

    def token_mask(self, output: list[int]) -> torch.Tensor:
        if self.error:  # an abandoned thread may still use the matcher
            raise self.error
        try:
            if self.budget.used > BUDGET_SECONDS:
                raise UserError(self.field + TOO_SLOW)
            return MASKS.call(self.budget.call, self.matcher.token_mask, output)
        except (UserError, QueueFull) as error:
            self.busy = isinstance(error, QueueFull)
            self.error = UserError(str(error))
            raise self.error from None

    def reason(self) -> str:
        return self.field + self.matcher.reason()

    @property
    def field(self) -> str:
        """Return the prefix of an error: the request field of the constraint."""
        grammar = self.matcher.grammar
        return f"{grammar.field}: " if grammar else ""

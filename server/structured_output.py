"""Constraints of texts, compiled and asked for masks where neither can hold up a server.

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

import constraints
from constraints import Matcher, make_matcher
from errors import UserError
from sampling import SamplingParams

COMPILE_SECONDS = 10  # as long as a constraint may take to compile
MASK_SECONDS = 2  # and each mask of a text; other texts wait for it
# Beyond these, masks use up a budget that all texts of a request share. In processor time, so that
# a busy machine ends no text. An ambiguous grammar ends by it.
FAIR_SECONDS = 0.005
BUDGET_SECONDS = 1
TOO_SLOW = (
    "it takes too long to say which tokens may follow: write it so that a text can be read "
    "in one way only, or with fewer alternatives"
)
MAX_TIMED_OUT = 4  # computations that go on after their time: each holds a thread and a processor
MAX_BYTES = 2**29  # of compiled constraints, as `constraint_bytes` estimates them


class QueueFull(Exception):
    """There is no room now."""


class Deadline:
    """Calls functions in threads of its own, and gives up those that take too long.

    seconds: how long a call may take. A thread that is given up is left alone, ends when its
    function does, and keeps no process alive. After MAX_TIMED_OUT of them at once nothing is
    called.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.idle: list[queue.SimpleQueue] = []  # of threads that wait for a call
        self.timed_out: set[Future] = set()

    @property
    def full(self) -> bool:
        """Whether so many calls are late that no more are taken."""
        return len(self.timed_out) >= MAX_TIMED_OUT

    def call(self, function: Callable, *args):
        """Return what a function returns, or raise what it raises.

        Raises UserError if that takes too long, QueueFull if too many calls are late.
        """
        if self.full:
            raise QueueFull(f"{MAX_TIMED_OUT} constraints are still being computed: try again")
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
    """Do one call after another, until None comes."""
    while call := calls.get():
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, args  # else they are held until the next call


COMPILER = Deadline(COMPILE_SECONDS)
MASKS = Deadline(MASK_SECONDS)


@functools.cache
def compile_pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process in which requests wait for constraints.

    They are not the event loop's own, which also encode prompts. process: its id; what is forked
    has no threads.
    """
    COMPILER.idle.clear()
    MASKS.idle.clear()
    return ThreadPoolExecutor(2, "compile")


def stall_reason() -> str | None:
    """Return why no constraint is computed any more; None if constraints are."""
    full = COMPILER.full or MASKS.full
    return f"{MAX_TIMED_OUT} constraints of texts are computed without end" if full else None


def compile_matcher(params: SamplingParams, encoding, config) -> Matcher | None:
    """Return a matcher for a text, as `make_matcher`, which holds the compiled constraint.

    Raises what `make_matcher` raises, UserError for a constraint that takes longer than
    COMPILE_SECONDS, and QueueFull.
    """
    if params.constraint_field is None:
        return None
    source = getattr(params, params.constraint_field)
    known = any(key[:2] == (params.constraint_field, source) for key in constraints.compiled.copy())
    if not known and not has_capacity(source):
        constraints.clear_constraint_cache()
        if not has_capacity(source):
            held = constraints.compiled_bytes() // 2**20
            raise QueueFull(
                f"the constraints of waiting and running texts take {held} MB: try again"
            )
    return COMPILER.call(make_matcher, params, encoding, config)


def has_capacity(source: str | tuple[str, ...]) -> bool:
    """Return whether the bytes of one more constraint are within MAX_BYTES."""
    return constraints.compiled_bytes() + constraints.constraint_bytes(source) <= MAX_BYTES


async def run_in_compile_pool(function: Callable, *args):
    """Await a function in a thread for constraints."""
    return await asyncio.get_running_loop().run_in_executor(
        compile_pool(os.getpid()), function, *args
    )


@dataclass
class MaskTimeBudget:
    """Processor time that the masks of a request may take beyond FAIR_SECONDS each.

    clock: returns seconds of the thread that calls it.
    """

    clock: Callable[[], float] = time.thread_time
    used: float = 0.0  # seconds

    def call(self, function: Callable, *args):
        """Return what a function returns, and charge the time that it takes."""
        began = self.clock()
        result = function(*args)
        self.used += max(0.0, self.clock() - began - FAIR_SECONDS)
        return result


class TimedMatcher(Matcher):
    """A matcher that gives a text up when its masks take too long.

    That is when one takes longer than MASK_SECONDS, or when the budget is used up. `token_mask`
    then raises UserError, again and again. budget: None for one of its own.
    """

    def __init__(self, matcher: Matcher, budget: MaskTimeBudget | None = None):
        super().__init__(matcher.vocabulary)
        self.matcher = matcher
        self.budget = budget or MaskTimeBudget()
        self.error: UserError | None = None
        self.busy = False  # whether others' constraints are why

    def token_mask(self, output: list[int]) -> torch.Tensor:
        if self.error:  # the other thread may still have the matcher
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
        """The beginning of an error, which names the field that the constraint is from."""
        grammar = getattr(self.matcher, "grammar", None)
        return f"{grammar.field}: " if grammar else ""

"""The processes that compute a model together, and what crosses between them."""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from errors import UserError, catch_out_of_memory, is_out_of_memory

WAYS = "gather", "reduce"
LIMIT = timedelta(seconds=60)  # one that does not answer in this time is taken for dead
FOREVER = timedelta(days=365)  # between two passes
GONE = re.compile("connect|time.?out|timed out|socket|pipe|barrier", re.IGNORECASE)  # gloo's words
ENDED = "another of the processes has ended or does not answer"


class RankError(Exception):
    """One of several processes cannot go on, so none can."""


class Ranks:
    """The processes of this run: rank is which one this is, from 0 on, size how many there are.

    Rank 0 leads: it reads and prints, and tells the others each pass. way: how layers are joined,
    "gather" or "reduce". collectives, traffic, seconds: how often ranks met in passes, how many
    bytes this one sent, and how long it took, waiting included. What `tell` sends is not counted.
    Use it as a context manager. All ranks leave the block together. If one fails in it, all do: the
    first one says why, and the others raise SystemExit.
    """

    def __init__(self, way: str = "gather"):
        self.way = way
        self.store, self.rank, self.size = next(dist.rendezvous("env://", timeout=LIMIT))
        group = {"store": self.store, "rank": self.rank, "world_size": self.size}
        dist.init_process_group("gloo", timeout=LIMIT, **group)
        # Followers wait forever; the leader times out, or it would hang on a stalled rank.
        self.news = dist.new_group(timeout=FOREVER if self.rank else LIMIT)
        self.patient = dist.new_group(timeout=FOREVER)
        self.collectives = 0
        self.traffic = 0
        self.seconds = 0.0
        # A rank that waits in a collective does not come to raise KeyboardInterrupt.
        if self.rank and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def all_gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """The parts of all ranks, (..., widths[rank]), side by side: (..., sum(widths))."""
        padded, parts = of_one_size(x, widths)
        self.call((self.size - 1) * padded.nbytes, dist.all_gather, parts, padded)
        return side_by_side(parts, widths)

    def gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Join the parts on rank 0; the other ranks send theirs, and get them back."""
        padded, parts = of_one_size(x, widths)
        if self.rank:
            self.call(padded.nbytes, dist.gather, padded)
            return x
        self.call(0, dist.gather, padded, parts)
        return side_by_side(parts, widths)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the x of all ranks, in place (all-reduce)."""
        self.call(2 * (self.size - 1) * x.nbytes // self.size, dist.all_reduce, x)
        return x

    @contextlib.contextmanager
    def no_way_back(self):
        """Raise RankError if memory runs out inside the block: the others cannot go on."""
        try:
            with catch_out_of_memory("the texts of this step"):
                yield
        except UserError as error:
            raise RankError(str(error)) from None

    def tell(self, work=None):
        """Broadcast what rank 0 has to say: it is returned on each rank. Others may wait long."""
        box = [work]
        self.guard(dist.broadcast_object_list, box, group=self.news)
        return box[0]

    def wait(self) -> None:
        """A barrier: until all ranks are here, however long that takes."""
        self.guard(dist.barrier, self.patient)

    def call(self, traffic: int, collective: Callable, *arguments) -> None:
        """Meet the other ranks, and count it. traffic: bytes that this one sends."""
        began = time.perf_counter()
        self.guard(collective, *arguments)
        self.collectives += 1
        self.traffic += traffic
        self.seconds += time.perf_counter() - began

    def guard(self, collective: Callable, *arguments, **options) -> None:
        """Meet the other ranks. Raises RankError if one of them is not there any more."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            if GONE.search(str(error)):
                raise RankError(ENDED) from error
            raise

    def statistics(self, passes: int) -> str:
        """What a pass took of meetings, on average."""
        passes = max(passes, 1)
        each = f"{self.collectives / passes:.0f} collectives a step"
        cost = f"{self.traffic / passes:,.0f} bytes sent, {1000 * self.seconds / passes:.1f} ms"
        return f"{self.size} ranks: {each}, {cost}"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, error, _) -> None:
        if error is None:
            try:
                self.wait()
                dist.destroy_process_group()
                return
            except RankError as ended:
                error = ended
        first = self.is_first()
        if not isinstance(error, Exception):
            return  # Ctrl-C
        if not first:
            sys.exit(2)
        sys.stderr = sys.__stderr__  # a follower's own leads nowhere
        name = f"rank {self.rank}: " if self.rank else ""
        if is_out_of_memory(error):
            error = UserError("the model and its texts do not fit in memory")
        if isinstance(error, UserError | RankError):
            raise UserError(f"{name}{error}") from None

    def is_first(self) -> bool:
        """Whether no other process has failed before."""
        try:
            return self.store.add("failures", 1) == 1
        except RuntimeError:  # the store was in a process that has ended
            return True


class RankRunner:
    """Lets several processes compute the passes of a model: rank 0 tells the others of each.

    runner: what computes this rank's part.
    """

    def __init__(self, ranks: Ranks, runner):
        self.ranks = ranks
        self.runner = runner

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        self.ranks.tell((spans, keep))
        return self.compute(model, cache, spans, keep)

    def compute(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        """Compute this rank's part of a pass. Ranks above 0 have no use for the result."""
        # An engine goes on after a pass without memory, but the other ranks are inside of it.
        with self.ranks.no_way_back():
            return self.runner.logits(model, cache, spans, keep)

    @torch.inference_mode()
    def follow(self, model, cache) -> None:
        """Compute each pass that rank 0 tells of, for it has the engine, until it has no more."""
        while work := self.ranks.tell():
            self.compute(model, cache, *work)

    def choose(self, *arguments) -> list[int]:
        return self.runner.choose(*arguments)


def of_one_size(x: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A part filled up to the widest, as gloo takes it, and room for those of all ranks."""
    padded = F.pad(x, (0, max(widths) - x.shape[-1]))
    return padded, [torch.empty_like(padded) for _ in widths]


def side_by_side(parts: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
    """What was filled up, in its own width again: (..., sum(widths))."""
    return torch.cat([part[..., :width] for part, width in zip(parts, widths)], dim=-1)

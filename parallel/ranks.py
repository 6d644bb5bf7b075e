"""Tensor-parallel ranks and their collectives."""

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
from model import PassOutput, TorchRunner

PARALLEL_MODES = "gather", "reduce"
TIMEOUT = timedelta(seconds=60)  # a rank that has not answered by then counts as dead
IDLE_TIMEOUT = timedelta(days=365)  # between two passes
LOST_CONNECTION = re.compile("connect|time.?out|timed out|socket|pipe|barrier", re.IGNORECASE)
RANK_LOST = "another process has ended or does not respond"


class RankError(Exception):
    """A failure of one rank, which stops all ranks."""


class TensorParallelGroup:
    """The tensor-parallel group. rank: of this process, from 0. size: the number of processes.

    Rank 0 is the driver: it does the input and output and broadcasts each pass to the workers.
    parallel_mode: how layers combine their results, "gather" or "reduce". collectives, bytes_sent,
    seconds: the number of collectives in passes, the bytes that this rank sent, and the time they
    took, waiting included. `broadcast` is not counted. Use it as a context manager. All ranks leave
    the block together. If one fails in it, all fail: the first reports the reason, and the others
    raise SystemExit.
    """

    def __init__(self, parallel_mode: str = "gather"):
        self.parallel_mode = parallel_mode
        self.store, self.rank, self.size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        group = {"store": self.store, "rank": self.rank, "world_size": self.size}
        dist.init_process_group("gloo", timeout=TIMEOUT, **group)
        # Workers wait forever; the driver times out, or it would hang on a stalled rank.
        self.broadcast_group = dist.new_group(timeout=IDLE_TIMEOUT if self.rank else TIMEOUT)
        self.barrier_group = dist.new_group(timeout=IDLE_TIMEOUT)
        self.collectives = 0
        self.bytes_sent = 0
        self.seconds = 0.0
        # A worker that waits in a collective would never get to raise KeyboardInterrupt.
        if self.rank and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def all_gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Concatenate the parts of all ranks, (..., widths[rank]), as (..., sum(widths))."""
        padded, parts = pad_to_widest(x, widths)
        self.timed_collective((self.size - 1) * padded.nbytes, dist.all_gather, parts, padded)
        return unpad_and_concat(parts, widths)

    def gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Concatenate the parts on rank 0. Other ranks send their part and get it back."""
        padded, parts = pad_to_widest(x, widths)
        if self.rank:
            self.timed_collective(padded.nbytes, dist.gather, padded)
            return x
        self.timed_collective(0, dist.gather, padded, parts)
        return unpad_and_concat(parts, widths)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks in place (all-reduce)."""
        self.timed_collective(2 * (self.size - 1) * x.nbytes // self.size, dist.all_reduce, x)
        return x

    @contextlib.contextmanager
    def fatal_out_of_memory(self):
        """Raise RankError if memory runs out inside the block, because no rank can continue."""
        try:
            with catch_out_of_memory("the sequences of this step"):
                yield
        except UserError as error:
            raise RankError(str(error)) from None

    def broadcast(self, command=None):
        """Broadcast rank 0's command and return it on every rank. Workers may wait a long time."""
        objects = [command]
        self.run_collective(dist.broadcast_object_list, objects, group=self.broadcast_group)
        return objects[0]

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes."""
        self.run_collective(dist.barrier, self.barrier_group)

    def timed_collective(self, bytes_sent: int, collective: Callable, *arguments) -> None:
        """Run a collective and count it. bytes_sent: by this rank."""
        began = time.perf_counter()
        self.run_collective(collective, *arguments)
        self.collectives += 1
        self.bytes_sent += bytes_sent
        self.seconds += time.perf_counter() - began

    def run_collective(self, collective: Callable, *arguments, **options) -> None:
        """Run a collective. Raises RankError if another rank is lost."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            if LOST_CONNECTION.search(str(error)):
                raise RankError(RANK_LOST) from error
            raise

    def statistics(self, passes: int) -> str:
        """Return the average communication per pass as a line of text."""
        passes = max(passes, 1)
        each = f"{self.collectives / passes:.0f} collectives a step"
        cost = f"{self.bytes_sent / passes:,.0f} bytes sent, {1000 * self.seconds / passes:.1f} ms"
        return f"{self.size} ranks: {each}, {cost}"

    def __enter__(self) -> "TensorParallelGroup":
        return self

    def __exit__(self, error_type, error, _) -> None:
        if error is None:
            try:
                self.barrier()
                dist.destroy_process_group()
                return
            except RankError as ended:
                error = ended
        is_first = self.is_first_failure()
        if not isinstance(error, Exception):
            return  # Ctrl-C
        if not is_first:
            sys.exit(2)
        sys.stderr = sys.__stderr__  # a worker's stderr is discarded
        prefix = f"rank {self.rank}: " if self.rank else ""
        if is_out_of_memory(error):
            error = UserError("the model and its sequences do not fit in memory")
        if isinstance(error, UserError | RankError):
            raise UserError(f"{prefix}{error}") from None

    def is_first_failure(self) -> bool:
        """Return whether no other process has failed before."""
        try:
            return self.store.add("failures", 1) == 1
        except RuntimeError:  # the process that held the store has ended
            return True


class TensorParallelRunner(TorchRunner):
    """A runner that computes each pass on all ranks, driven by rank 0.

    local_runner: computes this rank's part.
    """

    def __init__(self, tp_group: TensorParallelGroup, local_runner):
        self.tp_group = tp_group
        self.local_runner = local_runner

    def with_local_runner(self, local_runner) -> "TensorParallelRunner":
        """Return a runner on the same ranks, with this rank's part on another backend."""
        return TensorParallelRunner(self.tp_group, local_runner)

    def forward(self, model, cache, spans: list, keep: list[int]) -> PassOutput:
        self.tp_group.broadcast((spans, keep))
        return self.compute(model, cache, spans, keep)

    def compute(self, model, cache, spans: list, keep: list[int]) -> PassOutput:
        """Compute this rank's part of a pass. Workers ignore the result."""
        # The engine could go on after a failed allocation, but the other ranks are inside the pass.
        with self.tp_group.fatal_out_of_memory():
            return self.local_runner.forward(model, cache, spans, keep)

    @torch.inference_mode()
    def run_worker_loop(self, model, cache) -> None:
        """Compute each pass that rank 0 broadcasts, until it sends None. Only rank 0 schedules."""
        while command := self.tp_group.broadcast():
            self.compute(model, cache, *command)

    def sample_batch(self, *arguments) -> list[int]:
        return self.local_runner.sample_batch(*arguments)


def pad_to_widest(x: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return x padded to the widest part, as gloo requires, and buffers for the parts of all."""
    padded = F.pad(x, (0, max(widths) - x.shape[-1]))
    return padded, [torch.empty_like(padded) for _ in widths]


def unpad_and_concat(parts: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
    """Remove the padding of each part and concatenate them: (..., sum(widths))."""
    return torch.cat([part[..., :width] for part, width in zip(parts, widths)], dim=-1)

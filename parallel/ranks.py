"""The processes that compute a model together, and what crosses between them."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

WAYS = "gather", "reduce"
FOREVER = timedelta(days=365)  # between two passes of a server


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def follows() -> bool:
    """Whether this process is not the first of several."""
    return launched() and os.environ["RANK"] != "0"


class Ranks:
    """The processes of this run: rank is which one this is, from 0 on, size how many there are.

    Rank 0 leads: it reads and prints, and tells the others each pass. way: how layers are joined,
    "gather" or "reduce". collectives, traffic, seconds: how often ranks met in passes, how many
    bytes this one sent, and how long it took, waiting included. What `tell` sends is not counted.
    Use it as a context manager; all ranks leave it together.
    """

    def __init__(self, way: str = "gather"):
        self.way = way
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.news = dist.new_group(timeout=FOREVER)
        self.collectives = 0
        self.traffic = 0
        self.seconds = 0.0

    def all_gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """The parts of all ranks, (..., widths[rank]), side by side: (..., sum(widths))."""
        padded, parts = of_one_size(x, widths)
        self.call((self.size - 1) * padded.nbytes, dist.all_gather, parts, padded)
        return side_by_side(parts, widths)

    def gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """The same on rank 0 alone; the others send it their parts, and get them back."""
        padded, parts = of_one_size(x, widths)
        if self.rank:
            self.call(padded.nbytes, dist.gather, padded)
            return x
        self.call(0, dist.gather, padded, parts)
        return side_by_side(parts, widths)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Those of all ranks added up, in place: an all-reduce."""
        return self.all_reduce(x, dist.ReduceOp.SUM)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, number by number, in place. A NaN counts as infinite."""
        x.masked_fill_(x.isnan(), torch.inf)  # gloo would leave it out
        return self.all_reduce(x, dist.ReduceOp.MAX)

    def all_reduce(self, x: torch.Tensor, operation) -> torch.Tensor:
        self.call(2 * (self.size - 1) * x.nbytes // self.size, dist.all_reduce, x, operation)
        return x

    def tell(self, work=None):
        """Broadcast what rank 0 has to say: it is returned on each rank. It may take its time."""
        box = [work]
        dist.broadcast_object_list(box, group=self.news)
        return box[0]

    def wait(self) -> None:
        """A barrier: until all ranks are here, however long that takes."""
        dist.barrier(self.news)

    def call(self, traffic: int, collective: Callable, *arguments) -> None:
        """Meet the other ranks, and count it. traffic: bytes that this one sends."""
        began = time.perf_counter()
        collective(*arguments)
        self.collectives += 1
        self.traffic += traffic
        self.seconds += time.perf_counter() - began

    def statistics(self, passes: int) -> str:
        """What a pass took of meetings, on average."""
        passes = max(passes, 1)
        each = f"{self.collectives / passes:.0f} collectives a step"
        cost = f"{self.traffic / passes:,.0f} bytes sent, {1000 * self.seconds / passes:.1f} ms"
        return f"{self.size} ranks: {each}, {cost}"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.wait()
            dist.destroy_process_group()


def of_one_size(x: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A part filled up to the widest, as gloo takes it, and room for those of all ranks."""
    padded = F.pad(x, (0, max(widths) - x.shape[-1]))
    return padded, [torch.empty_like(padded) for _ in widths]


def side_by_side(parts: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
    """What was filled up, in its own width again: (..., sum(widths))."""
    return torch.cat([part[..., :width] for part, width in zip(parts, widths)], dim=-1)

"""The processes that compute a model together, and what crosses between them."""

from datetime import timedelta

import torch
import torch.distributed as dist

FOREVER = timedelta(days=365)  # between two passes


class Ranks:
    """The processes of this run: rank is which one this is, from 0 on, size how many there are.

    Rank 0 leads: it reads and prints, and tells the others each pass.
    Use it as a context manager. All ranks leave the block together.
    """

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.news = dist.new_group(timeout=FOREVER)

    def tell(self, work=None):
        """Broadcast what rank 0 has to say: it is returned on each rank. Others may wait long."""
        box = [work]
        dist.broadcast_object_list(box, group=self.news)
        return box[0]

    def wait(self) -> None:
        """A barrier: until all ranks are here, however long that takes."""
        dist.barrier(self.news)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.wait()
            dist.destroy_process_group()


class RankRunner:
    """Lets several processes compute the passes of a model: rank 0 tells the others of each.

    runner: what computes them on each rank.
    """

    def __init__(self, ranks: Ranks, runner):
        self.ranks = ranks
        self.runner = runner

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        self.ranks.tell((spans, keep))
        return self.runner.logits(model, cache, spans, keep)

    @torch.inference_mode()
    def follow(self, model, cache) -> None:
        """Compute each pass that rank 0 tells of, for it has the engine, until it has no more."""
        while work := self.ranks.tell():
            self.runner.logits(model, cache, *work)

    def choose(self, *arguments) -> list[int]:
        return self.runner.choose(*arguments)

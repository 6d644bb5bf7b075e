"""The processes that compute a model together, and what rank 0 tells the others."""

import os
from datetime import timedelta

import torch.distributed as dist

FOREVER = timedelta(days=365)  # between two passes of a server


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def follows() -> bool:
    """Whether this process is not the first of several."""
    return launched() and os.environ["RANK"] != "0"


class Ranks:
    """The processes of this run: rank is which one this is, from 0 on, size how many there are.

    Rank 0 leads: it reads and prints, and tells the others each pass.
    Use it as a context manager; all ranks leave it together.
    """

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.news = dist.new_group(timeout=FOREVER)

    def tell(self, work=None):
        """Broadcast what rank 0 has to say: it is returned on each rank. It may take its time."""
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

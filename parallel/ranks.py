"""Tensor-parallel ranks and their collectives."""

from datetime import timedelta

import torch
import torch.distributed as dist

IDLE_TIMEOUT = timedelta(days=365)  # between two passes


class TensorParallelGroup:
    """The tensor-parallel group. rank: of this process, from 0. size: the number of processes.

    Rank 0 is the driver: it does the input and output and broadcasts each pass to the workers. Use
    it as a context manager. All ranks leave the block together.
    """

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.broadcast_group = dist.new_group(timeout=IDLE_TIMEOUT)

    def broadcast(self, command=None):
        """Broadcast rank 0's command and return it on every rank. Workers may wait a long time."""
        objects = [command]
        dist.broadcast_object_list(objects, group=self.broadcast_group)
        return objects[0]

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes."""
        dist.barrier(self.broadcast_group)

    def __enter__(self) -> "TensorParallelGroup":
        return self

    def __exit__(self, error_type, *_) -> None:
        if error_type is None:
            self.barrier()
            dist.destroy_process_group()


class TensorParallelRunner:
    """A runner that computes each pass on all ranks, driven by rank 0.

    local_runner: computes them on each rank.
    """

    def __init__(self, tp_group: TensorParallelGroup, local_runner):
        self.tp_group = tp_group
        self.local_runner = local_runner

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        self.tp_group.broadcast((spans, keep))
        return self.local_runner.logits(model, cache, spans, keep)

    @torch.inference_mode()
    def run_worker_loop(self, model, cache) -> None:
        """Compute each pass that rank 0 broadcasts, until it sends None. Only rank 0 schedules."""
        while command := self.tp_group.broadcast():
            self.local_runner.logits(model, cache, *command)

    def sample_batch(self, *arguments) -> list[int]:
        return self.local_runner.sample_batch(*arguments)

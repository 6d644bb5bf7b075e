"""The choice of tokens in C."""

import ctypes

import torch

from native.linear import address
from native.structs import INT, POINTER, struct

DrawStruct = struct(
    "DrawStruct",
    logits=POINTER,
    seed=ctypes.c_uint64,
    **dict.fromkeys(("position", "top_k"), INT),
    **dict.fromkeys(("temperature", "top_p"), ctypes.c_float),
)


def draw(
    library: ctypes.CDLL, rows: list[torch.Tensor], params: list, positions: list[int]
) -> list[int]:
    """The next token of each row, as `sampling.sample` chooses it, but for rounding.

    rows: logits (vocab_size,), after penalties. params: a SamplingParams for each, with a seed or
    greedy; positions: of the draws. There is at least one row, and they are shared out over torch's
    threads.
    Whatever the logits are, a token is an id of the vocabulary. Raises ValueError for rows of other
    shapes and dtypes.
    """
    count = len(rows)
    size = len(rows[0])
    limits = torch.finfo(torch.float32)
    jobs = (DrawStruct * count)()
    for job, row, each, position in zip(jobs, rows, params, positions):
        job.logits = address(row, torch.float32, size)
        job.seed = each.seed or 0
        job.position = position
        job.top_k = min(each.top_k, size)
        if each.temperature:  # a divisor is neither 0 nor infinite in this dtype
            job.temperature = min(max(each.temperature, limits.tiny), limits.max)
        job.top_p = each.top_p
    chosen = (INT * count)()
    threads = min(torch.get_num_threads(), count)
    work = torch.empty(threads, 2, size)
    library.draw(INT(count), INT(size), jobs, chosen, POINTER(work.data_ptr()), threads)
    return list(chosen)

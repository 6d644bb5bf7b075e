"""Sampling in C."""

import ctypes

import torch

from native.linear import address
from native.structs import INT, POINTER, struct
from sampling import min_p_threshold

DrawStruct = struct(
    "DrawStruct",
    logits=POINTER,
    token_mask=POINTER,
    seed=ctypes.c_uint64,
    **dict.fromkeys(("position", "top_k"), INT),
    **dict.fromkeys(("temperature", "top_p", "min_p_threshold"), ctypes.c_float),
)


def draw(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    params: list,
    positions: list[int],
    token_masks: list[torch.Tensor | None] | None = None,
) -> list[int]:
    """Sample the next token of each row; it is the token of `sampling.sample`, up to rounding.

    logits: (B, vocab_size), after penalties, B >= 1. params: a SamplingParams for each row, with a
    seed or greedy. positions: the position of each draw. token_masks: for each row which tokens may
    be drawn, (vocab_size,) bools, some of them true; None: all. Torch's threads share the rows.
    Each token is an id of the vocabulary, whatever the logits are. Raises ValueError for logits
    that are not float32, or masks not bool, contiguous and of this shape.
    """
    count, size = len(params), logits.shape[-1]
    start = address(logits, torch.float32, count, size)
    limits = torch.finfo(torch.float32)
    jobs = (DrawStruct * count)()
    masks = token_masks or [None] * count
    for job, each, position, mask in zip(jobs, params, positions, masks, strict=True):
        job.logits = start
        job.token_mask = address(mask, torch.bool, size)
        start += size * logits.element_size()
        job.seed = each.seed or 0
        job.position = position
        job.top_k = min(each.top_k, size)
        if each.temperature:  # clamped, because float32 could round it to 0 or infinity
            job.temperature = min(max(each.temperature, limits.tiny), limits.max)
        job.top_p = each.top_p
        job.min_p_threshold = min_p_threshold(each.min_p)
    chosen = (INT * count)()
    threads = min(torch.get_num_threads(), count)
    scratch = torch.empty(threads, 2, size)
    library.draw(INT(count), INT(size), jobs, chosen, POINTER(scratch.data_ptr()), threads)
    return list(chosen)

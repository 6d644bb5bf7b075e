"""Sampling in C: ctypes bindings of draw.c."""

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
    """Sample the next token of each row of logits, as `sampling.sample` does up to rounding.

    logits: (B, vocab_size), after penalties, B >= 1. params: a SamplingParams per row, greedy or
    with a seed. positions: position of each draw. token_masks: allowed tokens of each row,
    (vocab_size,) bools, at least one of them true; None: all. Uses up to torch.get_num_threads()
    threads. Returns valid token ids for any logits, even NaN. Raises ValueError unless logits are
    float32 and masks bool, contiguous and of these shapes.
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
        if each.temperature:  # clamped, because float32 may round it to 0 or infinity
            job.temperature = min(max(each.temperature, limits.tiny), limits.max)
        job.top_p = each.top_p
        job.min_p_threshold = min_p_threshold(each.min_p)
    chosen = (INT * count)()
    threads = min(torch.get_num_threads(), count)
    scratch = torch.empty(threads, 2, size)
    library.draw(INT(count), INT(size), jobs, chosen, POINTER(scratch.data_ptr()), threads)
    return list(chosen)

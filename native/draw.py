"""The most likely token, found in C."""

import ctypes

import torch

from native.linear import address
from native.structs import INT, POINTER


def draw(library: ctypes.CDLL, logits: torch.Tensor) -> list[int]:
    """The most likely token of each row of logits, (B, vocab_size); of equal ones the first.

    Torch's threads share the rows. Raises ValueError for logits that are not float32 and
    contiguous.
    """
    count, size = logits.shape
    start = address(logits, torch.float32, count, size)
    chosen = (INT * count)()
    threads = min(torch.get_num_threads(), count)
    library.draw(INT(count), INT(size), POINTER(start), chosen, threads)
    return list(chosen)

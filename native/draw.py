"""The most likely token, found in C: ctypes bindings of draw.c."""

import ctypes

import torch

from native.linear import address
from native.structs import INT, POINTER


def draw(library: ctypes.CDLL, logits: torch.Tensor) -> list[int]:
    """Return the most likely token of each row of logits, ties by lower id.

    logits: (B, vocab_size). Uses up to torch.get_num_threads() threads. Raises ValueError unless
    logits are float32 and contiguous.
    """
    count, size = logits.shape
    start = address(logits, torch.float32, count, size)
    chosen = (INT * count)()
    threads = min(torch.get_num_threads(), count)
    library.draw(INT(count), INT(size), POINTER(start), chosen, threads)
    return list(chosen)

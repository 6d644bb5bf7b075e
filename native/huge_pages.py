"""Huge pages for weights: the TLB holds too few addresses for pages of 4 KB."""

import ctypes
from pathlib import Path

import torch

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
MADV_COLLAPSE = 25  # since Linux 6.1


def huge_page_bytes() -> int:
    """Return the size of the system's huge pages, 0 if there are none or `enabled` says never."""
    try:
        never = "[never]" in (SYSTEM / "enabled").read_text()
        return 0 if never else int((SYSTEM / "hpage_pmd_size").read_text())
    except OSError:
        return 0


def use_huge_pages(tensors: list[torch.Tensor]) -> None:
    """Move tensors on the CPU to huge pages. Their addresses stay.

    It takes about a second per GB. The kernel moves what it can: an older one nothing, and one
    without enough contiguous memory a part. Then passes are as fast as before.
    """
    size = huge_page_bytes()
    if not size:
        return
    madvise = ctypes.CDLL(None).madvise
    for tensor in filter(torch.numel, tensors):
        start = tensor.data_ptr() // size * size
        length = -(-(tensor.data_ptr() + tensor.nbytes - start) // size) * size
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_COLLAPSE)

"""What a process of the server does so that garbage, Python's and the C library's, costs little."""

import ctypes
import gc
import sys

GC_THRESHOLD = 10_000  # new objects before garbage is looked for among them


def freeze() -> None:
    """Look for garbage only among what is made from now on, and less often.

    The libraries are a million objects that stay. A body of 1 MiB has half a million more: without
    this, garbage is looked for among all of them several times while it is parsed, in which all
    streams stand still.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def trim() -> None:
    """Give what is garbage or free in the heap back to the system, where the C library can.

    glibc keeps it otherwise: what many clients needed at one time would stay for ever.
    """
    gc.collect()
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim:  # musl has none
            malloc_trim(0)

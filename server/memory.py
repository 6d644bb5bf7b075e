"""Settings of the garbage collector and the heap for a server process."""

import ctypes
import gc
import sys

GC_THRESHOLD = 10_000  # new objects before a collection of the youngest generation


def freeze() -> None:
    """Exclude all current objects from garbage collection, and collect less often.

    The libraries hold a million permanent objects, and parsing a body of 1 MiB makes half a million
    more. Otherwise the collector would scan all of them several times while it is parsed, and all
    streams would stall.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def trim() -> None:
    """Return garbage and free heap memory to the system, if the C library can.

    Otherwise glibc keeps the peak memory of many clients forever.
    """
    gc.collect()
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim:  # musl has none
            malloc_trim(0)

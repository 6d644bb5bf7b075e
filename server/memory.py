"""Settings of the garbage collector for a server process."""

import gc

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

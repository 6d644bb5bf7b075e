"""What a process of the server does so that garbage, Python's and the C library's, costs little."""

import gc

MANY = 10_000  # new objects before garbage is looked for among them


def freeze() -> None:
    """Look for garbage only among what is made from now on, and less often.

    The libraries are a million objects that stay. A body of 1 MiB has half a million more: without
    this, garbage is looked for among all of them several times while it is parsed, in which all
    streams stand still.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MANY)

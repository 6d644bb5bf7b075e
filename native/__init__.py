"""Native code for the CPU: gpt.c and draw.c, what compiles them, and what calls them."""

import torch

from native.build import BuildError, kernel
from native.step import NativeRunner

__all__ = ["BuildError", "NativeRunner", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model: its passes with a cache, and in all others its products.

    Its weights are packed, in place. Raises BuildError and ValueError as `NativeRunner`; then the
    model is as it was.
    """
    model.runner = NativeRunner(model)

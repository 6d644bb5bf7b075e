"""Native code for the CPU: gpt.c, what compiles it, and what calls it."""

import torch

from native.build import BuildError, kernel, load
from native.linear import native_layers

__all__ = ["BuildError", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Let C compute the products of a model.

    Its weights are packed, in place. Raises BuildError, and ValueError for weights that C cannot
    read.
    """
    native_layers(model, load())

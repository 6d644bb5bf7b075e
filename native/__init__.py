"""Native CPU backend: gpt.c, its build, and its Python bindings."""

import torch

from native.build import BuildError, kernel, load
from native.linear import replace_with_native_linear

__all__ = ["BuildError", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Run a model's linear layers and token embedding in C.

    The weights are packed in place. Raises BuildError, and ValueError for weights that C cannot
    read.
    """
    replace_with_native_linear(model, load())

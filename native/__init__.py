"""Native code for the CPU: gpt.c and draw.c, what compiles them, and what calls them."""

import torch

from native.build import BuildError, kernel, load
from native.linear import replace_with_native_linear
from native.step import NativeRunner, NativeSampler

__all__ = ["BuildError", "NativeRunner", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model: its passes with a cache, and in all others its products.

    Of a model that several processes compute, it computes products alone, and draws.
    Its weights are packed, in place. Raises BuildError and ValueError as `NativeRunner`; then the
    model is as it was.
    """
    if model.runner.tp_group:
        library = load()
        replace_with_native_linear(model, library)
        model.runner.runner = NativeSampler(library)
    else:
        model.runner = NativeRunner(model)

"""Native code for the CPU: gpt.c and draw.c, what compiles them, and what calls them."""

import torch

from native.build import BuildError, kernel, load
from native.linear import native_layers
from native.step import NativeChoice, NativePass

__all__ = ["BuildError", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model: its passes with a cache, and in all others its products.

    Of a model that several processes compute, it computes products alone, and draws.
    Its weights are packed, in place. Raises BuildError and ValueError as `NativePass`; then the
    model is as it was.
    """
    if model.ranks:
        library = load()
        native_layers(model, library)
        model.draws = NativeChoice(library)
    else:
        model.native = model.draws = NativePass(model)

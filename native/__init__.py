"""Native code for the CPU: gpt.c, what compiles it, and what calls it."""

import torch

from native.build import BuildError, kernel  # noqa: F401
from native.step import NativePass


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model: its passes with a cache, and in all others its products.

    Its weights are packed, in place. Raises BuildError and ValueError as `NativePass`; then the
    model is as it was.
    """
    model.native = model.draws = NativePass(model)

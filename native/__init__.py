"""Native code for the CPU: gpt.c, what compiles it, and what calls it."""

import torch

from int8 import Int8Linear
from native.build import BuildError, kernel  # noqa: F401
from native.linear import int8_linear
from native.step import NativePass


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model's passes of few tokens, and in all others the products with int8 weights.

    Raises BuildError without compiled code, ValueError for an architecture other than GPT-2 and Llama, and for weights
    that are neither float32 nor int8 or not on the CPU; then the model is as it was.
    """
    model.native = NativePass(model)
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.native = int8_linear

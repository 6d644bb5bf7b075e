"""Native code for the CPU: gpt.c, what compiles it, and what calls it."""

import torch

from int8 import Int8Linear
from native.build import BuildError, kernel, load  # noqa: F401
from native.linear import int8_linear


def use_native(model: torch.nn.Module) -> None:
    """Let C compute a model's products with int8 weights. Raises BuildError without compiled code."""
    load()
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.native = int8_linear

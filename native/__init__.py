"""Native CPU backend: gpt.c and draw.c, their build, and their Python bindings."""

import torch

from native.build import BuildError, kernel
from native.step import NativeRunner

__all__ = ["BuildError", "NativeRunner", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Run a model in C: whole forward passes with a KV cache, only linear layers without one.

    The weights are packed in place. Raises BuildError and ValueError as `NativeRunner` does, and
    then leaves the model unchanged.
    """
    model.runner = NativeRunner(model)

"""Native CPU backend: gpt.c and draw.c, their build, and their Python bindings."""

import torch

from draft_head import DraftHead
from native.build import BuildError, kernel, load
from native.huge_pages import use_huge_pages
from native.linear import replace_with_native_linear
from native.step import NativeHeadRunner, NativeRunner, NativeSampler

__all__ = ["BuildError", "NativeRunner", "kernel", "use_native"]


def use_native(model: torch.nn.Module) -> None:
    """Run a model in C: whole forward passes with a KV cache, only linear layers without one.

    With tensor parallelism C runs only the linear layers and the sampling. A draft head requires a
    target that was native when the head was made. The weights are packed in place. Raises
    BuildError and ValueError as `NativeRunner` does, and then leaves the model unchanged.
    """
    if isinstance(model, DraftHead):
        model.runner = NativeHeadRunner(model)
        use_huge_pages(list(model.target_layers[2].state_dict().values()))  # rows of the target
    elif model.runner.tp_group:
        library = load()
        replace_with_native_linear(model, library)
        model.runner = model.runner.with_local_runner(NativeSampler(library))
    else:
        model.runner = NativeRunner(model)
    use_huge_pages(list(model.state_dict().values()))

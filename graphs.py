"""Decode steps that are captured or compiled once for each shape, and replayed with new inputs."""

import copy
import functools
from collections.abc import Callable, Hashable

import torch

from cache import Span
from model import Model, TorchRunner

# packed inputs of a step, (n,), int64 -> its outputs, on the device
Step = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
# (function of inputs on the device, first inputs, device) -> the step, which takes inputs on the
# host or the device, and whose outputs the next step may overwrite
MakeStep = Callable[[Step, torch.Tensor, torch.device], Step]


def pack(parts: list[list[int] | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate lists and int64 tensors on the host, ready for a copy to the device."""
    packed = torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in parts])
    # From pageable memory the copy itself would be a sync.
    return packed.pin_memory() if device.type == "cuda" else packed


def eager_step(function: Step, packed: torch.Tensor, device: torch.device) -> Step:
    """Return a step that launches its kernels one by one; arguments as in MakeStep."""
    return lambda packed: function(packed.to(device, non_blocking=True))


@functools.cache
def memory_pool() -> torch.cuda.MemPool:
    """Return the memory that all graphs share, because no two run at the same time."""
    return torch.cuda.MemPool()


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """Return the stream of all warm-ups and captures, as libraries keep workspaces for each."""
    return torch.cuda.Stream()


class CapturedStep:
    """A step as a CUDA graph: one launch replays all its kernels, in the same memory.

    Arguments as in MakeStep. See "CUDA graphs" in PyTorch's notes on CUDA semantics.
    """

    def __init__(self, function: Step, packed: torch.Tensor, device: torch.device):
        self.function = function  # its tensors must live as long as the graph
        self.packed = packed.to(device, copy=True)
        stream = capture_stream()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function(self.packed)  # a first call loads or compiles kernels, which a capture may not
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may wait for the GPU meanwhile.
        options = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, memory_pool().id, **options):
            self.outputs = function(self.packed)

    def __call__(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.packed.copy_(packed, non_blocking=True)
        self.graph.replay()
        return self.outputs


MAX_COMPILED_STEPS = 2**16  # in a process; at torch's limits of 8 and 256 an engine would fail


def compile_step(function: Step, packed: torch.Tensor, device: torch.device) -> Step:
    """Return a step that torch.compile compiles in its first call; on a GPU it is captured, too.

    Arguments as in MakeStep. Caches with equal shapes share the compiled code.
    """
    torch._dynamo.config.accumulated_recompile_limit = MAX_COMPILED_STEPS
    options = {"fullgraph": True, "dynamic": False, "recompile_limit": MAX_COMPILED_STEPS}
    compiled = torch.compile(function, **options)
    return CapturedStep(compiled, packed, device) if device.type == "cuda" else compiled


def has_experts(model: Model) -> bool:
    """Return whether shapes depend on values, because each expert has its own number of rows."""
    return getattr(model.config, "experts", None) is not None


def has_fixed_shapes(model: Model, spans: list[Span]) -> bool:
    """Return whether a pass can have fixed shapes: one token of each sequence, no adapter."""
    fixed = all(len(span.tokens) == 1 and not span.adapter for span in spans)
    return fixed and not has_experts(model)


class GraphRunner(TorchRunner):
    """The torch backend with decode steps of fixed shapes, each made once by make_step.

    A cache keeps its steps, because they read and write its memory.
    """

    def __init__(self, make_step: MakeStep):
        self.make_step = make_step

    def replay(
        self, model, cache, key: Hashable, length: int, packed: torch.Tensor, function, *args
    ) -> tuple[torch.Tensor, ...]:
        """Run a step on packed inputs, and make it first if its shape is new; return its outputs.

        key: its shape. length: bound on the positions. function: called with model, cache, RoPE's
        tables for length, args and inputs on the device.
        """
        if key not in cache.steps:
            view = copy.copy(cache)  # a step that held the cache itself would keep it alive
            view.steps = {}
            step = functools.partial(function, model, view, model.rope_tables(length), *args)
            cache.steps[key] = self.make_step(step, packed, model.device)
        return cache.steps[key](packed)

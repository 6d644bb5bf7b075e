"""Decode steps that are captured or compiled once for each shape, and replayed with new inputs."""

import copy
import functools
from collections.abc import Callable, Hashable

import torch

from cache import KVCache, Span, cached_attention, make_causal_mask, write_slots
from model import Model, PassOutput, TorchRunner

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


MIN_LENGTH = 64  # positions of the smallest step in `generate`


def round_up(count: int) -> int:
    """Return the smallest power of two >= count."""
    return 1 << (count - 1).bit_length()


def has_experts(model: Model) -> bool:
    """Return whether shapes depend on values, because each expert has its own number of rows."""
    return getattr(model.config, "experts", None) is not None


def has_fixed_shapes(model: Model, spans: list[Span]) -> bool:
    """Return whether a pass can have fixed shapes: one token of each sequence, no adapter."""
    fixed = all(len(span.tokens) == 1 and not span.adapter for span in spans)
    return fixed and not has_experts(model)


class GraphRunner(TorchRunner):
    """The torch backend with decode steps of fixed shapes, each made once by make_step.

    A cache keeps its steps, because they read and write its memory. Here steps over a whole
    KVCache have fixed shapes; `StaticRunner` adds those over pages.
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

    def forward(self, model, cache, spans: list[Span], keep: list[int]) -> PassOutput:
        fixed = isinstance(cache, KVCache) and has_fixed_shapes(model, spans)
        if not fixed or [span.pages[0] for span in spans] != list(range(len(cache.tokens))):
            return super().forward(model, cache, spans, keep)
        tokens = [token for span in spans for token in span.tokens]
        starts = [span.start for span in spans]
        length = min(max(round_up(max(starts) + 1), MIN_LENGTH), cache.storage.shape[4])
        packed = pack([tokens, starts], model.device)
        output = self.replay(model, cache, length, length, packed, batch_output, length)
        return PassOutput(*(each.clone() for each in output))  # the next step may overwrite them


def batch_output(
    model: Model, cache: KVCache, tables: list[torch.Tensor], length: int, packed: torch.Tensor
) -> PassOutput:
    """Run a decode step over a KVCache, and return its output, a row for each sequence.

    packed: a token of each sequence, then their positions, below length. tables: of RoPE.
    """
    tokens, positions = packed.view(2, -1)
    attention = StaticBatch(cache, positions, length)
    x = model.hidden(tokens, positions, attention.attend, tables)
    return PassOutput(model.head(x).float(), x)


class StaticBatch:
    """Attention of a decode step over the first `length` positions of a KVCache.

    positions: of each sequence's token, (B,).
    """

    def __init__(self, cache: KVCache, positions: torch.Tensor, length: int):
        self.cache = cache
        self.length = length
        heads, max_len = cache.storage.shape[3:5]
        device = positions.device
        rows = torch.arange(len(positions) * heads, device=device).view(-1, heads)
        self.slots = rows * max_len + positions[:, None]  # of new keys, in a layer's keys
        keys = torch.arange(length, device=device)
        queries = positions.view(-1, 1, 1, 1)
        self.masks = {
            sliding_window: make_causal_mask(queries, keys, sliding_window)
            for sliding_window in set(cache.sliding_windows)
        }

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (B, heads, head_dim).
        """
        storage = self.cache.storage
        for index, new in enumerate((k, v), 2 * layer):
            write_slots(storage, index, self.slots, new)
        keys, values = storage[layer, ..., : self.length, :]
        mask = self.masks[self.cache.sliding_windows[layer]]
        q = q[:, :, None]
        return cached_attention(q, keys, values, mask, self.cache.softcap)[:, :, 0]

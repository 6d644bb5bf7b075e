"""Decode steps of fixed shapes: the same operations each time, on other numbers."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from cache import Span, cached_attention, write_slots
from engine.cache import PagedCache
from engine.device import BatchSampling, DeviceRunner, finite_logits
from engine.pages import page_count
from graphs import CapturedStep, GraphRunner, eager_step, has_fixed_shapes, pack, round_up
from model import Model, StepOutput, TorchRunner
from sampling import Sequence


class StepShape(NamedTuple):
    """Shape of a decode step, from which the sizes of all its tensors follow."""

    num_seqs: int  # a power of two
    num_pages: int  # of each page table, a power of two


def plan_step(cache: PagedCache, spans: list[Span]) -> tuple[StepShape, list[list[int]]]:
    """Plan a decode step on the host: return its shape, and what `StaticPass` needs.

    spans: of one token each. The last one is repeated to fill the shape, which writes the same keys
    and values again.
    """
    size = round_up(len(spans))
    spans = spans + spans[-1:] * (size - len(spans))
    page_size = cache.storage.shape[4]
    starts = [span.start for span in spans]
    counts = [page_count(start + 1, page_size) for start in starts]
    groups = [
        [table[:count] for table, count in zip(tables, counts)]
        for tables in zip(*((span.pages, span.sliding_pages) for span in spans))
    ]
    parts = [[token for span in spans for token in span.tokens], starts]
    parts += [[table[-1] for table in tables] for tables in groups[: len(cache.storages)]]
    pages = round_up(max(counts))
    for sliding_window, group_id in cache.views:
        width = pages
        if sliding_window is not None:  # its positions lie in no more pages
            width = min(pages, (sliding_window + 2 * page_size - 2) // page_size)
        parts += cache.page_columns(starts, groups[group_id], sliding_window, width)
    return StepShape(size, pages), parts


class StaticPass:
    """Attention of a decode step over a paged cache, with no shape that depends on a value.

    parts: of `plan_step`, on the device.
    """

    def __init__(self, cache: PagedCache, parts: Iterable[torch.Tensor]):
        self.cache = cache
        parts = iter(parts)
        self.tokens, self.positions = next(parts), next(parts)
        heads, page_size = cache.storage.shape[3:5]
        offsets = self.positions % page_size
        is_first = (offsets == 0).view(-1, 1, 1, 1)
        self.slots = []  # of each group, (B, heads): where a new key lies in a layer's keys
        for storage in cache.storages:
            pages = next(parts)
            # As in `PagedCache.bind`: a reused page may hold NaN.
            used = storage.index_select(2, pages).masked_fill(is_first, 0)
            storage.index_copy_(2, pages, used)
            head_pages = pages[:, None] * heads + torch.arange(heads, device=pages.device)
            self.slots.append(head_pages * page_size + offsets[:, None])
        self.kv_views = {
            sliding_window: cache.kv_view(
                self.positions, next(parts), next(parts), 1, sliding_window
            )
            for sliding_window, _ in cache.views
        }

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (B, heads, head_dim).
        """
        group_ids = self.cache.group_ids
        group_id = group_ids[layer]
        storage = self.cache.storages[group_id]
        num_pages, heads, page_size, width = storage.shape[2:]
        pages = storage.view(-1, page_size * width)  # flat, as in `write_slots`
        head_pages, mask = self.kv_views[self.cache.sliding_windows[layer]]
        read = []
        for index, new in enumerate((k, v), 2 * group_ids[:layer].count(group_id)):
            write_slots(storage, index, self.slots[group_id], new)
            own = pages.index_select(0, head_pages + index * num_pages * heads)
            read.append(own.view(len(q), heads, mask.shape[3], width))
        return cached_attention(q[:, :, None], *read, mask, self.cache.softcap)[:, :, 0]


class StaticRunner(GraphRunner, DeviceRunner):
    """The torch backend with decode steps of fixed shapes, each made once by `make_step`.

    A pass with several tokens of a sequence, an adapter or a mixture of experts runs as in
    `DeviceRunner`.
    """

    def step(
        self,
        model,
        cache,
        spans: list[Span],
        keep: list[int],
        sequences: list[Sequence],
        rows: list[int],
    ) -> StepOutput:
        count = len(spans)
        if not has_fixed_shapes(model, spans) or rows != list(range(count)):
            return super().step(model, cache, spans, keep, sequences, rows)
        shape, pass_parts = plan_step(cache, spans)
        sampling = BatchSampling(sequences + sequences[-1:] * (shape.num_seqs - count))
        fixed_parts = pass_parts + sampling.fixed_parts
        sizes = [len(part) for part in fixed_parts]
        packed = pack(fixed_parts + sampling.edits, model.device)
        sampler = None if sampling.edits else sampling
        if sampling.edits:  # their sizes vary, so the sampler runs after the step
            packed = packed.to(model.device, non_blocking=True)
        key = shape, sampler and (sampler.is_greedy, sampler.is_filtered)
        length = shape.num_pages * cache.storage.shape[4]
        inputs = packed[: sum(sizes)]
        logits, x, results = self.replay(
            model, cache, key, length, inputs, decode_step, sizes, sampler
        )
        if sampling.edits:
            parts = packed.split([*sizes, *map(len, sampling.edits)])
            results = torch.cat([sampling.sample(logits, parts[len(pass_parts) :]), results])
        tokens, finite = results.view(2, -1)[:, :count].tolist()
        return StepOutput(tokens, list(map(bool, finite)), logits[:count], x[:count])


def decode_step(
    model: Model,
    cache: PagedCache,
    tables: list[torch.Tensor],
    sizes: list[int],
    sampling: BatchSampling | None,
    packed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a decode step: return logits, hidden states, and tokens, then finite flags, (2 * B,).

    tables: of RoPE. packed: the parts of `plan_step`, then `BatchSampling.fixed_parts`. sizes:
    their lengths. sampling: how to sample; None: return the flags only, (B,).
    """
    parts = packed.split(sizes)
    attention = StaticPass(cache, parts)
    x = model.hidden(attention.tokens, attention.positions, attention.attend, tables)
    logits, finite = finite_logits(model, x)
    tokens = [sampling.sample(logits, parts[-3:])] if sampling else []
    return logits, x, torch.cat([*tokens, finite.long()])


def use_device_runner(model: Model) -> None:
    """Let a model step without waiting on a GPU; MPS keeps its runner, as it has no float64."""
    if type(model.runner) is GraphRunner:
        model.runner = StaticRunner(model.runner.make_step)
    elif type(model.runner) is TorchRunner and model.device.type not in ("cpu", "mps"):
        model.runner = StaticRunner(CapturedStep if model.device.type == "cuda" else eager_step)

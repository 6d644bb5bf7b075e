"""Paged KV cache of many sequences, and attention over it."""

import math
from typing import NamedTuple

import torch

from cache import (
    Span,
    cached_attention,
    first_visible_position,
    kv_cache_group_ids,
    layer_sliding_windows,
    make_causal_mask,
    stored_head_dim,
    to_cache_dtype,
)
from engine.pages import page_count
from engine.upload import upload
from errors import UserError


class PassPlan(NamedTuple):
    """A pass that is planned on the host."""

    parts: list[list[int]]  # what `PagedCache.bind` needs on the device
    shapes: list[tuple[int, int]]  # of each attention batch: sequences, tokens of each
    ends: list[int]  # of each span
    length: int  # positions of the longest sequence


class PagedCache:
    """Pages of keys and values, and attention over them; spans carry the page tables.

    storage: (n_layer, 2, num_pages, n_kv_head, page_size, stored_head_dim of head_dim).
    num_sliding_pages: pages of the second storage, for sliding-window layers; None: all layers
    share one storage. dtype: of the storages; None: the model's. Raises UserError if the storages
    do not fit in memory. After Kwon et al. 2023 (2309.06180), "Efficient memory
    management for large language model serving with PagedAttention".
    """

    def __init__(
        self,
        model,
        num_pages: int,
        page_size: int,
        num_sliding_pages: int | None = None,
        dtype: torch.dtype | None = None,
    ):
        config = model.config
        dtype = dtype or model.dtype
        self.sliding_windows = layer_sliding_windows(config)
        self.softcap = config.attn_logit_softcapping
        self.group_ids = kv_cache_group_ids(config, num_sliding_pages is not None)
        page_shape = model.n_kv_head, page_size, stored_head_dim(config.head_dim, dtype)
        shapes = [(self.group_ids.count(0), 2, num_pages, *page_shape)]
        if num_sliding_pages is not None:
            shapes.append((self.group_ids.count(1), 2, num_sliding_pages, *page_shape))
        options = {"dtype": dtype, "device": model.device}
        try:
            self.storages = [torch.empty(shape, **options) for shape in shapes]
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"num_pages {num_pages}, page_size {page_size}: a cache of"
                f" {sum(map(math.prod, shapes)) * dtype.itemsize:,} bytes does not fit in memory"
            ) from None
        self.storage = self.storages[0]
        # Sliding window and KV cache group of the layers, each pair once.
        self.views = sorted(set(zip(self.sliding_windows, self.group_ids)), key=str)
        # Views of each layer's storage: (2, num_pages, n_kv_head, page_size, width) in `layers`,
        # (2, num_pages * n_kv_head, page_size * width) in `head_pages`.
        parts = [iter(storage.unbind()) for storage in self.storages]
        self.layers = [next(parts[group_id]) for group_id in self.group_ids]
        self.head_pages = [layer.flatten(3).flatten(1, 2) for layer in self.layers]
        self.scratch = self.storage.new_empty(2, 0, self.head_pages[0].shape[2])
        self.steps = {}  # decode steps over these storages, by shape: see `GraphRunner`

    def prepare(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass and return its tokens and positions, both (N,), and the spans' ends.

        Spans with equal token counts and similar numbers of pages form one attention batch and are
        adjacent in N. A span's end is the index in N one past its last token.
        """
        plan = self.plan(spans)
        return *self.bind(plan, upload(plan.parts, self.storage.device)), plan.ends

    def plan(self, spans: list[Span]) -> PassPlan:
        """Plan a pass on the host, as `prepare` does."""
        size = self.storage.shape[4]
        batches = {}
        new_pages = [[] for _ in self.storages]  # pages about to get their first position
        for index, span in enumerate(spans):
            used = page_count(span.start + len(span.tokens), size)
            tables = [table[:used] for table in (span.pages, span.sliding_pages)]
            for new, table in zip(new_pages, tables):
                new += table[page_count(span.start, size) :]
            alike = len(span.tokens), used.bit_length()
            batches.setdefault(alike, []).append((index, span, tables))
        tokens = []
        positions = []
        pages = [[] for _ in self.storages]
        ends = [0] * len(spans)
        shapes = []
        views = []
        for (count, _), members in batches.items():
            for index, span, tables in members:
                steps = range(span.start, span.start + count)
                tokens += span.tokens
                positions += steps
                for group_pages, table in zip(pages, tables):
                    group_pages += [table[step // size] for step in steps]
                ends[index] = len(tokens)
            starts = [span.start for _, span, _ in members]
            shapes.append((len(members), count))
            for sliding_window, group_id in self.views:
                group_tables = [tables[group_id] for _, _, tables in members]
                views += [starts, *self.page_columns(starts, group_tables, sliding_window)]
        parts = [tokens, positions, *pages, *new_pages, *views]
        return PassPlan(parts, shapes, ends, max(positions) + 1)

    def page_columns(
        self,
        starts: list[int],
        tables: list[list[int]],
        sliding_window: int | None,
        width: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the number of skipped pages of each of G sequences, and the pages that it reads.

        The pages are (G, width), flattened. width: None: as wide as the longest table.
        """
        size = self.storage.shape[4]
        skipped_pages = [first_visible_position(start, sliding_window) // size for start in starts]
        tables = [table[skipped:] for table, skipped in zip(tables, skipped_pages)]
        width = width or max(map(len, tables))
        # Pad with the sequence's own last page, because a page of another one could hold NaN.
        tables = [table + table[-1:] * (width - len(table)) for table in tables]
        return skipped_pages, [page for table in tables for page in table]

    def bind(self, plan: PassPlan, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Set up the attention of a planned pass; return its tokens and positions, both (N,).

        parts: of the plan, on the device.
        """
        parts = iter(parts)
        tokens, positions = next(parts), next(parts)
        groups = range(len(self.storages))
        offsets = positions % self.storage.shape[4]
        self.slot_mappings = [(next(parts), offsets) for _ in groups]
        for storage in self.storages:
            new_pages = next(parts)
            if len(new_pages):
                # A reused page may hold NaN, and no mask hides it: 0 * NaN is NaN.
                storage.index_fill_(2, new_pages, 0)
        self.batches = []
        end = 0
        for G, count in plan.shapes:
            kv_views = {
                sliding_window: self.kv_view(
                    next(parts), next(parts), next(parts), count, sliding_window
                )
                for sliding_window, _ in self.views
            }
            self.batches.append((slice(end, end + G * count), kv_views))
            end += G * count
        largest = max(
            len(head_pages) for _, kv_views in self.batches for head_pages, _ in kv_views.values()
        )
        if largest > self.scratch.shape[1]:
            self.scratch = self.scratch.new_empty(2, largest, self.scratch.shape[2])
        return tokens, positions

    def kv_view(
        self,
        starts: torch.Tensor,
        skipped_pages: torch.Tensor,
        page_ids: torch.Tensor,
        count: int,
        sliding_window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages that `count` tokens of each of G sequences read, and the mask.

        starts, skipped_pages: (G,). page_ids: (G * pages,). The result's pages are flat indices
        into `head_pages` of a layer with this sliding window, ordered (G, heads, pages). The mask
        is (G, 1, count, positions).
        """
        device = self.storage.device
        heads, size, _ = self.storage.shape[3:]
        page_ids = page_ids.view(len(starts), 1, -1)
        head_pages = page_ids * heads + torch.arange(heads, device=device)[:, None]
        column = (-1, 1, 1, 1)
        query_positions = starts.view(column) + torch.arange(count, device=device)[:, None]
        positions = torch.arange(page_ids.shape[2] * size, device=device)
        key_positions = skipped_pages.view(column) * size + positions
        mask = make_causal_mask(query_positions, key_positions, sliding_window)
        return head_pages.flatten(), mask

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (N, heads, head_dim).
        """
        pages, offsets = self.slot_mappings[self.group_ids[layer]]
        for stored, new in zip(self.layers[layer], (k, v)):
            stored[pages, :, offsets] = to_cache_dtype(new, stored.dtype)
        out = torch.empty_like(q)
        for part, kv_views in self.batches:
            head_pages, mask = kv_views[self.sliding_windows[layer]]
            G, _, T, S = mask.shape
            # Into the scratch buffer, because allocating memory takes longer than copying.
            keys, values = (
                torch.index_select(stored, 0, head_pages, out=scratch[: len(head_pages)])
                for stored, scratch in zip(self.head_pages[layer], self.scratch)
            )
            keys = keys.view(G, -1, S, self.storage.shape[5])  # (G, heads, S, width)
            values = values.view(keys.shape)
            queries = q[part].view(G, T, *q.shape[1:]).transpose(1, 2)
            attended = cached_attention(queries, keys, values, mask, self.softcap)
            out[part] = attended.transpose(1, 2).flatten(0, 1)
        return out

"""Keys and values of many texts in one pool of pages, and attention for tokens of all of them."""

import math

import torch

from cache import (
    Span,
    attend_stored,
    first_seen,
    layer_kinds,
    layer_windows,
    seen,
    stored_width,
    to_stored,
)
from engine.pages import page_count
from errors import UserError


class PagedCache:
    """Pages of keys and values. A text's positions lie in pages anywhere; `arrange` is told which.

    storage: (n_layer, 2, num_pages, n_kv_head, page_size, stored_width of head_dim).
    num_sliding_pages: the pages that layers with a window have of their own, in a second of
    `storages`; None: all layers share one. dtype: of the storages; None: the model's. Raises
    UserError if they do not fit in memory. After Kwon et al. 2023 (2309.06180), "Efficient memory
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
        self.windows = layer_windows(config)
        self.kinds = layer_kinds(config, num_sliding_pages is not None)
        rest = model.n_kv_head, page_size, stored_width(config.head_dim, dtype)
        shapes = [(self.kinds.count(0), 2, num_pages, *rest)]
        if num_sliding_pages is not None:
            shapes.append((self.kinds.count(1), 2, num_sliding_pages, *rest))
        options = {"dtype": dtype, "device": model.device}
        try:
            self.storages = [torch.empty(shape, **options) for shape in shapes]
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"{num_pages} pages of {page_size} positions do not fit in memory:"
                f" {sum(map(math.prod, shapes)) * dtype.itemsize:,} bytes"
            ) from None
        self.storage = self.storages[0]
        # The keys and values of each layer, and the same cut into units: what one page holds for
        # one head. n_layer times (2, num_pages * n_kv_head, page_size * width)
        parts = [iter(storage.unbind()) for storage in self.storages]
        self.layers = [next(parts[kind]) for kind in self.kinds]
        self.units = [layer.flatten(3).flatten(1, 2) for layer in self.layers]
        self.room = self.storage.new_empty(2, 0, self.units[0].shape[2])

    def arrange(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens and their positions, both (N,), and where each span ends in them.

        Spans of one length lie side by side, and attention takes those of similar pasts together.
        """
        device = self.storage.device
        size = self.storage.shape[4]
        groups = {}
        begun = [[] for _ in self.storages]  # pages that get their first position
        for index, span in enumerate(spans):
            used = page_count(span.start + len(span.tokens), size)
            tables = [table[:used] for table in (span.pages, span.sliding_pages)]
            for new, table in zip(begun, tables):
                new += table[page_count(span.start, size) :]
            alike = len(span.tokens), used.bit_length()
            groups.setdefault(alike, []).append((index, span, tables))
        tokens = []
        positions = []
        pages = [[] for _ in self.storages]
        ends = [0] * len(spans)
        pairs = set(zip(self.windows, self.kinds))
        self.groups = []
        for (count, _), members in groups.items():
            first = len(tokens)
            for index, span, tables in members:
                steps = range(span.start, span.start + count)
                tokens += span.tokens
                positions += steps
                for own, table in zip(pages, tables):
                    own += [table[step // size] for step in steps]
                ends[index] = len(tokens)
            starts = [span.start for _, span, _ in members]
            views = {}
            for window, kind in pairs:
                own = [tables[kind] for _, _, tables in members]
                views[window] = self.view(starts, count, own, window)
            self.groups.append((slice(first, len(tokens)), views))
        largest = max(len(units) for _, views in self.groups for units, _ in views.values())
        if largest > self.room.shape[1]:
            self.room = self.room.new_empty(2, largest, self.room.shape[2])
        # What the last text left in a page may be NaN, and no mask hides that: 0 * NaN is NaN.
        for storage, new in zip(self.storages, begun):
            storage[:, :, new] = 0
        places = torch.tensor(positions, device=device)
        self.written = [(torch.tensor(own, device=device), places % size) for own in pages]
        return torch.tensor(tokens, device=device), places, ends

    def view(
        self, starts: list[int], count: int, tables: list[list[int]], window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `count` tokens of each text read in a layer with this window, and what they see.

        That is the units of its pages, for all heads, and a mask, (G, 1, count, positions).
        """
        device = self.storage.device
        heads, size, _ = self.storage.shape[3:]
        unseen = [first_seen(start, window) // size for start in starts]  # pages
        tables = [table[skipped:] for table, skipped in zip(tables, unseen)]
        width = max(map(len, tables))
        # A shorter table repeats its own last page: another text's could hold NaN.
        tables = [table + table[-1:] * (width - len(table)) for table in tables]
        own = torch.arange(heads, device=device)[:, None]
        units = torch.tensor(tables, device=device)[:, None] * heads + own  # (G, heads, pages)
        column = (-1, 1, 1, 1)
        positions = torch.tensor(starts, device=device).view(column)
        positions = positions + torch.arange(count, device=device)[:, None]
        keys = torch.tensor(unseen, device=device).view(column) * size
        keys = keys + torch.arange(width * size, device=device)
        return units.flatten(), seen(positions, keys, window)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to all up to each position.

        All shapes are (N, heads, head_dim).
        """
        pages, offsets = self.written[self.kinds[layer]]
        for stored, new in zip(self.layers[layer], (k, v)):
            stored[pages, :, offsets] = to_stored(new, stored.dtype)
        out = torch.empty_like(q)
        for part, views in self.groups:
            units, mask = views[self.windows[layer]]
            G, _, T, S = mask.shape
            # Into room that is there already: to get new memory takes longer than to copy.
            keys, values = (
                torch.index_select(stored, 0, units, out=room[: len(units)])
                for stored, room in zip(self.units[layer], self.room)
            )
            keys = keys.view(G, -1, S, self.storage.shape[5])  # (G, heads, S, width)
            values = values.view(keys.shape)
            queries = q[part].view(G, T, *q.shape[1:]).transpose(1, 2)
            attended = attend_stored(queries, keys, values, mask)
            out[part] = attended.transpose(1, 2).flatten(0, 1)
        return out

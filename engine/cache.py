"""Keys and values of many texts in one pool of pages, and attention for tokens of all of them side by side."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from checkpoint import UserError


class Span(NamedTuple):
    """The positions of one text that a pass computes."""

    pages: list[int]  # of the text, from position 0 on
    start: int  # the first of them
    tokens: list[int]  # at them


class PagedCache:
    """Pages of keys and values. A text's positions lie in pages anywhere; `plan` is told which.

    storage: (n_layer, 2, num_pages, n_kv_head, page_size, head_dim). Raises UserError if it does not fit in memory.
    Kwon et al. 2023 (2309.06180), "Efficient memory management for large language model serving with PagedAttention".
    """

    def __init__(self, model, num_pages: int, page_size: int):
        config = model.config
        shape = (config.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim)
        try:
            # Zeros: a masked position has weight 0, but 0 times a NaN in uninitialised memory would be NaN.
            self.storage = torch.zeros(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"{num_pages} pages of {page_size} positions do not fit in memory:"
                f" {math.prod(shape) * model.dtype.itemsize:,} bytes"
            ) from None
        # Of each layer its keys and its values, cut into units: what one page holds for one head.
        self.units = self.storage.flatten(4).flatten(2, 3).unbind()  # n_layer times (2, num_pages * n_kv_head, ...)
        self.gathered = self.storage.new_empty(2, 0, page_size * config.head_dim)

    def plan(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens and their positions, both (N,), and where among them each span ends.

        Spans of one length lie side by side, so that attention takes those of similar pasts together.
        """
        (heads, size, _), device = self.storage.shape[3:], self.storage.device
        groups = {}
        for index, span in enumerate(spans):
            pages = -(-(span.start + len(span.tokens)) // size)
            groups.setdefault((len(span.tokens), pages.bit_length()), []).append((index, span, span.pages[:pages]))
        tokens, positions, pages, ends = [], [], [], [0] * len(spans)
        for members in groups.values():
            for index, span, used in members:
                steps = range(span.start, span.start + len(span.tokens))
                tokens += span.tokens
                positions += steps
                pages += [used[step // size] for step in steps]
                ends[index] = len(tokens)
        tokens, positions = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        self.written = torch.tensor(pages, device=device), positions % size
        self.groups, end = [], 0
        for (count, _), members in groups.items():
            rows, end = slice(end, end + count * len(members)), end + count * len(members)
            width = max(len(used) for _, _, used in members)
            # A shorter table repeats its own last page: another text's could hold NaN, and a mask does not hide that.
            tables = torch.tensor([used + used[-1:] * (width - len(used)) for _, _, used in members], device=device)
            units = tables[:, None] * heads + torch.arange(heads, device=device)[:, None]  # (G, heads, pages)
            seen = positions[rows].view(len(members), 1, count, 1)
            self.groups.append((rows, units.flatten(), torch.arange(width * size, device=device) <= seen))
        largest = max(len(units) for _, units, _ in self.groups)
        if largest > self.gathered.shape[1]:
            self.gathered = self.gathered.new_empty(2, largest, self.gathered.shape[2])
        return tokens, positions, ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to all up to each position. All shapes are (N, heads, head_dim)."""
        pages, offsets = self.written
        for stored, new in zip(self.storage[layer], (k, v)):
            stored[pages, :, offsets] = new
        out = torch.empty_like(q)
        for rows, units, mask in self.groups:
            G, _, T, S = mask.shape
            keys, values = (  # gathered into room that is there already: to get new memory takes longer
                torch.index_select(stored, 0, units, out=room[: len(units)]).view(G, -1, S, q.shape[-1])
                for stored, room in zip(self.units[layer], self.gathered)
            )  # (G, heads, S, head_dim)
            queries = q[rows].view(G, T, *q.shape[1:]).transpose(1, 2)
            attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def clear(self, span: Span) -> None:
        """Forget what a pass wrote: NaN behind a mask would still reach the next text on that page."""
        size = self.storage.shape[4]
        for position in range(span.start, span.start + len(span.tokens)):  # without new memory: there may be none
            self.storage[:, :, span.pages[position // size], :, position % size] = 0


def last_logits(model, cache: PagedCache, spans: list[Span], keep: list[int]) -> torch.Tensor:
    """The logits at the last keep[i] positions of span i, (sum of keep, vocab_size), float32, from one pass."""
    tokens, positions, ends = cache.plan(spans)
    x = model.hidden(tokens, positions, cache.attend)  # (N, C)
    return model.head(x[[row for end, count in zip(ends, keep) for row in range(end - count, end)]]).float()

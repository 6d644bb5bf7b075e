"""Keys and values of many texts, and attention for tokens of all of them side by side."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from checkpoint import UserError


class Span(NamedTuple):
    """The positions of one text that a pass computes."""

    row: int  # of the cache
    start: int  # the first of them
    tokens: list[int]  # at them


class RowCache:
    """A row for each text, with room for a whole window.

    storage: (n_layer, 2, max_rows, n_kv_head, block_size, head_dim). Raises UserError if it does not fit in memory.
    """

    def __init__(self, model, max_rows: int):
        config = model.config
        shape = (config.n_layer, 2, max_rows, config.n_kv_head, config.block_size, config.head_dim)
        try:
            # Zeros: a masked position has weight 0, but 0 times a NaN in uninitialised memory would be NaN.
            self.storage = torch.zeros(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"{max_rows} rows of {config.block_size} positions do not fit in memory:"
                f" {math.prod(shape) * model.dtype.itemsize:,} bytes"
            ) from None

    def plan(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens and their positions, both (N,), and where among them each span ends.

        Spans of one length lie side by side, so that attention takes them together.
        """
        device, groups = self.storage.device, {}
        for index, span in enumerate(spans):
            groups.setdefault(len(span.tokens), []).append((index, span))
        tokens, positions, rows, ends = [], [], [], [0] * len(spans)
        for members in groups.values():
            for index, span in members:
                tokens += span.tokens
                positions += range(span.start, span.start + len(span.tokens))
                rows += [span.row] * len(span.tokens)
                ends[index] = len(tokens)
        tokens, positions = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        self.written = torch.tensor(rows, device=device), positions
        self.groups, end = [], 0
        for count, members in groups.items():
            part, end = slice(end, end + count * len(members)), end + count * len(members)
            length = max(span.start for _, span in members) + count
            seen = positions[part].view(len(members), 1, count, 1)
            mask = torch.arange(length, device=device) <= seen  # (G, 1, T, S)
            self.groups.append((part, torch.tensor([span.row for _, span in members], device=device), mask))
        return tokens, positions, ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to all up to each position. All shapes are (N, heads, head_dim)."""
        rows, positions = self.written
        for stored, new in zip(self.storage[layer], (k, v)):
            stored[rows, :, positions] = new
        out = torch.empty_like(q)
        for part, rows, mask in self.groups:
            G, _, T, S = mask.shape
            keys, values = self.storage[layer][:, rows, :, :S]  # (G, heads, S, head_dim)
            queries = q[part].view(G, T, *q.shape[1:]).transpose(1, 2)
            attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            out[part] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def clear(self, span: Span) -> None:
        """Forget what a pass wrote: NaN behind a mask would still reach the next text in that row."""
        self.storage[:, :, span.row, :, span.start : span.start + len(span.tokens)] = 0


def last_logits(model, cache: RowCache, spans: list[Span]) -> torch.Tensor:
    """The logits at the last position of each span, (spans, vocab_size), float32, from one pass over all of them."""
    tokens, positions, ends = cache.plan(spans)
    x = model.hidden(tokens, positions, cache.attend)  # (N, C)
    return model.head(x[[end - 1 for end in ends]]).float()

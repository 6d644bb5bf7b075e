"""Keys and values of many texts, and attention for tokens of all of them side by side."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from errors import UserError


class Span(NamedTuple):
    """The positions of one text that a pass computes."""

    row: int  # of the cache
    start: int  # the first of them
    tokens: list[int]  # at them


class RowCache:
    """A row for each text, with room for a whole window.

    storage: (n_layer, 2, max_rows, n_kv_head, block_size, head_dim). Raises UserError if it does
    not fit in memory.
    """

    def __init__(self, model, max_rows: int):
        config = model.config
        shape = (config.n_layer, 2, max_rows, config.n_kv_head, config.block_size, config.head_dim)
        try:
            self.storage = torch.empty(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"{max_rows} rows of {config.block_size} positions do not fit in memory:"
                f" {math.prod(shape) * model.dtype.itemsize:,} bytes"
            ) from None

    def arrange(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens and their positions, both (N,), and where each span ends in them.

        Spans of one length lie side by side, so that attention takes them together.
        """
        device = self.storage.device
        groups = {}
        for index, span in enumerate(spans):
            groups.setdefault(len(span.tokens), []).append((index, span))
        tokens = []
        positions = []
        rows = []
        ends = [0] * len(spans)
        self.groups = []
        for count, members in groups.items():
            first = len(tokens)
            for index, span in members:
                tokens += span.tokens
                positions += range(span.start, span.start + count)
                rows += [span.row] * count
                ends[index] = len(tokens)
            own = torch.tensor([span.row for _, span in members], device=device)
            starts = torch.tensor([span.start for _, span in members], device=device)
            seen = starts.view(-1, 1, 1, 1) + torch.arange(count, device=device)[:, None]
            mask = torch.arange(starts.max() + count, device=device) <= seen  # (G, 1, T, S)
            self.groups.append((slice(first, len(tokens)), own, mask))
        # What the last text left in a row may be NaN, and no mask hides that: 0 * NaN is NaN.
        self.storage[:, :, [span.row for span in spans if span.start == 0]] = 0
        places = torch.tensor(positions, device=device)
        self.written = torch.tensor(rows, device=device), places
        return torch.tensor(tokens, device=device), places, ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to all up to each position.

        All shapes are (N, heads, head_dim).
        """
        rows, positions = self.written
        for stored, new in zip(self.storage[layer], (k, v)):
            stored[rows, :, positions] = new
        out = torch.empty_like(q)
        for part, own, mask in self.groups:
            G, _, T, S = mask.shape
            keys, values = self.storage[layer][:, own, :, :S]  # (G, heads, S, head_dim)
            queries = q[part].view(G, T, *q.shape[1:]).transpose(1, 2)
            attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            out[part] = attended.transpose(1, 2).flatten(0, 1)
        return out


def last_logits(model, cache: RowCache, spans: list[Span]) -> torch.Tensor:
    """The logits after each span, (spans, vocab_size), float32, from one pass over all of them."""
    tokens, positions, ends = cache.arrange(spans)
    x = model.hidden(tokens, positions, cache.attend)  # (N, C)
    return model.head(x[[end - 1 for end in ends]]).float()

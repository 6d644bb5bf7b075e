"""Keys and values of many texts in one pool of pages, and attention for tokens of all of them."""

import math

import torch
import torch.nn.functional as F

from cache import Span
from engine.pages import page_count
from errors import UserError


class PagedCache:
    """Pages of keys and values. A text's positions lie in pages anywhere; `arrange` is told which.

    storage: (n_layer, 2, num_pages, n_kv_head, page_size, head_dim). Raises UserError if it does
    not fit in memory.
    After Kwon et al. 2023 (2309.06180), "Efficient memory management for large language model
    serving with PagedAttention".
    """

    def __init__(self, model, num_pages: int, page_size: int):
        config = model.config
        shape = (config.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim)
        try:
            self.storage = torch.empty(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            raise UserError(
                f"{num_pages} pages of {page_size} positions do not fit in memory:"
                f" {math.prod(shape) * model.dtype.itemsize:,} bytes"
            ) from None

    def arrange(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens and their positions, both (N,), and where each span ends in them.

        Each text attends by itself.
        """
        device = self.storage.device
        size = self.storage.shape[4]
        tokens = []
        positions = []
        pages = []
        ends = []
        begun = []  # pages that get their first position
        self.texts = []
        for span in spans:
            first = len(tokens)
            steps = range(span.start, span.start + len(span.tokens))
            used = span.pages[: page_count(steps.stop, size)]
            begun += used[page_count(span.start, size) :]
            tokens += span.tokens
            positions += steps
            pages += [used[step // size] for step in steps]
            ends.append(len(tokens))
            seen = torch.tensor(steps, device=device)[:, None]
            mask = torch.arange(len(used) * size, device=device) <= seen  # (T, S)
            self.texts.append((slice(first, len(tokens)), torch.tensor(used, device=device), mask))
        # What the last text left in a page may be NaN, and no mask hides that: 0 * NaN is NaN.
        self.storage[:, :, begun] = 0
        places = torch.tensor(positions, device=device)
        self.written = torch.tensor(pages, device=device), places % size
        return torch.tensor(tokens, device=device), places, ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to all up to each position.

        All shapes are (N, heads, head_dim).
        """
        pages, offsets = self.written
        for stored, new in zip(self.storage[layer], (k, v)):
            stored[pages, :, offsets] = new
        out = torch.empty_like(q)
        for part, own, mask in self.texts:
            # (pages, heads, page_size, head_dim) to (heads, S, head_dim)
            keys, values = (
                stored[own].transpose(0, 1).flatten(1, 2) for stored in self.storage[layer]
            )
            queries = q[part].transpose(0, 1)  # (heads, T, head_dim)
            attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            out[part] = attended.transpose(0, 1)
        return out

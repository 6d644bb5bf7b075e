"""Paged KV cache of many sequences, and attention over it."""

import math

import torch
import torch.nn.functional as F

from cache import Span
from engine.pages import page_count
from errors import UserError


class PagedCache:
    """Pages of keys and values, and attention over them; spans carry the page tables.

    storage: (n_layer, 2, num_pages, n_kv_head, page_size, head_dim). Raises UserError if it does
    not fit in memory. After Kwon et al. 2023 (2309.06180), "Efficient memory management for large
    language model serving with PagedAttention".
    """

    def __init__(self, model, num_pages: int, page_size: int):
        config = model.config
        shape = (config.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim)
        try:
            self.storage = torch.empty(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, TypeError):  # TypeError: a size beyond 64 bits
            size = math.prod(shape) * model.dtype.itemsize
            raise UserError(
                f"num_pages {num_pages}, page_size {page_size}: a cache of"
                f" {size:,} bytes does not fit in memory"
            ) from None

    def prepare(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass and return its tokens and positions, both (N,), and the spans' ends.

        Attention runs once for each sequence. A span's end is the index in N one past its last
        token.
        """
        device = self.storage.device
        size = self.storage.shape[4]
        tokens = []
        positions = []
        pages = []
        ends = []
        new_pages = []  # pages about to get their first position
        self.sequences = []  # slice of N, page ids and mask of each sequence
        for span in spans:
            first = len(tokens)
            steps = range(span.start, span.start + len(span.tokens))
            table = span.pages[: page_count(steps.stop, size)]
            new_pages += table[page_count(span.start, size) :]
            tokens += span.tokens
            positions += steps
            pages += [table[step // size] for step in steps]
            ends.append(len(tokens))
            query_positions = torch.tensor(steps, device=device)[:, None]
            key_positions = torch.arange(len(table) * size, device=device)
            mask = key_positions <= query_positions  # (T, S)
            page_ids = torch.tensor(table, device=device)
            self.sequences.append((slice(first, len(tokens)), page_ids, mask))
        # A reused page may hold NaN, and no mask hides it: 0 * NaN is NaN.
        self.storage[:, :, new_pages] = 0
        position_ids = torch.tensor(positions, device=device)
        self.slot_mapping = torch.tensor(pages, device=device), position_ids % size
        return torch.tensor(tokens, device=device), position_ids, ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (N, heads, head_dim).
        """
        pages, offsets = self.slot_mapping
        for stored, new in zip(self.storage[layer], (k, v)):
            stored[pages, :, offsets] = new
        out = torch.empty_like(q)
        for part, page_ids, mask in self.sequences:
            # From (pages, heads, page_size, head_dim) to (heads, S, head_dim).
            keys, values = (
                stored[page_ids].transpose(0, 1).flatten(1, 2) for stored in self.storage[layer]
            )
            queries = q[part].transpose(0, 1)  # (heads, T, head_dim)
            attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            out[part] = attended.transpose(0, 1)
        return out

"""KV cache of a static batch: a pass computes only new tokens."""

import array
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from errors import UserError
from quantisation.int8 import quantize, rotate_channels, unrotate_channels


class Span(NamedTuple):
    """The consecutive positions of one sequence that a pass computes."""

    pages: list[int]  # page table of the sequence, from position 0
    start: int  # first computed position
    tokens: list[int]  # at positions start, start + 1, ...
    sliding_pages: list[int] | tuple = ()  # page table of the sliding-window group, if any
    adapter: str = ""  # name of its LoRA adapter; "": none


class KVCache:
    """A contiguous KV cache for a batch of sequences of any lengths, allocated once.

    storage: (n_layer, 2, batch_size, n_kv_head, max_len, stored_head_dim).
    max_len: positions per sequence; None: block_size. dtype: of the storage; None: the model's.
    tokens: the cached tokens of each sequence, from position 0. Later positions in the storage
    are stale. Raises UserError if the storage does not fit in memory.
    """

    def __init__(
        self,
        model,
        batch_size: int = 1,
        max_len: int | None = None,
        dtype: torch.dtype | None = None,
    ):
        config = model.config
        dtype = dtype or model.dtype
        max_len = config.block_size if max_len is None else max_len
        width = stored_head_dim(config.head_dim, dtype)
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, max_len, width)
        try:
            # Zeros: a masked position has weight 0, but 0 times a NaN in stale memory would be NaN.
            self.storage = torch.zeros(shape, dtype=dtype, device=model.device)
        except RuntimeError:
            size = dtype.itemsize
            factors = (
                f"batch size {batch_size} x {config.n_layer} layers x keys and values"
                f" x {config.n_kv_head} heads x {max_len} positions"
                f" x {width} elements x {size} bytes"
            )
            count = f"{math.prod(shape) * size:,} bytes"
            raise UserError(f"a cache of {count} does not fit in memory: {factors}") from None
        self.tokens = [[] for _ in range(batch_size)]
        self.sliding_windows = layer_sliding_windows(config)
        self.softcap = config.attn_logit_softcapping
        self.steps = {}  # decode steps over this storage, by shape: see `GraphRunner`

    @property
    def storages(self) -> list[torch.Tensor]:
        """Return the storage of each KV cache group; here one group holds all layers."""
        return [self.storage]

    def reorder(self, rows: list[int]) -> None:
        """Replace sequence i of the cache with a copy of sequence rows[i], as beam search needs.

        An index may occur several times or not at all, and the batch size may change.
        """
        moved = [row for row, source in enumerate(rows) if row != source]
        if len(rows) != len(self.tokens):
            self.storage = self.storage[:, :, rows]
            self.steps.clear()  # they write the old one
        elif moved:
            # In place and only used positions, because a whole copy costs more than a decode step.
            used = self.storage[..., : max(len(cached) for cached in self.tokens), :]
            used[:, :, moved] = used[:, :, [rows[row] for row in moved]]
        # Copy each list, because `truncate_to_prefix` changes it in place.
        self.tokens = [list(self.tokens[row]) for row in rows]

    def truncate_to_prefix(self, windows: list[list[int]], num_logits: int = 1) -> list[int]:
        """Drop the cached tokens of each sequence after its common prefix with its window.

        The last num_logits positions of a window are dropped too, because a pass has to compute
        their logits. Returns the number of cached positions of each sequence.
        """
        for cached, tokens in zip(self.tokens, windows, strict=True):
            del cached[common_prefix_length(cached, tokens[:-num_logits]) :]
        return [len(cached) for cached in self.tokens]

    def spans(self, new: list[list[int]], rows: list[int] | None = None) -> list[Span]:
        """Return the spans of a pass that appends new tokens to these rows (None: all rows).

        A row is the index of a sequence in the cache, and the only page of its span. Raises
        ValueError, before anything changes, if the tokens do not fit, a row occurs twice, or a row
        gets no token.
        """
        rows = list(range(len(self.tokens))) if rows is None else rows
        starts = [len(self.tokens[row]) for row in rows]
        end = max(start + len(tokens) for start, tokens in zip(starts, new, strict=True))
        if end > self.storage.shape[4]:
            raise ValueError(f"{end} positions exceed max_len ({self.storage.shape[4]})")
        if len(set(rows)) < len(rows) or not all(new):
            rule = "each row must occur once, with at least one token"
            raise ValueError(f"rows {rows}, new tokens {new}: {rule}")
        self.pending = list(zip(rows, new))
        return [Span([row], start, tokens) for row, start, tokens in zip(rows, starts, new)]

    def prepare(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass and return its tokens, (B, T), their positions, and the end of each span.

        T is the length of the longest span. A shorter span repeats its last token at the same
        position, which writes the same values again. Positions are (B, T), or (1, T) if all
        sequences of the cache have the same start and length. An end is an index into the flattened
        tokens.
        """
        new = [span.tokens for span in spans]
        rows = [span.pages[0] for span in spans]
        starts = [span.start for span in spans]
        everything = list(range(len(self.tokens)))
        stops = [start + len(tokens) for start, tokens in zip(starts, new)]
        end = max(stops)
        T = max(len(tokens) for tokens in new)
        device = self.storage.device
        in_step = rows == everything and len(set(starts)) == len(set(stops)) == 1
        if in_step:  # a slice is faster than an index, e.g. for a single sequence
            positions = torch.arange(end - T, end, device=device)[None]  # (1, T)
            self.slot_mapping = slice(None), slice(end - T, end)
        else:
            last = torch.tensor(stops)[:, None] - 1
            positions = torch.tensor(starts)[:, None] + torch.arange(T)
            positions = positions.minimum(last).to(device)  # (B, T)
            self.slot_mapping = torch.tensor(rows, device=device)[:, None], positions
        self.kv_views = {}  # sliding window -> first key that is read, mask
        for sliding_window in set(self.sliding_windows):
            first = first_visible_position(min(starts), sliding_window)
            mask = None  # (B or 1, 1, T, keys); None: all keys are visible
            if T > 1 or not in_step:
                # is_causal would align the first new query with the very first key.
                keys = torch.arange(first, end, device=device)
                mask = make_causal_mask(positions[:, None, :, None], keys, sliding_window)
            self.kv_views[sliding_window] = first, mask
        self.batch_indices = (
            slice(None) if rows == everything else torch.tensor(rows, device=device)
        )
        # Alternating: keys, then values of each layer.
        self.keys_values = self.storage[..., :end, :].flatten(0, 1).unbind()
        tokens = [each + each[-1:] * (T - len(each)) for each in new]
        ends = [T * index + len(each) for index, each in enumerate(new)]
        return torch.tensor(tokens, device=device), positions, ends

    def commit(self) -> None:
        """Record the tokens of the last `spans` as cached, after their pass is complete."""
        for row, tokens in self.pending:
            self.tokens[row] = self.tokens[row] + tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (B, T, heads, head_dim).
        """
        keys, values = self.keys_values[2 * layer : 2 * layer + 2]
        keys.transpose(1, 2)[self.slot_mapping] = to_cache_dtype(k, keys.dtype)
        values.transpose(1, 2)[self.slot_mapping] = to_cache_dtype(v, values.dtype)
        first, mask = self.kv_views[self.sliding_windows[layer]]
        keys = keys[:, :, first:][self.batch_indices]
        values = values[:, :, first:][self.batch_indices]
        q = q.transpose(1, 2)
        return cached_attention(q, keys, values, mask, self.softcap).transpose(1, 2)


def stored_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of this dtype a key or value takes in a cache.

    In int8 head_dim is padded to a multiple of 4, and 4 more bytes hold the float32 scale.
    """
    return head_dim + -head_dim % 4 + 4 if dtype == torch.int8 else head_dim


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert keys or values, (..., head_dim), to (..., stored_head_dim) of a cache's dtype.

    Each vector is rounded independently. For int8 it is rotated first, because keys have outliers.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    values, scale = quantize(rotate_channels(x.float()))
    return torch.cat([F.pad(values, (0, -x.shape[-1] % 4)), scale[..., None].view(dtype)], dim=-1)


def write_slots(storage: torch.Tensor, index: int, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write new keys or values, (B, heads, head_dim), into a cache's storage.

    index: of the keys or values of a layer, among (n_layer, 2). slots: positions in these, (B,
    heads). The storage is written as one flat tensor. Through views of its layers, which share
    memory, torch.compile would copy each layer in each step.
    """
    first = index * storage.shape[2:5].numel()
    storage.view(-1, storage.shape[5])[slots + first] = to_cache_dtype(new, storage.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap), between -cap and cap; float32 for 16-bit x.

    After Bello et al. 2016 (1611.09940), "Neural combinatorial optimization with reinforcement
    learning".
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return cap * torch.tanh(x / cap)


def capped_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Return the attention output with soft-capped scores, which torch's fused kernels lack.

    q and the output are (B, heads, T, head_dim), keys and values (B, n_kv_head, S, head_dim).
    """
    B, H, T, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)  # near 50, bfloat16 rounds to quarters
    shared = B, keys.shape[1], -1, D  # queries that share a KV head are rows of one matrix
    scores = (q.to(wide) / math.sqrt(D)).reshape(shared) @ keys.to(wide).mT
    scores = soft_cap(scores.view(B, H, T, -1), softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf)  # after the cap, or it would let them in
    probs = scores.softmax(-1).to(values.dtype).view(*shared[:3], keys.shape[2])
    return (probs @ values).view(B, H, T, D)


def cached_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the attention output. q and the output are (B, heads, T, head_dim).

    keys, values: as `to_cache_dtype` stores them, (B, n_kv_head, S, stored_head_dim). Consecutive
    query heads share a KV head. softcap: of the scores, if any.
    """
    D = q.shape[-1]
    is_rotated = keys.dtype == torch.int8
    queries = q
    if is_rotated:
        # The rotation is symmetric, so its inverse on the queries cancels it on the keys in the
        # dot products. The output is a weighted sum of rotated values, so it is unrotated below.
        queries = unrotate_channels(q.to(torch.promote_types(q.dtype, torch.float32)))
        keys, values = (
            stored[..., :D] * stored[..., -4:].view(torch.float32) for stored in (keys, values)
        )
    keys, values = (each.to(queries.dtype) for each in (keys, values))
    if softcap:
        out = capped_attention(queries, keys, values, mask, softcap)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return unrotate_channels(out).to(q.dtype) if is_rotated else out


def layer_sliding_windows(config) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in positions, the query included; None: no window."""
    return config.sliding_windows or (None,) * config.n_layer


def kv_cache_group_ids(config, separate: bool) -> list[int]:
    """Return the KV cache group of each layer: 1 if it has a sliding window, else 0.

    separate: whether sliding-window layers have their own pages; if not, all layers are in group 0.
    """
    return [
        int(separate and sliding_window is not None)
        for sliding_window in layer_sliding_windows(config)
    ]


def first_visible_position(position: int, sliding_window: int | None) -> int:
    """Return the first position visible from `position`; sliding_window None: 0."""
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def make_causal_mask(
    positions: torch.Tensor, keys: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """Return a causal mask, True where a position attends to a key position.

    positions and keys broadcast. sliding_window: as in `layer_sliding_windows`. After Beltagy et
    al. 2020 (2004.05150), "Longformer: The long-document transformer".
    """
    mask = keys <= positions
    return mask if sliding_window is None else mask & (keys > positions - sliding_window)


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of two token lists."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the common case, 20 times as fast as a loop
        return length
    return next(index for index, (x, y) in enumerate(zip(a, b)) if x != y)


class ContextWindow:
    """The context window over a growing sequence: its last tokens, at most block_size.

    It moves by whole strides, and only when the sequence no longer fits (a context shift).
    stride: tokens, from 1 to block_size; None: half of block_size. Raises UserError for any other.
    """

    def __init__(self, block_size: int, stride: int | None = None):
        self.block_size = block_size
        self.stride = max(1, block_size // 2) if stride is None else stride
        if type(self.stride) is not int or not 1 <= self.stride <= block_size:
            allowed = f"an integer from 1 to block_size ({block_size})"
            raise UserError(f"stride {stride!r}: must be {allowed}")

    def start(self, length: int) -> int:
        """Return the start of the window over a sequence of `length` tokens."""
        return max(0, math.ceil((length - self.block_size) / self.stride)) * self.stride

    def crop(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a sequence that are in the window."""
        return tokens[self.start(len(tokens)) :]


def root_hash(cache_salt: str) -> bytes:
    """Return the parent hash of a sequence's first page."""
    return hashlib.sha256(cache_salt.encode(errors="surrogatepass")).digest()


def hash_pages(tokens: list[int], page_size: int, parent_hash: bytes) -> Iterator[bytes]:
    """Yield the hash of each full page: of its tokens and, through parent_hash, all tokens before.

    SHA-256 has no known collision, so pages with equal hashes hold equal tokens.
    """
    for end in range(page_size, len(tokens) + 1, page_size):
        page = array.array("q", tokens[end - page_size : end])
        parent_hash = hashlib.sha256(parent_hash + page.tobytes()).digest()
        yield parent_hash

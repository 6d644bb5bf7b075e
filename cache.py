"""Keys and values of past positions, so that a pass computes new tokens only."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from errors import UserError
from int8 import quantize, rotate_channels, unrotate_channels


class Span(NamedTuple):
    """The positions of one text that a pass computes."""

    pages: list[int]  # of the text's cache, from position 0 on
    start: int  # the first position that is computed
    tokens: list[int]  # at start, start + 1, ...
    sliding_pages: list[int] | tuple = ()  # of layers with a window, where these have their own
    adapter: str = ""  # that the model has for this text


class KVCache:
    """The keys and values of a batch of rows, of any lengths, in one tensor, allocated once.

    storage: (n_layer, 2, batch_size, n_kv_head, max_len, stored_head_dim of head_dim).
    max_len: positions in a row; None: block_size. dtype: of the storage; None: the model's. tokens:
    what each row holds, position 0 first; anything after them in the storage is stale. Raises
    UserError if it does not fit in memory.
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
                f"{batch_size} rows x {config.n_layer} layers x keys and values"
                f" x {config.n_kv_head} heads x {max_len} positions"
                f" x {width} numbers x {size} bytes"
            )
            count = f"{math.prod(shape) * size:,} bytes"
            raise UserError(f"a cache of {count} does not fit in memory: {factors}") from None
        self.tokens = [[] for _ in range(batch_size)]
        self.sliding_windows = layer_sliding_windows(config)

    @property
    def storages(self) -> list[torch.Tensor]:
        """Those of each kind of layers, as in `kv_cache_group_ids`: here one for all."""
        return [self.storage]

    def reorder(self, rows: list[int]) -> None:
        """Row i becomes a copy of what row rows[i] held.

        A row may be taken often or never, and their number may change.
        """
        moved = [row for row, source in enumerate(rows) if row != source]
        if len(rows) != len(self.tokens):
            self.storage = self.storage[:, :, rows]
        elif moved:
            # In place, and only what is in use: a decode step takes less time than a whole copy.
            used = self.storage[..., : max(len(cached) for cached in self.tokens), :]
            used[:, :, moved] = used[:, :, [rows[row] for row in moved]]
        # Each row gets a list of its own: `truncate_to_prefix` changes them.
        self.tokens = [list(self.tokens[row]) for row in rows]

    def truncate_to_prefix(self, windows: list[list[int]], keep: int = 1) -> list[int]:
        """Keep what each row shares with its window, except the window's last `keep` tokens.

        Returns how many positions are left in each row.
        """
        for cached, tokens in zip(self.tokens, windows, strict=True):
            del cached[common_prefix_length(cached, tokens[:-keep]) :]
        return [len(cached) for cached in self.tokens]

    def spans(self, new: list[list[int]], rows: list[int] | None = None) -> list[Span]:
        """What a pass computes that appends new tokens to these rows, None for all.

        A row is one page. Raises ValueError, before anything changes, if they do not fit.
        """
        rows = list(range(len(self.tokens))) if rows is None else rows
        starts = [len(self.tokens[row]) for row in rows]
        end = max(start + len(tokens) for start, tokens in zip(starts, new, strict=True))
        if end > self.storage.shape[4]:
            raise ValueError(f"{end} positions do not fit into a cache of {self.storage.shape[4]}")
        if len(set(rows)) < len(rows) or not all(new):
            rule = "each row may be there once, with at least one token"
            raise ValueError(f"rows are {rows}, new tokens {new}; {rule}")
        self.pending = list(zip(rows, new))
        return [Span([row], start, tokens) for row, start, tokens in zip(rows, starts, new)]

    def prepare(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Plan a pass: its tokens, (B, T), their positions, and where each span ends in them.

        T is the length of the longest span. A shorter one is padded with its last token, at that
        token's position: it computes and writes the same again. The positions are (B, T), or (1, T)
        for rows in step, and an end is a place in the flattened tokens.
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
        if in_step:  # such as a single row: a slice takes less time than an index
            positions = torch.arange(end - T, end, device=device)[None]  # (1, T)
            self.slot_mapping = slice(None), slice(end - T, end)
        else:
            last = torch.tensor(stops)[:, None] - 1
            positions = torch.tensor(starts)[:, None] + torch.arange(T)
            positions = positions.minimum(last).to(device)  # (B, T)
            self.slot_mapping = torch.tensor(rows, device=device)[:, None], positions
        self.kv_views = {}  # of each window: the first key that is read, and which keys are seen
        for sliding_window in set(self.sliding_windows):
            first = first_visible_position(min(starts), sliding_window)
            mask = None  # (B or 1, 1, T, keys); one new token of rows in step sees all
            if T > 1 or not in_step:
                # Not is_causal: it would line up the first new query with the first key of all.
                keys = torch.arange(first, end, device=device)
                mask = make_causal_mask(positions[:, None, :, None], keys, sliding_window)
            self.kv_views[sliding_window] = first, mask
        self.batch_indices = (
            slice(None) if rows == everything else torch.tensor(rows, device=device)
        )
        # Per layer: keys, then values.
        self.keys_values = self.storage[..., :end, :].flatten(0, 1).unbind()
        tokens = [each + each[-1:] * (T - len(each)) for each in new]
        ends = [T * index + len(each) for index, each in enumerate(new)]
        return torch.tensor(tokens, device=device), positions, ends

    def commit(self) -> None:
        """The pass of the last spans is complete: its keys and values are in the storage."""
        for row, tokens in self.pending:
            self.tokens[row] = self.tokens[row] + tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append keys and values, and attend to all up to each position.

        All shapes are (B, T, heads, head_dim).
        """
        keys, values = self.keys_values[2 * layer : 2 * layer + 2]
        keys.transpose(1, 2)[self.slot_mapping] = to_cache_dtype(k, keys.dtype)
        values.transpose(1, 2)[self.slot_mapping] = to_cache_dtype(v, values.dtype)
        first, mask = self.kv_views[self.sliding_windows[layer]]
        keys = keys[:, :, first:][self.batch_indices]
        values = values[:, :, first:][self.batch_indices]
        return cached_attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)


def stored_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """How many numbers of this dtype a key or value takes in a cache.

    In int8 it is filled up to whole floats, and the last one is its scale.
    """
    return head_dim + -head_dim % 4 + 4 if dtype == torch.int8 else head_dim


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values, (..., head_dim), as a cache of this dtype holds them.

    Each is rounded by itself; for int8 it is rotated first, because keys have outliers.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    values, scale = quantize(rotate_channels(x.float()))
    return torch.cat([F.pad(values, (0, -x.shape[-1] % 4)), scale[..., None].view(dtype)], dim=-1)


def cached_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention to what `to_cache_dtype` made. q: (B, heads, T, head_dim), as the result.

    keys, values: (B, n_kv_head, S, stored_head_dim); neighbouring query heads share one.
    """
    D = q.shape[-1]
    is_rotated = keys.dtype == torch.int8
    queries = q
    if is_rotated:
        # What both sides have rotated is 2**k times itself: queries, and later results, undo that.
        queries = unrotate_channels(q.to(torch.promote_types(q.dtype, torch.float32)))
        keys, values = (
            stored[..., :D] * stored[..., -4:].view(torch.float32) for stored in (keys, values)
        )
    keys, values = (each.to(queries.dtype) for each in (keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return unrotate_channels(out).to(q.dtype) if is_rotated else out


def layer_sliding_windows(config) -> tuple[int | None, ...]:
    """The window of each layer: how many positions one sees, itself included; None: all."""
    return config.sliding_windows or (None,) * config.n_layer


def kv_cache_group_ids(config, separate: bool) -> list[int]:
    """The kind of each layer: 1 for one with a window, if these have pages of their own, else 0."""
    return [
        int(separate and sliding_window is not None)
        for sliding_window in layer_sliding_windows(config)
    ]


def first_visible_position(position: int, sliding_window: int | None) -> int:
    """The first position that one sees, in a layer with this window."""
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def make_causal_mask(
    positions: torch.Tensor, keys: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """Whether each position sees each key: itself and those before it.

    sliding_window: as of `layer_sliding_windows`. After Beltagy et al. 2020 (2004.05150),
    "Longformer: The long-document transformer".
    """
    mask = keys <= positions
    return mask if sliding_window is None else mask & (keys > positions - sliding_window)


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common from the start on."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # nearly always, and 20 times as fast as a loop
        return length
    return next(index for index, (x, y) in enumerate(zip(a, b)) if x != y)


def check_stride(stride: int | None, block_size: int) -> int:
    """The stride of a window; None is half of block_size. Raises UserError for one out of range."""
    if stride is None:
        return max(1, block_size // 2)
    if type(stride) is not int or not 1 <= stride <= block_size:
        allowed = f"an integer from 1 to block_size = {block_size}"
        raise UserError(f"stride is {stride!r}; it must be {allowed}")
    return stride


def window_start(length: int, block_size: int, stride: int) -> int:
    """Where the window on a text of `length` tokens begins.

    It moves by whole strides, and only when it must.
    """
    return max(0, math.ceil((length - block_size) / stride)) * stride

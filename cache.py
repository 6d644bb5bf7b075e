"""Keys and values of past positions, so that a pass computes new tokens only."""

import math

import torch
import torch.nn.functional as F

from checkpoint import UserError


class KVCache:
    """The keys and values of a batch of rows, of any lengths, in one tensor that is allocated once.

    storage: (n_layer, 2, batch_size, n_kv_head, max_len, head_dim), in the model's dtype; max_len None: block_size.
    tokens: what each row holds, position 0 first. Anything after them in the storage is stale. Raises UserError if it
    does not fit in memory.
    """

    def __init__(self, model, batch_size: int = 1, max_len: int | None = None):
        config = model.config
        max_len = config.block_size if max_len is None else max_len
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, max_len, config.head_dim)
        try:
            # Zeros: a masked position has weight 0, but 0 times a NaN in uninitialised memory would be NaN.
            self.storage = torch.zeros(shape, dtype=model.dtype, device=model.device)
        except RuntimeError:
            raise UserError(
                f"a cache of {math.prod(shape) * model.dtype.itemsize:,} bytes does not fit in memory: {batch_size}"
                f" rows x {config.n_layer} layers x keys and values x {config.n_kv_head} heads x {max_len} positions"
                f" x {config.head_dim} numbers x {model.dtype.itemsize} bytes"
            ) from None
        self.tokens = [[] for _ in range(batch_size)]

    def truncate(self, length: int) -> None:
        """Forget the positions of all rows from `length` on. Raises ValueError if it is negative."""
        if length < 0:
            raise ValueError(f"a cache is cut to {length} positions; it must be 0 or more")
        for held in self.tokens:
            del held[length:]

    def reset(self) -> None:
        """Forget all positions."""
        self.truncate(0)

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of what row rows[i] held; a row may be taken often or never, and their number change."""
        moved = [row for row, source in enumerate(rows) if row != source]
        if len(rows) != len(self.tokens):
            self.storage = self.storage[:, :, rows]
        elif moved:  # in place, and only what is in use: a decode step takes less time than a copy of all positions
            used = self.storage[..., : max(len(held) for held in self.tokens), :]
            used[:, :, moved] = used[:, :, [rows[row] for row in moved]]
        self.tokens = [list(self.tokens[row]) for row in rows]  # each row its own list: `match` cuts them

    def match(self, windows: list[list[int]], keep: int = 1) -> list[int]:
        """Keep what each row shares with its window, but for its last `keep` tokens; returns how many are left."""
        for held, window in zip(self.tokens, windows, strict=True):
            del held[shared_length(held, window[:-keep]) :]
        return [len(held) for held in self.tokens]

    def extend(self, new: list[list[int]], rows: list[int] | None = None) -> torch.Tensor:
        """Plan a pass that appends new tokens to these rows, None for all; returns their positions, (B, T).

        T is the length of the longest list. A shorter one is padded with its last token, at that token's position: it
        computes and writes the same again. Rows in step have one row of positions, (1, T).
        Raises ValueError, before anything changes, if they do not fit.
        """
        everything = list(range(len(self.tokens)))
        rows = everything if rows is None else rows
        starts, device = self.plan(new, rows), self.storage.device
        ends = [start + len(tokens) for start, tokens in zip(starts, new)]
        end, T = max(ends), max(len(tokens) for tokens in new)
        # Rows in step, such as a single one, are written without an index, and one new token needs no mask.
        in_step = rows == everything and len(set(starts)) == len(set(ends)) == 1
        if in_step:
            positions = torch.arange(end - T, end, device=device)[None]  # (1, T)
        else:
            steps, last = torch.arange(T), torch.tensor(ends)[:, None] - 1
            positions = (torch.tensor(starts)[:, None] + steps).minimum(last).to(device)  # (B, T)
            self.slots = torch.tensor(rows, device=device)[:, None], positions
        self.mask = None
        if T > 1 or not in_step:
            # Not is_causal: it would line up the first new query with the first key of all.
            self.mask = torch.arange(end, device=device) <= positions[:, None, :, None]  # (B or 1, 1, T, end)
        self.rows = None if rows == everything else torch.tensor(rows, device=device)
        # Of each layer its keys, then its values: all that the pass may see, and the part that it fills in.
        self.visible = self.storage[..., :end, :].flatten(0, 1).unbind()
        self.filled = self.storage[..., end - T : end, :].transpose(3, 4).flatten(0, 1).unbind() if in_step else None
        return positions

    def plan(self, new: list[list[int]], rows: list[int]) -> list[int]:
        """Note that a pass appends new tokens to these rows; returns where each begins.

        Raises ValueError, before anything changes, if they do not fit.
        """
        starts = [len(self.tokens[row]) for row in rows]
        end = max(start + len(tokens) for start, tokens in zip(starts, new, strict=True))
        if end > self.storage.shape[4]:
            raise ValueError(f"{end} positions do not fit into a cache of {self.storage.shape[4]}")
        if len(set(rows)) < len(rows) or not all(new):
            raise ValueError(f"rows are {rows}, new tokens {new}; each row may be there once, with at least one token")
        self.planned = list(zip(rows, new))
        return starts

    def record(self) -> None:
        """The planned pass is complete: its keys and values are in the storage."""
        for row, tokens in self.planned:
            self.tokens[row] = self.tokens[row] + tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append keys and values, and attend to all up to each position. All shapes are (B, T, heads, head_dim)."""
        keys, values = self.visible[2 * layer : 2 * layer + 2]
        if self.filled:
            self.filled[2 * layer].copy_(k)
            self.filled[2 * layer + 1].copy_(v)
        else:
            keys.transpose(1, 2)[self.slots], values.transpose(1, 2)[self.slots] = k, v
        if self.rows is not None:
            keys, values = keys[self.rows], values[self.rows]
        if layer == len(self.storage) - 1:
            self.record()
        q = q.transpose(1, 2)  # with as many heads as keys, or a multiple of that
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, enable_gqa=True).transpose(1, 2)


def shared_length(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common from the start on."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # nearly always, and 20 times as fast as a loop
        return length
    return next(index for index, (x, y) in enumerate(zip(a, b)) if x != y)


def check_stride(stride: int | None, block_size: int) -> int:
    """The stride of a window, half of block_size for None. Raises UserError if it is out of range."""
    stride = max(1, block_size // 2) if stride is None else stride
    if not 1 <= stride <= block_size:
        raise UserError(f"stride is {stride}; it must be from 1 to block_size = {block_size}")
    return stride


def window_start(length: int, block_size: int, stride: int) -> int:
    """Where the window on a text of `length` tokens begins: it moves by whole strides, and only when it must."""
    return max(0, math.ceil((length - block_size) / stride)) * stride

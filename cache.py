"""Keys and values of past positions, so that a pass computes new tokens only."""

import torch
import torch.nn.functional as F


class KVCache:
    """The keys and values of a batch of rows, all of one length. tokens: what each row holds, position 0 first."""

    def __init__(self, model, batch_size: int = 1):
        config = model.config
        shape = (2, batch_size, config.n_kv_head, 0, config.head_dim)  # keys and values, length 0
        self.layers = [torch.empty(shape, dtype=model.dtype, device=model.device)] * config.n_layer
        self.tokens = [[] for _ in range(batch_size)]

    def match(self, windows: list[list[int]]) -> int:
        """Keep what each row shares with its window, but for the window's last token; returns how many are left."""
        length = min(shared_length(held, window[:-1]) for held, window in zip(self.tokens, windows, strict=True))
        self.tokens = [held[:length] for held in self.tokens]
        self.layers = [past[..., :length, :] for past in self.layers]
        return length

    def extend(self, new: list[list[int]]) -> torch.Tensor:
        """Plan a pass that appends new tokens, equally many to each row; returns their positions, (T,)."""
        start, end, device = len(self.tokens[0]), len(self.tokens[0]) + len(new[0]), self.layers[0].device
        self.new, positions = new, torch.arange(start, end, device=device)
        # Not is_causal: it would line up the first new query with the first key of all.
        self.mask = torch.arange(end, device=device) <= positions[:, None]  # (T, end)
        return positions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append keys and values, and attend to all up to each position. All shapes are (B, T, heads, head_dim)."""
        new = torch.stack([k, v]).transpose(2, 3)  # (2, B, n_kv_head, T, head_dim)
        self.layers[layer] = keys, values = torch.cat([self.layers[layer], new], dim=3)
        if layer == len(self.layers) - 1:  # the pass is complete
            self.tokens = [held + tokens for held, tokens in zip(self.tokens, self.new, strict=True)]
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=self.mask).transpose(1, 2)


def shared_length(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common from the start on."""
    return next((index for index, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

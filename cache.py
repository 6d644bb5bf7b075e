"""KV cache of a static batch: a pass computes only new tokens."""

import torch
import torch.nn.functional as F


class KVCache:
    """A KV cache for a batch of sequences of equal length, which grows with each pass.

    layers: the keys and values of each layer, (2, batch_size, n_head, positions, head_dim).
    tokens: the cached tokens of each sequence, from position 0.
    """

    def __init__(self, model, batch_size: int = 1):
        config = model.config
        shape = (2, batch_size, config.n_head, 0, config.head_dim)
        self.layers = [torch.empty(shape, dtype=model.dtype, device=model.device)] * config.n_layer
        self.tokens = [[] for _ in range(batch_size)]

    def truncate_to_prefix(self, windows: list[list[int]]) -> int:
        """Drop the cached tokens after the common prefix of each sequence with its window.

        The last position of a window is dropped too, because a pass has to compute its logits.
        Returns the number of cached positions, the same for all sequences: the smallest.
        """
        length = min(
            common_prefix_length(cached, tokens[:-1])
            for cached, tokens in zip(self.tokens, windows, strict=True)
        )
        self.tokens = [cached[:length] for cached in self.tokens]
        self.layers = [kv[..., :length, :] for kv in self.layers]
        return length

    def prepare(self, new: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan a pass that appends new tokens, equally many to each sequence.

        Returns the tokens, (B, T), and their positions, (1, T).
        """
        T = len(new[0])
        end = len(self.tokens[0]) + T
        device = self.layers[0].device
        self.pending = new
        positions = torch.arange(end - T, end, device=device)[None]  # (1, T)
        self.mask = None  # (1, T, end); None: all keys are visible
        if T > 1:
            # is_causal would align the first new query with the very first key.
            keys = torch.arange(end, device=device)
            self.mask = keys <= positions[..., None]
        return torch.tensor(new, device=device), positions

    def commit(self) -> None:
        """Record the tokens of the last `prepare` as cached, after their pass is complete."""
        self.tokens = [cached + tokens for cached, tokens in zip(self.tokens, self.pending)]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append keys and values, and return causal attention over the cached ones.

        q, k, v and the result are (B, T, heads, head_dim).
        """
        new = torch.stack([k, v]).transpose(2, 3)  # (2, B, n_head, T, head_dim)
        self.layers[layer] = torch.cat([self.layers[layer], new], dim=3)
        keys, values = self.layers[layer]
        q = q.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask).transpose(1, 2)


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of two token lists."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the common case, 20 times as fast as a loop
        return length
    return next(index for index, (x, y) in enumerate(zip(a, b)) if x != y)

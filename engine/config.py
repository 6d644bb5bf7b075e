"""Settings of an engine, and their limits."""

from dataclasses import dataclass

import torch

from drafts import GAMMA_LIMITS
from engine.pages import page_count
from errors import check_limits

LIMITS = {  # field of EngineConfig: type, validity check, description of valid values
    "max_num_seqs": (int, lambda value: value >= 1, "an integer >= 1"),
    "num_pages": (int | None, lambda value: value is None or value >= 1, "an integer >= 1"),
    "page_size": (int, lambda value: value >= 1, "an integer >= 1"),
    "max_num_batched_tokens": (int, lambda value: value >= 1, "an integer >= 1"),
    **GAMMA_LIMITS,
}
MAX_POSITIONS = 2**16  # positions of 4 bytes per element, default cache size


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises UserError for a value out of range."""

    max_num_seqs: int = 32  # maximum sequences per step
    num_pages: int | None = None  # size of the KV cache; None: `cache_size` has the rule
    page_size: int = 16  # positions per page
    max_num_batched_tokens: int = 512  # maximum tokens per step
    gamma: int = 3  # maximum draft tokens per request and step, 1 to 16
    stride: int | None = None  # tokens by which a context shift moves the window, as in `generate`
    cache_dtype: torch.dtype | None = None  # of keys and values; None: the model's dtype

    def __post_init__(self):
        check_limits(LIMITS, **{name: getattr(self, name) for name in LIMITS})

    def cache_size(self, block_size: int) -> int:
        """Return num_pages; by default pages for max_num_seqs context windows, with a limit.

        The limit is MAX_POSITIONS, but at least one context window. With a cache_dtype of fewer
        than 4 bytes it rises, so that its bytes stay the same.
        """
        if self.num_pages is not None:
            return self.num_pages
        per_sequence = page_count(block_size, self.page_size)
        itemsize = self.cache_dtype.itemsize if self.cache_dtype else 4
        limit = page_count(MAX_POSITIONS * 4 // itemsize, self.page_size)
        return min(self.max_num_seqs * per_sequence, max(per_sequence, limit))

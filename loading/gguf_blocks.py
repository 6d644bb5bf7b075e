"""Numbers of a GGUF file that share a scale in blocks, as float32.

Each function takes the bytes of blocks, (n, bytes of a block), and returns their numbers, (n,
numbers of a block). The forms: ggml-common.h and ggml-quants.c in github.com/ggml-org/ggml.
"""

import torch

from loading.gguf import TYPES


def decode(name: str, data: torch.Tensor) -> torch.Tensor:
    """The float32 numbers in blocks of this type. data: their bytes, one after the other."""
    (size,) = (size for known, _, size in TYPES.values() if known == name)
    return DECODERS[name](data.view(-1, size)).flatten()


def halves(data: torch.Tensor) -> torch.Tensor:
    """Numbers stored as float16."""
    return data.view(torch.float16).float()


def fields(data: torch.Tensor, width: int, group: int) -> torch.Tensor:
    """Numbers of `width` bits: of each `group` bytes first the lowest bits of all, then the next.

    data: (n, bytes). Returns uint8 (n, numbers).
    """
    data = data.unflatten(1, (-1, group)).contiguous()  # twice as fast
    mask = 2**width - 1
    return torch.stack([data >> bit & mask for bit in range(0, 8, width)], dim=2).flatten(1)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale d (2 bytes), 32 int8 q: d q."""
    return halves(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale d (2 bytes), 32 nibbles q: d (q - 8)."""
    return halves(blocks[:, :2]) * (fields(blocks[:, 2:], 4, 16) - 8.0)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """A scale d and a minimum m (2 bytes each), 32 nibbles q: d q + m."""
    return halves(blocks[:, :2]) * fields(blocks[:, 4:], 4, 16) + halves(blocks[:, 2:4])


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale d (2 bytes), 32 fifth bits (4 bytes), 32 nibbles; together q: d (q - 16)."""
    q = fields(blocks[:, 6:], 4, 16) | fields(blocks[:, 2:6], 1, 1) << 4
    return halves(blocks[:, :2]) * (q - 16.0)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """A scale d and a minimum m, then as in Q5_0: d q + m."""
    q = fields(blocks[:, 8:], 4, 16) | fields(blocks[:, 4:8], 1, 1) << 4
    return halves(blocks[:, :2]) * q + halves(blocks[:, 2:4])


DECODERS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1}

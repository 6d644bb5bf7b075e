"""Unpacking of the block-quantised types of GGUF files, into float32.

Each unpacker takes the bytes of n blocks, (n, bytes per block), and returns their values,
(n, values per block). The formats: ggml-common.h and ggml-quants.c in github.com/ggml-org/ggml.
"""

import torch

from loading.gguf import GGML_TYPES


def dequantize(name: str, data: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks of a GGUF type to float32, (values,). data: the bytes of the blocks."""
    (size,) = (size for known, _, size in GGML_TYPES.values() if known == name)
    return UNPACKERS[name](data.view(-1, size)).flatten()


def from_float16(data: torch.Tensor) -> torch.Tensor:
    """Convert the bytes of float16 values to float32."""
    return data.view(torch.float16).float()


def unpack_bits(data: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Unpack values of `bits` bits: in each `group` bytes the lowest bits of all, then the next.

    data: (n, bytes). Returns uint8 (n, values).
    """
    data = data.unflatten(1, (-1, group)).contiguous()  # twice as fast
    mask = 2**bits - 1
    parts = [data >> bit & mask for bit in range(0, 8, bits)]
    return torch.stack(parts, dim=2).flatten(1)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack a scale d (2 bytes) and 32 int8 q: d q."""
    return from_float16(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack a scale d (2 bytes) and 32 nibbles q: d (q - 8)."""
    return from_float16(blocks[:, :2]) * (unpack_bits(blocks[:, 2:], 4, 16) - 8.0)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack a scale d, a minimum m (2 bytes each) and 32 nibbles q: d q + m."""
    scale = from_float16(blocks[:, :2])
    minimum = from_float16(blocks[:, 2:4])
    return scale * unpack_bits(blocks[:, 4:], 4, 16) + minimum


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack a scale d (2 bytes), then 32 fifth bits (4 bytes) and 32 nibbles of q: d (q - 16)."""
    q = unpack_bits(blocks[:, 6:], 4, 16) | unpack_bits(blocks[:, 2:6], 1, 1) << 4
    return from_float16(blocks[:, :2]) * (q - 16.0)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack a scale d, a minimum m (2 bytes each) and q as in Q5_0: d q + m."""
    q = unpack_bits(blocks[:, 8:], 4, 16) | unpack_bits(blocks[:, 4:8], 1, 1) << 4
    return from_float16(blocks[:, :2]) * q + from_float16(blocks[:, 2:4])


UNPACKERS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1}

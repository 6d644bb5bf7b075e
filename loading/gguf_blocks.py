"""Unpacking of the block-quantised types of GGUF files.

Each unpacker takes the bytes of n blocks, (n, bytes per block). It returns integers q, (n, parts,
values per part), and the scale and minimum of each part, both float32 (n, parts). Values are
scale * q + minimum. The minima are None in types without them. The formats: ggml-common.h and
ggml-quants.c in github.com/ggml-org/ggml.
"""

import torch

from loading.gguf import GGML_TYPES

QuantParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def dequantize(name: str, data: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks of a GGUF type to float32, (values,). data: the bytes of the blocks."""
    q, scales, minima = unpack_blocks(name, data)
    numbers = scales[..., None] * q
    return (numbers if minima is None else numbers + minima[..., None]).flatten()


def unpack_blocks(name: str, data: torch.Tensor) -> QuantParts:
    """Unpack blocks of a GGUF type. data: the bytes of the blocks."""
    (size,) = (size for known, _, size in GGML_TYPES.values() if known == name)
    return UNPACKERS[name](data.view(-1, size))


def from_float16(data: torch.Tensor) -> torch.Tensor:
    """Convert the bytes of float16 values to float32."""
    return data.view(torch.float16).float()


def unpack_bits(data: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Unpack values of `bits` bits: in each `group` bytes the lowest bits of all, then the next.

    data: (n, bytes). Returns int8 (n, values).
    """
    data = data.unflatten(1, (-1, group)).contiguous()  # twice as fast
    mask = 2**bits - 1
    parts = [data >> bit & mask for bit in range(0, 8, bits)]
    return torch.stack(parts, dim=2).flatten(1).view(torch.int8)


def q8_0(blocks: torch.Tensor) -> QuantParts:
    """Unpack a scale d (2 bytes) and 32 int8 q: d q."""
    return blocks[:, None, 2:].view(torch.int8), from_float16(blocks[:, :2]), None


def q4_0(blocks: torch.Tensor) -> QuantParts:
    """Unpack a scale d (2 bytes) and 32 nibbles q: d (q - 8)."""
    return unpack_bits(blocks[:, 2:], 4, 16)[:, None] - 8, from_float16(blocks[:, :2]), None


def q4_1(blocks: torch.Tensor) -> QuantParts:
    """Unpack a scale d, a minimum m (2 bytes each) and 32 nibbles q: d q + m."""
    return (
        unpack_bits(blocks[:, 4:], 4, 16)[:, None],
        from_float16(blocks[:, :2]),
        from_float16(blocks[:, 2:4]),
    )


def q5_0(blocks: torch.Tensor) -> QuantParts:
    """Unpack a scale d (2 bytes), then 32 fifth bits (4 bytes) and 32 nibbles of q: d (q - 16)."""
    q = unpack_bits(blocks[:, 6:], 4, 16) | unpack_bits(blocks[:, 2:6], 1, 1) << 4
    return q[:, None] - 16, from_float16(blocks[:, :2]), None


def q5_1(blocks: torch.Tensor) -> QuantParts:
    """Unpack a scale d, a minimum m (2 bytes each) and q as in Q5_0: d q + m."""
    q = unpack_bits(blocks[:, 8:], 4, 16) | unpack_bits(blocks[:, 4:8], 1, 1) << 4
    return q[:, None], from_float16(blocks[:, :2]), from_float16(blocks[:, 2:4])


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the scales and minima of the 8 parts of Q4_K or Q5_K blocks, each (n, 8).

    d and dmin (2 bytes each) are the factors of 8 scales and 8 minima of 6 bits (12 bytes). The
    first 8 bytes hold scales 0 to 3 and minima 0 to 3, and in their upper two bits the high bits of
    scales and minima 4 to 7. The last 4 bytes hold the low nibbles of these. ggml subtracts minima,
    so they are negated here.
    """
    scales, minima, nibbles = blocks[:, 4:16].split(4, dim=1)
    later = torch.cat([nibbles & 15 | scales >> 6 << 4, nibbles >> 4 | minima >> 6 << 4], dim=1)
    scales = torch.cat([scales & 63, later[:, :4]], dim=1)
    minima = torch.cat([minima & 63, later[:, 4:]], dim=1)
    return from_float16(blocks[:, :2]) * scales, -from_float16(blocks[:, 2:4]) * minima


def q4_k(blocks: torch.Tensor) -> QuantParts:
    """Unpack 8 parts of 32 nibbles q, each with a scale and a minimum."""
    return unpack_bits(blocks[:, 16:], 4, 32).unflatten(1, (8, 32)), *k_scales(blocks)


def q5_k(blocks: torch.Tensor) -> QuantParts:
    """Unpack as Q4_K, with fifth bits (32 bytes) before the nibbles."""
    q = unpack_bits(blocks[:, 48:], 4, 32) | unpack_bits(blocks[:, 16:48], 1, 32) << 4
    return q.unflatten(1, (8, 32)), *k_scales(blocks)


def q6_k(blocks: torch.Tensor) -> QuantParts:
    """Unpack 16 parts of 16: nibbles, two high bits each, int8 scales, d: d scale (q - 32)."""
    q = unpack_bits(blocks[:, :128], 4, 64) | unpack_bits(blocks[:, 128:192], 2, 32) << 4
    scales = from_float16(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return q.unflatten(1, (16, 16)) - 32, scales, None


def q2_k(blocks: torch.Tensor) -> QuantParts:
    """Unpack 16 parts of 16: nibbles of scales and minima, 2-bit q, d, dmin, used as in Q4_K."""
    scales = from_float16(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minima = -from_float16(blocks[:, 82:]) * (blocks[:, :16] >> 4)
    return unpack_bits(blocks[:, 16:80], 2, 32).unflatten(1, (16, 16)), scales, minima


def q3_k(blocks: torch.Tensor) -> QuantParts:
    """Unpack 16 parts of 16: third bits, 2-bit q, 6-bit scales, d: d (scale - 32) (q - 4)."""
    q = unpack_bits(blocks[:, 32:96], 2, 32) | unpack_bits(blocks[:, :32], 1, 32) << 2
    scales = unpack_bits(blocks[:, 96:104], 4, 8) | unpack_bits(blocks[:, 104:108], 2, 4) << 4
    return q.unflatten(1, (16, 16)) - 4, from_float16(blocks[:, 108:]) * (scales - 32), None


UNPACKERS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1}
UNPACKERS |= {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "Q2_K": q2_k, "Q3_K": q3_k}

"""Lesson 128: the first stages of a rotation in registers, whatever the instruction set."""

import pytest
import torch
from natives import call, random_rows
from test_packed_int8 import EVERY_KERNEL

pytestmark = pytest.mark.usefixtures("compiled")
# Widths with every power of two around a pair of vectors, with and without an odd rest.
SIZES = [0, 1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 45, 48, 64, 70, 96, 160, 192, 576, 896, 1536, 2018]


def rotated(library, x: torch.Tensor) -> torch.Tensor:
    assert hasattr(library, "rotate_channels"), "gpt.c exports no rotate_channels"
    y = torch.full_like(x, torch.nan)
    library.rotate_channels.restype = None
    for row, out in zip(x, y):
        call(library.rotate_channels, x.shape[1], row, out)
    return y


@EVERY_KERNEL
def test_the_bits_of_a_rotation(library):
    """They are torch's; a row in its own place has them too, and one that begins anywhere."""
    from quantisation.int8 import rotate_channels

    for size in SIZES:
        x = random_rows(5, size + 1)[:, 1:]
        expected = rotate_channels(x)
        assert torch.equal(rotated(library, x), expected)
        for row, wanted in zip(x, expected):
            call(library.rotate_channels, size, row, row)
            assert torch.equal(row, wanted)


@EVERY_KERNEL
def test_nothing_beside_a_row_is_written(library):
    assert hasattr(library, "rotate_channels"), "gpt.c exports no rotate_channels"
    for size in SIZES:
        room = torch.full((size + 2,), torch.nan)
        call(library.rotate_channels, size, torch.ones(size), room[1:])
        assert room[1:-1].isfinite().all() and room[[0, -1]].isnan().all()

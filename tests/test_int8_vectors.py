"""Each processor's own instructions for int8 products."""

import ctypes

import pytest
import torch
from natives import assert_equal, native_linear, random_layer

from quantisation.int8 import unrotate_channels

pytestmark = pytest.mark.usefixtures("compiled")
GROUPS = {"AVX-512 VNNI": (4, 128), "NEON": (4, 0)}


def exported(library, name: str) -> int | None:
    try:
        return ctypes.c_int.in_dll(library, name).value
    except ValueError:  # there is no such number
        return None


def test_each_kernel_has_groups_of_its_own(library):
    """VNNI takes four unsigned bytes, so 128 is added to each value."""
    name = (ctypes.c_char * 64).in_dll(library, "kernel").value.decode().split(",")[0]
    found = exported(library, "int8_group"), exported(library, "activation_zero_point")
    assert found == GROUPS.get(name, (2, 0))


def test_what_the_offset_adds_is_taken_away(target):
    weight, scale, bias = random_layer(33, 70, int8=True)
    sums = weight.sum(dim=1, dtype=torch.int32)
    linear = native_linear(weight.clone(), scale, bias)
    zero_point = exported(linear.library, "activation_zero_point")
    assert torch.equal(linear.compensation, -zero_point * sums)


@pytest.mark.parametrize("sign", [1, -1])
def test_still_sums_as_large_as_int32_holds(target, sign):
    """They pass 2**31 on the way, because numbers are made positive."""
    weight = torch.full((2, 2**17), 127 * sign).to(torch.int8)
    ones = unrotate_channels(torch.ones(7, 2**17))  # which are rotated to ones
    assert_equal(ones[:1], weight, torch.ones(2))
    assert_equal(-ones, weight, torch.ones(2))

"""float32 weights in panels, and products that do not depend on what else is computed."""

import pytest
import torch
from conftest import module_with
from natives import native_linear, random_layer, random_rows, threads

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("out, size, panel_width", [(8, 3, 4), (10, 3, 4), (3, 5, 8), (16, 1, 16)])
def test_each_weight_is_in_the_panel_of_its_output(out, size, panel_width):
    """Where the weight was; what fills no panel is copied to one of its own."""
    module_with("native.linear", "pack")
    from native.linear import pack

    weight = torch.arange(out * size).float().view(out, size) + 1
    before = weight.clone()
    panels, tail_panel = (each.view(torch.float32) for each in pack(weight, panel_width))
    full, left = divmod(out, panel_width)
    assert panels.shape == (full, size, panel_width) and tail_panel.shape == (size, panel_width)
    assert panels.data_ptr() == weight.data_ptr() or not full
    for o in range(full * panel_width):
        assert torch.equal(panels[o // panel_width, :, o % panel_width], before[o])
    assert torch.equal(tail_panel[:, :left], before[full * panel_width :].t())
    assert not tail_panel[:, left:].any()


def test_whole_numbers_are_exact(target):
    """Sums below 2**24 are exact in any order, so a number left out or taken twice shows."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 15, 16, 17, 63, 64, 65, 1000):
        weight = torch.randint(-9, 10, (69, size), generator=generator).float()
        bias = torch.arange(69.0)
        linear = native_linear(weight.clone(), None, bias)
        for rows in range(1, 18):
            x = torch.randint(-9, 10, (rows, size), generator=generator).float()
            assert torch.equal(linear(x), x @ weight.t() + bias)


def test_a_long_sum_is_made_of_short_ones(target):
    """A sum of 3,072 positive products, one after the other, is off by some 5e-7."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(32, 3072, generator=generator)
    x = torch.rand(8, 3072, generator=generator)
    expected = x.double() @ weight.double().t()
    off = (native_linear(weight)(x) - expected).abs() / expected
    assert off.mean() < 2e-7


def test_a_row_has_the_same_bits_among_any_others(target):
    for out, size in ((7, 3), (64, 32), (33, 100), (130, 1000)):
        linear = native_linear(*random_layer(out, size))
        x = random_rows(19, size)
        alone = torch.cat([linear(row[None]) for row in x])
        for count in range(1, 20):
            assert torch.equal(linear(x[:count]), alone[:count])
            assert torch.equal(linear(x[-count:]), alone[-count:])


def test_the_same_bits_at_any_number_of_threads():
    x = random_rows(9, 40)
    linear = native_linear(*random_layer(101, 40))
    expected = linear(x)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(linear(x), expected)

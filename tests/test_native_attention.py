"""The attention of one query, over keys and values in their pages."""

import random

import pytest
import torch
from natives import call, random_numbers

pytestmark = pytest.mark.usefixtures("compiled")


def attend(library, q, keys, values, page_size: int) -> torch.Tensor:
    """Attention to (length, D) keys and values, on pages anywhere, which are NaN elsewhere."""
    length, D = keys.shape
    count = -(-length // page_size)
    pages = random.Random(0).sample(range(2 * count), count)
    storage = torch.full((2, 2 * count, page_size, D), torch.nan)
    for position in range(length):
        page, place = pages[position // page_size], position % page_size
        storage[:, page, place] = torch.stack([keys[position], values[position]])
    y = torch.empty(D)
    sizes = page_size, page_size * D, length, D
    call(library.attend, torch.tensor(pages), *sizes, q, *storage, y)
    return y


@pytest.mark.parametrize("D", [1, 6, 16, 20, 64, 100])
def test_attention_over_pages(library, D):
    """It is as near to float64 as torch's, with equal bits for any page size and processor."""
    from native import build

    assert hasattr(library, "attend")
    for length in (1, 2, 15, 16, 17, 50):
        q = random_numbers(D)
        keys, values = random_numbers(2, length, D, seed=1)
        doubles = (each.double()[None] for each in (q[None], keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(*doubles)[0, 0].float()
        y = attend(library, q, keys, values, 1)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-6)
        for page_size in (3, 16, 64):
            assert torch.equal(attend(library, q, keys, values, page_size), y)
        assert torch.equal(attend(build.load(), q, keys, values, 16), y)


@pytest.mark.parametrize("factor", [100.0, 1e18])
def test_scores_far_from_zero(library, factor):
    """No exponential overflows: the largest score is subtracted."""
    assert hasattr(library, "attend")
    q = random_numbers(20) * factor
    keys, values = random_numbers(2, 30, 20, seed=1)
    y = attend(library, q, keys, values, 8)
    best = (keys.double() @ q.double()).argmax()
    torch.testing.assert_close(y, values[best], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(library, bad):
    assert hasattr(library, "attend")
    q = random_numbers(20)
    keys, values = random_numbers(2, 30, 20, seed=1)
    values[7, 3] = bad
    y = attend(library, q, keys, values, 8)
    assert not y[3].isfinite() and y[[2, 4]].isfinite().all()

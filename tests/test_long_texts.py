"""Lesson 134: attention in blocks of keys, with a running maximum; heads share what they read."""

import math

import pytest
import torch
from conftest import TARGETS, random_tokens
from natives import call, in_passes, native, random_numbers, threads

pytestmark = pytest.mark.usefixtures("compiled")
LENGTHS = 1, 31, 32, 33, 64, 65, 200


def attend(library, q, keys, values, page_size: int) -> torch.Tensor:
    """What C makes of one query, (D), whose pages lie in reverse order."""
    length, D = keys.shape
    count = -(-length // page_size)
    pages = list(range(count))[::-1]
    storage = torch.full((2, count, page_size, D), torch.nan)
    for position in range(length):
        place = pages[position // page_size], position % page_size
        storage[:, *place] = torch.stack([keys[position], values[position]])
    # Before this lesson the function took room for scores in front of y.
    y, room = torch.full((2, max(D, length)), torch.nan)
    sizes = page_size, page_size * D, length, D
    call(library.attend, torch.tensor(pages), *sizes, q, *storage, y, room)
    return y[:D]


@pytest.mark.parametrize("order", ["random", "rising", "falling", "far apart", "far below 0"])
@pytest.mark.parametrize("D", [5, 64, 72])
def test_attention_is_softmaxs_wherever_its_largest_score_lies(library, order, D):
    """It is as near to float64's, and has the same bits for each processor and size of pages."""
    from native import build

    for length in LENGTHS:
        q = random_numbers(D)
        keys, values = random_numbers(2, length, D, seed=length)
        if order != "random":  # scores get larger, or smaller, from each block to the next
            scores = torch.linspace(0, 500 if order == "far apart" else 20, length)
            scores = scores.flip(0) if order == "falling" else scores
            scores = scores - 120 * (order == "far below 0")
            keys = scores[:, None] * q / q.dot(q) * math.sqrt(D)
        weights = (keys.double() @ q.double() / math.sqrt(D)).softmax(0)
        y = attend(library, q, keys, values, length)
        torch.testing.assert_close(y.double(), weights @ values.double(), rtol=2e-5, atol=1e-5)
        for page_size in (1, 7, 16, 32, 64):
            assert torch.equal(attend(library, q, keys, values, page_size), y)
        assert torch.equal(attend(build.load(), q, keys, values, 16), y)


FORMS = [
    {"sliding_windows": (40, None), "n_kv_head": 1},
    {"sliding_windows": (None, 33, 7), "n_head": 6, "n_kv_head": 2, "head_dim": 64},
    {"sliding_windows": (64,), "n_head": 2, "n_kv_head": 2, "head_dim": 20},
]


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_bits_of_a_query_depend_on_its_position_only(tiny_windows, target, form):
    """Over several blocks of keys: however a text is cut into passes, on any pages and threads."""
    model = native(tiny_windows(dtype=torch.float32, block_size=150, **form), target)
    texts = [random_tokens(150, seed=row) for row in range(2)]
    alone = in_passes(model, texts, [[1, 1]] * 150, 150)
    for page_size in (3, 16, 32):
        for cut in (31, 37, 96, 150):
            passes = [[cut, cut], [150 - cut, 150 - cut]] if cut < 150 else [[150, 150]]
            assert torch.equal(in_passes(model, texts, passes, page_size), alone)
    for count in (1, 2, 4):  # one text: with 4, heads of a group go to different threads
        with threads(count):
            many = in_passes(model, texts, [[100, 60], [1, 1], [49, 89]], 16)
            one = in_passes(model, texts[:1], [[100], [1], [49]], 16)
        assert torch.equal(many, alone) and torch.equal(one, alone[:1])

"""Native models for tests, and the processors that they are compiled for."""

import contextlib
import random
from types import SimpleNamespace

import torch

from cache import KVCache, Span
from infer import pass_logits
from int8 import int8_linear, quantize


def native(model, target=None):
    """The model, computed in C."""
    from native.step import NativeRunner

    model.runner = NativeRunner(model, target)
    return model


def both(build, **shape) -> tuple:
    """The same random model in float32, in torch and in C."""
    return build(dtype=torch.float32, **shape), native(build(dtype=torch.float32, **shape))


def passed(model, storage, parts, keep) -> torch.Tensor:
    """The logits of a native pass. parts: pages, start and tokens of each text."""
    return model.runner.compute(storage, [Span(*part) for part in parts], keep)


def in_pieces(model, texts: torch.Tensor, size: int) -> torch.Tensor:
    """The logits at all positions of equally long texts, from passes of so many tokens of each."""
    cache = KVCache(model, *texts.shape)
    rows = list(range(len(texts)))
    parts = [
        pass_logits(model, part.tolist(), rows, cache, part.shape[1])
        for part in texts.split(size, dim=1)
    ]
    assert cache.tokens == texts.tolist()
    return torch.cat(parts, dim=1)


def in_passes(model, texts: list, passes: list[list[int]], page_size: int, seed=0) -> torch.Tensor:
    """The logits at all positions of texts, from passes of so many tokens of each.

    Their pages lie anywhere, in each other's midst, and are NaN before: nobody may read what was
    not written, and no other page is touched.
    """
    config = model.config
    count = -(-len(texts[0]) // page_size)
    order = random.Random(seed).sample(range((len(texts) + 1) * count), len(texts) * count)
    tables = [order[row * count : (row + 1) * count] for row in range(len(texts))]
    shape = config.n_layer, 2, (len(texts) + 1) * count, config.n_kv_head
    storage = torch.full((*shape, page_size, config.head_dim), torch.nan)
    starts = [0] * len(texts)
    parts = [[] for _ in texts]
    for lengths in passes:
        spans = [
            (table, start, text[start : start + length])
            for table, start, text, length in zip(tables, starts, texts, lengths)
        ]
        for own, logits in zip(parts, passed(model, storage, spans, lengths).split(lengths)):
            own.append(logits)
        starts = [start + length for start, length in zip(starts, lengths)]
    others = sorted(set(range(shape[2])) - set(order))
    assert storage[:, :, others].isnan().all()
    return torch.stack([torch.cat(own) for own in parts])


@contextlib.contextmanager
def threads(count: int):
    """While it is entered, torch and C use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_rows(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn(rows, 1, generator=generator)
    return torch.randn(rows, size, generator=generator) * sizes


def random_layer(out: int, size: int, bias: bool = True, int8: bool = True) -> tuple:
    """A weight, its scales (None for float32) and a bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, size, generator=generator)
    weight, scale = quantize(weight) if int8 else (weight, None)
    return weight, scale, torch.randn(out, generator=generator) if bias else None


def native_linear(weight, scale=None, bias=None):
    """A layer of these tensors in C."""
    from native import build
    from native.linear import NativeLinear

    return NativeLinear(SimpleNamespace(weight=weight, scale=scale, bias=bias), build.load())


def assert_equal(x, weight, scale, bias=None) -> None:
    """C computes the numbers of int8.py, bit for bit."""
    expected = int8_linear(x, weight, scale, bias)
    assert torch.equal(native_linear(weight.clone(), scale, bias)(x), expected)

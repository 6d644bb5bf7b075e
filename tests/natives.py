"""Compilers, native layers and native models for tests."""

import contextlib
import copy
import ctypes
import functools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TARGETS, random_tokens
from draws import random_logits
from torch import nn

from cache import KVCache, Span
from infer import pass_logits
from native import NativeRunner, build
from native.draw import draw
from native.linear import NativeLinear, replace_with_native_linear
from quantisation import quantisation_of
from quantisation.int8 import Int8Linear, int8_linear, quantize, rotate_channels
from sampling import SamplingParams, sample

WEIGHT_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)


def script(file, *lines) -> str:
    """Write a program that runs these lines of shell, such as a compiler's."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)


def files(build) -> list:
    return sorted(build.cache_directory().iterdir())


# What another process runs: build.py by itself, so that it imports no torch.
CODE = """
import sys
sys.path.insert(0, "native")
import build
build.SOURCE = build.Path(sys.argv[1])
print(build.kernel())
"""


def start(fresh) -> subprocess.Popen:
    command = [sys.executable, "-c", CODE, str(fresh.SOURCE)]
    return subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True)


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(int(pid), 0)
        about = Path("/proc", pid.strip(), "stat")
        return not Path("/proc").exists() or " Z " not in about.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def hanging_compiler(monkeypatch, tmp_path) -> Path:
    """Let $CC know its macros but never end its work. Returns the file with its process."""
    pid = tmp_path / "pid"
    macros = 'case "$*" in *-dM*) exec cc "$@";; esac'
    lines = (macros, "sleep 1000 &", f"echo $! > {pid}", "wait")
    monkeypatch.setenv("CC", script(tmp_path / "hanging-cc", *lines))
    return pid


def random_rows(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn(rows, 1, generator=generator)
    return torch.randn(rows, size, generator=generator) * sizes


def random_layer(out: int, size: int, bias: bool = True, int8: bool = False) -> tuple:
    """A weight, its scales (None for float32) and a bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, size, generator=generator)
    weight, scale = quantize(weight) if int8 else (weight, None)
    return weight, scale, torch.randn(out, generator=generator) if bias else None


def native_linear(weight, scale=None, bias=None):
    layer = object.__new__(nn.Linear if scale is None else Int8Linear)
    nn.Module.__init__(layer)
    layer.weight, layer.scale, layer.bias = weight, scale, bias
    return NativeLinear(layer, build.load())


@contextlib.contextmanager
def threads(count: int):
    """While it is entered, torch and C use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_equal(x, weight, scale, bias=None) -> None:
    """C computes the numbers of quantisation/int8.py, bit for bit."""
    expected = int8_linear(rotate_channels(x), weight, scale, bias)
    assert torch.equal(native_linear(weight.clone(), scale, bias)(x), expected)


def with_native_linear(model):
    replace_with_native_linear(model, build.load())
    return model


def call(function, *arguments) -> None:
    """Call a function of C with the addresses of tensors, int for int64_t, and float."""
    kinds = {int: ctypes.c_int64, float: ctypes.c_float}
    function.restype = None
    function(
        *(
            ctypes.c_void_p(each.data_ptr())
            if isinstance(each, torch.Tensor)
            else kinds[type(each)](each)
            for each in arguments
        )
    )


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def native(model, target=None):
    model.runner = NativeRunner(model, target)
    return model


def both(build, **shape) -> tuple:
    return build(dtype=torch.float32, **shape), native(build(dtype=torch.float32, **shape))


def passed(model, storage, parts, keep) -> torch.Tensor:
    """The logits of a native pass. parts: pages, start and tokens of each text."""
    return model.runner.compute([storage], [Span(*part) for part in parts], keep).logits


def in_pieces(model, texts: torch.Tensor, size: int, *dtype) -> torch.Tensor:
    """The logits at all positions of equally long texts, from passes of `size` tokens of each.

    dtype: of the cache.
    """
    cache = KVCache(model, *texts.shape, *dtype)
    rows = list(range(len(texts)))
    parts = [
        pass_logits(model, part.tolist(), rows, cache, part.shape[1])
        for part in texts.split(size, dim=1)
    ]
    assert cache.tokens == texts.tolist()
    return torch.cat(parts, dim=1)


def random_texts(model, count: int, length: int = 16) -> torch.Tensor:
    rows = [random_tokens(length, model.config.vocab_size, seed=row) for row in range(count)]
    return torch.tensor(rows)


def on_each_target(model, texts: torch.Tensor, size: int, *dtype) -> torch.Tensor:
    """The logits from passes of `size` tokens, whose bits are the same on each processor."""
    copies = [native(copy.deepcopy(model), target) for target in TARGETS]
    found = [in_pieces(each, texts, size, *dtype) for each in copies]
    assert all(torch.equal(logits, found[0]) for logits in found)
    return found[0]


def quantised(model, dtype: torch.dtype):
    quantisation = quantisation_of(dtype)
    weights = dict(model.named_parameters())
    tensors = quantisation.replace_layers(model, {}).state_dict()
    for name, weight in weights.items():
        quantisation.load_rows(tensors, name, slice(None), weight.detach())
    if model.adapters:
        model.adapters.attach(model)
    return model


def to_int8(model):
    return quantised(model, torch.int8)


def native_in_dtype(model, dtype):
    rounded = dtype in (torch.int8, torch.uint8)
    return native(quantised(model, dtype) if rounded else model.to(dtype))


def native_as_torch(model, dtype, monkeypatch):
    """Return a float32 model in C, with weights of dtype, after a check of its logits."""
    text = torch.tensor([random_tokens(model.config.block_size)])
    exact = copy.deepcopy(model).double()(text)
    model = native_in_dtype(model, dtype)
    monkeypatch.setattr(type(model), "hidden", None)  # the whole pass is in C
    found = in_pieces(model, text, text.shape[1])
    if dtype == torch.float32:
        assert (found - exact).abs().max() < 1e-4
    assert torch.equal(in_pieces(model, text, 1), found)
    return model


def in_passes(model, texts: list, passes: list[list[int]], page_size: int, seed=0) -> torch.Tensor:
    """The logits at all positions of texts. passes: in each, how many tokens of each text.

    Their pages lie anywhere, interleaved, and are NaN before: what was not written may not be read,
    and no other page is touched.
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


@functools.lru_cache(maxsize=8)  # to make them would take longer than the draws
def made_params(fields, count, first):
    return [SamplingParams(seed=(first + row) % 2**64, **dict(fields)) for row in range(count)]


def params_of(fields: dict, count: int, first: int = 0) -> list:
    """Parameters for `count` rows, each with a seed of its own."""
    return made_params(tuple(fields.items()), count, first)


def in_c(library, logits, params, position=9) -> list[int]:
    return draw(library, logits.contiguous(), params, [position] * len(logits))


def check_strange_logits(library, fields: dict, value: float) -> None:
    """Rows with NaN or infinity give an id of the vocabulary, and stay as they are."""
    for size in (1, 7, 255, 1000):
        logits = random_logits("random", 5, size)
        logits[1] = value
        logits[2, size // 2] = value
        logits[3, : size // 2] = value
        logits[4] = -value
        before = logits.clone()
        tokens = in_c(library, logits, params_of(fields, 5))
        assert all(0 <= token < size for token in tokens)
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def in_torch(logits, params, position=9) -> list[int]:
    rng_keys = [(own.seed, position) for own in params]
    return sample(logits, params[0], rng_keys=rng_keys).tolist()

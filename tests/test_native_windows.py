"""Lesson 120: layers with windows in C, with the same bits whatever is computed beside them."""

import copy

import pytest
import torch
from conftest import TARGETS, check_command_line, random_tokens
from engines import check_own_runs
from natives import (
    WEIGHT_DTYPES,
    in_passes,
    in_pieces,
    native,
    native_in_dtype,
    on_each_target,
    random_texts,
    threads,
    to_int8,
)

from llama import ExpertsConfig

pytestmark = pytest.mark.usefixtures("compiled")


def test_the_command_line_writes_what_transformers_does(cli, torch_passes, tmp_path):
    native = ("--backend", "native")
    check_command_line(cli, tmp_path, "Mistral", 30, *native, sliding_window=5)


@torch.inference_mode()
@WEIGHT_DTYPES
def test_each_layer_reaches_its_window_further(tiny_windows, dtype):
    """Two layers of windows 3 and 4 see 1 + 2 + 3 positions; what was before changes no bit."""
    model = native_in_dtype(tiny_windows(sliding_windows=(3, 4), dtype=torch.float32), dtype)
    text = torch.tensor([random_tokens(30)])
    for size in (1, 30):
        last = in_pieces(model, text, size)[0, -1]
        changes = []
        for position in range(30):
            other = text.clone()
            other[0, position] = (other[0, position] + 1) % 61
            changes.append(not torch.equal(in_pieces(model, other, size)[0, -1], last))
        assert changes == [False] * 24 + [True] * 6


@WEIGHT_DTYPES
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_engine_writes_the_text_of_each_own_run(tiny_windows, dtype, page_size):
    model = native_in_dtype(tiny_windows(dtype=torch.float32), dtype)
    pages = {"page_size": page_size, "num_pages": 100 // page_size}
    check_own_runs(model, (3, 1, 38, 60, 9, 2, 20), 50, **pages)


FORMS = [
    {
        "n_head": 1,
        "n_kv_head": 1,
        "head_dim": 2,
        "n_embd": 3,
        "n_inner": 1,
        "sliding_windows": (1, 2),
    },
    {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57},
    {"head_dim": 64, "n_embd": 130, "sliding_windows": (20, None, 17), "block_size": 70},
    {"n_kv_head": 1, "head_dim": 128, "n_embd": 33, "sliding_windows": (33,), "block_size": 80},
    {
        "sliding_windows": (5, 5),
        "qk_norm": True,
        "experts": ExpertsConfig(5, 2, 12, mlp_only_layers=(1,)),
    },
]


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_computes_logits_as_near_float64s_as_torch_does(tiny_windows, target, form):
    model = tiny_windows(dtype=torch.float32, **form)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(std=0.8 * model.config.n_embd**-0.5, generator=generator)
    texts = random_texts(model, 2, model.config.block_size)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 5, len(texts[0])):  # decode, and prefill in blocks of queries and without
        found = in_pieces(model, texts, size)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@WEIGHT_DTYPES
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_has_the_same_bits_for_each_number_of_tokens_threads_and_pages(tiny_windows, dtype, form):
    model = native_in_dtype(tiny_windows(dtype=torch.float32, **form), dtype)
    length = model.config.block_size
    texts = random_texts(model, 2, length)
    expected = in_pieces(model, texts, 1)
    for size, count in ((16, 1), (5, 2), (length, 5)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts, size), expected)
    # On pages anywhere, which are NaN elsewhere.
    for page_size, size in ((1, 8), (3, length), (16, 20), (64, length)):
        passes = [[min(size, length - start)] * 2 for start in range(0, length, size)]
        assert torch.equal(in_passes(model, texts.tolist(), passes, page_size), expected)


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_int8_logits_in_c_are_those_of_every_processor(tiny_windows, form):
    model = to_int8(tiny_windows(dtype=torch.float32, **form))
    texts = random_texts(model, 1, model.config.block_size)
    on_each_target(model, texts, 20)

"""Lesson 122: Gemma 3 in C: norms that add 1, norms after branches, GEGLU, two kinds of angles."""

import copy

import pytest
import torch
from conftest import TARGETS, check_command_line, random_tokens, run_rows
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

pytestmark = pytest.mark.usefixtures("compiled")


def test_the_command_line_writes_what_transformers_does(cli, tmp_path):
    shape = {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 6}
    check_command_line(cli, tmp_path, "Gemma3", 30, "--backend", "native", **shape)


FORMS = [
    {
        "n_head": 1,
        "n_kv_head": 1,
        "head_dim": 2,
        "n_embd": 3,
        "n_inner": 1,
        "sliding_windows": (1, None),
    },
    {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57},
    {
        "head_dim": 64,
        "n_embd": 130,
        "tie_word_embeddings": False,
        "rope_local_base_freq": 3.0,
        "query_pre_attn_scalar": 168,
    },
    {"n_kv_head": 1, "head_dim": 128, "n_embd": 33, "norm_eps": 0.1, "sliding_windows": (None,)},
]


def gentle(build, form, seed=0):
    """A model whose logits do not magnify rounding."""
    model = build(dtype=torch.float32, **form)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 2 * model.config.n_embd**-0.5
    return model


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_computes_logits_as_near_float64s_as_torch_does(tiny_gemma, target, form):
    model = gentle(tiny_gemma, form)
    texts = random_texts(model, 2, 40)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 5, 40):  # decode, and prefill in blocks of queries and without
        found = in_pieces(model, texts, size)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@WEIGHT_DTYPES
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_has_the_same_bits_for_each_number_of_tokens_threads_and_pages(tiny_gemma, dtype, form):
    model = native_in_dtype(tiny_gemma(dtype=torch.float32, **form), dtype)
    texts = random_texts(model, 2, 40)
    expected = in_pieces(model, texts, 1)
    for size, count in ((16, 1), (5, 2), (40, 5), (1, 5)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts, size), expected)
    for page_size, size in ((3, 8), (16, 20)):
        assert torch.equal(
            in_passes(model, texts.tolist(), [[size] * 2] * (40 // size), page_size), expected
        )


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_int8_logits_in_c_are_those_of_every_processor_and_near_torchs(tiny_gemma, form):
    model = to_int8(gentle(tiny_gemma, form))
    texts = random_texts(model, 1, 40)
    expected = model(texts)
    found = on_each_target(model, texts, 4)
    assert (found - expected).abs().mean() < 0.03 * expected.std()


@WEIGHT_DTYPES
def test_texts_are_those_of_own_runs(tiny_gemma, dtype):
    model = native_in_dtype(tiny_gemma(dtype=torch.float32), dtype)
    lengths = (3, 1, 38, 60, 9, 2)
    check_own_runs(model, lengths, 50)
    prompts = [random_tokens(length, seed=length) for length in lengths]
    given = {"max_new_tokens": 50, "ignore_eos": True}
    rows = run_rows(model, prompts, **given)
    assert rows == [run_rows(model, [prompt], **given)[0] for prompt in prompts]

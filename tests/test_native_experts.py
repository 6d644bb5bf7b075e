"""Lesson 117: a mixture of experts in C. Oracles: torch, float64, passes of one token."""

import copy
import math

import pytest
import torch
from conftest import TARGETS, random_tokens, run_rows
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

FORMS = [
    {"sizes": {"num_experts": 1, "num_experts_per_tok": 1, "n_inner": 1}, "n_embd": 3},
    {
        "sizes": {"num_experts": 9, "num_experts_per_tok": 9, "n_inner": 57},
        "n_embd": 51,
        "tie_word_embeddings": True,
    },
    {
        "sizes": {
            "num_experts": 40,
            "num_experts_per_tok": 8,
            "n_inner": 30,
            "norm_topk_prob": False,
        },
        "n_embd": 130,
    },
    {
        "sizes": {"num_experts": 7, "num_experts_per_tok": 3, "mlp_only_layers": (0,)},
        "n_layer": 3,
        "n_inner": 33,
    },
    {
        "sizes": {
            "num_experts": 300,
            "num_experts_per_tok": 1,
            "n_inner": 2,
            "mlp_only_layers": (1,),
        },
        "n_inner": 200,
    },
]
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=str)


def test_the_whole_pass_is_in_c(tiny_experts, compiled, monkeypatch):
    """Nothing of torch's forward pass runs, and the text is that of torch."""
    model = tiny_experts(dtype=torch.float32)
    params = {"max_new_tokens": 40, "ignore_eos": True}
    prompts = [[1, 2, 3], [4], random_tokens(16)]
    expected = run_rows(model, prompts, **params)
    native(model)
    monkeypatch.setattr(type(model), "hidden", None)
    assert run_rows(model, prompts, **params) == expected


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@EACH_FORM
def test_c_computes_logits_as_near_float64s_as_torch_does(tiny_experts, compiled, target, form):
    model = tiny_experts(dtype=torch.float32, **form)
    texts = random_texts(model, 2)
    expected = copy.deepcopy(model).double()(texts)
    allowed = 2e-5 + 4 * (model(texts) - expected).abs().max()
    native(model, target)
    for size in (1, 5, 16):
        assert (in_pieces(model, texts, size) - expected).abs().max() < allowed


@torch.inference_mode()
@WEIGHT_DTYPES
@EACH_FORM
def test_c_has_the_same_bits_for_each_number_of_tokens_and_threads(
    tiny_experts, compiled, dtype, form
):
    model = native_in_dtype(tiny_experts(dtype=torch.float32, **form), dtype)
    texts = random_texts(model, 2)
    expected = in_pieces(model, texts, 1)
    for size, count in ((16, 1), (5, 2), (1, 5), (16, 3)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts, size), expected)
    uneven = [[3, 0], [1, 7], [12, 1], [0, 8]]
    assert torch.equal(in_passes(model, texts.tolist(), uneven, 4), expected)


@torch.inference_mode()
@EACH_FORM
def test_int8_logits_in_c_are_those_of_every_processor_and_near_torchs(
    tiny_experts, compiled, form
):
    model = to_int8(tiny_experts(dtype=torch.float32, **form))
    texts = random_texts(model, 1)
    expected = model(texts)
    found = on_each_target(model, texts, 4)
    assert (found - expected).abs().median() < 0.03 * expected.std()


@torch.inference_mode()
@pytest.mark.parametrize("count, chosen", [(5, 2), (200, 9)])
def test_of_experts_that_tie_the_lower_numbers_win(tiny_experts, compiled, count, chosen):
    """A router of zeros: all experts have the same share, in torch and in C."""
    sizes = {"num_experts": count, "num_experts_per_tok": chosen}
    model = tiny_experts(dtype=torch.float32, sizes=sizes)
    for layer in model.layers:
        layer.mlp.gate.weight.zero_()
        for expert in layer.mlp.experts[chosen:]:
            expert.down_proj.weight.fill_(math.nan)
    texts = random_texts(model, 2)
    expected = model(texts)
    assert expected.isfinite().all()
    torch.testing.assert_close(in_pieces(native(model), texts, 5), expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@WEIGHT_DTYPES
def test_experts_that_no_token_chose_are_not_read(tiny_experts, compiled, dtype):
    """Their addresses become one that nothing may read."""
    model = tiny_experts(dtype=torch.float32, sizes={"num_experts": 9, "num_experts_per_tok": 2})
    model = to_int8(model) if dtype == torch.int8 else model
    text = random_texts(model, 1, 3)
    chosen = []
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(
            lambda mlp, args: chosen.append(mlp.route(args[0].flatten(0, 1))[1].unique().tolist())
        )
    model(text)
    expected = in_pieces(native(model), text, 3)
    for layer, numbers in enumerate(chosen):
        assert 2 <= len(numbers) <= 6
        for number in set(range(9)) - set(numbers):
            expert = model.runner.model.layers[layer].experts[number]
            for each in (*expert.inputs, expert.out):
                each.weight = each.tail_panel = each.compensation = 8
                each.scale = 8 if dtype == torch.int8 else None
    assert torch.equal(in_pieces(model, text, 3), expected)


@WEIGHT_DTYPES
def test_the_engine_writes_the_text_of_each_own_run(tiny_experts, compiled, dtype):
    model = native_in_dtype(tiny_experts(dtype=torch.float32), dtype)
    check_own_runs(model, (3, 1, 16, 40, 9, 2), 30)


@torch.inference_mode()
def test_shares_that_are_no_numbers_choose_experts_that_exist(tiny_experts, compiled):
    model = tiny_experts(dtype=torch.float32)
    model.layers[1].mlp.gate.weight.fill_(math.nan)
    texts = random_texts(model, 2)
    assert in_pieces(native(model), texts, 5).isnan().all()


def test_c_reads_no_expert_of_another_size(tiny_experts, compiled):
    model = tiny_experts(dtype=torch.float32)
    model.layers[1].mlp.experts[4].up_proj.weight = torch.nn.Parameter(torch.ones(13, 16))
    with pytest.raises(
        ValueError, match=r"reads contiguous torch.float32 \(12, 16\) .* \(13, 16\)"
    ):
        native(model)

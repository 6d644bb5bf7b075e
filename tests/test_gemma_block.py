"""The block of Gemma 3 computes what transformers does, in the modes of the lessons before too."""

import copy
import random

import pytest
import torch
from conftest import check_modes, difference, module_with, random_tokens, run_rows, their_rows
from engines import check_own_runs
from natives import random_texts, to_int8


def gemma_of(theirs):
    """Return our Gemma with the shape and the weights of one of transformers."""
    gemma = module_with("gemma", "Gemma", "GemmaConfig")
    shape = theirs.config
    config = gemma.GemmaConfig(
        vocab_size=shape.vocab_size,
        block_size=shape.max_position_embeddings,
        n_layer=shape.num_hidden_layers,
        n_head=shape.num_attention_heads,
        n_kv_head=shape.num_key_value_heads,
        n_embd=shape.hidden_size,
        n_inner=shape.intermediate_size,
        head_dim=shape.head_dim,
        norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_parameters["full_attention"]["rope_theta"],
        tie_word_embeddings=shape.tie_word_embeddings,
        query_pre_attn_scalar=shape.query_pre_attn_scalar,
    )
    ours = gemma.Gemma(config).double()
    weights = theirs.state_dict()
    ours.load_state_dict({key.removeprefix("model."): weights[key] for key in weights})
    return ours.eval()


@pytest.mark.parametrize("seed", range(15))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    keys = choose([1, 2, 3])
    heads = keys * choose([1, 2, 3])
    n_layer = choose([1, 3, 7])
    rope = {"rope_type": "default", "rope_theta": choose([10.0, 1e6])}
    theirs, _ = peer(
        "Gemma3",
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=choose([2, 6, 16, 20]),
        hidden_size=heads * choose([2, 4, 10]),
        num_hidden_layers=n_layer,
        max_position_embeddings=40,
        query_pre_attn_scalar=choose([1, 16, 256]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        layer_types=["full_attention"] * n_layer,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )
    ours = gemma_of(theirs)
    assert difference(ours, theirs) < 1e-9
    if n_layer < 7:  # deeper random weights magnify float32's rounding
        assert difference(ours.float(), theirs.float()) < 1e-4


def test_greedy_outputs_equal_transformers(peer):
    full = ["full_attention"] * 3
    theirs, _ = peer("Gemma3", num_hidden_layers=3, layer_types=full, max_position_embeddings=64)
    ours = run_rows(gemma_of(theirs), [[1, 5, 9]], max_new_tokens=60, ignore_eos=True)
    assert ours == their_rows(theirs, [[1, 5, 9]], 60)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_modes_of_the_lessons_before(tiny_gemma, dtype):
    """Ragged rows, the hop, speculation and beams give the text that a pass over all gives."""
    model = tiny_gemma() if dtype == "float64" else to_int8(tiny_gemma())
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(model, tiny_gemma(seed=1), prompts, 60)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_close(tiny_gemma, dtype):
    model = tiny_gemma()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 0.5
    texts = random_texts(model, 2)
    exact = model(texts).log_softmax(-1)
    half = copy.deepcopy(model).to(dtype)(texts).double().log_softmax(-1)
    divergence = (exact.exp() * (exact - half)).sum(-1).mean()
    assert divergence < {torch.float16: 1e-3, torch.bfloat16: 0.01}[dtype]


@torch.inference_mode()
def test_bfloat16_rounds_where_transformers_does(tiny_gemma, tmp_path):
    """Norms round once, after the product with their weights, and the root of the width does."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    model = tiny_gemma(dtype=torch.bfloat16, n_embd=48)
    assert model.embedding_scale == 6.9375  # not 6.928
    tokens = torch.arange(61)
    assert torch.equal(model.embed(tokens), model.embed_tokens.weight * model.embedding_scale)
    theirs = Gemma3RMSNorm(48, 1e-6).bfloat16()
    theirs.weight.data = model.norm.weight.data
    x = 10 * torch.randn(500, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    different = (model.norm(x) != theirs(x)).float().mean()
    assert different < 1e-3  # torch's rms_norm may round the mean's last bit otherwise


def test_the_engine_writes_the_text_of_each_own_run(tiny_gemma):
    model = tiny_gemma()
    check_own_runs(model, (3, 1, 38, 60, 9, 2), 50)

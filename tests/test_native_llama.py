"""A decode step of Llama in C: rotations, RMSNorm, SwiGLU, and keys that queries share."""

import copy

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, record, run_rows
from natives import (
    WEIGHT_DTYPES,
    both,
    check_logits,
    in_pieces,
    native,
    native_in_dtype,
    random_texts,
    threads,
    to_int8,
)

from llama import Llama

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
FORMS = [
    {"n_head": 1, "n_kv_head": 1, "head_dim": 2, "n_embd": 3, "n_inner": 1},
    {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57},
    {"head_dim": 64, "n_embd": 130, "n_inner": 130, "tie_word_embeddings": True},
    {"n_embd": 33, "n_layer": 3, "norm_eps": 0.1, "qkv_bias": True},
    {"n_kv_head": 1, "head_dim": 16, "n_embd": 64, "rope_theta": 10.0},
]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_decode_steps_of_a_llama_are_native(cli, monkeypatch, dtype):
    passes = record(monkeypatch, Llama, "hidden", lambda model, tokens, *_: tokens.shape)
    args = ("--model", CHECKPOINTS / "stories-llama", "--prompt", "Once upon a time")
    args += ("--max-new-tokens", 20, "--dtype", dtype, "--backend")
    code, out, err = cli(*args, "native")
    assert code == 0 and "note" not in err
    assert not [shape for shape in passes if shape[1] == 1]
    assert out == cli(*args, "torch")[1]


@torch.inference_mode()
@ALL_TARGETS
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_of_any_llama(tiny_llama, target, form):
    """They are as near to those of float64 as torch's."""
    check_logits(tiny_llama(dtype=torch.float32, **form), target)


@torch.inference_mode()
@ALL_TARGETS
def test_llama_activations_far_from_zero(tiny_llama, target):
    """The exponentials of SwiGLU and the softmax leave the range of float32 there."""
    model = tiny_llama(dtype=torch.float32)
    model.layers[0].mlp.gate_proj.weight.mul_(torch.linspace(-200, 200, 24)[:, None])
    model.layers[1].self_attn.q_proj.weight.mul_(200)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    logits = in_pieces(native(model, target), texts, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


WIDE = {"n_embd": 192, "n_head": 6, "head_dim": 32, "n_inner": 300, "block_size": 64}


@torch.inference_mode()
def test_int8_logits_of_a_llama_stay_close(tiny_llama):
    model = tiny_llama(dtype=torch.float32, **WIDE)
    to_int8(model.init_weights(std=0.05, generator=torch.Generator().manual_seed(0)))
    texts = random_texts(model, 1, 64)
    expected = model(texts)
    error = (in_pieces(native(model), texts, 1) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"head_dim": 20, "n_embd": 51, "n_inner": 57}], ids=str)
def test_int8_llama_logits_have_the_same_bits_on_every_processor(tiny_llama, shape):
    model = to_int8(tiny_llama(dtype=torch.float32, **shape))
    texts = random_texts(model, 1)
    expected = in_pieces(native(copy.deepcopy(model)), texts, 1)
    for target in TARGETS:
        compiled = native(copy.deepcopy(model), target)
        assert torch.equal(in_pieces(compiled, texts, 1), expected)


@torch.inference_mode()
@WEIGHT_DTYPES
@pytest.mark.parametrize("keys", [2, 6])
def test_llama_has_the_same_bits_at_any_number_of_threads(tiny_llama, dtype, keys):
    heads = {"n_head": 6, "n_kv_head": keys}
    model = native_in_dtype(tiny_llama(dtype=torch.float32, n_embd=64, n_inner=96, **heads), dtype)
    texts = random_texts(model, 1, 7)
    expected = in_pieces(model, texts, 1)
    for count in (2, 5):
        with threads(count):
            for _ in range(2):
                assert torch.equal(in_pieces(model, texts, 1), expected)


@torch.inference_mode()
def test_the_angles_are_those_of_torch(tiny_llama):
    """One is 150,000 radians at the last position: computed in another way it is off by 0.01."""
    model = tiny_llama(dtype=torch.float32, rope_theta=1e-6)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model), texts, 1), expected, rtol=2e-5, atol=2e-5)


def test_llama_texts_beyond_the_window(tiny_llama):
    eager, model = both(tiny_llama)
    given = {"max_new_tokens": 50, "ignore_eos": True}
    prompt = [random_tokens(3)]
    assert run_rows(model, prompt, **given) == run_rows(eager, prompt, **given)


@pytest.mark.parametrize("heads", [3, 8])
def test_heads_that_cannot_share_keys_are_refused(tiny_llama, heads):
    with pytest.raises(ValueError, match="4 heads cannot share the keys of"):
        native(tiny_llama(dtype=torch.float32, n_kv_head=heads))

"""GPT-2 against transformers, and the logits of several last positions of windows."""

import math

import pytest
import torch
from conftest import difference
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCache
from infer import next_logits
from loading.load import save_model
from model import GPT, GPTConfig


@pytest.mark.parametrize(
    "n_head, n_embd, vocab_size, epsilon",
    [(1, 8, 11, 0.5), (3, 12, 97, 1e-5), (5, 40, 1001, 1e-5), (7, 7, 2, 1e-5)],
)
@torch.inference_mode()
def test_logits_equal_transformers_on_random_shapes(
    tiny, tmp_path, n_head, n_embd, vocab_size, epsilon
):
    from transformers import AutoModelForCausalLM

    shape = {"n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size}
    shape |= {"eos_token_id": vocab_size - 1, "layer_norm_epsilon": epsilon}
    ours = tiny(dtype=torch.float32, **shape)
    save_model(ours, tmp_path)
    assert difference(ours, AutoModelForCausalLM.from_pretrained(tmp_path).eval()) < 1e-4


@pytest.mark.parametrize("length", [0, 17])
def test_a_pass_takes_1_to_block_size_tokens(tiny, length):
    with pytest.raises(ValueError, match=rf"{length} tokens in one pass: .* block_size \(16\)"):
        tiny()(torch.zeros(1, length, dtype=torch.long))


def test_weights_that_end_a_residual_branch_start_smaller():
    model = GPT(GPTConfig(vocab_size=400, block_size=8, n_layer=8, n_head=2, n_embd=64))
    model.init_weights(std=0.1)
    for block in model.h:
        assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.1, rel=0.1)
        for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight):
            assert weight.std().item() == pytest.approx(0.1 / math.sqrt(2 * 8), rel=0.1)
        assert block.ln_1.weight.eq(1).all()
        assert block.mlp.c_fc.bias.eq(0).all()


@given(data=st.data(), keep=st.integers(1, 4), cached=st.booleans())
@settings(max_examples=40)
@torch.inference_mode()
def test_logits_equal_full_recomputation(tiny, data, keep, cached):
    """Windows of a small alphabet share beginnings by chance: they grow, change, hop."""
    model = tiny()
    window = st.lists(st.integers(0, 2), min_size=keep, max_size=16)
    steps = data.draw(st.lists(st.lists(window, min_size=3, max_size=3), min_size=1, max_size=4))
    cache = KVCache(model, 3) if cached else None
    for windows in steps:
        logits = next_logits(model, windows, cache, keep)
        assert logits.shape == (3, keep, 61)
        assert logits.dtype == torch.float32
        for tokens, ours in zip(windows, logits):
            torch.testing.assert_close(ours, model(torch.tensor([tokens]))[0, -keep:].float())


@pytest.mark.parametrize("cached", [True, False])
def test_a_window_shorter_than_what_is_kept_is_refused(tiny, cached):
    cache = KVCache(tiny(), 2) if cached else None
    with pytest.raises(ValueError, match="shorter than the 3 positions to keep"):
        next_logits(tiny(), [[1, 2, 3], [1, 2]], cache, keep=3)


def test_a_pass_that_fails_leaves_no_claim(tiny):
    model = tiny()
    cache = KVCache(model)
    next_logits(model, [[1, 2]], cache)
    handle = model.h[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next_logits(model, [[1, 2, 3, 4]], cache)
    handle.remove()
    expected = model(torch.tensor([[1, 2, 3, 4, 5]]))[:, -1:].float()
    torch.testing.assert_close(next_logits(model, [[1, 2, 3, 4, 5]], cache), expected)

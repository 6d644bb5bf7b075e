"""The forward pass against transformers'."""

import dataclasses
import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens

from loading.load import load_model, save_model
from model import GPT, GPTConfig, causal_attention

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def batch(rows: int, length: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.tensor(random_tokens(rows * length, vocab_size)).view(rows, length)


def peer(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def test_logits_equal_transformers_on_a_checkpoint():
    ours = load_model(CHECKPOINTS / "stories-draft")
    theirs = peer(CHECKPOINTS / "stories-draft")
    tokens = batch(2, 256, 4096)
    assert ours.config.eos_token_ids == (theirs.config.eos_token_id,) == (4095,)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **CLOSE)


@pytest.mark.parametrize(
    "n_head, n_embd, vocab_size, epsilon",
    [(1, 8, 11, 0.5), (3, 12, 97, 1e-5), (5, 40, 1001, 1e-5), (7, 7, 2, 1e-5)],
)
@torch.inference_mode()
def test_logits_equal_transformers_on_random_shapes(
    tiny, tmp_path, n_head, n_embd, vocab_size, epsilon
):
    shape = {"n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size}
    shape |= {"eos_token_id": vocab_size - 1, "layer_norm_epsilon": epsilon}
    ours = tiny(dtype=torch.float32, **shape)
    save_model(ours, tmp_path)
    tokens = batch(3, 16, vocab_size)
    torch.testing.assert_close(ours(tokens), peer(tmp_path)(tokens).logits, **CLOSE)


@torch.inference_mode()
def test_hidden_takes_any_leading_shape(tiny):
    """A layer does the same to a position in any shape; only `attend` must know it."""
    model = tiny()
    tokens = batch(2, 6)
    positions = torch.arange(6)

    def attend(layer, q, k, v):
        assert q.shape == k.shape == v.shape == (*leading, 2, 8)
        layers.append(layer)
        return causal_attention(layer, *(x.reshape(2, 6, 2, 8) for x in (q, k, v))).reshape(q.shape)

    x = model.hidden(tokens, positions, causal_attention)  # (6,) broadcasts to (2, 6)
    whole = model.head(x)
    torch.testing.assert_close(whole, model(tokens))
    for leading in [(2, 6), (12,), (1, 2, 3, 2)]:
        layers = []
        every = positions.expand(2, 6).reshape(leading)
        result = model.head(model.hidden(tokens.reshape(leading), every, attend))
        assert layers == [0, 1]
        assert result.shape == (*leading, 61)
        torch.testing.assert_close(result.reshape(2, 6, 61), whole)


@torch.inference_mode()
def test_hidden_adds_the_position_that_it_is_told(tiny):
    model = tiny()
    tokens = batch(2, 3)

    def nothing(layer, q, k, v):
        return torch.zeros_like(q)

    shifted = model.hidden(tokens, torch.tensor([[4], [9]]), nothing)
    for row, position in [(0, 4), (1, 9)]:
        one = model.hidden(tokens[row], torch.tensor(position), nothing)
        torch.testing.assert_close(shifted[row], one)
    other = model.hidden(tokens[0], torch.tensor(5), nothing)
    assert not torch.allclose(shifted[0], other)


@torch.inference_mode()
def test_logits_to_keep_are_the_last_ones(tiny):
    model = tiny()
    tokens = batch(2, 6)
    logits = model(tokens)
    assert logits.shape == (2, 6, 61)
    for n in (1, 3, 6):
        torch.testing.assert_close(model(tokens, logits_to_keep=n), logits[:, -n:])


@pytest.mark.parametrize("length", [0, 17])
def test_a_pass_takes_1_to_block_size_tokens(tiny, length):
    with pytest.raises(ValueError, match=rf"{length} tokens in one pass; .* block_size = 16"):
        tiny()(torch.zeros(1, length, dtype=torch.long))


def test_the_config_is_frozen_and_knows_its_heads():
    config = GPTConfig(n_head=4, n_embd=20)
    assert (config.head_dim, config.n_kv_head) == (5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 1


def test_weights_that_end_a_residual_branch_start_smaller():
    model = GPT(GPTConfig(vocab_size=400, block_size=8, n_layer=8, n_head=2, n_embd=64))
    model.init_weights(std=0.1)
    for block in model.h:
        assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.1, rel=0.1)
        for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight):
            assert weight.std().item() == pytest.approx(0.1 / math.sqrt(2 * 8), rel=0.1)
        assert block.ln_1.weight.eq(1).all()
        assert block.mlp.c_fc.bias.eq(0).all()

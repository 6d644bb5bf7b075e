"""Tokens of a prompt that attend side by side have the bits of each alone."""

import copy
import math

import pytest
import torch
from conftest import TARGETS, random_tokens
from natives import in_passes, in_pieces, native, random_texts, threads

pytestmark = pytest.mark.usefixtures("compiled")
FORMS = [
    ("tiny", {"n_head": 3, "n_embd": 60}),
    ("tiny_llama", {}),
    ("tiny_llama", {"n_head": 3, "n_kv_head": 1, "head_dim": 64}),  # what the compiler knows
]


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("family, form", FORMS, ids=str)
def test_tokens_together_have_the_bits_of_each_alone(request, target, family, form):
    """Wherever they begin, in their text and in the pass."""
    build = request.getfixturevalue(family)
    model = native(build(dtype=torch.float32, block_size=50, **form), target)
    texts = [random_tokens(50, seed=row) for row in range(3)]
    alone = in_passes(model, texts, [[1, 1, 1]] * 50, 16)
    for page_size in (1, 7):
        for lengths in ([49, 1, 33], [17, 47, 34], [35, 16, 32]):
            passes = [lengths, [50 - length for length in lengths]]
            assert torch.equal(in_passes(model, texts, passes, page_size), alone)
        assert torch.equal(in_passes(model, texts, [[50, 50, 50]], page_size), alone)
        with threads(2):  # each has a text of its own
            two = in_passes(model, texts[:2], [[50, 50]], page_size)
        assert torch.equal(two, alone[:2])


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_token_does_not_see_those_behind_it(tiny, target):
    """Though they are computed together: what is NaN in these is not in its logits."""
    model = tiny(dtype=torch.float32, block_size=50, n_head=1)
    model.wpe.weight.data[42] = math.nan  # in the midst of 4, 8 or 16 tokens
    native(model, target)
    (logits,) = in_passes(model, [random_tokens(50)], [[50]], 7)
    assert logits[:42].isfinite().all() and logits[42:].isnan().all()


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_activations_far_from_zero_in_blocks(tiny, tiny_llama, target):
    """The exponentials of the softmax leave the range of float32 there."""
    gpt = tiny(dtype=torch.float32)
    gpt.h[0].mlp.c_fc.bias.copy_(torch.linspace(-40, 40, 64))
    gpt.h[1].attn.c_attn.weight[:32].mul_(200)
    llama = tiny_llama(dtype=torch.float32)
    llama.layers[0].mlp.gate_proj.weight.mul_(torch.linspace(-200, 200, 24)[:, None])
    llama.layers[1].self_attn.q_proj.weight.mul_(200)
    for model in (gpt, llama):
        texts = random_texts(model, 1)
        expected = copy.deepcopy(model).double()(texts).float()
        logits = in_pieces(native(model, target), texts, 16)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

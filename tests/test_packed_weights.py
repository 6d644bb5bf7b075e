"""Lesson 50: weights in panels, and logits that do not depend on what else is computed."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from test_native_int8 import TARGETS, native_linear, random_rows
from test_native_linear import layer
from test_native_step import in_pieces, native

from loading.load import load_model
from model import TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")


@torch.inference_mode()
def test_logits_have_the_same_bits_in_passes_of_any_size():
    model = native(load_model(CHECKPOINTS / "stories-draft"))
    texts = torch.tensor([random_tokens(24, 4096, seed=row) for row in range(2)])
    expected = in_pieces(model, texts, 4)
    for size in (1, 2, 3, 5, 8):
        assert torch.equal(in_pieces(model, texts, size), expected)


@pytest.fixture(params=TARGETS, ids=str)
def target(request, monkeypatch):
    """All code in this test is compiled for that processor."""
    from native import build

    library = build.load(request.param)
    monkeypatch.setattr(build, "load", lambda *_: library)


def test_a_row_has_the_same_bits_among_any_others(target):
    for out, size in ((7, 3), (64, 32), (33, 100), (130, 1000)):
        weight, bias = layer(out, size)
        linear = native_linear(weight, None, bias)
        x = random_rows(19, size)
        alone = torch.cat([linear(row[None]) for row in x])
        for count in range(1, 20):
            assert torch.equal(linear(x[:count]), alone[:count])
            assert torch.equal(linear(x[-count:]), alone[-count:])


@pytest.mark.parametrize("outputs", [8, 32])
@pytest.mark.parametrize("out", [1, 7, 8, 31, 32, 64, 100])
def test_a_panel_has_the_weights_of_one_input_side_by_side(out, outputs):
    from native.linear import pack

    weight = torch.arange(out * 5.0).view(out, 5)
    original = weight.clone()
    panels, rest = (part.view(torch.float32) for part in pack(weight, outputs))
    whole = out // outputs
    assert panels.shape == (whole, 5, outputs) and rest.shape == (5, outputs)
    for o in range(out):
        panel = panels[o // outputs] if o < whole * outputs else rest
        assert torch.equal(panel[:, o % outputs], original[o])
    assert not rest[:, out % outputs :].any()


def test_weights_are_packed_where_they_are():
    weight, bias = layer(100, 40)
    linear = native_linear(weight, None, bias)
    assert linear.weight.data_ptr() == weight.data_ptr()
    whole = linear.weight.numel() // 40
    assert whole + 40 > 100 >= whole and linear.rest.shape[1] * 2 > 100 - whole


def test_still_a_shared_weight_is_packed_once(tiny, tiny_llama):
    for model in (tiny(dtype=torch.float32), tiny_llama(dtype=torch.float32, tied_head=True)):
        native(model)
        embedding = model.layer("embedding")
        assert embedding.linear is model.lm_head
    other = native(tiny_llama(dtype=torch.float32))
    assert other.embed_tokens.linear is not other.lm_head


@torch.inference_mode()
def test_still_an_embedding_reads_its_rows(tiny, target):
    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0)
        tokens = torch.arange(vocab_size).view(1, -1)
        expected = model.wte(tokens)
        assert torch.equal(native(model).wte(tokens), expected)
        for token in (-1, vocab_size):
            with pytest.raises(ValueError, match=f"they are from 0 to {vocab_size - 1}"):
                model.wte(torch.tensor([token]))


@torch.inference_mode()
def test_still_a_model_is_as_it_was_if_it_cannot_be_packed(tiny):
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(9)])
    expected = model(texts)
    model.ln_f.weight.data = model.ln_f.weight.double()
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(model)
    model.ln_f.weight.data = model.ln_f.weight.float()
    assert torch.equal(model(texts), expected) and type(model.runner) is TorchRunner


@torch.inference_mode()
def test_still_the_whole_model_without_a_cache(tiny):
    """Its products are native then, of any number of tokens."""
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(3)])
    expected = model(texts)
    torch.testing.assert_close(native(model)(texts), expected, rtol=1e-5, atol=1e-5)

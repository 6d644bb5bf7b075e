"""Weights in panels, and products that do not depend on what else is computed."""

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, run_rows
from natives import assert_equal, native, native_linear, random_layer, random_rows

from int8 import to_int8
from loading.load import load_model
from model import TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Also the kernel for AVX-512 without its int8 products.
ALL = [*TARGETS, *([("-O1", "-march=skylake-avx512")] if HAS_AVX512 else [])]
EVERY_KERNEL = pytest.mark.parametrize("library", ALL, ids=str, indirect=True)
INT8 = pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])


def test_a_row_has_the_same_bits_among_any_others(target):
    for out, size in ((7, 3), (64, 32), (33, 100), (130, 1000)):
        linear = native_linear(*random_layer(out, size, int8=False))
        x = random_rows(19, size)
        alone = torch.cat([linear(row[None]) for row in x])
        for count in range(1, 20):
            assert torch.equal(linear(x[:count]), alone[:count])
            assert torch.equal(linear(x[-count:]), alone[-count:])


@INT8
def test_weights_are_packed_where_they_are(int8):
    weight, scale, bias = random_layer(100, 40, int8=int8)
    linear = native_linear(weight, scale, bias)
    assert linear.weight.data_ptr() == weight.data_ptr()
    whole = linear.weight.shape[0] * linear.weight.shape[2]
    assert whole <= 100 < whole + linear.rest.shape[1]


@INT8
def test_a_shared_weight_is_packed_once(tiny, tiny_llama, int8):
    for model in (tiny(dtype=torch.float32), tiny_llama(dtype=torch.float32, tied_head=True)):
        native(to_int8(model) if int8 else model)
        embedding = model.layer("embedding")
        assert embedding.linear is model.lm_head
    other = native(tiny_llama(dtype=torch.float32))
    assert other.embed_tokens.linear is not other.lm_head


def test_the_weights_of_an_int8_model_are_packed():
    """And its text is what it was."""
    model = load_model(CHECKPOINTS / "stories-draft", torch.int8)
    shapes = {name: layer.weight.shape for name, layer in model.named_modules() if "c_fc" in name}
    expected = run_rows(model, [[5, 6, 7]], options={"use_cache": False}, max_new_tokens=20)
    native(model)
    for name, (out, size) in shapes.items():
        weight = model.get_submodule(name).weight  # (panels, groups, outputs)
        assert weight.dim() == 3 and weight.shape[0] * weight.shape[2] == out
        assert weight.numel() * weight.itemsize == out * size
    options = {"use_cache": False}
    assert run_rows(model, [[5, 6, 7]], options=options, max_new_tokens=20) == expected


@EVERY_KERNEL
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_int8_products_of_every_kernel(target, size):
    for out in (1, 15, 16, 17, 32, 33, 100):
        for rows in (1, 2, 4, 6, 7, 13):
            assert_equal(random_rows(rows, size), *random_layer(out, size))


@EVERY_KERNEL
def test_all_weights_that_a_byte_holds(target):
    weight = torch.arange(-128, 128).to(torch.int8).repeat(3, 1)
    x = torch.arange(-128, 128).float() * torch.tensor([[1.0], [-1.0]])
    assert_equal(x, weight, torch.ones(3))


@EVERY_KERNEL
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_as_large_as_int32_holds(target, sign):
    """With numbers that are made positive they pass 2**31 on the way."""
    weight = torch.full((2, 2**17), 127 * sign).to(torch.int8)
    assert_equal(torch.ones(1, 2**17), weight, torch.ones(2))
    assert_equal(-torch.ones(7, 2**17), weight, torch.ones(2))


@torch.inference_mode()
@EVERY_KERNEL
@INT8
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_an_embedding_reads_its_rows(tiny, target, shape, int8):
    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0, **shape)
        if int8:
            to_int8(model)
        tokens = torch.arange(vocab_size).view(1, -1)
        expected = model.wte(tokens)
        assert torch.equal(native(model).wte(tokens), expected)
        for token in (-1, vocab_size):
            with pytest.raises(ValueError, match=f"they are from 0 to {vocab_size - 1}"):
                model.wte(torch.tensor([token]))


@torch.inference_mode()
def test_a_model_is_as_it_was_if_it_cannot_be_packed(tiny):
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(9)])
    expected = model(texts)
    model.ln_f.weight.data = model.ln_f.weight.double()
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(model)
    model.ln_f.weight.data = model.ln_f.weight.float()
    assert torch.equal(model(texts), expected) and type(model.runner) is TorchRunner

"""Lesson 51: int8 weights in panels, whose sums are those of lesson 24 in every kernel."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run_rows
from test_native_int8 import TARGETS, assert_equal, layer, native_linear, random_rows
from test_native_step import native

from loading.load import load_model

pytestmark = pytest.mark.usefixtures("compiled")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Also the kernel for AVX-512 without its int8 products.
ALL = [*TARGETS, *([("-march=skylake-avx512",)] if HAS_AVX512 else [])]


@pytest.fixture(params=ALL, ids=str)
def target(request, monkeypatch):
    """All code in this test is compiled for that processor."""
    from native import build

    library = build.load(request.param)
    monkeypatch.setattr(build, "load", lambda *_: library)


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 300])
def test_still_equal_to_torch_bit_for_bit(target, size):
    for out in (1, 15, 16, 17, 32, 33, 100):
        for rows in (1, 2, 4, 6, 7, 13):
            assert_equal(random_rows(rows, size), *layer(out, size))


def test_still_all_weights_that_a_byte_holds(target):
    weight = torch.arange(-128, 128).to(torch.int8).repeat(3, 1)
    x = torch.arange(-128, 128).float() * torch.tensor([[1.0], [-1.0]])
    assert_equal(x, weight, torch.ones(3))


@pytest.mark.parametrize("sign", [1, -1])
def test_still_sums_as_large_as_int32_holds(target, sign):
    """With numbers that are made positive they pass 2**31 on the way."""
    weight = torch.full((2, 2**17), 127 * sign).to(torch.int8)
    assert_equal(torch.ones(1, 2**17), weight, torch.ones(2))
    assert_equal(-torch.ones(7, 2**17), weight, torch.ones(2))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 4, 10])
@pytest.mark.parametrize("out", [1, 8, 13])
def test_a_panel_has_the_weights_of_a_group_of_inputs_side_by_side(out, size, group):
    from native.linear import pack

    outputs = 8
    weight = torch.arange(out * size).view(out, size).to(torch.int8)
    original = weight.clone()
    panels, rest = (part.view(torch.int8) for part in pack(weight, outputs, group))
    groups = -(-size // group)
    panels = panels.view(out // outputs, groups, outputs, group)
    rest = rest.view(groups, outputs, group)
    for o in range(out):
        panel = panels[o // outputs] if o < out - out % outputs else rest
        row = panel[:, o % outputs].flatten()
        assert torch.equal(row[:size], original[o]) and not row[size:].any()
    assert not rest[:, out % outputs :].any()


def test_still_weights_are_packed_where_they_are():
    weight, scale, bias = layer(100, 40)
    assert native_linear(weight, scale, bias).weight.data_ptr() == weight.data_ptr()


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_still_an_embedding_reads_its_rows(tiny, target, shape):
    from int8 import to_int8

    for vocab_size in (3, 32, 61, 200):
        model = tiny(dtype=torch.float32, vocab_size=vocab_size, eos_token_id=0, **shape)
        to_int8(model)
        tokens = torch.tensor([random_tokens(9, vocab_size), range(vocab_size - 9, vocab_size)])
        tokens = tokens.clamp(min=0)
        expected = model.wte(tokens)
        assert torch.equal(native(model).wte(tokens), expected)

"""Lesson 127: rows are rotated before they are rounded, so outliers cost little."""

import pytest
import torch
import torch.nn.functional as F
from conftest import CHECKPOINTS, module_with, random_tokens
from natives import in_pieces, native, random_numbers, to_int8
from ranks import LLAMA, compared, save_uneven

from loading.load import load_model

SIZES = [1, 2, 3, 4, 5, 6, 9, 16, 45, 48, 64, 70, 72, 2018]


def matrix(size: int) -> torch.Tensor:
    """R as a Kronecker product: the Hadamard matrix, and a reflection for each odd prime factor."""
    found = torch.ones(1, 1).double()
    while size % 2 == 0:
        found = torch.kron(torch.tensor([[1, 1], [1, -1]]).double(), found)
        size //= 2
    for p in range(3, size + 1, 2):
        while size % p == 0:
            found = torch.kron(torch.eye(p).double() - 2 / p, found)
            size //= p
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_the_product_with_a_symmetric_matrix(size):
    int8 = module_with("quantisation.int8", "rotate_channels", "unrotate_channels")
    x = random_numbers(2, 3, size).double()
    R = matrix(size)
    torch.testing.assert_close(int8.rotate_channels(x), x @ R, rtol=0, atol=1e-9)
    assert torch.equal(R, R.t())
    torch.testing.assert_close(
        int8.rotate_channels(int8.unrotate_channels(x)), x, rtol=0, atol=1e-12
    )
    weight = random_numbers(5, size).double()
    products = int8.rotate_channels(x) @ int8.unrotate_channels(weight).t()
    torch.testing.assert_close(products, x @ weight.t(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [64, 70, 576, 1536])
def test_a_rotated_row_does_not_depend_on_its_neighbours(size):
    """Nor where it lies: it is contiguous, because torch adds up strided rows in another order."""
    int8 = module_with("quantisation.int8", "rotate_channels")
    x = random_numbers(7, size)
    rotated = int8.rotate_channels(x)
    assert rotated.is_contiguous()
    assert torch.equal(rotated, torch.stack([int8.rotate_channels(row) for row in x]))
    assert torch.equal(rotated, int8.rotate_channels(x.t().contiguous().t()))


FAMILIES = ["tiny", "tiny_llama", "tiny_gemma", "tiny_experts"]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_rounded_is_the_model(family, request, monkeypatch):
    """A rotation changes the rounding only: float64 without it has the model's logits."""
    int8 = module_with("quantisation.int8", "rotate_channels", "unrotate_channels")
    tokens = torch.tensor([random_tokens(8)])
    whole = request.getfixturevalue(family)()
    expected = whole(tokens)
    weights = {name: weight.clone() for name, weight in whole.named_parameters()}
    model = to_int8(whole)
    for name, layer in model.named_modules():
        if f"{name}.weight" in weights and isinstance(layer, int8.Int8Linear):
            layer.weight = int8.unrotate_channels(weights[f"{name}.weight"])
            layer.scale = torch.ones(len(layer.weight)).double()
    head = model.layer("head")
    if model.config.tie_word_embeddings:
        head.weight = model.layer("embedding").weight
        head.scale = model.layer("embedding").scale
    linear = lambda x, weight, scale, bias: F.linear(x, weight * scale[:, None], bias)  # noqa: E731
    monkeypatch.setattr(int8, "int8_linear", linear)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)


def with_outliers(model):
    """The same function, with a few inputs of each layer far larger than the others."""
    norms = {"attn_norm": ("qkv", "query", "key", "value"), "mlp_norm": ("up", "gate")}
    for block in range(model.config.n_layer):
        for norm, readers in norms.items():
            layer = model.layer(norm, block)
            for tensor in layer.parameters():
                tensor.data[3::50] *= 16
            for reader in filter(None, (model.layer(role, block) for role in readers)):
                reader.weight.data[:, 3::50] /= 16
    return model


@torch.inference_mode()
@pytest.mark.parametrize("name, in_c", [("stories", True), ("stories-llama", False)])
def test_outliers_cost_little(compiled, name, in_c):
    tokens = torch.tensor([random_tokens(64, 4000)])
    whole = load_model(CHECKPOINTS / name)
    expected = whole(tokens).log_softmax(dim=-1)
    model = with_outliers(whole)
    torch.testing.assert_close(model(tokens).log_softmax(dim=-1), expected, rtol=0, atol=1e-4)
    to_int8(model)
    logits = in_pieces(native(model), tokens, 64) if in_c else model(tokens)
    found = logits.log_softmax(dim=-1)
    assert (expected.exp() * (expected - found)).sum(dim=-1).mean() < 0.005


def test_ranks_join_inputs_before_they_rotate_them(tiny_llama, tmp_path):
    """So --join reduce is gather, and of layers with any widths each bit is that of one process."""
    tokens = torch.tensor([random_tokens(12)])
    name = save_uneven(tiny_llama, tmp_path, "tiny_llama")
    for parallel_mode in ("gather", "reduce"):
        assert (
            compared(
                3, name, tokens, parallel_mode, dtype=torch.int8, native=parallel_mode == "gather"
            )[0]
            == 0
        )
    tokens = torch.tensor([random_tokens(12, 4096)])
    options = {"dtype": torch.int8, "native": False}
    took = [
        compared(2, LLAMA, tokens, parallel_mode, **options)[1]
        for parallel_mode in ("gather", "reduce")
    ]
    assert took[0] == took[1]

"""Lesson 27: the norm and the MLP of Llama, each against transformers'."""

import pytest
import torch
from conftest import module_with


def filled(module, std=0.4):
    """The module with random weights, in float64."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.data.normal_(std=std, generator=generator)
    return module.double()


def inputs(*shape) -> torch.Tensor:
    """Numbers around 1, so that a mean that is taken off would be seen, in float64."""
    generator = torch.Generator().manual_seed(1)
    return 1 + torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
@torch.inference_mode()
def test_a_norm_divides_by_the_root_of_the_mean_square(shape, epsilon):
    llama = module_with("llama", "LlamaConfig", "RMSNorm")
    norm = filled(llama.RMSNorm(llama.LlamaConfig(n_embd=5, norm_eps=epsilon)))
    x = inputs(*shape)
    root = (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    torch.testing.assert_close(norm(x), norm.weight * x / root, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1, 5, 192])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
@torch.inference_mode()
def test_a_norm_is_that_of_transformers(size, epsilon):
    """They compute in float32, whatever the weights are."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    llama = module_with("llama", "LlamaConfig", "RMSNorm")
    ours = filled(llama.RMSNorm(llama.LlamaConfig(n_embd=size, norm_eps=epsilon)))
    theirs = LlamaRMSNorm(size, epsilon).double()
    theirs.load_state_dict(ours.state_dict())
    x = inputs(2, 3, size)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


def test_a_norm_in_half_precision_does_not_overflow():
    llama = module_with("llama", "LlamaConfig", "RMSNorm")
    norm = llama.RMSNorm(llama.LlamaConfig(n_embd=4)).half()
    torch.nn.init.ones_(norm.weight)
    x = torch.tensor([300.0, -300.0, 300.0, -300.0], dtype=torch.float16)
    assert norm(x).tolist() == [1, -1, 1, -1]
    assert norm(x).dtype == torch.float16


@pytest.mark.parametrize("width, inner", [(32, 1), (64, 13), (192, 512)])
@torch.inference_mode()
def test_an_mlp_is_that_of_transformers(width, inner):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    llama = module_with("llama", "LlamaConfig", "MLP")
    ours = filled(llama.MLP(llama.LlamaConfig(n_embd=width, n_inner=inner)))
    sizes = {"hidden_size": width, "intermediate_size": inner, "head_dim": 2}
    theirs = LlamaMLP(LlamaConfig(**sizes)).double()
    theirs.load_state_dict(ours.state_dict())  # the names, and no biases
    x = inputs(2, 3, width)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)

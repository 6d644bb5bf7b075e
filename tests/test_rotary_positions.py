"""Lesson 28: queries and keys turned by their positions, as in transformers."""

import math

import pytest
import torch
from conftest import module_with

CPU = torch.device("cpu")


def tables(length: int, dtype=torch.float64, **shape) -> tuple:
    """The module, the cosines and the sines of the first `length` positions."""
    llama = module_with("llama", "LlamaConfig", "RotaryEmbedding", "apply_rotary_emb")
    return llama, *llama.RotaryEmbedding(llama.LlamaConfig(**shape), dtype, CPU).cos_sin(length)


def random_heads(*shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_pair_is_turned_by_its_angle():
    """Number i of the first half and number i of the second are one point."""
    llama, cos, sin = tables(7, head_dim=4, rope_theta=100.0)
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)  # one head: (1, 0) and (0, 2)
    for position in range(7):
        fast, slow = position, position / 10  # theta ** (-2 / 4) is a tenth
        expected = [math.cos(fast), -2 * math.sin(slow), math.sin(fast), 2 * math.cos(slow)]
        turned = llama.apply_rotary_emb(x, cos[position], sin[position])[0].tolist()
        assert turned == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("head_dim", [2, 6, 10, 128])
@pytest.mark.parametrize("theta", [10.0, 10000.0, 500000.0])
def test_it_is_the_rotation_of_transformers(head_dim, theta):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    llama, *ours = tables(90, head_dim=head_dim, rope_theta=theta)
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=90)
    q = random_heads(2, 90, 4, head_dim)
    k = random_heads(2, 90, 1, head_dim)
    theirs = LlamaRotaryEmbedding(config)(q, torch.arange(90)[None])
    expected = apply_rotary_pos_emb(q, k, *theirs, unsqueeze_dim=2)
    for x, turned in zip((q, k), expected):
        torch.testing.assert_close(llama.apply_rotary_emb(x, *ours), turned, rtol=0, atol=1e-10)


def test_a_score_depends_on_the_distance_alone():
    llama, cos, sin = tables(200)
    q, k = random_heads(2, 1, 32)

    def score(m, n):
        return (
            llama.apply_rotary_emb(q, cos[m], sin[m]) @ llama.apply_rotary_emb(k, cos[n], sin[n]).T
        ).item()

    for distance in (0, 1, 7, 100):
        near = score(distance, 0)
        for n in (1, 50, 99):
            assert score(n + distance, n) == pytest.approx(near, abs=1e-4)
        assert abs(score(distance + 1, 0) - near) > 1e-2


@pytest.mark.parametrize("head_dim", [2, 6, 10, 128, 1000])
def test_rotations_are_the_same_however_far_the_first_texts_came(head_dim):
    """Else a text would depend on what the process has computed before."""
    llama, *whole = tables(700, torch.float32, head_dim=head_dim)
    grown = llama.RotaryEmbedding(llama.LlamaConfig(head_dim=head_dim), torch.float32, CPU)
    for length in (1, 3, 64, 65, 300, 7, 700):
        for table, expected in zip(grown.cos_sin(length), whole):
            assert table.shape == (length, 1, head_dim)
            assert torch.equal(table, expected[:length])


def test_a_table_grows_by_whole_pieces_and_at_least_doubles():
    llama = module_with("llama", "LlamaConfig", "TABLE_CHUNK", "RotaryEmbedding")
    table = llama.RotaryEmbedding(llama.LlamaConfig(), torch.float32, CPU)
    assert len(table.cos) == len(table.sin) == 0
    for length, expected in ((1, 64), (64, 64), (65, 128), (130, 256), (700, 704), (3, 704)):
        table.cos_sin(length)
        assert len(table.cos) == len(table.sin) == expected
    assert llama.TABLE_CHUNK == 64


def test_a_table_is_kept_for_the_next_pass():
    llama = module_with("llama", "LlamaConfig", "rotary_embedding")
    first = llama.rotary_embedding(llama.LlamaConfig(), torch.float32, CPU)
    assert llama.rotary_embedding(llama.LlamaConfig(), torch.float32, CPU) is first
    assert (
        llama.rotary_embedding(llama.LlamaConfig(rope_theta=77.0), torch.float32, CPU) is not first
    )

"""RoPE on a part of each head, against transformers' Phi-3."""

import dataclasses

import pytest
import torch
from conftest import (
    check_bad_config,
    check_modes,
    difference,
    exact_norm,
    random_tokens,
    refused,
    run_rows,
    their_rows,
)
from engines import check_own_runs
from families import randomize_norms
from natives import native_as_torch
from ranks import check_logits_of_ranks, save_uneven

from benchmarks.export_gguf import write_gguf
from loading import load
from loading.load import save_model

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture
def build_partial(tiny_llama):
    """`tiny_llama` that rotates 4 of the 6 elements of a head; norms are random too."""

    def build(seed=0, **shape):
        own = {"rotary_dim": 4, "block_size": 40, "rope_theta": 1000.0}
        return randomize_norms(tiny_llama(seed, **own | shape), seed)

    return build


@pytest.fixture
def phi(peer, build_partial, monkeypatch):
    """A function that makes a random Phi-3 of transformers, and our model with its weights."""
    from transformers.models.phi3 import modeling_phi3

    monkeypatch.setattr(modeling_phi3.Phi3RMSNorm, "forward", exact_norm)

    def make(factor=0.75, rotary_dim=6, head_dim=8, windows=()):
        rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": factor}
        shape = {"rms_norm_eps": 1e-6, "pad_token_id": 1, "max_position_embeddings": 40}
        shape |= {"sliding_window": windows[0] if windows else None, "head_dim": head_dim}
        theirs, _ = peer("Phi3", rope_parameters=rope, **shape)
        ours = build_partial(rotary_dim=rotary_dim, head_dim=head_dim, sliding_windows=windows)
        own = ours.state_dict()
        weights = {}
        for name, weight in theirs.state_dict().items():
            name = name.removeprefix("model.")
            fused = next((each for each in FUSED if each in name), "")
            names = [name.replace(fused, part) for part in FUSED.get(fused, ("",))]
            weights |= zip(names, weight.split([len(own[each]) for each in names]))
        ours.load_state_dict(weights)
        return theirs, ours

    return make


# 1. Tables and rotation


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"factor": 0.5, "rotary_dim": 4},
        {"factor": 1.0, "rotary_dim": None},
        {"factor": 1.0, "rotary_dim": 8},
        {"factor": 0.85, "rotary_dim": 8, "head_dim": 10},
        {"windows": (7, 7)},
    ],
    ids=str,
)
def test_logits_equal_transformers(phi, shape):
    theirs, ours = phi(**shape)
    assert difference(ours, theirs) < 1e-9


@pytest.mark.step(n=1)
def test_ragged_batches_equal_transformers(phi):
    theirs, ours = phi()
    prompts = [random_tokens(length, seed=length) for length in (1, 20, 7)]
    expected = [their_rows(theirs, [prompt], 20)[0] for prompt in prompts]
    assert run_rows(ours, prompts, max_new_tokens=20, ignore_eos=True) == expected


@pytest.mark.step(n=1)
def test_batches_shifts_speculation_and_beams_equal_a_full_pass(build_partial):
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(build_partial(), build_partial(seed=1), prompts, 60)


# 2. C, and ranks


@pytest.mark.step(n=2)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
def test_c_computes_the_same(build_partial, compiled, monkeypatch, dtype, cache_dtype):
    model = native_as_torch(build_partial(qk_norm=True).float(), dtype, monkeypatch)
    check_own_runs(model, (3, 14, 1, 38), 30, num_pages=25, cache_dtype=cache_dtype)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_ranks_have_the_logits_of_one_process(tiny_llama, compiled, tmp_path, monkeypatch, dtype):
    save_uneven(tiny_llama, tmp_path, "tiny_llama")

    def read_config(file, raw):
        return dataclasses.replace(load.LLAMA.read_config(file, raw), rotary_dim=20)

    partial = dataclasses.replace(load.LLAMA, read_config=read_config)
    monkeypatch.setitem(load.ARCHITECTURES, "llama", partial)
    check_logits_of_ranks(tmp_path, dtype)


# 3. Files


@pytest.mark.step(n=3)
@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ],
    ids=str,
)
def test_a_file_of_a_family_that_rotates_whole_heads(cli, tiny_llama, tmp_path, changes):
    words = "partial_rotary_factor is 0.5; supported is 1"
    check_bad_config(cli, tiny_llama, tmp_path, changes, words)


@pytest.mark.step(n=3)
def test_what_a_file_cannot_say_is_not_written(build_partial, tmp_path):
    model = build_partial(dtype=torch.float32, qk_norm=True)
    message = refused(save_model, model, tmp_path)
    assert "cannot be saved: transformers supports" in message and "rotary_dim" in message
    words = "the model cannot be exported: "
    assert words in refused(write_gguf, model, tmp_path / "model.gguf", "float32")
    assert list(tmp_path.iterdir()) == []

"""Phi-3: fused projections in files, against transformers."""

import json

import pytest
import torch
from conftest import (
    check_bad_config,
    check_command_line,
    difference,
    edit_json,
    is_one_line,
    load,
    refused,
    save_speaking,
)
from families import randomize_norms
from lora_files import check_adapter_as_in_peft, peft_adapter, random_tensors, save_adapter
from natives import quantised
from ranks import check_logits_of_ranks, save_uneven
from safetensors.torch import load_file, save_file

from llama import RopeScaling
from loading.load import load_config, save_model
from loading.lora import read_adapter

PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}


@pytest.fixture
def phi(peer):
    """A function that saves a random Phi-3 of transformers, in float64."""
    small = {"hidden_size": 32, "rope_parameters": PARTIAL, "max_position_embeddings": 40}
    return lambda **shape: peer("Phi3", **small | shape)


@pytest.fixture
def build_partial(tiny_llama):
    """`tiny_llama` that rotates 4 of the 6 elements of a head; norms are random too."""

    def build(seed=0, **shape):
        own = {"rotary_dim": 4, "block_size": 40, "rope_theta": 1000.0, "n_embd": 24}
        return randomize_norms(tiny_llama(seed, **own | shape), seed)

    return build


# 1. Loading


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "shape, expected",
    [
        ({}, 6),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}}, 4),
        ({"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}}, None),
        ({"head_dim": 10, "rope_parameters": PARTIAL | {"partial_rotary_factor": 0.85}}, 8),
        ({"num_key_value_heads": 4, "tie_word_embeddings": True}, 6),
        ({"sliding_window": 7, "shard_size": "3KB"}, 6),
    ],
    ids=str,
)
def test_logits_equal_transformers(phi, shape, expected):
    theirs, directory = phi(**shape)
    ours = load(directory)
    assert ours.config.rotary_dim == expected
    assert difference(ours, theirs) < 1e-9


@pytest.mark.step(n=1)
@pytest.mark.parametrize("shards", ["1GB", "3KB"])
def test_an_older_file_has_the_factor_beside(phi, shards):
    theirs, directory = phi(shard_size=shards)
    changes = {"rope_parameters": None, "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    edit_json(directory / "config.json", changes)
    assert difference(load(directory), theirs) < 1e-9


@pytest.mark.step(n=1)
def test_what_a_config_lacks_is_as_in_transformers(tmp_path):
    import transformers

    said = {"model_type": "phi3", "vocab_size": 32064, "hidden_size": 64}
    said |= {"num_attention_heads": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 16}))
    ours = load_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (ours.n_kv_head, ours.head_dim) == (theirs.num_key_value_heads, 4)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.tie_word_embeddings, ours.norm_eps) == (False, theirs.rms_norm_eps)
    assert ours.sliding_windows == ()


@pytest.mark.step(n=1)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    shape = {"rope_parameters": PARTIAL, "hidden_size": 32, "pad_token_id": 1}
    check_command_line(cli, tmp_path, "Phi3", 40, "--backend", backend, **shape)


@pytest.mark.step(n=1)
@pytest.mark.parametrize("targets", ["all-linear", ["qkv_proj"], ["gate_up_proj", "o_proj"]])
def test_an_adapter_of_fused_layers_is_added_as_in_peft(phi, tmp_path, targets):
    check_adapter_as_in_peft(*phi(), tmp_path / "adapter", target_modules=targets)


@pytest.mark.step(n=1)
def test_an_adapter_that_lacks_a_fused_layer_is_refused(phi, tmp_path):
    theirs, base = phi()
    peft_adapter(theirs, tmp_path / "adapter", target_modules=["qkv_proj", "o_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: a for name, a in tensors.items() if "1.self_attn.qkv" not in name}, file)
    message = refused(read_adapter, tmp_path / "adapter", load(base))
    assert "target_modules names 'qkv_proj'" in message
    assert "lacks layers.1.self_attn.qkv_proj" in message


@pytest.mark.step(n=1)
def test_an_adapter_of_a_layer_and_its_part_is_refused(phi, tmp_path):
    ours = load(phi()[1])
    tensors = random_tensors(ours, ("q_proj",))
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj.lora_"
        tensors |= {f"{stem}A.weight": torch.ones(3, 32), f"{stem}B.weight": torch.ones(64, 3)}
    directory = save_adapter(tmp_path / "adapter", tensors)
    assert "layers.0.self_attn.qkv_proj, fused and not" in refused(read_adapter, directory, ours)


# 2. Saving


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_ranks_have_the_logits_of_one_process(build_partial, compiled, tmp_path, dtype):
    """Each reads its rows of queries, keys and values from the fused matrices of a file."""
    save_uneven(build_partial, tmp_path, "tiny_llama", rotary_dim=20)
    assert "qkv_proj" in str([*load_file(tmp_path / "model.safetensors")])
    check_logits_of_ranks(tmp_path, dtype)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("windows", [(), (7, 7)], ids=str)
def test_a_saved_model_is_the_same_model(build_partial, tmp_path, windows, dtype):
    from transformers import AutoModelForCausalLM

    ours = build_partial(dtype=torch.float32, sliding_windows=windows)
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Phi3ForCausalLM" and theirs.config.model_type == "phi3"
    assert difference(ours, theirs) < 1e-4
    expected = ours if dtype == torch.float32 else quantised(ours, dtype)
    for (name, a), (_, b) in zip(
        expected.state_dict().items(), load(tmp_path, dtype).state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.step(n=2)
def test_without_a_part_it_is_a_llama(phi, tmp_path):
    ours = load(phi(rope_parameters=None)[1])
    save_model(ours, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "llama"
    assert load_config(tmp_path / "again") == ours.config


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dim", [2, 28, 50, 58, 74, 98])
def test_a_saved_factor_gives_the_same_dimension(build_partial, tmp_path, dim):
    from loading.config import llama_to_dict

    config = build_partial(rotary_dim=dim, head_dim=100).config
    (tmp_path / "config.json").write_text(json.dumps(llama_to_dict(config)))
    assert load_config(tmp_path).rotary_dim == dim


@pytest.mark.step(n=2)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"partial_rotary_factor": 0}, "partial_rotary_factor 0: must be above 0 and at most 1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5: must be above 0 and at most"),
        ({"partial_rotary_factor": 0.5}, "rotates 3 of 6 elements of a head: must rotate an even"),
        ({"partial_rotary_factor": 0.1}, "rotates 0 of 6 elements"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'; supported is 'default'"),
        ({"model_type": "llama"}, "partial_rotary_factor is 0.666666666"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(cli, build_partial, tmp_path, changes, words):
    check_bad_config(cli, build_partial, tmp_path, changes, words)


@pytest.mark.step(n=2)
def test_a_fused_matrix_of_another_height_is_one_line(cli, build_partial, tmp_path):
    save_speaking(build_partial, tmp_path, eos_token_id=4095, bos_token_id=0)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "layers.1.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-6].clone()}, tmp_path / "model.safetensors")
    result = cli("--model", tmp_path, "--prompt", "Lily", "--max-new-tokens", 2)
    words = "layers.1.self_attn.qkv_proj.weight has shape (42, 24); config.json says (48, 24)"
    assert is_one_line(result, words), result


@pytest.mark.step(n=2)
def test_other_families_rotate_whole_heads_in_transformers(build_partial, tmp_path):
    words = "transformers supports rotary_dim only in a Phi-3 without other RoPE scaling"
    scaled = {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 24)}
    for shape in ({"qk_norm": True}, {"qkv_bias": True}, {"nope_layers": (1,)}, scaled):
        assert words in refused(save_model, build_partial(**shape), tmp_path)
    assert list(tmp_path.iterdir()) == []

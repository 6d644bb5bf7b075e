"""LongRoPE within the original window: Phi-4-mini, against transformers."""

import json

import pytest
import torch
from conftest import (
    check_modes,
    edit_json,
    is_one_line,
    load,
    random_tokens,
    refused,
    run_rows,
    save_speaking,
    their_rows,
)
from gguf_files import edited
from natives import native_as_torch

import errors
from benchmarks.export_gguf import write_gguf
from loading.load import load_config, load_model, save_model

LONG = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
LONG |= {"short_factor": [1.0, 1.1, 1.5], "long_factor": [2.0, 7.0, 30.0]}


@pytest.fixture
def phi(peer):
    """A function that saves a random Phi-3 of transformers, trained on 40 tokens, in float64."""
    small = {"hidden_size": 32, "max_position_embeddings": 320}
    small |= {"original_max_position_embeddings": 40}
    return lambda shape=None, **rope: peer(
        "Phi3", **small | {"rope_parameters": LONG | rope} | (shape or {})
    )


@pytest.fixture
def build_long(tiny_llama):
    """`tiny_llama` with LongRoPE in a window of 40 tokens."""

    def build(seed=0, **shape):
        from llama import LongRopeScaling

        scaling = LongRopeScaling((1.0, 1.25), (3.0, 9.0), 40, 1.25)
        own = {"rotary_dim": 4, "block_size": 40, "rope_theta": 1000.0, "rope_scaling": scaling}
        return tiny_llama(seed, **own | {"n_embd": 24} | shape)

    return build


@pytest.mark.parametrize(
    "rope, shape",
    [
        ({}, {}),
        ({"factor": 32.0}, {}),
        ({"factor": 0.5}, {}),
        ({"attention_factor": 1.7}, {}),
        ({"attention_factor": None, "factor": None}, {"num_key_value_heads": 4}),
        ({"original_max_position_embeddings": 7}, {}),  # what stands beside it counts
        ({}, {"max_position_embeddings": 24}),
        (
            {"partial_rotary_factor": 1.0, "short_factor": [1, 2, 3, 4], "long_factor": [9] * 4},
            {"sliding_window": 7},
        ),
    ],
    ids=str,
)
@torch.inference_mode()
def test_logits_equal_transformers_in_the_original_window(phi, rope, shape):
    theirs, directory = phi(shape, **rope)
    ours = load(directory)
    length = min(40, shape.get("max_position_embeddings", 40))
    assert ours.config.block_size == length
    tokens = torch.tensor([random_tokens(length)])
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-9


def test_ragged_batches_equal_transformers(phi):
    theirs, directory = phi()
    prompts = [random_tokens(length, seed=length) for length in (1, 20, 7)]
    expected = [their_rows(theirs, [prompt], 20)[0] for prompt in prompts]
    assert run_rows(load(directory), prompts, max_new_tokens=20, ignore_eos=True) == expected


def test_older_names_and_a_note_of_the_window(phi, capsys):
    errors.warn_once.cache_clear()
    _, directory = phi()
    config = load_config(directory)
    words = "LongRoPE is supported only in the original context window: using 40 tokens, not 320"
    assert capsys.readouterr().err.count(words) == 1
    older = {key: LONG[key] for key in ("short_factor", "long_factor")} | {"type": "su"}
    changes = {"rope_parameters": None, "rope_theta": 1000.0, "rope_scaling": older}
    edit_json(directory / "config.json", changes | {"partial_rotary_factor": 0.75})
    assert load_config(directory) == config


def test_batches_shifts_speculation_and_beams_equal_a_full_pass(build_long):
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(build_long(), build_long(seed=1), prompts, 60)


def test_c_computes_the_same(build_long, compiled, monkeypatch):
    native_as_torch(build_long().float(), torch.float32, monkeypatch)


def test_a_saved_model_is_the_same_model(build_long, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = build_long(dtype=torch.float32)
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.tensor([random_tokens(40)])
    with torch.inference_mode():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["rope_scaling"]["rope_type"]) == ("phi3", "longrope")


@pytest.mark.parametrize("original", [40, 30])
def test_a_gguf_file_as_the_converter_writes_it(tiny_llama, tmp_path, original):
    from llama import LongRopeScaling

    shape = {"rotary_dim": 4, "block_size": 40, "n_embd": 24, "dtype": torch.float32}
    model = tiny_llama(**shape)
    write_gguf(model, tmp_path / "model.gguf", "float32")
    values = {"attn_factor": 1.25, "original_context_length": original}
    values = {f"phi3.rope.scaling.{key}": value for key, value in values.items()}
    tensors = {"rope_factors_short.weight": [1, 1.25], "rope_factors_long.weight": [3, 9]}
    file = edited(tmp_path / "model.gguf", tmp_path / "o.gguf", values=values, tensors=tensors)
    scaling = LongRopeScaling((1.0, 1.25), (3.0, 9.0), original, 1.25)
    expected = tiny_llama(**shape | {"rope_scaling": scaling, "block_size": original})
    found = load_model(file)
    assert found.config == expected.config
    tokens = torch.tensor([random_tokens(original)])
    with torch.inference_mode():
        assert torch.equal(found(tokens), expected(tokens))
    other = edited(file, tmp_path / "f.gguf", values={"phi3.rope.scaling.factor": 2.0})
    assert "rope.scaling.factor is 2.0; supported is 1" in refused(load_config, other)
    words = "the export supports no LongRoPE"
    assert words in refused(write_gguf, found, tmp_path / "again.gguf", "float32")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"short_factor": None}, "short_factor None: must be a list of 2 numbers above 0"),
        ({"long_factor": [1.0] * 3}, "long_factor [1.0, 1.0, 1.0]: must be a list of 2 numbers"),
        ({"short_factor": [1.0, 0]}, "short_factor[1] 0: must be above 0"),
        ({"long_factor": ["1", 2]}, "long_factor[0] '1': must be above 0"),
        ({"attention_factor": -1}, "attention_factor -1: must be above 0"),
        ({"factor": "2"}, "factor '2': must be above 0"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_one_line(cli, build_long, tmp_path, changes, words):
    save_speaking(build_long, tmp_path, eos_token_id=4095, bos_token_id=0)
    raw = json.loads((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "config.json", {"rope_scaling": raw["rope_scaling"] | changes})
    result = cli("--model", tmp_path, "--prompt", "Lily", "--max-new-tokens", 2)
    assert is_one_line(result, f"{tmp_path / 'config.json'}: ", words), result

"""Gemma 2 without its soft caps, against transformers: a Gemma 3 without QK-norm."""

import json

import pytest
import torch
from conftest import check_bad_config, difference, edit_json, load
from natives import native_as_torch

from gemma import Gemma2Config
from loading.load import load_config, save_model

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
NO_CAPS = dict.fromkeys(CAPS)
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}


@pytest.fixture(name="gemma2")
def gemma2_fixture(peer, monkeypatch):
    """A function that saves a random Gemma 2 of transformers, in float64."""

    def exact_softmax(x, dim, dtype):
        return x.softmax(dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact_softmax)
    small = {"num_hidden_layers": 3, "max_position_embeddings": 40, "hidden_size": 20}
    small |= {"head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 3}
    small |= NO_CAPS | {"attn_implementation": "eager"}
    return lambda **shape: peer("Gemma2", **small | shape)


@pytest.fixture(name="build_gemma2")
def build_gemma2_fixture(tiny_gemma):
    """`tiny_gemma` for a Gemma 2 without caps."""
    small = {"kind": Gemma2Config, "sliding_windows": (5, None, 5), "n_embd": 20}
    small |= {"n_layer": 3, "query_pre_attn_scalar": 3, "rope_linear_factor": 1.0} | NO_CAPS
    return lambda seed=0, **shape: tiny_gemma(seed, **small | shape)


@pytest.mark.parametrize(
    "shape, windows",
    [
        ({}, (5, None, 5)),
        ({"num_hidden_layers": 4, "query_pre_attn_scalar": 6}, (5, None, 5, None)),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 5) * 2),
        ({"layer_types": ["full_attention"] * 3}, ()),
        ({"tie_word_embeddings": False, "num_key_value_heads": 4}, (5, None, 5)),
        ({"num_key_value_heads": 1, "sliding_window": 1}, (1, None, 1)),
        ({"rope_parameters": LINEAR}, (5, None, 5)),
    ],
    ids=str,
)
def test_logits_equal_transformers(gemma2, shape, windows):
    theirs, directory = gemma2(**shape | {"num_hidden_layers": len(windows) or 3})
    ours = load(directory)
    assert ours.config.sliding_windows == windows
    assert difference(ours, theirs) < 1e-9


def test_an_older_file_has_rope_keys_beside(gemma2):
    theirs, directory = gemma2(rope_parameters=LINEAR)
    scaling = {"type": "linear", "factor": 4.0}
    changes = {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": scaling}
    edit_json(directory / "config.json", changes)
    assert difference(load(directory), theirs) < 1e-9


def test_c_scales_queries_without_a_norm(build_gemma2, compiled, monkeypatch):
    native_as_torch(build_gemma2().float(), torch.float32, monkeypatch)


def test_a_saved_model_is_the_same_model(build_gemma2, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = build_gemma2(dtype=torch.float32, rope_linear_factor=2.0, rope_theta=77.0)
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    options = {"attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert type(theirs).__name__ == "Gemma2ForCausalLM" and theirs.config.model_type == "gemma2"
    assert difference(ours, theirs) < 1e-4


def test_what_a_config_lacks_is_as_in_transformers(tmp_path):
    import transformers

    said = {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 64, "num_hidden_layers": 9}
    said |= {"num_attention_heads": 16, "intermediate_size": 24, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(said | NO_CAPS))
    ours = load_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (ours.n_kv_head, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] == 10000
    assert (ours.tie_word_embeddings, ours.norm_eps) == (True, theirs.rms_norm_eps)
    assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar == 256
    assert theirs.layer_types == [
        "sliding_attention" if window else "full_attention" for window in ours.sliding_windows
    ]
    assert max(filter(None, ours.sliding_windows)) == theirs.sliding_window


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0: must be above 0"),
        ({"layer_types": ["full_attention"]}, "layer_types of length 1: must have length 3"),
        ({"sliding_window": 0}, "sliding_window 0: must be an integer from 1"),
        ({"rope_theta": 0}, "rope_theta 0: must be above 0"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'; supported is 'default' or"),
        ({"rope_scaling": {"type": "linear"}}, "factor None: must be above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear': must be an object"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported is"),
        ({"use_bidirectional_attention": True}, "attention is True; supported is False"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(cli, build_gemma2, tmp_path, changes, words):
    check_bad_config(cli, build_gemma2, tmp_path, changes, words)
